"""Code that --model names is the user's: what it prints stays off stdout, and what it left to atexit runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.forked import WarmPython

SOURCE = """
import atexit, os, pathlib, subprocess
import torch

atexit.register(lambda: pathlib.Path("left.txt").write_text("atexit ran"))
atexit.register(print, "goodbye")
print("imported")

class Talking(torch.nn.Sequential):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def make():
    print("made")
    os.system("echo of a child process")
    return Talking(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(SOURCE)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.ones(3, 2)).sum().backward()
    adam.step()
    torch.save({"model": net.state_dict(), "optimizer": adam.state_dict()}, "last.pt")
    return tmp_path


COMMANDS = [
    "reload last.pt --input-shape 4,2",
    "doctor last.pt",
    "convert-batchnorm last.pt out.pt --to sync",
    "optimizer last.pt out.pt --to names",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_model_prints_goes_to_stderr(command: str, folder: Path, warm_python: WarmPython) -> None:
    ran = warm_python.run("-m", "ckpttool", *command.split(), "--model", "net.py:make", "--json")
    assert ran.returncode == 0, ran.stderr
    json.loads(ran.stdout)
    for word in (b"imported", b"made", b"of a child process", b"goodbye"):
        assert word in ran.stderr


def test_an_output_on_stdout_holds_no_prints_of_the_model(folder: Path, warm_python: WarmPython) -> None:
    ran = warm_python.run(
        "-m", "ckpttool", "optimizer", "last.pt", "-", "--to", "names", "--model", "net.py:make"
    )
    assert (ran.returncode, ran.stdout[:2]) == (0, b"PK")
    (folder / "out.pt").write_bytes(ran.stdout)
    assert torch.load(folder / "out.pt")["optimizer"]["param_groups"][0]["params"][0] == "0.weight"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_model_left_to_atexit_runs(command: str, folder: Path, warm_python: WarmPython) -> None:
    warm_python.run("-m", "ckpttool", *command.split(), "--model", "net.py:make")
    assert (folder / "left.txt").read_text() == "atexit ran"


def test_the_exit_code_stays_when_atexit_runs(folder: Path, process: Any) -> None:
    torch.save({"0.weight": torch.ones(3, 3)}, "other.pt")
    ran = process("reload", "other.pt", "--model", "net.py:make")
    assert (ran.returncode, (folder / "left.txt").exists()) == (1, True)
