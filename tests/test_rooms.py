"""Each room can be taken away, with those that need it: the rest of the program works without them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.rooms import ROOMS
from tests.support.running import ROOT

pytestmark = pytest.mark.lint

# Runs each command's help in one process, and a conversion there and back.
SCRIPT = """
import sys
from ckpttool.core.cli.program import group, run
assert run(["strip-prefix", "a.safetensors", "b.pt"]) == 0
assert run(["convert", "b.pt", "c.safetensors"]) == 0
if "inspect" in group.commands:
    assert run(["inspect", "c.safetensors"]) == 0
for name in group.commands:
    assert run([name, "--help"]) == 0, name
print("commands:", *group.commands)
import ckpttool
for name in ckpttool.__all__:
    try:
        getattr(ckpttool, name)
    except AttributeError:
        print("lacks:", name)
"""


def with_its_dependents(room: str) -> set[str]:
    """Return a room and all that need it."""
    gone = {room}
    while more := {name for name, needs in ROOMS.items() if name not in gone and gone & {*needs}}:
        gone |= more
    return gone


def run_without(rooms: set[str], folder: Path) -> dict[str, list[str]]:
    """Return the commands that are left and the public names that are not, in a copy without some rooms."""
    shutil.copytree(ROOT / "ckpttool", folder / "ckpttool", ignore=shutil.ignore_patterns("__pycache__"))
    for room in rooms:
        shutil.rmtree(folder / "ckpttool" / room)
    save_file({"module.w": torch.ones(2)}, folder / "a.safetensors")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    said = {"commands": [], "lacks": []}
    for line in lines:
        name, found, rest = line.partition(": ")
        if found and name in said:
            said[name] += rest.split()
    return said


@pytest.mark.parametrize("room", ROOMS)
def test_without_a_room_all_other_commands_work(room: str, tmp_path: Path) -> None:
    whole = run_without(set(), tmp_path / "whole") if room == next(iter(ROOMS)) else None
    left = run_without(with_its_dependents(room), tmp_path / "left")
    assert "convert" in left["commands"]
    if whole:
        assert whole["lacks"] == []
        assert {*left["commands"]} < {*whole["commands"]}


def test_without_any_room_files_are_still_converted(tmp_path: Path) -> None:
    left = run_without({*ROOMS}, tmp_path / "core")
    assert {*left["commands"]} == {"strip-prefix", "add-prefix", "rename-keys", "convert", "schema", "skill"}
