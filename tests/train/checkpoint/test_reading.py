"""What a run reads: a last.pt, where any changed field is one line; and any file's weights for `--init`."""

from __future__ import annotations

import copy
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpttool.core import cli
from ckpttool.distributed.group import process_group
from ckpttool.errors import CkptToolError, Damaged, NoState, Refused, Unreadable, UsageFault
from tests.support.comparing import prefixed, saved, values
from tests.support.small_net import SmallNet, used
from train import main
from train.checkpoint import format as checkpoints
from train.checkpoint import resume
from train.checkpoint import resume as resuming
from train.checkpoint.format import capture
from train.config import command_line
from train.main import steps_of_epoch
from train.trainer.trainer import Trainer

MODEL = """
from torch import nn
def net(num_classes):
    head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)
"""
Path_ = tuple[Any, ...]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], Path]:
    """A short run with all that a checkpoint can hold: its flags, a checkpoint as read, and its path."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own.py").write_text(MODEL)
    flags = ["--data", "fake:12", "--model", f"{folder}/own.py:net", "--batch-size", "4"]
    flags += ["--batchnorm", "pooled", "--save-every", "2steps"]
    assert main.main([*flags, "--epochs", "1", "--keep", "9", "--out", str(folder / "out")]) == 0
    path = folder / "out" / "step-000002.pt"
    return flags, torch.load(path, weights_only=True), path


def read(value: Any, folder: Path) -> dict[str, Any]:
    return checkpoints.read(str(saved(value, folder / "changed.pt")))


def test_an_unchanged_checkpoint_is_read(run, tmp_path):
    _, state, path = run
    assert checkpoints.read(str(path))["progress"] == read(state, tmp_path)["progress"] == state["progress"]


@pytest.mark.parametrize(
    "value", [{"model": {}}, [1], nn.Linear(2, 2).state_dict()], ids=["a dict", "a list", "a state dict"]
)
def test_another_programs_checkpoint_is_refused(tmp_path, value):
    with pytest.raises(Refused, match="not a checkpoint of this trainer") as refused:
        read(value, tmp_path)
    assert "ckpttool inspect" in refused.value.hint


def test_a_checkpoint_that_would_run_something_is_refused_without_torchs_advice_to_run_it(tmp_path):
    with pytest.raises(Damaged, match="holds more than tensors and plain values, or is damaged") as refused:
        read({"model": subprocess.Popen}, tmp_path)
    assert "weights_only" not in str(refused.value)


def test_a_truncated_file_is_damaged(run, tmp_path):
    data = run[2].read_bytes()
    for kept in (0, 100, *(part * len(data) // 20 for part in range(1, 20)), len(data) - 99):
        (tmp_path / "cut.pt").write_bytes(data[:kept])
        with pytest.raises(Damaged, match=r"cut\.pt: is cut short: " if kept else r"cut\.pt: is empty"):
            checkpoints.read(str(tmp_path / "cut.pt"))


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_flipped_bit_that_torch_would_load_is_damaged(run, tmp_path, part):
    _, state, path = run
    moments = state["optimizer"]["state"][0]["momentum_buffer"]
    tensor = moments if part == "optimizer" else state["model"]["module.4.weight"]
    data, values = bytearray(path.read_bytes()), tensor.numpy().tobytes()
    assert data.count(values) == 1
    data[data.index(values) + 5] ^= 1
    (tmp_path / "flipped.pt").write_bytes(data)
    torch.load(tmp_path / "flipped.pt", weights_only=True)
    with pytest.raises(Damaged, match=f"the {part}'s values"):
        checkpoints.read(str(tmp_path / "flipped.pt"))


# ---- changed fields ------------------------------------------------------------------------------------


def fields(value: Any, path: Path_ = (), depth: int = 5) -> Iterator[Path_]:
    """Yield the path of each field; of a list, of weights and of moments, only of the first and the last."""
    if path:
        yield path
    inner: list[Any] = []
    if depth and isinstance(value, dict):
        inner = list(value)
        inner = [inner[0], inner[-1]] if path in (("model",), ("optimizer", "state")) else inner
    elif depth and isinstance(value, list | tuple) and value:
        inner = sorted({0, len(value) - 1})
    for key in inner:
        yield from fields(value[key], (*path, key), depth - 1)


def changed(state: dict[str, Any], path: Path_, how: str) -> dict[str, Any] | None:
    """Return a copy with one field changed; None if that is no change."""
    made = copy.deepcopy(state)
    parent, key = made, path[-1]
    for each in path[:-1]:
        parent = parent[each]
        if isinstance(parent, tuple):
            return None
    old = parent.pop(key) if how == "dropped" else parent[key]
    if how == "dropped":
        return made
    is_scalar = isinstance(old, torch.Tensor) and old.dim() == 0
    news = {
        "empty": old[:0] if isinstance(old, str | list | tuple | torch.Tensor) and not is_scalar else {},
        "text": "text",
        "number": -7,
        "nothing": None,
        "list": [[]],
        "tensor": torch.zeros(2, 3),
    }
    parent[key] = new = news[how]
    same = type(new) is type(old) and (torch.equal(new, old) if isinstance(new, torch.Tensor) else new == old)
    return None if same else made


HOW = ["dropped", "empty", "text", "number", "nothing", "list", "tensor"]


def test_any_changed_field_is_refused_in_one_line(run, tmp_path):
    """The digest of the run finds all of them alike, so each field is changed in one way."""
    tried = set()
    for number, path in enumerate(fields(run[1])):
        # The digest itself; and whose the file is, which no step depends on.
        if path in (("digests", "run"), ("training",)):
            continue
        ways = (HOW[(number + other) % len(HOW)] for other in range(len(HOW)))
        how, made = next((how, made) for how in ways if (made := changed(run[1], path, how)))
        with pytest.raises(CkptToolError) as refused:
            read(made, tmp_path)
        assert (refused.value.exit_code, refused.value.message.count("\n")) == (3, 0), path
        tried.add((path, how))
    assert len(tried) > 50
    assert {how for _, how in tried} == set(HOW)


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_a_changed_field_without_the_digest_of_the_run_is_refused_or_harmless(run, tmp_path, how):
    """Checkpoints of before that digest have none. Harmless: the run continues for a step and is saved."""
    flags, state, _ = run
    config = command_line.parse([*flags, "--epochs", "2", "--resume", str(tmp_path / "changed.pt")])
    job = main.prepare(config)
    with process_group(job.place, timeout=5):
        trainer = Trainer(config, job.data, job.model, job.place, job.task)
        rest = {part: value for part, value in state.items() if part not in ("model", "optimizer", "digests")}
        for path in fields(rest):
            made = changed(state, path, how)
            if made is None:
                continue
            del made["digests"]["run"]
            saved(made, tmp_path / "changed.pt")
            try:
                resuming.resume(trainer, "")
            except CkptToolError as error:
                assert error.exit_code in (2, 3) and "\n" not in error.message, path
                continue
            next(steps_of_epoch(trainer))
            capture(trainer)


def test_the_program_ends_in_one_line(run, tmp_path, capsys):
    flags, state, _ = run
    path = saved({**state, "progress": {**state["progress"], "epoch": "one"}}, tmp_path / "changed.pt")
    capsys.readouterr()
    assert main.main([*flags, "--epochs", "2", "--resume", str(path), "--out", str(tmp_path / "on")]) == 3
    assert capsys.readouterr().err == f"error: {path}: progress.epoch is a str, not a int\n"


@pytest.mark.parametrize("digests", [{}, {"model": ""}, {"run": ""}, None, []])
def test_a_checkpoint_without_digests_is_damaged(run, tmp_path, digests):
    with pytest.raises(Damaged, match="digests"):
        read({**run[1], "digests": digests}, tmp_path)


# ---- --init: a training starts from any file with weights ----------------------------------------------


@pytest.fixture
def net() -> SmallNet:
    return used()


def assert_same(expected: Any, found: Any) -> None:
    first, second = ({name: values(value) for name, value in state.items()} for state in (expected, found))
    assert first == second


def fresh(classes: int = 3) -> SmallNet:
    torch.manual_seed(2)
    return SmallNet(classes)


def load(model: nn.Module, path: Path, *allow_missing: str) -> list[str]:
    return resume.load_weights(model, str(path), allow_missing)


def dcp(state: Any, path: Path) -> None:
    import torch.distributed.checkpoint as distributed_checkpoint

    distributed_checkpoint.save(dict(state), checkpoint_id=str(path), no_dist=True)


def shards(state: Any, path: Path) -> None:
    whole = path.with_suffix(".safetensors")
    save_file(dict(state), whole)
    assert cli.run(["convert", str(whole), f"{path}/", "--shard-size", "200B"]) == 0


FILES: dict[str, Callable[[Any, Path], object]] = {
    "plain": saved,
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "DDP": lambda state, path: saved(prefixed(state, "module."), path),
    "DDP of compiled": lambda state, path: saved(prefixed(state, "module._orig_mod."), path),
    "training checkpoint": lambda state, path: saved({"epoch": 1, "model": state}, path),
    "safetensors": lambda state, path: save_file(dict(state), path),
    "shards": shards,
    "DCP": dcp,
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_checkpoint_gives_its_weights(kind, net, tmp_path):
    path, model = tmp_path / "f", fresh()
    FILES[kind](net.state_dict(), path)
    remarks = load(model, path)
    assert_same(net.state_dict(), model.state_dict())
    assert remarks[0].startswith(f"9 tensors from {path}")


def test_tied_weights_may_be_in_the_file_once(tmp_path):
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
        model["out"].weight = model["embed"].weight
        return model

    source, model = tied(), tied()
    load(model, saved({"embed.weight": source["embed"].weight.detach()}, tmp_path / "f.pt"))
    assert torch.equal(model["out"].weight, source["embed"].weight)
    assert model["out"].weight is model["embed"].weight


LACKS = "the file lacks 1 counter of BatchNorm, which begins at 0"
ALSO = "it also holds 'ema'; to start from that: ckpttool slim {} last.ema.safetensors --state ema"
HALF = "8 tensors are float16 in the file and float32 here"

REMARKED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "no counters": (lambda state: {n: v for n, v in state.items() if "num_batches" not in n}, [LACKS]),
    "others": (
        lambda state: {"model": state, "ema": dict(state), "optimizer": {"state": {}, "param_groups": []}},
        [ALSO, "not used: optimizer"],
    ),
    "float16": (
        lambda state: {n: v.half() if v.is_floating_point() else v for n, v in state.items()},
        [HALF],
    ),
}


@pytest.mark.parametrize("what", REMARKED)
def test_the_remarks_say_what_the_file_also_holds_or_lacks_and_what_is_cast(what, net, tmp_path):
    change, said = REMARKED[what]
    tree, model = change(net.state_dict()), fresh()
    path = saved(tree, tmp_path / "last.pt")
    remarks = load(model, path)
    assert {remark.format(path) for remark in said} <= {*remarks}
    expected = {**net.state_dict(), "norm.num_batches_tracked": torch.tensor(0), **tree.get("model", tree)}
    found = model.state_dict()
    assert_same({name: value.to(found[name]) for name, value in expected.items()}, found)


def test_casts_of_several_types_are_each_counted(tmp_path):
    def model(*dtypes: torch.dtype) -> nn.Module:
        return nn.ModuleList(nn.Linear(2, 2, dtype=dtype) for dtype in dtypes)

    path = saved(prefixed(model(torch.float32, torch.float64).state_dict(), "module."), tmp_path / "f.pt")
    remarks = load(model(torch.bfloat16, torch.float32), path)
    assert "2 tensors are float32 in the file and bfloat16 here" in remarks
    assert "2 tensors are float64 in the file and float32 here" in remarks


# ---- what does not fit ---------------------------------------------------------------------------------


def refusal(model: nn.Module, path: Path, *allow_missing: str) -> UsageFault:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageFault) as caught:
        load(model, path, *allow_missing)
    assert_same(before, model.state_dict())
    return caught.value


def test_a_head_of_other_classes_is_refused_with_the_flag_that_allows_it(net, tmp_path):
    path = saved(prefixed(net.state_dict(), "module."), tmp_path / "f.pt")
    fault = refusal(fresh(classes=5), path)
    assert fault.message == f"--init {path}: does not fit the model: 2 of another shape"
    assert "head.weight ([3, 4] in the file, [5, 4] in the model)" in str(fault.hint)
    assert str(fault.hint).endswith(f"  --init {path} --init-allow-missing 'head.*'")


@pytest.mark.parametrize(("classes", "said"), [
    (5, "newly made, not loaded: head.weight, head.bias"),
    (3, "--init-allow-missing 'head.*': the file has all of it"),
])  # fmt: skip
def test_the_advised_pattern_keeps_a_new_head_and_loads_the_rest(net, tmp_path, classes, said):
    path, model = saved(prefixed(net.state_dict(), "module."), tmp_path / "f.pt"), fresh(classes)
    assert said in load(model, path, "head.*")
    new = prefixed(fresh(classes).head.state_dict(), "head.") if classes == 5 else {}
    assert_same({**net.state_dict(), **new}, model.state_dict())


def test_a_pattern_that_matches_no_name_of_the_model_is_refused(net, tmp_path):
    fault = refusal(fresh(), saved(net.state_dict(), tmp_path / "f.pt"), "fc.*")
    assert fault.message == "--init-allow-missing: no name of the model matches 'fc.*'"
    assert fault.hint == "its last name is 'head.bias'"


def test_a_pattern_does_not_allow_what_it_does_not_match(net, tmp_path):
    state = net.state_dict()
    del state["conv.bias"]
    fault = refusal(fresh(classes=5), saved(state, tmp_path / "f.pt"), "head.*")
    assert fault.message.endswith("does not fit the model: 1 missing")
    assert "--init-allow-missing 'head.*' --init-allow-missing conv.bias" in str(fault.hint)


def test_the_advised_commands_make_the_file_fit(net, here):
    path = saved({**prefixed(net.state_dict(), "net."), "net.aux.w": torch.ones(2)}, Path("f.pt"))
    advice = str(refusal(fresh(classes=5), path).hint).splitlines()
    for line in advice[advice.index("rewrite the file:") + 1 : -2]:
        assert cli.run(shlex.split(line)[1:]) == 0
    flag, result, *globs = shlex.split(advice[-1])
    assert flag == "--init"
    model = fresh(classes=5)
    load(model, result, *globs[1::2])
    assert torch.equal(model.conv.weight, net.conv.weight)


def test_the_first_names_are_listed_and_the_rest_counted_for_another_architecture(net, tmp_path):
    fault = refusal(nn.Linear(2, 2), saved(net.state_dict(), tmp_path / "f.pt"))
    for words in (next(iter(net.state_dict())), "weight", "bias", "and 1 more", "ckpttool inspect"):
        assert words in str(fault.hint)


def test_weights_that_are_nan_are_refused(net, tmp_path):
    state = {name: value.clone() for name, value in net.state_dict().items()}
    state["norm.running_var"][1] = float("nan")
    with pytest.raises(UsageFault, match=r"norm.running_var is NaN or infinite"):
        load(fresh(), saved(state, tmp_path / "f.pt"))


def test_a_sparse_tensor_is_refused_by_name(net, tmp_path):
    state = {**net.state_dict(), "head.weight": net.head.weight.detach().to_sparse()}
    with pytest.raises(CkptToolError, match=r"missing|head.weight") as caught:
        load(fresh(), saved(state, tmp_path / "f.pt"))
    assert "head.weight" in f"{caught.value} {caught.value.hint}"


def truncated(state: Any, path: Path) -> None:
    path.write_bytes(saved(state, path).read_bytes()[:-300])


def flipped(state: Any, path: Path) -> None:
    data = bytearray(saved(state, path).read_bytes())
    data[data.index(state["conv.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)


def twice(state: Any, path: Path) -> None:
    saved({"a": dict(state), "b": dict(state), "n": 1}, path)


BAD: dict[str, tuple[Callable[[Any, Path], object], type[CkptToolError], str]] = {
    "missing": (lambda *_: None, Unreadable, "no such file"),
    "truncated": (truncated, Damaged, "cut short"),
    "a flipped bit": (flipped, Damaged, "do not match their checksum"),
    "an empty folder": (lambda _, path: path.mkdir(), Unreadable, "folder without the index"),
    "a named pipe": (lambda _, path: os.mkfifo(path), Unreadable, "is not a regular file"),
    "two models": (twice, NoState, "holds 2 states"),
    "no model": (lambda _, path: saved({"epoch": 3}, path), NoState, "holds no dict of tensors"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_can_not_be_read_is_refused_by_name(kind, net, tmp_path):
    make, error, words = BAD[kind]
    make(net.state_dict(), tmp_path / "f.pt")
    with pytest.raises(error, match=words) as caught:
        load(fresh(), tmp_path / "f.pt")
    assert str(tmp_path / "f.pt") in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_rank_without_the_file_leaves_its_weights_to_rank_0(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    model = fresh()
    assert load(model, tmp_path / "f.pt") == []
    assert_same(fresh().state_dict(), model.state_dict())


def test_the_digest_is_that_of_the_weights_wherever_the_file_lies(net, tmp_path):
    first = resume.digest_of_weights(saved(net.state_dict(), tmp_path / "a.pt"))
    save_file(net.state_dict(), tmp_path / "b.safetensors")
    assert resume.digest_of_weights(tmp_path / "b.safetensors") == first
    assert resume.digest_of_weights(saved(fresh().state_dict(), tmp_path / "c.pt")) != first


def test_the_published_resnet_20_fits_as_it_is(resnet20):
    from train.model import builtin as models

    remarks = load(models.resnet20(), resnet20)
    assert remarks[0].endswith("of 'state_dict', without 'module.'")
