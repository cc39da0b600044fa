"""What a program prints on a terminal: lines that end between words; elsewhere one line stays one line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from train import console
from train.config import command_line

ROOT = Path(__file__).parents[2]

LONG = "error: --data folder:nowhere: no such folder (give folder:PATH with a sub-folder for each class)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_lines_that_end_between_words(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    console.note(f"{LONG}\n  python train/main.py --a-command-to-paste --that-is-longer-than-forty-columns")
    *lines, command, end = terminal.getvalue().split("\n")
    assert " ".join(lines) == LONG and len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert command.endswith("--that-is-longer-than-forty-columns") and end == ""


def test_a_file_gets_the_line_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    console.note(LONG)
    assert capsys.readouterr().err == f"{LONG}\n"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_help_breaks_no_word_and_keeps_to_the_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, end, _ = command_line.train_parser().format_help().partition("\nexamples:")
    assert end and "torch.distributed.checkpoint" in text.split() and "--grad-checkpoint" in text
    helps = [line for line in text.splitlines() if not line.startswith(("  -", "usage", "Train"))]
    assert max(map(len, helps)) <= columns
    assert not any(line.endswith("-") for line in helps)


@pytest.mark.parametrize(
    ("words", "code"), [("--no-such-flag 2>&-", 2), ("--no-such-flag >&- 2>&-", 2), ("--help >&-", 0)]
)
def test_a_program_whose_streams_are_closed_ends_as_usual(words, code):
    command = f"{sys.executable} train/main.py {words}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=100).returncode == code


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_run_whose_streams_are_closed_trains(tmp_path, closed):
    command = f"{sys.executable} train/main.py --data fake:8 --epochs 1 --out {tmp_path}/run {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=100).returncode == 0
    assert (tmp_path / "run" / "last.pt").exists()


def test_what_is_meant_for_a_closed_stderr_does_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    console.note(LONG)
    assert capsys.readouterr().out == ""
