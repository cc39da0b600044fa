"""What goes to a terminal is folded between words, and what is to be pasted stays whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.conforming.command import _table
from ckpttool.conforming.conform import conform
from ckpttool.core.cli.console import Console, say
from ckpttool.core.cli.failure import COMMAND, fail
from ckpttool.errors import Damaged
from ckpttool.inspecting.folder_page import run_page
from ckpttool.inspecting.tables import checkpoint_rows
from ckpttool.scanning.command import _say_problems
from ckpttool.scanning.scan import named_in, scan_each
from tests.support.running import Terminal


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def said(call: Callable[[], object]) -> list[str]:
    """Return the lines that a call prints on a terminal of 40 columns, without colours."""
    with contextlib.redirect_stderr(Terminal()) as terminal:
        call()
    return click.unstyle(terminal.getvalue()).splitlines()


def test_an_error_and_its_hint_are_folded() -> None:
    error = Damaged("in.pt", "is cut short: the zip directory at its end is missing")
    lines = said(lambda: fail(error, as_json=False))
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("error: in.pt: is cut") and "hint: copy or download it again, or use" in lines


def test_a_command_in_a_hint_stays_whole_on_a_line_of_its_own() -> None:
    command = "ckpttool merge a/long/folder/of/a/run OUT --take-rank 3"
    lines = said(lambda: say("hint:", "cyan", f"take one rank's values: {command}", command=COMMAND))
    assert lines == ["hint: take one rank's values:", command]


def test_a_short_hint_is_one_line() -> None:
    hint = "ckpttool convert --help"
    assert said(lambda: say("hint:", "cyan", hint, command=COMMAND)) == [f"hint: {hint}"]


def test_what_can_t_be_scanned_is_said_in_lines_that_fit(here: Path) -> None:
    torch.save({"w": torch.ones(300)}, "cut.pt")
    Path("cut.pt").write_bytes(Path("cut.pt").read_bytes()[:900])
    scanned = [*scan_each(named_in(["cut.pt"]))]
    lines = said(lambda: _say_problems(scanned))
    assert lines[0].startswith("unreadable: cut.pt: ") and len(lines) > 1
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(("width", "hidden"), [(40, ["shape", "steps", "by"]), (120, [])])
def test_columns_of_conform_that_do_not_fit_are_told(width: int, hidden: list[str], here: Path) -> None:
    shapes = {"convolution": (32, 48, 3, 3), "projection": (64, 16)}
    torch.save(
        {f"encoder.blocks.{i}.{n}.weight": torch.ones(s) for i in (0, 1) for n, s in shapes.items()}, "a.pt"
    )
    shapes = {"conv": (32, 48, 3, 3), "proj": (16, 64)}
    torch.save(
        {f"backbone.layers.{i}.{n}.weight": torch.ones(s) for i in (0, 1) for n, s in shapes.items()}, "b.pt"
    )
    with ckpttool.open("a.pt") as checkpoint:
        _, conformed = conform(checkpoint, "b.pt")
        lines, gone = _table(conformed.table, width)
    assert list(gone) == hidden
    assert lines[0].split() == ["from", "to", *(["shape", "steps", "by"] if not hidden else [])]
    assert max(map(len, lines)) <= width


class Running:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
def test_the_table_of_a_folder_keeps_what_is_wrong(here: Path, width: int | None) -> None:
    weights = {"l.weight": torch.ones(4, 4), "l.bias": torch.ones(4)}
    save_file(weights, "base.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, "new.safetensors")
    ckpttool.delta("base.safetensors", "new.safetensors", "step.delta.safetensors")
    save_file(
        {"l.lora_A.weight": torch.ones(2, 4), "l.lora_B.weight": torch.ones(4, 2)}, "adapter.safetensors"
    )
    torch.save({"model": weights, "more": Running()}, "runs.pt")
    torch.save(weights, "a-checkpoint-with-a-long-name.pt")
    Path("a-checkpoint-with-a-long-name.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    rows = checkpoint_rows(".")
    said = " ".join(" ".join(run_page(".", rows, width)).split())
    assert width is None or max(map(len, run_page(".", rows, width))) <= max(width, 40)
    for name, verdict in {
        "step.delta.safetensors": "a delta",
        "adapter.safetensors": "a LoRA adapter",
        "runs.pt": "whole, without an optimizer; could run posix.system",
        "base.safetensors": "whole, without an optimizer",
        "name.pt": "no: is cut short: the zip directory at its end is missing",
    }.items():
        assert re.search(rf"{re.escape(name[-12:])}[^:]*? {re.escape(verdict)}", said), (name, said)


def test_a_bar_on_a_narrow_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with contextlib.redirect_stderr(Terminal()) as terminal, Console().bar("strip-prefix") as bar:
        bar.expect(1 << 30)
        bar.add(1 << 29)
        bar._shown.refresh()
    drawn = next(line for line in terminal.getvalue().split("\r") if " 50%" in line)
    assert len(drawn) <= 60 and len(re.findall("[█▏▎▍▌▋▊▉#]", drawn)) >= 8, drawn
