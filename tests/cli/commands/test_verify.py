"""ckpttool verify and digest, as people and scripts use them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.files.digest import digest

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


def test_a_whole_file_is_ok(path: Path, cli: Any) -> None:
    ran = cli("verify", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{path}: ok (")
    assert re.search(r" checked; no checksum covers \d+ bytes of header fields\)\n$", ran.out)


def test_json_has_the_fields_that_scripts_rely_on(path: Path, cli: Any) -> None:
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


def test_a_flipped_bit_is_exit_1_with_the_tensor_s_name(path: Path, cli: Any) -> None:
    damage(path)
    ran = cli("verify", path)
    assert (ran.code, ran.err) == (1, "checksum: model.w: its bytes do not match their checksum\n")
    assert ran.out.startswith(f"{path}: 1 problem (")
    ran = cli("verify", path, "--json")
    assert ran.code == 1 and ran.json["ok"] is False
    wanted = [{"kind": "checksum", "name": "model.w", "message": "its bytes do not match their checksum"}]
    assert ran.json["problems"] == wanted


def test_structural_damage_is_exit_3(path: Path, cli: Any) -> None:
    path.write_bytes(path.read_bytes()[:-10])
    ran = cli("verify", path)
    assert (ran.code, ran.out) == (3, "")


def test_values_that_are_not_finite_are_named_and_with_finite_a_problem(cli: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([nan, 1.0, nan]), "v": torch.tensor([1.0])}, tmp_path / "in.pt")
    ran = cli("verify", tmp_path / "in.pt")
    assert (ran.code, ran.err) == (0, "NaN or infinite values: w (2)\n")
    ran = cli("verify", tmp_path / "in.pt", "--finite")
    assert ran.code == 1
    assert "non-finite: w: 2 of its values are NaN or infinite" in ran.err
    ran = cli("verify", tmp_path / "in.pt", "--finite", "--json")
    assert (ran.code, ran.json["non_finite"]) == (1, {"w": 2})


def test_storages_without_checksums_are_counted(cli: Any, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "in.safetensors")
    ran = cli("verify", tmp_path / "in.safetensors")
    assert (ran.code, ran.err) == (0, "")
    free = "56 bytes of values, 120 bytes of contents"
    assert ran.out.endswith(f"no checksum covers {free})\n")


def test_against_a_file_of_another_format(path: Path, cli: Any) -> None:
    save_file(STATE, path.parent / "same.safetensors")
    ran = cli("verify", path, "--against", path.parent / "same.safetensors")
    assert ran.code == 0 and f"ok, same model state as {path.parent / 'same.safetensors'} (" in ran.out


def test_differences_are_exit_1_by_name(path: Path, cli: Any) -> None:
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


def test_many_problems_are_cut_short_and_the_rest_is_counted(cli: Any, tmp_path: Path) -> None:
    torch.save({f"a{i:02}": torch.ones(1) for i in range(15)} | {"w": torch.ones(1)}, tmp_path / "in.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    ran = cli("verify", tmp_path / "in.pt", "--against", tmp_path / "other.pt")
    assert (len(ran.err.splitlines()), ran.err.splitlines()[-1]) == (11, "and 5 more: -v shows them")
    assert ": 15 problems (" in ran.out
    ran = cli("verify", tmp_path / "in.pt", "--against", tmp_path / "other.pt", "-v")
    assert len(ran.err.splitlines()) == 15


def test_the_other_file_must_be_readable(path: Path, cli: Any) -> None:
    ran = cli("verify", path, "--against", path.parent / "none.pt")
    assert ran.code == 3 and "none.pt: no such file" in ran.err


def test_quiet_leaves_the_exit_code(path: Path, cli: Any) -> None:
    damage(path)
    ran = cli("verify", path, "-q")
    assert (ran.code, ran.out, ran.err) == (1, "", "")


MODEL = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7)}


def expected(path: Path, state: str | None = None) -> str:
    with ckpttool.open(path) as checkpoint:
        return digest(checkpoint.state(state).tensors)


def test_the_line_has_the_form_of_sha256sum(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": MODEL, "epoch": 3}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{expected(tmp_path / 'in.pt')}  {tmp_path / 'in.pt'}\n"


def test_json_has_the_field_that_scripts_rely_on(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": MODEL}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "--json")
    assert ran.json == {
        "digest": expected(tmp_path / "in.pt"),
        "state": "model",
        "keys": 2,
        "path": str(tmp_path / "in.pt"),
    }
    assert len(ran.json["digest"]) == 64


def test_the_digest_is_the_same_in_another_format(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": MODEL, "epoch": 3}, tmp_path / "in.pt")
    save_file(MODEL, tmp_path / "in.safetensors")
    one, other = (cli("digest", tmp_path / f"in.{e}", "--json").json for e in ("pt", "safetensors"))
    assert one["digest"] == other["digest"]


def test_the_digest_of_another_state_can_be_asked_for(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": MODEL, "ema": {"w": torch.ones(2)}}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "--state", "ema", "--json")
    assert (ran.json["state"], ran.json["keys"]) == ("ema", 1)
    assert ran.json["digest"] == expected(tmp_path / "in.pt", "ema")
    assert cli("digest", tmp_path / "in.pt", "--state", "none").code == 3


def test_a_file_without_a_state_is_exit_3(cli: Any, tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt")
    assert (ran.code, ran.out) == (3, "")


def test_quiet_prints_the_digest_alone(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": MODEL, "ema": MODEL}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"[0-9a-f]{64}\n", ran.out)


def test_a_file_name_can_t_steer_the_terminal(cli: Any, tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "\x1b[31m.pt")
    assert "\x1b" not in cli("digest", tmp_path / "\x1b[31m.pt").out


def test_the_file_is_read_from_a_pipe(process: Any, tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "in.pt")
    ran = process("digest", "-", input=(tmp_path / "in.pt").read_bytes())
    assert ran.stdout.decode() == f"{expected(tmp_path / 'in.pt')}  -\n"
