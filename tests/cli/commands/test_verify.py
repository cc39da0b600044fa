"""ckpttool verify, as people and scripts use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from tests.support.running import Ran

Cli = Callable[..., Ran]

nan = float("nan")
STATE = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def damage(path: Path) -> None:
    """Flips one bit of the tensor `w`."""
    with ckpttool.open(path) as checkpoint:
        data = checkpoint.state().tensors["w"].data
    raw = bytearray(path.read_bytes())
    raw[data.offset + 5] ^= 4  # type: ignore[union-attr]
    path.write_bytes(raw)


def test_a_whole_file_is_ok(path: Path, cli: Cli) -> None:
    ran = cli("verify", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{path}: ok (")
    assert re.search(r" checked; no checksum covers \d+ bytes of header fields\)\n$", ran.out)


def test_json_has_the_fields_that_scripts_rely_on(path: Path, cli: Cli) -> None:
    ran = cli("verify", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["checked_bytes"] > 56
    assert set(ran.json["unvouched"]) == {"header fields"}
    assert ran.json | {"checked_bytes": 0, "unvouched": {}} == {
        "path": str(path),
        "ok": True,
        "checked_bytes": 0,
        "problems": [],
        "non_finite": {},
        "unsummed": 0,
        "unvouched": {},
        "compared": None,
        "hint": None,
    }


def test_a_flipped_bit_is_exit_1_with_the_tensor_s_name(path: Path, cli: Cli) -> None:
    damage(path)
    ran = cli("verify", path)
    assert (ran.code, ran.err) == (1, "checksum: model.w: its bytes do not match their checksum\n")
    assert ran.out.startswith(f"{path}: 1 problem (")
    ran = cli("verify", path, "--json")
    assert ran.code == 1 and ran.json["ok"] is False
    assert ran.json["problems"] == [
        {"kind": "checksum", "name": "model.w", "message": "its bytes do not match their checksum"}
    ]


def test_structural_damage_is_exit_3(path: Path, cli: Cli) -> None:
    path.write_bytes(path.read_bytes()[:-10])
    ran = cli("verify", path)
    assert (ran.code, ran.out) == (3, "")


def test_values_that_are_not_finite_are_named_and_with_finite_a_problem(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([nan, 1.0, nan]), "v": torch.tensor([1.0])}, tmp_path / "in.pt")
    ran = cli("verify", tmp_path / "in.pt")
    assert (ran.code, ran.err) == (0, "NaN or infinite values: w (2)\n")
    ran = cli("verify", tmp_path / "in.pt", "--finite")
    assert ran.code == 1
    assert "non-finite: w: 2 of its values are NaN or infinite" in ran.err
    ran = cli("verify", tmp_path / "in.pt", "--finite", "--json")
    assert (ran.code, ran.json["non_finite"]) == (1, {"w": 2})


def test_storages_without_checksums_are_counted(cli: Cli, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "in.safetensors")
    ran = cli("verify", tmp_path / "in.safetensors")
    assert (ran.code, ran.err) == (0, "")
    free = "56 bytes of values, 120 bytes of contents"
    assert ran.out.endswith(f"no checksum covers {free})\n")


def test_against_a_file_of_another_format(path: Path, cli: Cli) -> None:
    save_file(STATE, path.parent / "same.safetensors")
    ran = cli("verify", path, "--against", path.parent / "same.safetensors")
    assert ran.code == 0 and f"ok, same model state as {path.parent / 'same.safetensors'} (" in ran.out


def test_differences_are_exit_1_by_name(path: Path, cli: Cli) -> None:
    other = path.parent / "other.safetensors"
    save_file({"w": STATE["w"] + 1, "m": STATE["n"]}, other)
    ran = cli("verify", path, "--against", other)
    assert ran.code == 1
    assert ran.err.splitlines() == [
        "only-here: n: is not in the other file",
        "only-there: m: is only in the other file",
        "values: w: 12 of 12 values differ",
    ]
    assert ": 3 problems (" in ran.out
    ran = cli("verify", path, "--against", other, "--json")
    kinds = [problem["kind"] for problem in ran.json["problems"]]
    assert kinds == ["only-here", "only-there", "values"]


def test_many_problems_are_cut_short_and_the_rest_is_counted(cli: Cli, tmp_path: Path) -> None:
    torch.save({f"a{i:02}": torch.ones(1) for i in range(15)} | {"w": torch.ones(1)}, tmp_path / "in.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    ran = cli("verify", tmp_path / "in.pt", "--against", tmp_path / "other.pt")
    assert (len(ran.err.splitlines()), ran.err.splitlines()[-1]) == (11, "and 5 more: -v shows them")
    assert ": 15 problems (" in ran.out
    ran = cli("verify", tmp_path / "in.pt", "--against", tmp_path / "other.pt", "-v")
    assert len(ran.err.splitlines()) == 15


def test_the_other_file_must_be_readable(path: Path, cli: Cli) -> None:
    ran = cli("verify", path, "--against", path.parent / "none.pt")
    assert ran.code == 3 and "none.pt: no such file" in ran.err


def test_quiet_leaves_the_exit_code(path: Path, cli: Cli) -> None:
    damage(path)
    ran = cli("verify", path, "-q")
    assert (ran.code, ran.out, ran.err) == (1, "", "")
