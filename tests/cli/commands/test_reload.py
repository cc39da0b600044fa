"""ckpttool reload: load into the plain model, in one process, and report it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SOURCE = """
import torch

def make(classes=3, dtype=None):
    body = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
    net = torch.nn.Sequential(*body, torch.nn.Linear(36, classes))
    return net.to(dtype and getattr(torch, dtype))

def number():
    return 5

def failing():
    class Net(torch.nn.Linear):
        def forward(self, x):
            raise ValueError
    return Net(1, 1)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(SOURCE)
    return f"{tmp_path}/net.py:make"


@pytest.fixture
def state(tmp_path: Path, net: str) -> dict[str, torch.Tensor]:
    scope: dict[str, Any] = {}
    exec(SOURCE, scope)
    found: dict[str, torch.Tensor] = scope["make"]().state_dict()
    return found


def test_one_line_says_what_was_loaded_and_how(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save({f"module.{k}": v for k, v in state.items()}, tmp_path / "ddp.pt")
    ran = cli("reload", tmp_path / "ddp.pt", "--model", net)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"loaded 9 of 9 tensors without 'module.' into {net}, strictly, in one process")


def test_an_input_shape_runs_a_forward_pass(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    save_file(state, tmp_path / "f.safetensors")
    ran = cli("reload", tmp_path / "f.safetensors", "--model", net, "--input-shape", "2,3,5,5")
    assert ran.out.splitlines()[-1] == "forward pass: [2, 3, 5, 5] -> [2, 3]"


def test_the_forward_pass_has_the_model_s_dtype(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", f"{net}(dtype='float64')", "--input-shape", "1,3,5,5")
    assert ran.code == 0, ran.err


def test_json_has_the_fields_that_scripts_rely_on(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save({"model": state}, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", net, "--json", "--input-shape", "1,3,5,5")
    found = ran.json
    assert ran.err == ""
    assert (found["loaded"], found["missing"], found["unexpected"], found["mismatched"]) == (9, [], [], [])
    assert (found["state"], found["output_shape"]) == ("model", [1, 3])


def test_other_sizes_are_exit_1_with_both_sizes(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", f"{net}(classes=7)")
    assert (ran.code, ran.out) == (1, "")
    assert "2 of another shape or type (3.weight [3, 36] in the file, [7, 36] in the model" in ran.err
    found = cli("reload", tmp_path / "f.pt", "--model", f"{net}(classes=7)", "--json").json["error"]
    assert (found["kind"], found["missing"], found["unexpected"]) == ("mismatch", [], [])
    assert found["mismatched"][0] == {"name": "3.weight", "file": "[3, 36]", "model": "[7, 36]"}


def hint(ran: Any) -> list[str]:
    """Return the words of the hint of an error."""
    return shlex.split(ran.err.partition("\nhint: ")[2])


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_hint_for_other_sizes_works(prefix: str, net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    """A reload strips wrappers' prefixes itself, so a command that only strips them would not help."""
    torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", f"{net}(classes=7)")
    assert hint(ran) == ["ckpttool", "reload", f"{tmp_path}/f.pt", "--model", f"{net}(classes=3)"]
    assert cli(*hint(ran)[1:]).code == 0


def test_the_hint_for_several_remedies_is_the_doctor(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    wrong = {f"backbone.{name}": value for name, value in state.items()}
    wrong["backbone.3.weight"] = wrong["backbone.3.weight"].t().contiguous()
    torch.save({"model": {"x": torch.ones(1)}, "mine": wrong}, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", net, "--state", "mine")
    assert hint(ran) == ["ckpttool", "doctor", f"{tmp_path}/f.pt", "--model", net, "--state", "mine"]
    commands = [line for line in cli(*hint(ran)[1:]).out.splitlines() if not line.startswith("#")]
    assert len(commands) == 4
    assert [cli(*shlex.split(command)[1:]).code for command in commands] == [0] * 4


def test_a_mismatch_has_the_json_fields_of_a_reload(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    new = state.pop("0.bias")
    torch.save({**state, "new": new}, tmp_path / "f.pt")
    found = cli("reload", tmp_path / "f.pt", "--model", f"{net}(classes=7)", "--json").json
    assert (found["loaded"], found["missing"], found["unexpected"]) == (0, ["0.bias"], ["new"])
    assert [entry["name"] for entry in found["mismatched"]] == ["3.weight", "3.bias"]


@pytest.mark.parametrize("classes, code", [(3, 0), (7, 1)])
def test_the_state_that_was_chosen_is_said_also_if_it_does_not_fit(
    classes: int, code: int, net: str, state: Any, cli: Any, tmp_path: Path
) -> None:
    torch.save({"model": state, "teacher": dict(state)}, tmp_path / "f.pt")
    spec = f"{net}(classes={classes})"
    ran = cli("reload", tmp_path / "f.pt", "--model", spec)
    assert ran.code == code
    assert ran.err.startswith("state: 'model'; also available: --state teacher\n")
    assert "also available" not in cli("reload", tmp_path / "f.pt", "--model", spec, "--state", "teacher").err


def test_counters_that_the_file_lacks_are_named(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save({k: v for k, v in state.items() if "num_batches" not in k}, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", net)
    assert ran.code == 0
    assert "missing in the file, kept as they are in the model: 1.num_batches_tracked" in ran.err


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("make", "1,3,1,1", "the forward pass failed on zeros of shape [1, 3, 1, 1]: "),
        ("failing", "1,1", ": ValueError"),
    ],
)
def test_a_forward_pass_that_fails_is_a_failed_check(
    name: str, shape: str, words: str, net: str, state: Any, cli: Any, tmp_path: Path
) -> None:
    torch.save(state if name == "make" else torch.nn.Linear(1, 1).state_dict(), tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", net.replace("make", name), "--input-shape", shape)
    assert ran.code == 1 and words in ran.err
    assert "hint: the state loads" in ran.err


@pytest.mark.parametrize(
    "spec, words",
    [
        ("{}:number", "returned an object of type int, not a torch.nn.Module"),
        ("{}:nothing", "has no factory"),
    ],
)
def test_a_spec_that_makes_no_model_is_a_usage_error(
    spec: str, words: str, net: str, state: Any, cli: Any, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", spec.format(net.partition(":")[0]))
    assert ran.code == 2 and words in ran.err


def test_a_factory_that_leaves_the_current_folder_does_not_move_the_file(
    state: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        f"import os\n{SOURCE}\ndef away():\n    os.chdir('/')\n    return make()\n"
    )
    torch.save(state, "f.pt")
    for command in ("reload", "doctor"):
        monkeypatch.chdir(tmp_path)
        ran = cli(command, "f.pt", "--model", "net.py:away")
        assert ran.code == 0, ran.err


def test_tensors_that_stay_without_values_are_said(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.register_buffer('mask', torch.ones(2), persistent=False)\n"
        "def meta():\n"
        "    with torch.device('meta'):\n"
        "        return Net()\n"
    )
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "f.pt")
    ran = cli("reload", tmp_path / "f.pt", "--model", f"{tmp_path}/net.py:meta")
    assert ran.code == 0 and "on the meta device, without values, as no file holds them: mask" in ran.err
    assert cli("reload", tmp_path / "f.pt", "--model", f"{tmp_path}/net.py:Net").err == ""


def test_what_the_model_keeps_takes_part_in_forward(net: str, state: Any, cli: Any, tmp_path: Path) -> None:
    torch.save({name: value for name, value in state.items() if not name.startswith("3.")}, tmp_path / "f.pt")
    words = ["reload", tmp_path / "f.pt", "--model", net, "--allow-missing", "3.*"]
    for more in ([], ["--input-shape", "2,3,5,5"]):
        ran = cli(*words, *more)
        assert ran.code == 0, ran.err
        assert ran.err == "kept as they are in the model: 3.weight, 3.bias\n"
        data = cli(*words, *more, "--json").json
        assert (data["missing"], data["without_values"]) == (["3.weight", "3.bias"], [])
    assert ran.out.splitlines()[-1] == "forward pass: [2, 3, 5, 5] -> [2, 3]"


ODD = """
import os, torch
from torch import nn

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyLinear(2)
    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))

class Buffers(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("none", None)
    def forward(self, x):
        return super().forward(x) * self.scale + self.shift

def parametrised():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    nn.utils.parametrizations.weight_norm(model[1])
    return model

def twice():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)

def from_a_file():
    with open(os.path.join(os.path.dirname(__file__), "sizes.txt")) as sizes:
        return nn.Linear(*map(int, sizes.read().split()))

def on_meta():
    with torch.device("meta"):
        return nn.Linear(3, 3)
"""


@pytest.mark.parametrize("name", ["Lazy", "Buffers", "parametrised", "twice", "from_a_file", "on_meta"])
def test_odd_models_are_loaded_and_run(name: str, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "sizes.txt").write_text("3 3")
    scope: dict[str, Any] = {"__file__": f"{tmp_path}/odd.py"}
    exec(ODD, scope)
    model = torch.nn.Linear(3, 3) if name == "on_meta" else scope[name]()
    shape = (2, 3, 8, 8) if name == "Lazy" else (2, 3)
    model(torch.rand(shape))  # gives lazy modules their sizes
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "f.pt")
    spec = f"{tmp_path}/odd.py:{name}"
    ran = cli("reload", tmp_path / "f.pt", "--model", spec, "--input-shape", ",".join(map(str, shape)))
    assert (ran.code, ran.err) == (0, "")
    assert "without 'module.'" in ran.out
    script = cli("doctor", tmp_path / "f.pt", "--model", spec).out.splitlines()
    commands = [line for line in script if not line.startswith("#")]
    assert [cli(*shlex.split(command)[1:]).code for command in commands] == [0, 0]


def test_nothing_distributed_is_started(process: Any, net: str, state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "f.pt")
    env = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    ran = process("reload", tmp_path / "f.pt", "--model", net, env=env)
    assert ran.returncode == 0, ran.stderr


def test_a_model_that_begins_with_an_embedding_gets_indices(cli: Any, tmp_path: Path) -> None:
    from tests.support import architectures

    torch.save(architectures.tied().state_dict(), tmp_path / "f.pt")
    spec = f"{architectures.__file__}:tied"
    ran = cli("reload", tmp_path / "f.pt", "--model", spec, "--input-shape", "2,3", "--json")
    assert (ran.code, ran.json["output_shape"]) == (0, [2, 3, 7])
