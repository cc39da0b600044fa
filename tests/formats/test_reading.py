"""Opening a file, whatever its format."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import ckpttool
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
