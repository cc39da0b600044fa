"""inspect, digest and verify take several FILEs, and one that can't be read stops none of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

COMMANDS = ["inspect", "digest", "verify"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({"model": {"w": torch.ones(ord(name[0]))}}, name)
    Path("bad.pt").write_bytes(b"nonsense")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_the_json_of_several_files_lists_what_each_has_alone(command: str, folder: Path, cli: Any) -> None:
    ran = cli(command, "a.pt", "b.pt", "--json")
    assert ran.code == 0
    assert ran.json == {"files": [cli(command, name, "--json").json for name in ("a.pt", "b.pt")]}
    assert [found["path"] for found in ran.json["files"]] == ["a.pt", "b.pt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_people_read_one_answer_after_the_other(command: str, folder: Path, cli: Any) -> None:
    both = cli(command, "a.pt", "b.pt").out
    between = "\n" if command == "inspect" else ""
    assert both == between.join(cli(command, name).out for name in ("a.pt", "b.pt"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_can_t_be_read_is_named_and_the_others_are_answered(
    command: str, folder: Path, cli: Any
) -> None:
    ran = cli(command, "bad.pt", "a.pt", "missing.pt")
    assert ran.code == 3 and "a.pt" in ran.out and "bad.pt" not in ran.out
    assert [line for line in ran.err.splitlines() if line.startswith("error: ")] == [
        "error: bad.pt: is not a checkpoint in any format known here",
        "error: missing.pt: no such file",
    ]
    found = cli(command, "bad.pt", "a.pt", "--json")
    assert found.code == 3
    assert [item["path"] for item in found.json["files"]] == ["bad.pt", "a.pt"]
    assert found.json["files"][0]["error"]["kind"] == "unsupported"


def test_verify_exits_with_the_worst_code(folder: Path, cli: Any) -> None:
    torch.save({"w": torch.tensor([float("nan")])}, "nan.pt")
    assert cli("verify", "nan.pt", "a.pt", "--finite").code == 1
    assert cli("verify", "nan.pt", "a.pt", "bad.pt", "--finite").code == 3


def test_verify_compares_each_file_with_the_other(folder: Path, cli: Any) -> None:
    torch.save(torch.load("a.pt"), "same.pt")
    ran = cli("verify", "same.pt", "b.pt", "--against", "a.pt")
    assert ran.code == 1
    assert "same.pt: ok, same model state as a.pt" in ran.out and "b.pt: 1 problem" in ran.out


def test_digests_of_several_files_are_lines_as_sha256sum_prints_them(folder: Path, cli: Any) -> None:
    lines = [line.split("  ") for line in cli("digest", "a.pt", "b.pt", "a.pt").out.splitlines()]
    assert [name for _, name in lines] == ["a.pt", "b.pt", "a.pt"]
    assert lines[0][0] == lines[2][0] != lines[1][0]
