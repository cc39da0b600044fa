"""Folders in which each rank saved its own file with torch.save: opened as one whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from tests.ranks import shardings
from tests.support.comparing import assert_same

RunRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def placed(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save tensors placed in many ways by 4 ranks."""
    folder = tmp_path_factory.mktemp("placed") / "ranks"
    folder.mkdir()
    run_ranks(4, shardings.save_placed, str(folder), timeout=60)
    return folder


def loaded(folder: Path, **choices: Any) -> Any:
    """Return what torch loads of a folder, converted to one file."""
    out = folder.parent / f"{folder.name}-out.pt"
    with ckpttool.open(folder) as checkpoint:
        ckpttool.save(checkpoint, out, force=True, **choices)
    return torch.load(out, weights_only=True)


def apart(tree: Any) -> Any:
    """Return a tree whose tensors are contiguous copies, each with its own storage."""
    if isinstance(tree, dict):
        new = type(tree)((key, apart(value)) for key, value in tree.items())
        if hasattr(tree, "_metadata"):
            new._metadata = tree._metadata  # type: ignore[attr-defined]
        return new
    if isinstance(tree, list):
        return [apart(value) for value in tree]
    return tree.detach().clone(memory_format=torch.contiguous_format) if torch.is_tensor(tree) else tree


def test_tensors_placed_in_any_way_are_whole(placed: Path) -> None:
    found = loaded(placed)
    assert_same(apart(found), apart(torch.load(f"{placed}-whole.pt")))
    assert found["tied"].data_ptr() == found["rows"].data_ptr()


@pytest.mark.parametrize("case", [shardings.save_fsdp_tp, shardings.save_hsdp])
def test_what_trainers_save_is_whole_with_the_optimizer(
    case: Callable[..., None], run_ranks: RunRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    run_ranks(4, case, str(folder), timeout=60)
    assert_same(apart(loaded(folder)), apart(torch.load(f"{folder}-whole.pt")))


def test_fsdp1(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, shardings.save_fsdp1, str(tmp_path), timeout=60)
    assert_same(apart(loaded(tmp_path / "sharded")), apart(torch.load(tmp_path / "whole.pt")))
