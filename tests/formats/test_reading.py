"""Opening a file, whatever its format."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

import ckpttool
from ckpttool.checkpoint.ranks import Ranks
from ckpttool.formats import frameworks
from tests.support.crafting import list_of, torch_zip


@pytest.mark.parametrize("running", [True, False])
def test_the_garbage_collector_is_left_as_it_was(running: bool, tmp_path: Path) -> None:
    torch_zip(tmp_path / "many.pt", list_of(*[b"]"] * 5000), {})
    try:
        if not running:
            gc.disable()
        kept = ckpttool.open(tmp_path / "many.pt")
        assert gc.isenabled() is running
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
    kept.close()


def test_the_collector_need_not_search_what_was_read(tmp_path: Path) -> None:
    torch_zip(tmp_path / "many.pt", list_of(*[b"]"] * 5000), {})
    kept = ckpttool.open(tmp_path / "many.pt")
    assert len(gc.get_objects(generation=0)) < 1000
    kept.close()


def test_what_ranks_hold_in_several_folders_is_added_up(tmp_path: Path) -> None:
    """accelerate saves the model and each optimizer as a DCP folder of its own."""
    checkpoint = ckpttool.open(torch_zip(tmp_path / "in.pt", b"}", {}))
    ranks = Ranks("DCP", held={0: 4, 1: 8}, missing=(2,), lacking=("__2_0.distcp",))
    parts = [replace(checkpoint, ranks=ranks)] * 2
    assert frameworks._of_one_run("m", parts) == replace(ranks, held={0: 8, 1: 16})
