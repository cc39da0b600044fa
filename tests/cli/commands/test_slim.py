"""ckpttool slim, as people and scripts use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.running import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    big = torch.arange(100_000, dtype=torch.float32)
    value = {"model": {"part": big[10:13], "own": torch.ones(2)}, "optimizer": [big], "epoch": 3}
    torch.save({"run": value, "args": 1}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_only_the_state_is_written_and_the_rest_is_named(ending: str, path: Path, cli: Cli) -> None:
    out = path.parent / f"out{ending}"
    ran = cli("slim", path, out)
    assert (ran.code, ran.err) == (0, "left out: args, run.optimizer, run.epoch\n")
    assert ran.out.startswith(f"slimmed {path.stat().st_size / 1000:.0f} kB -> {out} (")
    loaded = torch.load(out) if ending == ".pt" else load_file(out)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {"part": [10, 11, 12], "own": [1, 1]}
    assert out.stat().st_size < 3_000


def test_json_has_the_fields_that_scripts_rely_on(path: Path, cli: Cli) -> None:
    ran = cli("slim", path, path.parent / "out.pt", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds"}
    assert (ran.json["keys"], ran.json["renamed"]) == (2, 0)
    assert ran.json["left_out"] == ["args", "run.optimizer", "run.epoch"]
    assert ran.json["bytes"] == (path.parent / "out.pt").stat().st_size


def test_another_state_can_be_named(path: Path, cli: Cli) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "ema": {"v": torch.ones(1)}}, path)
    ran = cli("slim", path, path.parent / "out.pt", "--state", "ema", "--json")
    assert ran.json["left_out"] == ["model"]
    assert list(torch.load(path.parent / "out.pt")) == ["v"]


def test_a_state_that_is_the_file_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    ran = cli("slim", tmp_path / "in.pt", tmp_path / "out.pt", "--json")
    assert ran.json["left_out"] == []


def test_a_file_without_a_state_is_exit_3(cli: Cli, tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "in.pt")
    ran = cli("slim", tmp_path / "in.pt", tmp_path / "out.pt")
    assert ran.code == 3 and "holds no dict of tensors" in ran.err
    assert not (tmp_path / "out.pt").exists()


def test_a_dry_run_tells_the_size_it_would_have(path: Path, cli: Cli) -> None:
    dry = cli("slim", path, path.parent / "out.pt", "--dry-run", "--json").json
    assert not (path.parent / "out.pt").exists()
    assert cli("slim", path, path.parent / "out.pt", "--json").json["bytes"] == dry["bytes"]
