"""benchmarks/history.py: a row that became worse by more than its noise is named, beside what it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import history, turns
from benchmarks.case import Benchmark, Case, Need, Run, Way
from benchmarks.history import Figure, worse
from benchmarks.program import main
from benchmarks.targets import at_least_times_faster, at_most_times, floor

BEFORE = Figure("cp; x / cp", 1.0, 0.9, 1.1, 1.5, False, "2 cores", "2026-11-01", "abc")
KEY = (BEFORE.machine, BEFORE.row)


@pytest.mark.parametrize(
    ("at_least", "low", "high", "is_worse"),
    [
        (False, 1.13, 1.3, True),
        (False, 1.11, 1.3, False),  # less than 2 % beyond what it was at its worst
        (False, 1.05, 9.0, False),
        (False, 0.1, 0.2, False),
        (True, 0.5, 0.87, True),
        (True, 0.5, 0.89, False),
        (True, 2.0, 3.0, False),
    ],
)
def test_a_figure_is_worse_if_its_best_round_is_worse_than_the_worst_was(at_least, low, high, is_worse):
    was = replace(BEFORE, at_least=at_least)
    now = replace(was, value=(low + high) / 2, low=low, high=high)
    found = worse([now], {KEY: was})
    assert bool(found) == is_worse
    assert all(text.startswith("cp; x / cp: 1 (0.9–1.1, 2026-11-01, abc) -> ") for text in found)


def test_another_machine_and_a_new_row_are_compared_with_nothing():
    now = replace(BEFORE, low=9.0, high=9.0)
    assert worse([replace(now, machine="4 cores"), replace(now, row="other")], {KEY: BEFORE}) == []


def benchmark(seconds: Callable[[str], float], monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Return a benchmark of two ways that take as long as is said."""

    def timed(command: list[str]) -> Run:
        return Run(seconds(command[0]), 0.1, 1_000_000)

    monkeypatch.setattr(turns, "timed", timed)
    limits = [at_most_times("b", "a", 1.5), at_least_times_faster("b", "a", 0.1), floor("b", "a")]
    case = Case("work", [Way("a", ["a"]), Way("b", ["b"])], limits)
    return Benchmark("work", False, lambda size: Need(0, 0), lambda folder, size: case)


def test_a_run_prints_what_was_before_names_what_is_worse_and_adds_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    words = ["--folder", str(tmp_path), "--rounds", "3", "--record"]
    for factor in (1.0, 1.01, 2.0):
        work = benchmark(lambda way, f=factor: 1.0 if way == "a" else f, monkeypatch)  # type: ignore[misc]
        assert main([work], words) == 0
    first, second, third = capsys.readouterr().out.split("\nwork ")[1:]
    assert "before" not in first and "WORSE" not in first + second
    assert re.search(r"b / a +≤ 1\.50 × +1\.01 × +2\.00 × +MISSED", third)
    assert third.count("WORSE than before, beyond its noise: work; ") == 2
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["value"] for line in lines[::2]] == [1.0, 1.01, 2.0]
    assert [line["limit"] for line in lines[:2]] == [1.5, 0.1]
    assert all(line["machine"] and line["date"] for line in lines)


def test_without_record_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    assert main([benchmark(lambda way: 1.0, monkeypatch)], ["--folder", str(tmp_path)]) == 0
    assert not (tmp_path / "history.jsonl").exists()
