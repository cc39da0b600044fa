"""ckpttool verify and digest; and several FILEs at once, of which one that can't be read stops no other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.files.digest import digest

nan = float("nan")
STATE = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7)}


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    """Save one state as in.pt, with an epoch, and as same.safetensors; two more, and one of nonsense."""
    torch.save({"model": STATE, "epoch": 3}, "in.pt")
    save_file(STATE, "same.safetensors")
    for name in ("a.pt", "b.pt"):
        torch.save({"model": {"w": torch.ones(ord(name[0]))}}, name)
    Path("bad.pt").write_bytes(b"nonsense")


# verify


def test_a_whole_file_is_ok(cli: Any) -> None:
    ran = cli("verify in.pt")
    assert (ran.code, ran.err) == (0, "")
    assert re.match(r"in\.pt: ok \(.* checked; no checksum covers \d+ bytes of header fields\)\n$", ran.out)


def test_json_has_the_fields_that_scripts_rely_on(cli: Any) -> None:
    ran = cli("verify in.pt --json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["checked_bytes"] > 56
    assert set(ran.json["unvouched"]) == {"header fields"}
    wanted = {"schema": 1, "path": "in.pt", "ok": True, "problems": [], "non_finite": {}, "unsummed": 0}
    wanted |= {"compared": None, "hint": None, "checked_bytes": 0, "unvouched": {}}
    wanted |= {"text_keys_here": [], "text_keys_there": [], "sealed": False, "unsealed": []}
    assert ran.json | {"checked_bytes": 0, "unvouched": {}} == wanted


def test_a_flipped_bit_is_exit_1_with_the_tensor_s_name(cli: Any) -> None:
    with ckpttool.open("in.pt") as checkpoint:
        data = checkpoint.state().tensors["w"].data
    raw = bytearray(Path("in.pt").read_bytes())
    raw[data.offset + 5] ^= 4  # type: ignore[union-attr]
    Path("in.pt").write_bytes(raw)
    ran = cli("verify in.pt")
    assert (ran.code, ran.err) == (1, "checksum: model.w: its bytes do not match their checksum\n")
    assert ran.out.startswith("in.pt: 1 problem (")
    ran = cli("verify in.pt --json")
    assert ran.code == 1 and ran.json["ok"] is False
    wanted = [{"kind": "checksum", "name": "model.w", "message": "its bytes do not match their checksum"}]
    assert ran.json["problems"] == wanted
    ran = cli("verify in.pt -q")
    assert (ran.code, ran.out, ran.err) == (1, "", "")


def test_values_that_are_not_finite_are_named_and_with_finite_a_problem(cli: Any) -> None:
    torch.save({"w": torch.tensor([nan, 1.0, nan]), "v": torch.tensor([1.0])}, "in.pt")
    ran = cli("verify in.pt")
    assert (ran.code, ran.err) == (0, "NaN or infinite values: w (2)\n")
    assert ran.out.startswith("in.pt: not finite, but not damaged (")
    ran = cli("verify in.pt --finite")
    assert ran.code == 1
    assert "non-finite: w: 2 of its values are NaN or infinite" in ran.err
    ran = cli("verify in.pt --finite --json")
    assert (ran.code, ran.json["non_finite"]) == (1, {"w": 2})


def test_storages_without_checksums_are_counted(cli: Any) -> None:
    ran = cli("verify same.safetensors")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("no checksum covers 56 bytes of values, 120 bytes of contents)\n")


def test_against_a_file_of_another_format(cli: Any) -> None:
    ran = cli("verify in.pt --against same.safetensors")
    assert ran.code == 0 and "ok, same model state as same.safetensors (" in ran.out
    ran = cli("verify in.pt --against none.pt")
    assert ran.code == 3 and "none.pt: no such file" in ran.err


def test_differences_are_exit_1_by_name(cli: Any) -> None:
    save_file({"w": STATE["w"] + 1, "m": STATE["n"]}, "other.safetensors")
    ran = cli("verify in.pt --against other.safetensors")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        "only-here: n: is not in the other file",
        "only-there: m: is only in the other file",
        "values: w: 12 of 12 values differ",
    ]
    assert ": 3 problems (" in ran.out
    problems = cli("verify in.pt --against other.safetensors --json").json["problems"]
    assert [problem["kind"] for problem in problems] == ["only-here", "only-there", "values"]


def test_many_problems_are_cut_short_and_the_rest_is_counted(cli: Any) -> None:
    torch.save({f"a{i:02}": torch.ones(1) for i in range(15)} | {"w": torch.ones(1)}, "in.pt")
    torch.save({"w": torch.ones(1)}, "other.pt")
    ran = cli("verify in.pt --against other.pt")
    assert (len(ran.err.splitlines()), ran.err.splitlines()[-1]) == (11, "and 5 more: -v shows them")
    assert ": 15 problems (" in ran.out
    assert len(cli("verify in.pt --against other.pt -v").err.splitlines()) == 15


# digest


def expected(path: str, state: str | None = None) -> str:
    with ckpttool.open(path) as checkpoint:
        return digest(checkpoint.state(state).tensors)


def test_the_line_has_the_form_of_sha256sum_and_quiet_prints_the_digest_alone(cli: Any, process: Any) -> None:
    ran = cli("digest in.pt")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{expected('in.pt')}  in.pt\n"
    assert re.match(r"[0-9a-f]{64} ", ran.out)
    piped = process("digest", "-", input=Path("in.pt").read_bytes())
    assert piped.stdout.decode() == f"{expected('in.pt')}  -\n"
    torch.save({"model": STATE, "ema": STATE}, "two.pt")
    ran = cli("digest two.pt -q")
    assert (ran.code, ran.out, ran.err) == (0, f"{expected('in.pt')}\n", "")


@pytest.mark.parametrize("path", ["in.pt", "same.safetensors"])
def test_json_has_the_field_that_scripts_rely_on_the_same_in_every_format(path: str, cli: Any) -> None:
    state = "model" if path == "in.pt" else ""
    wanted = {"schema": 1, "digest": expected("in.pt"), "state": state, "keys": 2, "path": path}
    assert cli(f"digest {path} --json").json == wanted


def test_the_digest_of_another_state_can_be_asked_for(cli: Any) -> None:
    torch.save({"model": STATE, "ema": {"w": torch.ones(2)}}, "in.pt")
    found = cli("digest in.pt --state ema --json").json
    assert (found["state"], found["keys"], found["digest"]) == ("ema", 1, expected("in.pt", "ema"))


def test_a_file_without_a_state_is_exit_3(cli: Any) -> None:
    torch.save({"epoch": 1}, "in.pt")
    ran = cli("digest in.pt")
    assert (ran.code, ran.out) == (3, "")


def test_a_file_name_can_t_steer_the_terminal(cli: Any) -> None:
    torch.save(STATE, "\x1b[31m.pt")
    assert "\x1b" not in cli("digest", "\x1b[31m.pt").out


# Several files.

COMMANDS = ["inspect", "digest", "verify"]


@pytest.mark.parametrize("command", COMMANDS)
def test_several_files_are_answered_one_after_the_other(command: str, cli: Any) -> None:
    ran = cli(command, "a.pt", "b.pt", "--json")
    assert ran.code == 0
    alone = [cli(command, name, "--json").json for name in ("a.pt", "b.pt")]
    assert ran.json == {"schema": 1, "files": alone}
    assert [found["path"] for found in ran.json["files"]] == ["a.pt", "b.pt"]
    between = "\n" if command == "inspect" else ""
    assert cli(command, "a.pt", "b.pt").out == between.join(
        cli(command, each).out for each in ("a.pt", "b.pt")
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_can_t_be_read_is_named_and_the_others_are_answered(command: str, cli: Any) -> None:
    ran = cli(command, "bad.pt", "a.pt", "missing.pt")
    assert ran.code == 3 and "a.pt" in ran.out and "bad.pt" not in ran.out
    assert [line for line in ran.err.splitlines() if line.startswith("error: ")] == [
        "error: bad.pt: is not a checkpoint, but text: nonsense",
        "error: missing.pt: no such file",
    ]
    found = cli(command, "bad.pt", "a.pt", "--json")
    assert found.code == 3
    assert [item["path"] for item in found.json["files"]] == ["bad.pt", "a.pt"]
    assert found.json["files"][0]["error"]["kind"] == "unsupported"


def test_verify_exits_with_the_worst_code(cli: Any) -> None:
    torch.save({"w": torch.tensor([nan])}, "nan.pt")
    assert cli("verify nan.pt a.pt --finite").code == 1
    assert cli("verify nan.pt a.pt bad.pt --finite").code == 3


def test_verify_compares_each_file_with_the_other(cli: Any) -> None:
    torch.save(torch.load("a.pt"), "same.pt")
    ran = cli("verify same.pt b.pt --against a.pt")
    assert ran.code == 1
    assert "same.pt: ok, same model state as a.pt" in ran.out and "b.pt: 1 problem" in ran.out


def test_digests_of_several_files_are_lines_as_sha256sum_prints_them(cli: Any) -> None:
    lines = [line.split("  ") for line in cli("digest a.pt b.pt a.pt").out.splitlines()]
    assert [name for _, name in lines] == ["a.pt", "b.pt", "a.pt"]
    assert lines[0][0] == lines[2][0] != lines[1][0]


def test_whether_a_file_can_be_read_is_told_by_reading_it(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can't be read is no wrong use of a command: 3, not click's 2, which asks access() alone."""
    torch.save({"w": torch.ones(2)}, "a.pt")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    for words in (
        ["verify", "a.pt"],
        ["diff", "a.pt", "a.pt"],
        ["convert", "a.pt", "new.pt"],
        ["scan", "a.pt"],
    ):
        assert cli(*words).code == 0
