"""ckpttool reload: load into the plain model, in one process, and report it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks.forked import WarmPython
from tests.support import architectures
from tests.support.comparing import prefixed

SOURCE = """
import os, torch
from torch import nn

def make(classes=3, dtype=None):
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    net = nn.Sequential(*body, nn.Linear(36, classes))
    return net.to(dtype and getattr(torch, dtype))

def number():
    return 5

def failing():
    class Net(nn.Linear):
        def forward(self, x):
            raise ValueError
    return Net(1, 1)

def away():
    os.chdir("/")
    return make()

class Masked(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(3), persistent=False)

def masked_on_meta():
    with torch.device("meta"):
        return Masked()

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
MODELS: dict[str, Any] = {"__file__": "net.py"}
exec(SOURCE, MODELS)


@pytest.fixture(autouse=True)
def state(here: Path) -> dict[str, torch.Tensor]:
    """Save models as net.py, and the state of one as f.pt."""
    Path("net.py").write_text(SOURCE)
    Path("sizes.txt").write_text("3 3")
    found: dict[str, torch.Tensor] = MODELS["make"]().state_dict()
    torch.save(found, "f.pt")
    return found


def test_one_line_says_what_was_loaded_and_how(state: Any, cli: Any) -> None:
    torch.save(prefixed(state, "module."), "ddp.pt")
    ran = cli("reload ddp.pt --model net.py:make")
    assert (ran.code, ran.err) == (0, "")
    said = "loaded 9 of 9 tensors without 'module.' into net.py:make, strictly, in one process"
    assert ran.out.startswith(said)


def test_an_input_shape_runs_a_forward_pass_in_the_model_s_dtype(state: Any, cli: Any) -> None:
    save_file(state, "f.safetensors")
    ran = cli("reload f.safetensors --model net.py:make --input-shape 2,3,5,5")
    assert ran.out.splitlines()[-1] == "forward pass: [2, 3, 5, 5] -> [2, 3]"
    ran = cli("reload f.pt --input-shape 1,3,5,5 --model", "net.py:make(dtype='float64')")
    assert ran.code == 0, ran.err


def test_json_has_the_fields_that_scripts_rely_on(state: Any, cli: Any) -> None:
    torch.save({"model": state}, "f.pt")
    ran = cli("reload f.pt --model net.py:make --json --input-shape 1,3,5,5")
    found = ran.json
    assert ran.err == ""
    assert (found["loaded"], found["missing"], found["unexpected"], found["mismatched"]) == (9, [], [], [])
    assert (found["state"], found["output_shape"]) == ("model", [1, 3])


def test_other_sizes_are_exit_1_with_both_sizes(state: Any, cli: Any) -> None:
    ran = cli("reload f.pt --model net.py:make(classes=7)")
    assert (ran.code, ran.out) == (1, "")
    assert "2 of another shape or type (3.weight [3, 36] in the file, [7, 36] in the model" in ran.err
    found = cli("reload f.pt --model net.py:make(classes=7) --json").json["error"]
    assert (found["kind"], found["missing"], found["unexpected"]) == ("mismatch", [], [])
    assert found["mismatched"][0] == {"name": "3.weight", "file": "[3, 36]", "model": "[7, 36]"}
    new = state.pop("0.bias")
    torch.save({**state, "new": new}, "f.pt")
    found = cli("reload f.pt --model net.py:make(classes=7) --json").json  # has the fields of a reload too
    assert (found["loaded"], found["missing"], found["unexpected"]) == (0, ["0.bias"], ["new"])
    assert [entry["name"] for entry in found["mismatched"]] == ["3.weight", "3.bias"]


def hint(ran: Any) -> str:
    """Return the command in the hint of an error."""
    return str(ran.err.partition("\nhint: ckpttool ")[2].strip())


def codes(cli: Any, script: str) -> list[int]:
    """Run the commands of a doctor's script, and return their exit codes."""
    return [cli(line.partition(" ")[2]).code for line in script.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_hint_for_other_sizes_works(prefix: str, state: Any, cli: Any) -> None:
    """A reload strips wrappers' prefixes itself, so a command that only strips them would not help."""
    torch.save(prefixed(state, prefix), "f.pt")
    ran = cli("reload f.pt --model net.py:make(classes=7)")
    assert shlex.split(hint(ran)) == ["reload", "f.pt", "--model", "net.py:make(classes=3)"]
    assert cli(hint(ran)).code == 0


def test_the_hint_for_several_remedies_is_the_doctor(state: Any, cli: Any) -> None:
    wrong = prefixed(state, "backbone.")
    wrong["backbone.3.weight"] = wrong["backbone.3.weight"].t().contiguous()
    torch.save({"model": {"x": torch.ones(1)}, "mine": wrong}, "f.pt")
    ran = cli("reload f.pt --model net.py:make --state mine")
    assert hint(ran) == "doctor f.pt --model net.py:make --state mine"
    assert codes(cli, cli(hint(ran)).out) == [0] * 4


@pytest.mark.parametrize(("classes", "code"), [(3, 0), (7, 1)])
def test_the_state_that_was_chosen_is_said_also_if_it_does_not_fit(
    classes: int, code: int, state: Any, cli: Any
) -> None:
    torch.save({"model": state, "teacher": dict(state)}, "f.pt")
    command = f"reload f.pt --model net.py:make(classes={classes})"
    ran = cli(command)
    assert ran.code == code
    assert ran.err.startswith("state: 'model'; also available: --state teacher\n")
    assert "also available" not in cli(f"{command} --state teacher").err


def test_counters_that_the_file_lacks_are_named(state: Any, cli: Any) -> None:
    torch.save({k: v for k, v in state.items() if "num_batches" not in k}, "f.pt")
    ran = cli("reload f.pt --model net.py:make")
    assert ran.code == 0
    assert "missing in the file, kept as they are in the model: 1.num_batches_tracked" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("make --input-shape 1,3,1,1", 1, "the forward pass failed on zeros of shape [1, 3, 1, 1]: "),
        ("failing --input-shape 1,1", 1, ": ValueError"),
        ("number", 2, "returned an object of type int, not a torch.nn.Module"),
        ("nothing", 2, "has no factory"),
    ],
)
def test_a_forward_pass_that_fails_is_a_failed_check_and_no_model_a_wrong_call(
    words: str, code: int, said: str, cli: Any
) -> None:
    if words.startswith("failing"):
        torch.save(torch.nn.Linear(1, 1).state_dict(), "f.pt")
    ran = cli(f"reload f.pt --model net.py:{words}")
    assert ran.code == code and said in ran.err
    assert code == 2 or "hint: the state loads" in ran.err


@pytest.mark.parametrize("command", ["reload", "doctor"])
def test_a_factory_that_leaves_the_current_folder_does_not_move_the_file(command: str, cli: Any) -> None:
    ran = cli(f"{command} f.pt --model net.py:away")
    assert ran.code == 0, ran.err


def test_tensors_that_stay_without_values_are_said(cli: Any) -> None:
    torch.save(torch.nn.Linear(3, 3).state_dict(), "f.pt")
    ran = cli("reload f.pt --model net.py:masked_on_meta")
    assert ran.code == 0 and "on the meta device, without values, as no file holds them: mask" in ran.err
    assert cli("reload f.pt --model net.py:Masked").err == ""


@pytest.mark.parametrize("more", ["", "--input-shape 2,3,5,5"])
def test_what_the_model_keeps_takes_part_in_forward(more: str, state: Any, cli: Any) -> None:
    torch.save({name: value for name, value in state.items() if not name.startswith("3.")}, "f.pt")
    command = f"reload f.pt --model net.py:make --allow-missing 3.* {more}"
    ran = cli(command)
    assert (ran.code, ran.err) == (0, "kept as they are in the model: 3.weight, 3.bias\n")
    assert (ran.out.splitlines()[-1] == "forward pass: [2, 3, 5, 5] -> [2, 3]") == bool(more)
    found = cli(f"{command} --json").json
    assert (found["missing"], found["without_values"]) == (["3.weight", "3.bias"], [])


@pytest.mark.parametrize("name", ["Lazy", "Buffers", "parametrised", "twice", "from_a_file", "on_meta"])
def test_odd_models_are_loaded_and_run(name: str, cli: Any) -> None:
    model = torch.nn.Linear(3, 3) if name == "on_meta" else MODELS[name]()
    shape = (2, 3, 8, 8) if name == "Lazy" else (2, 3)
    model(torch.rand(shape))  # gives lazy modules their sizes
    torch.save(prefixed(model.state_dict(), "module."), "f.pt")
    ran = cli(f"reload f.pt --model net.py:{name} --input-shape", ",".join(map(str, shape)))
    assert (ran.code, ran.err) == (0, "")
    assert "without 'module.'" in ran.out
    assert codes(cli, cli(f"doctor f.pt --model net.py:{name}").out) == [0, 0]


def test_nothing_distributed_is_started(warm_python: WarmPython) -> None:
    env = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    ran = warm_python.run("-m", "ckpttool", "reload", "f.pt", "--model", "net.py:make", env=env)
    assert ran.returncode == 0, ran.stderr


def test_a_model_that_begins_with_an_embedding_gets_indices(cli: Any) -> None:
    torch.save(architectures.tied().state_dict(), "f.pt")
    ran = cli(f"reload f.pt --model {architectures.__file__}:tied --input-shape 2,3 --json")
    assert (ran.code, ran.json["output_shape"]) == (0, [2, 3, 7])
