"""ckpttool digest, as people and scripts use it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.files.digest import digest
from tests.support.running import Ran

Cli = Callable[..., Ran]

STATE = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(7)}


def expected(path: Path, state: str | None = None) -> str:
    with ckpttool.open(path) as checkpoint:
        return digest(checkpoint.state(state).tensors)


def test_the_line_has_the_form_of_sha256sum(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{expected(tmp_path / 'in.pt')}  {tmp_path / 'in.pt'}\n"


def test_json_has_the_field_that_scripts_rely_on(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": STATE}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "--json")
    assert ran.json == {
        "digest": expected(tmp_path / "in.pt"),
        "state": "model",
        "keys": 2,
        "path": str(tmp_path / "in.pt"),
    }
    assert len(ran.json["digest"]) == 64


def test_the_digest_is_the_same_in_another_format(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "in.pt")
    save_file(STATE, tmp_path / "in.safetensors")
    one, other = (cli("digest", tmp_path / f"in.{e}", "--json").json for e in ("pt", "safetensors"))
    assert one["digest"] == other["digest"]


def test_the_digest_of_another_state_can_be_asked_for(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": STATE, "ema": {"w": torch.ones(2)}}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "--state", "ema", "--json")
    assert (ran.json["state"], ran.json["keys"]) == ("ema", 1)
    assert ran.json["digest"] == expected(tmp_path / "in.pt", "ema")
    assert cli("digest", tmp_path / "in.pt", "--state", "none").code == 3


def test_a_file_without_a_state_is_exit_3(cli: Cli, tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt")
    assert (ran.code, ran.out) == (3, "")


def test_quiet_prints_the_digest_alone(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": STATE, "ema": STATE}, tmp_path / "in.pt")
    ran = cli("digest", tmp_path / "in.pt", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"[0-9a-f]{64}\n", ran.out)


def test_a_file_name_can_t_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "\x1b[31m.pt")
    assert "\x1b" not in cli("digest", tmp_path / "\x1b[31m.pt").out


def test_the_file_is_read_from_a_pipe(process: Any, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "in.pt")
    ran = process("digest", "-", input=(tmp_path / "in.pt").read_bytes())
    assert ran.stdout.decode() == f"{expected(tmp_path / 'in.pt')}  -\n"
