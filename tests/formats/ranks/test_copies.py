"""Files of ranks that each hold the whole: DDP programs whose every rank saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.errors import Unreadable
from tests.support.comparing import assert_same
from tests.support.running import Ran
from tests.support.saved import refused

Cli = Callable[..., Ran]


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"module.w": torch.arange(6.0).reshape(2, 3), "module.mean": torch.full((3,), value)}


def save(folder: Path, name: str, trees: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / name.format(rank))
    return folder


@pytest.mark.parametrize("name", ["model_rank{}.pt", "r{}.pth", "ckpt-rank-{}.bin"])
def test_equal_copies_are_one(name: str, tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", name, [state(), state(), state()])
    for inputs in ([folder], sorted(folder.iterdir(), reverse=True)):
        ran = cli("merge", *inputs, out := tmp_path / "out.pt", "--force")
        assert (ran.code, "merged 3 ranks of whole copies" in ran.out) == (0, True), ran.err
        assert_same(torch.load(out), state())
    assert "whole copies" in cli("inspect", folder).out


def test_copies_that_differ_are_named_and_one_is_taken(tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", [state(), state(2.0)])
    ran = cli("merge", folder, out := tmp_path / "out.pt")
    assert (ran.code, out.exists()) == (1, False)
    assert "module.mean" in ran.err
    assert "--take-rank 0" in ran.err
    assert cli("merge", folder, out, "--take-rank", "1").code == 0
    assert_same(torch.load(out), state(2.0))
    assert cli("merge", folder, out, "--take-rank", "2", "--force").code == 2


def test_numbers_that_differ_are_named(tmp_path: Path, cli: Cli) -> None:
    trees = [{"model": state(), "seed": rank, "step": 3} for rank in range(2)]
    folder = save(tmp_path / "run", "rank{}.pt", trees)
    ran = cli("merge", folder, out := tmp_path / "out.pt")
    assert (ran.code, "'seed' of rank 1" in ran.err) == (0, True)
    assert torch.load(out)["seed"] == 0
    trees[1]["step"] = 4
    ran = cli("merge", save(folder, "rank{}.pt", trees), out, "--force")
    assert (ran.code, "is of another save" in ran.err) == (3, True)


def test_files_of_two_kinds_become_one_dict(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "model_rank{}.pt", [state(), state()])
    save(folder, "ema_rank{}.pt", [state(5.0), state(5.0)])
    assert {*ckpttool.open(folder).tree} == {"ema", "model"}  # type: ignore[misc]


@pytest.mark.parametrize(
    "trees",
    [
        [state()],
        [state(), {"module.w": torch.zeros(1, 3), "module.mean": torch.zeros(3)}],
        [state(), {**state(), "more": torch.zeros(1)}],
    ],
)
def test_what_is_no_copy_is_left_alone(trees: list[Any], tmp_path: Path) -> None:
    refused(save(tmp_path / "run", "rank{}.pt", trees), error=Unreadable)


def test_a_missing_copy_is_not_made_up(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", [state(), state(), state()])
    (folder / "rank1.pt").unlink()
    refused(folder, error=Unreadable)


def test_a_model_s_own_number_is_no_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "net_r50_rank{}.pt", [state(), state()])
    assert ckpttool.open(folder).ranks.world_size == 2  # type: ignore[union-attr]
    for number in (18, 50):
        torch.save(state(), save(tmp_path / "other", "x", []) / f"net-r{number}.pth")
    refused(tmp_path / "other", "holds checkpoints, and is none itself", Unreadable)
