"""Reading a last.pt: foreign files and any field that is missing, empty or of another type are one line."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.distributed.group import process_group
from ckpttool.errors import CkptToolError, Damaged, Refused
from tests.support.comparing import saved
from train import main
from train.checkpoint import format as checkpoints
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
