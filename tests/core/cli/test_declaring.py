"""Commands are found in the rooms: one whose room is taken away is missing, with its options of others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool import rooms
from ckpttool.core.cli import group, program
from ckpttool.core.cli.options import Command
from ckpttool.errors import MissingRoom
from tests.support.running import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]


def without(folder: Path, *taken: str) -> Run:
    """Return what runs a copy of the package that lacks the commands of some rooms."""
    shutil.copytree(ROOT / "ckpttool", folder / "ckpttool", ignore=shutil.ignore_patterns("__pycache__"))
    for name in taken:
        (folder / "ckpttool" / name / "command.py").unlink()
    torch.save({"w": torch.ones(2, 3)}, folder / "a.pt")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "ckpttool", *words]
        return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)

    return run


def test_every_command_stands_under_a_heading_of_the_help() -> None:
    declared = [each for commands in program.SECTIONS.values() for each in commands]
    assert [*group.commands.values()] == declared
    assert all(isinstance(each, Command) and each.summary for each in declared)


def test_a_command_does_without_what_others_would_add_to_it(tmp_path: Path) -> None:
    run = without(tmp_path, "mapping", "numbers", "reporting", "models", "explaining")
    listed = run("--help")
    assert listed.returncode == 0 and "\n  convert " in listed.stdout
    assert not any(
        f"\n  {name} " in listed.stdout for name in ("maps", "report", "doctor", "reload", "explain")
    )
    assert "\nLoad:" not in listed.stdout, "a heading without commands"
    for words in ("convert a.pt b.safetensors", "inspect b.safetensors", "slim a.pt c.pt", "diff a.pt c.pt"):
        ran = run(*words.split())
        assert (ran.returncode, ran.stderr) == (0, ""), words
    for flag in ("--map x", "--permute w=1,0", "--dequantize"):
        ran = run("convert", "a.pt", "d.pt", *flag.split())
        assert ran.returncode == 2 and "No such option" in ran.stderr
    assert '"map_' not in run("schema", "convert").stdout


def test_an_addition_to_a_command_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert without(tmp_path, "slimming", "conforming")("--help").returncode == 0


def test_a_room_that_is_not_there_is_none_and_one_that_lacks_a_library_is_an_error(tmp_path: Path) -> None:
    assert rooms.find("no_such_room.command") is None
    assert rooms.find("dcp.no_such_file") is None
    with pytest.raises(MissingRoom, match="'no_such_room', which was taken out"):
        rooms.need("no_such_room.reading")
    run = without(tmp_path)
    (tmp_path / "ckpttool" / "slimming" / "command.py").write_text("import no_such_library")
    assert "No module named 'no_such_library'" in run("--help").stderr
