"""The examples of tasks, as their docstrings start them: the same weights on any number of ranks."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.programs import TORCHRUN, start
from tests.support.run_log import epochs_of
from tests.support.running import ROOT

SHORT = {"regression": ["--epochs", "5"], "character_lm": ["--epochs", "2"]}
PLAIN = ["--optimizer", "sgd", "--lr", "0.1"]
"""AdamW divides by the size of each gradient, so that rounding in the smallest ones is seen in weights."""


def commands(name: str) -> list[list[str]]:
    """Return the commands in the docstring of an example."""
    text = (ROOT / "examples" / f"{name}.py").read_text().partition('"""')[2].partition('"""')[0]
    found = re.findall(r"^    python ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", "")) for command in found]


def train(name: str, ranks: int, out: Path, *more: str) -> dict[str, Any]:
    """Train an example briefly, and return its checkpoint."""
    arguments = commands(name)[0]
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
    done = start([*launcher, *arguments, *SHORT[name], "--out", str(out), *more])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(out / "last.pt", weights_only=True)
    return found


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two checkpoints' weights."""
    return max((one["model"][name] - other["model"][name]).abs().max().item() for name in one["model"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "ranks", "bound"), [("regression", 4, 1e-14), ("character_lm", 2, 1e-6)])
def test_an_example_ends_with_the_same_weights_on_one_rank_and_on_many(tmp_path, name, ranks, bound):
    alone = train(name, 1, tmp_path / "alone", *PLAIN)
    many = train(name, ranks, tmp_path / "many", *PLAIN)
    assert many["plan"]["world_size"] == ranks
    assert farthest(alone, many) <= bound
    logs = [epochs_of(tmp_path / run) for run in ("alone", "many")]
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5)


@pytest.mark.timeout(300)
def test_the_language_model_writes_lines_of_its_characters(tmp_path):
    train("character_lm", 1, tmp_path / "run")
    program, _, beginning = commands("character_lm")[1]
    done = start([sys.executable, program, str(tmp_path / "run/last.pt"), beginning])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(beginning.rstrip()) for line in lines)
