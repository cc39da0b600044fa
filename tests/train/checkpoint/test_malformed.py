"""A malformed last.pt: any field that is missing, empty or of another type is one line, and no traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.distributed.group import process_group
from ckpttool.errors import CkptToolError, Damaged
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
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))
"""
Path_ = tuple[Any, ...]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], Path]:
    """A short run with all that a checkpoint can hold: its flags, its last.pt as read, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own.py").write_text(MODEL)
    flags = ["--data", "fake:12", "--model", f"{folder}/own.py:net", "--batch-size", "4"]
    flags += ["--batchnorm", "pooled", "--save-every", "2steps"]
    assert main.main([*flags, "--epochs", "1", "--keep", "9", "--out", str(folder / "out")]) == 0
    return flags, torch.load(folder / "out" / "step-000002.pt", weights_only=True), folder


def fields(value: Any, path: Path_ = (), depth: int = 5) -> Iterator[Path_]:
    """Yield the path of each field; of a list, of weights and of moments, only of the first and the last."""
    if path:
        yield path
    if depth and isinstance(value, dict):
        keys = list(value)
        for key in keys if path not in (("model",), ("optimizer", "state")) else (keys[0], keys[-1]):
            yield from fields(value[key], (*path, key), depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from fields(value[index], (*path, index), depth - 1)


def changed(state: dict[str, Any], path: Path_, how: str) -> dict[str, Any] | None:
    """Return a copy with one field changed; None if that is no change."""
    made = copy.deepcopy(state)
    parent = made
    for key in path[:-1]:
        if isinstance(parent[key], tuple):
            return None
        parent = parent[key]
    old, key = parent[path[-1]], path[-1]
    if isinstance(parent, tuple):
        return None
    if how == "dropped":
        del parent[key]
        return made
    news = {
        "empty": old[:0] if isinstance(old, str | list | tuple | torch.Tensor) and not _scalar(old) else {},
        "text": "text",
        "number": -7,
        "nothing": None,
        "list": [[]],
        "tensor": torch.zeros(2, 3),
    }
    new = news[how]
    parent[key] = new
    same = type(new) is type(old) and (torch.equal(new, old) if isinstance(new, torch.Tensor) else new == old)
    return None if same else made


def _scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


HOW = ["dropped", "empty", "text", "number", "nothing", "list", "tensor"]


def test_any_changed_field_is_refused_in_one_line(run):
    """The digest of the run finds all of them alike, so each field is changed in one way."""
    _, state, folder = run
    tried = set()
    for number, path in enumerate(fields(state)):
        if path == ("digests", "run"):
            continue
        ways = (HOW[(number + other) % len(HOW)] for other in range(len(HOW)))
        how, made = next((how, made) for how in ways if (made := changed(state, path, how)))
        torch.save(made, folder / "changed.pt")
        with pytest.raises(CkptToolError) as refused:
            checkpoints.read(str(folder / "changed.pt"))
        assert refused.value.exit_code == 3, path
        assert "\n" not in refused.value.message, path
        tried.add((path, how))
    assert len(tried) > 50
    assert {how for _, how in tried} == set(HOW)


@pytest.mark.parametrize("how", HOW)
def test_a_changed_field_without_the_digest_of_the_run_is_refused_or_harmless(run, how):
    """Checkpoints of before that digest have none. Harmless: the run continues for a step and is saved."""
    flags, state, folder = run
    config = command_line.parse([*flags, "--epochs", "2", "--resume", str(folder / "changed.pt")])
    job = main.prepare(config)
    with process_group(job.place, timeout=5):
        trainer = Trainer(config, job.data, job.model, job.place, job.task)
        rest = {part: value for part, value in state.items() if part not in ("model", "optimizer", "digests")}
        for path in fields(rest):
            made = changed(state, path, how)
            if made is None:
                continue
            del made["digests"]["run"]
            torch.save(made, folder / "changed.pt")
            try:
                resuming.resume(trainer, "")
            except CkptToolError as error:
                assert error.exit_code in (2, 3), path
                assert "\n" not in error.message, path
                continue
            next(steps_of_epoch(trainer))
            capture(trainer)


def test_the_program_ends_in_one_line(run, capsys):
    flags, state, folder = run
    torch.save({**state, "progress": {**state["progress"], "epoch": "one"}}, folder / "changed.pt")
    more = ["--epochs", "2", "--resume", str(folder / "changed.pt"), "--out", str(folder / "resumed")]
    capsys.readouterr()
    assert main.main([*flags, *more]) == 3
    assert capsys.readouterr().err == f"error: {folder}/changed.pt: progress.epoch is a str, not a int\n"


@pytest.mark.parametrize("digests", [{}, {"model": ""}, {"run": ""}, None, []])
def test_a_checkpoint_without_digests_is_damaged(run, digests):
    _, state, folder = run
    torch.save({**state, "digests": digests}, folder / "changed.pt")
    with pytest.raises(Damaged, match="digests"):
        checkpoints.read(str(folder / "changed.pt"))


def test_the_unchanged_checkpoint_is_read(run):
    _, state, folder = run
    torch.save(state, folder / "changed.pt")
    assert checkpoints.read(str(folder / "changed.pt"))["progress"] == state["progress"]
