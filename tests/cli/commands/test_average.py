"""ckpttool average, as people and scripts use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.running import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for i in (0, 1, 5):
        state = {"w": torch.full((3,), float(i)), "n": torch.tensor(i), "bn.running_var": torch.ones(1) * i}
        torch.save({"model": state, "epoch": i}, tmp_path / f"{i}.pt")
    return [tmp_path / f"{i}.pt" for i in (0, 1, 5)]


def test_the_mean_is_written_and_what_is_not_averaged_is_said(files: list[Path], cli: Cli) -> None:
    out = files[0].with_name("mean.pt")
    ran = cli("average", *files, out)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"averaged 2 tensors of 3 files -> {out} (")
    assert f"integers that differ, taken from {files[2]}: n" in ran.err
    assert "1 running statistics of BatchNorm were averaged too" in ran.err
    assert "left out: epoch" in ran.err
    found = torch.load(out, weights_only=True)
    assert (found["w"].tolist(), found["n"].item()) == ([2.0] * 3, 5)


def test_weights_json_dry_run_and_force(files: list[Path], cli: Cli) -> None:
    out = files[0].with_name("mean.safetensors")
    ran = cli("average", *files, out, "--weights", "0,3,1", "--json", "--dry-run")
    assert (ran.code, ran.json["files"], ran.json["averaged"], ran.json["dry_run"]) == (0, 3, 2, True)
    assert ran.json["taken_from_last"] == ["n"] and not out.exists()
    assert cli("average", *files, out, "--weights", "0,3,1", "--verify").code == 0
    assert (cli("inspect", out).code, cli("average", *files, out).code) == (0, 2)
    assert cli("average", *files, out, "--force").code == 0
    for wrong in ("1,2", "a,b,c", "0,0,0", "1,-1,1"):
        assert cli("average", *files, out, "--force", "--weights", wrong).code == 2


def test_other_structures_are_refused_with_the_command_that_tells_more(files: list[Path], cli: Cli) -> None:
    torch.save({"model": {"w": torch.ones(4)}}, files[1])
    ran = cli("average", *files, files[0].with_name("mean.pt"))
    assert ran.code == 3 and "hint: ckpttool diff --model-only" in ran.err
    assert cli("average", files[0], files[0].with_name("mean.pt")).code == 2
