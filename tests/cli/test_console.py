"""What -q, -v and --json promise, the same for every command that rewrites a file."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import cli as command_line
from ckpttool.cli import console
from ckpttool.cli.console import MAX_INDENTED, to_json


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Seven keys with a prefix, seven without, and seven things beside the model."""
    model = {f"module.a{i}": torch.full((2,), float("nan")) for i in range(7)}
    model |= {f"b{i}": torch.ones(2) for i in range(7)}
    torch.save({"model": model, **{f"beside{i}": i for i in range(7)}}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_the_first_names_are_listed_and_the_rest_is_counted(many: Path, cli: Any, tmp_path: Path) -> None:
    said = cli("strip-prefix", many, tmp_path / "out.safetensors").err
    assert "kept as they were: b0, b1, b2, b3 and 3 more" in said
    assert (
        "left out, as safetensors holds only tensors: beside0, beside1, beside2, beside3 and 3 more" in said
    )
    assert "module.a0" not in said


def test_verbose_lists_every_name(many: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli("strip-prefix", many, tmp_path / "out.safetensors", "-v")
    assert "more" not in ran.err
    for i in range(7):
        assert f"module.a{i} -> a{i}\n" in ran.err
        assert f"b{i}" in ran.err and f"beside{i}" in ran.err
    assert len(ran.out.splitlines()) == 1


def test_verbose_with_dry_run_shows_what_a_renaming_would_do(many: Path, cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    ran = cli("rename-keys", many, out, "--map", r"^b(\d)=c.\1", "--dry-run", "-v")
    assert "b0 -> c.0\n" in ran.err and "b6 -> c.6\n" in ran.err
    assert ran.out.startswith("would have renamed 7 of 14 keys")
    assert not out.exists()


def test_verbose_lists_every_tensor_that_is_not_finite(many: Path, cli: Any) -> None:
    assert "model.module.a3 (2) and 3 more" in cli("verify", many).err
    assert "model.module.a6" in cli("verify", many, "-v").err


@pytest.mark.parametrize("command", ["strip-prefix", "convert", "slim"])
def test_quiet_prints_nothing(command: str, many: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli(command, many, tmp_path / "out.safetensors", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_json_is_alone_on_stdout_and_stderr_is_empty(many: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli("strip-prefix", many, tmp_path / "out.safetensors", "--json", "-v")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["keys"], ran.json["renamed"]) == (14, 7)
    assert ran.json["left_out"] == [f"beside{i}" for i in range(7)]
    assert ran.json["kept"] == [f"b{i}" for i in range(7)]
    assert (ran.json["copied"], ran.json["mentions"]) == ([], [])


class Terminal(io.StringIO):
    """Something that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr from here on, and bars however small the work."""
    terminal = Terminal()
    monkeypatch.setattr(console.sys, "stderr", terminal)
    monkeypatch.setattr(console, "BAR_FROM", 1)
    return terminal


@pytest.mark.parametrize("command", ["strip-prefix", "convert", "slim", "verify", "digest"])
def test_long_work_shows_its_bytes_on_a_terminal(
    command: str, many: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stderr = on_a_terminal(monkeypatch)
    out = [] if command in ("verify", "digest") else [str(tmp_path / "out.pt")]
    assert command_line.run([command, str(many), *out]) == 0
    assert "%|" in stderr.getvalue() and "B/s]" in stderr.getvalue()


def test_notes_break_between_words_on_a_terminal_and_nowhere_in_a_pipe(
    many: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    said = cli("slim", many, tmp_path / "a.pt").err
    assert len(said.splitlines()) == 1 and len(said) > 40
    stderr = on_a_terminal(monkeypatch)
    monkeypatch.setattr(console, "BAR_FROM", 1 << 30)
    assert command_line.run(["slim", str(many), str(tmp_path / "b.pt")]) == 0
    lines = stderr.getvalue().splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(lines) == said.strip()


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
def test_json_and_quiet_draw_no_bar(flag: str, many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = on_a_terminal(monkeypatch)
    assert command_line.run(["verify", str(many), flag]) == 0
    assert stderr.getvalue() == ""


def test_a_bar_stops_at_its_total_when_the_work_was_underestimated(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = on_a_terminal(monkeypatch)
    with console.Console().progress(100, "reading") as progress:
        assert progress is not None
        for _ in range(3):
            progress(60)
    assert "180" not in stderr.getvalue()


def test_no_bar_is_drawn_outside_a_terminal(many: Path, process: Any) -> None:
    assert b"%|" not in process("verify", many).stderr


@pytest.mark.parametrize("odd", [math.nan, -math.inf, (1, math.inf)], ids=str)
def test_large_json_holds_the_same_on_few_lines(odd: Any) -> None:
    data = {"rows": [{"name": f"é\ud800{i}", "value": None} for i in range(3)], "odd": odd, "map": {"a": 1}}
    large = data | {"much": "x" * MAX_INDENTED}
    small, much = json.loads(to_json(data)), json.loads(to_json(large))
    assert {key: much[key] for key in small} == small
    assert len(to_json(large).splitlines()) == 2 + len(large)
    assert "NaN" not in to_json(large) and "Infinity" not in to_json(large)
