"""What a run prints: a table for any task, and a progress bar that leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, environment
from train.config import command_line
from train.config.training import TrainConfig
from train.run import report

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs[:40], inputs[:40, :1]), TensorDataset(inputs[40:], inputs[40:, :1])

def model():
    return nn.Linear(4, 1)
"""


def on_terminal(folder: Path, columns: int, *arguments: str) -> list[str]:
    """Return what is on a terminal of this width when the trainer has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, str(ROOT / "train" / "main.py"), *arguments, "--out", "x"]
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
    run = Program(command, folder, env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert run.wait(timeout=60) == 0, said.decode()
    return [overprinted(line) for line in said.decode().replace("\r\n", "\n").split("\n")]


def overprinted(line: str) -> str:
    """Return what is seen of a line in which carriage returns begin again."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_scores_of_any_task_are_a_table_and_the_bar_leaves_nothing(tmp_path, columns):
    (tmp_path / "own.py").write_text(OWN)
    given = ["--data", "own.py:data", "--model", "own.py:model", "--task", "regression", "--epochs", "2"]
    lines = on_terminal(tmp_path, columns, *given, "--batch-size", "8", "--eval-every", "3steps")
    start = next(i for i, line in enumerate(lines) if "train loss" in line)
    heading, *rows = lines[start : lines.index("", start)]
    assert heading.split() == ["epoch", "train", "loss", "test", "loss", "mse", "mae", "r2", "seconds"]
    assert [row.split()[0] for row in rows] == ["0.60/2", "1/2", "1.20/2", "1.80/2", "2/2"]
    for row in rows:
        assert row[len(heading) - 1].isdigit() and row[len(heading) :] in ("", "  best")
    assert not any("step/s" in line for line in lines)
    assert "  ckpttool strip-prefix x/best.pt x/model.safetensors" in lines
    assert max(len(line) for line in lines if "evaluate.py" not in line) <= 80


def test_a_recipe_is_broken_between_its_parts():
    config = TrainConfig(amp="bf16", clip_norm=1.0, ema=0.999, augment="crop-flip", mixup=0.2, seed=123)
    text = f"train   {report.in_lines(report.recipe(config))}"
    assert text == (
        "train   10 epochs, sgd lr 0.1, cosine, amp bf16, clip-norm 1.0, ema 0.999,\n"
        "        augment crop-flip, mixup 0.2, seed 123"
    )


def test_a_command_is_broken_before_flags_and_is_the_same_for_a_shell():
    words = ["python", "train/main.py", "--model", "own.py:model", "--data", "own.py:data", "--mean=-1,2"]
    words += ["--out", "my \\ run", "--init-allow-missing", "linear.*", "--epochs", "20", "--resume", "auto"]
    text = command_line.to_paste(words)
    assert shlex.split(text.replace(" \\\n", " ")) == words
    assert 1 < len(text.splitlines()) == text.count("\n      --") + 1
    assert max(map(len, text.splitlines())) <= 80
