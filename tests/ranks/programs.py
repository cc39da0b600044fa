"""The two programs of train/, started in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks.forked import Program

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TINY = ["--data", "fake:10", "--epochs", "1", "--batch-size", "4"]
PATIENCE = 110.0
"""Seconds that a program has until it fails its test."""

OWN_DATA = """
import random, torch
from torch.utils.data import Dataset

class Augmented(Dataset):
    classes = list("ab")
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.rand(1, 8, 8) + random.random(), index % 2

def pair():
    return Augmented(), Augmented()
"""
"""A file of a user's with samples that are drawn anew each time they are loaded."""


OWN_MODEL = """
import itertools, os, sys, time, torch
from pathlib import Path
from torch import nn

marks, passes = Path(__file__).parent, itertools.count(1)
rank = os.environ.get("RANK", "0")

class Own(nn.Linear):
    def forward(self, x):
        if torch.distributed.is_initialized() and len(x) > 1 and {when}:
            {does}
        return super().forward(x.flatten(1))

def model():
    return Own(3072, 10)
"""
"""A file of a user's with a model for `fake` data, which does something before passes of several samples."""


def own_model(folder: Path, does: str, when: str = "self.training") -> str:
    """Write a file of a user's with a model that does something in its passes; return its `--model`.

    The code has `marks` (the folder), `passes` (a counter from 1) and `rank` (a text).
    """
    (folder / "own.py").write_text(OWN_MODEL.format(does=does.replace("\n", "\n" + 12 * " "), when=when))
    return f"{folder}/own.py:model"


BROKEN_DATA = """
import time, torch
from torch.utils.data import TensorDataset

class Broken(TensorDataset):
    def __getitem__(self, index):
        if index == 300:
            raise ValueError("sample 300 is broken")
        time.sleep(0.001)
        return super().__getitem__(index)

def make():
    train = TensorDataset(torch.zeros(20, 1, 8, 8), torch.arange(20) % 10)
    return train, Broken(torch.zeros(4000, 1, 8, 8), torch.arange(4000) % 10)
"""
"""A file of a user's of whose test samples one, in the third batch of an evaluation, can't be read."""


def without(module: str, program: str) -> list[str]:
    """Return the command that runs a program of train/ as if a module were not installed."""
    hide = f"import sys; sys.modules['{module}'] = None; sys.argv = sys.argv[1:]; import runpy; "
    hide += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-c", hide, str(ROOT / "train" / program)]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with one thread, which torchrun would set with a note."""
    inherited = {name: value for name, value in os.environ.items() if name != "CKPTTOOL_DEBUG"}
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


def start(
    command: list[str], cwd: Path = ROOT, *, patience: float = PATIENCE, anew: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        patience: seconds that it has.
        anew: start a new process of Python's, and not a fork of one that has imported torch.
        more: variables of its environment.
    """
    if not anew and command[0] == sys.executable:
        program = Program(command, cwd, environment(**more))
        out, err = program.communicate(patience)
        return subprocess.CompletedProcess(command, program.returncode or 0, out, err)
    env = environment(**more)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=patience)
