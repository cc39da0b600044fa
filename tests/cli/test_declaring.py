"""Commands are found through a table: one whose file is taken away is missing, with its options of others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool.core.cli import group, program
from ckpttool.core.cli.options import Command
from tests.support.running import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]


def without(folder: Path, *taken: str) -> Run:
    """Return what runs a copy of the package that lacks some command files."""
    shutil.copytree(ROOT / "ckpttool", folder / "ckpttool", ignore=shutil.ignore_patterns("__pycache__"))
    for name in taken:
        (folder / "ckpttool" / "cli" / "commands" / f"{name}.py").unlink()
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
    run = without(tmp_path, "maps", "layouts", "quantizing", "report", "load")
    listed = run("--help")
    assert listed.returncode == 0 and "\n  convert " in listed.stdout
    assert not any(f"\n  {name} " in listed.stdout for name in ("maps", "report", "doctor", "reload"))
    assert "\nLoad:" not in listed.stdout, "a heading without commands"
    for words in ("convert a.pt b.safetensors", "inspect b.safetensors", "slim a.pt c.pt", "diff a.pt c.pt"):
        ran = run(*words.split())
        assert (ran.returncode, ran.stderr) == (0, ""), words
    for flag in ("--map x", "--permute w=1,0", "--dequantize"):
        ran = run("convert", "a.pt", "d.pt", *flag.split())
        assert ran.returncode == 2 and "No such option" in ran.stderr
    assert '"map_' not in run("schema", "convert").stdout


def test_an_addition_to_a_command_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert without(tmp_path, "slim", "conform")("--help").returncode == 0


def test_a_file_that_is_not_there_declares_nothing_and_one_that_lacks_a_library_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_room.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    assert program._declared_in("ckpttool.no_such_room.command") == []
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        program._declared_in("lacking_room")
