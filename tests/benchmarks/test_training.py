"""The benchmark of the training loop: it runs, and its table is of what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training import as_markdown, measure, ratio

SECONDS = {
    "bare": [(1.0, 0.5), (2.0, 0.5), (4.0, 0.5)],
    "ours": [(2.0, 0.4), (2.0, 0.5), (2.0, 1.0)],
}


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    assert ratio(SECONDS, "ours") == 1.0
    assert ratio(SECONDS, "ours", cpu=True) == 1.0
    assert ratio({**SECONDS, "ours": SECONDS["ours"][1:] * 2, "bare": SECONDS["bare"][1:] * 2}, "ours") == 1.5


def test_the_table_names_what_was_measured() -> None:
    lines = as_markdown(SECONDS, 4).splitlines()
    assert lines[2] == "| a bare loop | 2.00 | 1.000 | 1.00 – 1.00 | 1.000 |"
    assert lines[3] == "| train/main.py | 2.00 | 1.000 | 0.50 – 2.00 | 1.000 |"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_loops_take_turns(tmp_path: Path) -> None:
    seconds = measure(tmp_path, ["bare", "ours"], launches=1, rounds=2, steps=1, batch=4)
    assert [len(of_way) for of_way in seconds.values()] == [2, 2]
    assert all(wall > 0 and cpu > 0 for of_way in seconds.values() for wall, cpu in of_way)
