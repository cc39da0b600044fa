"""What a run prints: its plan with `--preview`, a table of scores, and a bar that leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from ckpttool.distributed.plan import Plan
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, TORCHRUN, environment, start
from train.config import command_line
from train.config.sections import TrainConfig
from train.main import main
from train.run import preview, report


def seen(capsys: Any, *flags: str) -> str:
    assert main(["--preview", *flags]) == 0
    return capsys.readouterr().out


def of_torch(samples: int, batch_size: int, *, drop_last: bool = False) -> Plan:
    return Plan(samples, batch_size, sampler="torch", drop_last=drop_last)


@pytest.mark.parametrize(("plan", "world_size", "said"), [
    (of_torch(5, 4), 2, ["5 samples on 2 ranks: sample 4 is seen twice"]),
    (of_torch(10, 4), 4, ["10 samples on 4 ranks: samples 1 and 4 are seen twice"]),
    (of_torch(10, 4, drop_last=True), 4, ["10 samples on 4 ranks: samples 2 and 6 are left out of epoch 0"]),
    (of_torch(3, 8), 8, ["3 samples on 8 ranks: samples 0 and 2 are seen 3 times, sample 1 is seen twice"]),
    (of_torch(9, 32), 32, ["9 samples on 32 ranks: 5 samples are seen 4 times, 4 samples are seen 3 times"]),
    (of_torch(6, 8, drop_last=True), 2, ["6 samples on 2 ranks, batch 8: no rank gets a batch"]),
    (Plan(10, 4), 4, [
        "10 samples on 4 ranks: each is seen exactly once in an epoch",
        "10 samples, batch 4 on 4 ranks: the last batch leaves 2 ranks with nothing",
    ]),
    (Plan(7, 4), 4, [
        "7 samples on 4 ranks: each is seen exactly once in an epoch",
        "7 samples, batch 4 on 4 ranks: the last batch leaves one rank with nothing",
    ]),
    (Plan(8, 4, set_epoch=False), 1, [
        "8 samples on 1 rank: each is seen exactly once in an epoch",
        "no set_epoch: every epoch has the same order",
    ]),
    (Plan(10, 4, sampler="none"), 4, ["no sampler: every rank takes all 10 samples, 4 times in all"]),
    (Plan(10, 4, sampler="none"), 1, ["10 samples on 1 rank: each is seen exactly once in an epoch"]),
])  # fmt: skip
def test_the_sentences_say_what_is_repeated_left_out_or_missing(plan, world_size, said):
    assert preview.sentences(plan, world_size) == said


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("world_size", [1, 32])
@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(5000, 64), Plan(3000, 1024), Plan(3, 8, drop_last=True)])
def test_the_table_fits_the_terminal(plan, world_size, width):
    lines = preview.table(plan, world_size, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= preview.STEPS + 3


def test_the_table_shows_each_ranks_samples_by_step():
    assert preview.table(Plan(7, 4, rank_batch=(1, 3)), 2, 80) == [
        "epoch 0  rank 0  rank 1",
        "step 0   3       2 1 0",
        "step 1   5       6 4",
    ]


def test_a_long_table_names_what_it_leaves_out():
    lines = preview.table(Plan(5000, 64), 32, 80)
    assert "... 67 more steps" in lines
    assert lines[-1] == "(26 ranks between the last two columns)"
    assert lines[-2].startswith("step 78")


def test_the_json_is_what_torchs_classes_take(capsys):
    flags = "--json --data fake:10 --sampler torch --spawn 2 --batch-size 4 --epochs 2 --seed 3"
    entries = json.loads(seen(capsys, *flags.split()))
    assert [(entry["epoch"], entry["rank"]) for entry in entries] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    samples = range(sum(map(len, entries[0]["steps"] + entries[1]["steps"])))
    for entry in entries:
        sampler = DistributedSampler(samples, 2, entry["rank"], seed=3)
        sampler.set_epoch(entry["epoch"])
        loader = DataLoader(samples, 2, sampler=sampler, collate_fn=list)
        assert entry["steps"] == list(loader)


def test_it_says_what_no_sampler_and_no_set_epoch_would_do(capsys):
    flags = "--data fake:10 --sampler none --no-set-epoch --spawn 4 --batch-size 4"
    text = seen(capsys, *flags.split())
    assert "no sampler: every rank takes all " in text
    assert "no set_epoch: every epoch has the same order" in text
    assert main(["--sampler", "none"]) == 2
    assert "--sampler none: every rank would train on all samples" in capsys.readouterr().err


def test_shares_that_are_measured_are_said_to_be_equal_until_then(capsys):
    text = seen(capsys, "--data", "fake:10", "--rank-share", "auto", "--spawn", "2")
    assert "shares are equal until the speeds of the ranks have been measured" in text


@pytest.mark.parametrize("task", ["classification", "language-model", "own.py:no_such_task"])
def test_samples_need_no_classes_and_are_not_read(tmp_path, capsys, task):
    code = "class Texts(list):\n    def __getitem__(self, index):\n        raise OSError\n"
    (tmp_path / "own.py").write_text(f"{code}def data():\n    return Texts('abcde'), Texts('ab')\n")
    assert "5 training samples" in seen(capsys, "--data", f"{tmp_path}/own.py:data", "--task", task)


@pytest.mark.parametrize(
    "launcher", [[*TORCHRUN, "2", "train/main.py"], [sys.executable, "train/main.py", "--spawn", "2"]]
)
def test_one_table_is_printed_whoever_starts_the_ranks(launcher, tmp_path):
    flags = ["--preview", "--data", "fake:10", "--batch-size", "4", "--out", str(tmp_path / "run")]
    ran = start([*launcher, *flags], cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("epoch 0  rank 0  rank 1") == 1
    assert not (tmp_path / "run").exists()


# ---- scores and commands --------------------------------------------------------------------------------

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


def pasted(lines: list[str]) -> str:
    """Return what a shell takes lines for."""
    return " ".join("\n".join(lines).replace("\\\n", "").split())


@pytest.mark.parametrize("columns", [40, 80])
def test_the_scores_of_any_task_are_a_table_and_the_bar_leaves_nothing(tmp_path, columns):
    (tmp_path / "own.py").write_text(OWN)
    given = ["--data", "own.py:data", "--model", "own.py:model", "--task", "regression", "--epochs", "2"]
    lines = on_terminal(tmp_path, columns, *given, "--batch-size", "8", "--eval-every", "3steps")
    start = next(i for i, line in enumerate(lines) if "train loss" in line)
    heading, *rows = lines[start : lines.index("", start)]
    figures = ["mse", "mae", "r2", "seconds"] if columns == 80 else []
    assert heading.split() == ["epoch", "train", "loss", "test", "loss", *figures]
    named = "note the terminal is too narrow for columns that the log has: r2, mae, mse, seconds"
    assert (named in " ".join(" ".join(lines).split())) == (columns == 40)
    assert [row.split()[0] for row in rows] == ["0.60/2", "1/2", "1.20/2", "1.80/2", "2/2"]
    for row in rows if columns == 80 else ():
        assert row[len(heading) - 1].isdigit() and row[len(heading) :] in ("", "  best")
    assert not any("step/s" in line for line in lines)
    assert "ckpttool strip-prefix x/best.pt x/model.safetensors" in pasted(lines)
    assert max(len(line) for line in lines if "evaluate.py" not in line) <= columns
    assert not any(line.endswith("-") or line.startswith(" " * 9) for line in lines[: start - 1])


def test_a_recipe_is_broken_between_its_parts():
    config = TrainConfig.of(amp="bf16", clip_norm=1.0, ema=0.999, augment="crop-flip", mixup=0.2, seed=123)
    text = f"train   {report.in_lines(report.recipe(config))}"
    first = "train   10 epochs, sgd lr 0.1, cosine, amp bf16, clip-norm 1.0, ema 0.999,"
    assert text == f"{first}\n        augment crop-flip, mixup 0.2, seed 123"


def test_a_command_is_broken_before_flags_and_is_the_same_for_a_shell():
    words = ["python", "train/main.py", "--model", "own.py:model", "--data", "own.py:data", "--mean=-1,2"]
    words += ["--out", "my \\ run", "--init-allow-missing", "linear.*", "--epochs", "20", "--resume", "auto"]
    text = command_line.to_paste(words)
    assert shlex.split(text.replace(" \\\n", " ")) == words
    assert 1 < len(text.splitlines()) == text.count("\n      --") + 1
    assert max(map(len, text.splitlines())) <= 80


def test_a_command_is_broken_between_paths_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    words = "ckpttool strip-prefix runs/2026-11-26-201001/best.pt runs/2026-11-26-201001/model.safetensors"
    program, *paths = words.split(" runs")
    broken = "".join(f" \\\n      runs{path}" for path in paths)
    assert command_line.to_paste(words.split()) == f"  {program}{broken}"
    assert command_line.to_paste(["ckpttool"]) == "  ckpttool"
