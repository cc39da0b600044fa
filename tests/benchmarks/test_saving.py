"""The benchmark of saving: it runs, and its tables are of what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.saving import as_markdown, measure

FOUND = {
    "bytes": 5e8,
    "blocked": {"copy": [0.04, 0.05], "async": [0.04, 0.05], "torch.save": [0.4, 0.5]},
    "first": {"copy": 1.0, "async": 1.0, "torch.save": 1.0},
    "whole": {"none": [10.0, 20.0], "async": [10.2, 20.4]},
    "cpu": {"none": [10.0, 20.0], "async": [10.1, 20.2]},
}


def test_the_tables_hold_each_way_against_a_copy_and_a_run_without_saves() -> None:
    lines = as_markdown(FOUND).splitlines()
    assert "| torch.save | 0.450 s | 0.400-0.500 s | 10.00 | 1.000 s |" in lines
    assert "| train/main.py --save async | 15.3 s | +2.0% | +1.0% |" in lines
    assert "| async / copy | ≤ 1.20 × | 1.00 × | met |" in lines
    assert lines[-1] == "| async, beyond no save | ≤ 3.0% | 2.0% | met |"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_ways_take_turns(tmp_path: Path) -> None:
    found = measure(tmp_path, megabytes=2, rounds=2, steps=1, batch=2)
    assert 1.9e6 < found["bytes"] < 2.3e6
    assert {len(seconds) for part in ("blocked", "whole") for seconds in found[part].values()} == {2}
