"""What each row measured before, so that one that became worse is named: benchmarks/history.jsonl.

One line for each target of a run with `--record`: the row, its figure and the range of the rounds, machine,
date and commit. A figure is compared with the last one of the same row on the same machine.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .case import Case, Results, Target

HISTORY = Path(__file__).with_suffix(".jsonl")

LEAST = 0.02  # of a figure: less is noise, whatever the rounds say


@dataclass(frozen=True)
class Figure:
    """A measured number, as a line of the file.

    Attributes:
        row: the benchmark with its size, and the number's name.
        value: the number; of several rounds that of all.
        low, high: the smallest and the largest of the single rounds: the noise.
        limit: the target; None for a floor.
        at_least: whether more is better.
        machine, date, commit: where, when and of what.
    """

    row: str
    value: float
    low: float
    high: float
    limit: float | None
    at_least: bool
    machine: str
    date: str
    commit: str

    def is_worse(self, before: Figure) -> bool:
        """Return whether even the best round is worse than the worst one was before."""
        if self.at_least:
            return self.high < before.low * (1 - LEAST)
        return self.low > before.high * (1 + LEAST)


def figure_of(case: Case, target: Target, results: Results, about: tuple[str, str, str]) -> Figure:
    """Return what a target measures; `about` is machine, date and commit."""
    rounds = range(len(results[case.ways[0].name]))
    single = [target.measure({way: [runs[n]] for way, runs in results.items()}) for n in rounds]
    limit = None if math.isinf(target.limit) else target.limit
    row = f"{case.title}; {target.text}"
    return Figure(row, target.measure(results), min(single), max(single), limit, target.at_least, *about)


def commit() -> str:
    """Return the commit that is measured, with a + if files are changed; "" outside of a repository."""
    words = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def last() -> dict[tuple[str, str], Figure]:
    """Return the last figure of each row on each machine, by both."""
    if not HISTORY.exists():
        return {}
    figures = (Figure(**json.loads(line)) for line in HISTORY.read_text().splitlines())
    return {(figure.machine, figure.row): figure for figure in figures}


def record(figures: Iterable[Figure]) -> None:
    """Add figures to the file."""
    with HISTORY.open("a") as file:
        file.writelines(f"{json.dumps(asdict(figure), ensure_ascii=False)}\n" for figure in figures)


def worse(figures: Sequence[Figure], before: dict[tuple[str, str], Figure]) -> list[str]:
    """Return what to say of each figure that became worse by more than its noise."""
    pairs = [(figure, before.get((figure.machine, figure.row))) for figure in figures]
    return [
        f"{now.row}: {was.value:.4g} ({was.low:.4g}–{was.high:.4g}, {was.date}, {was.commit}) -> "
        f"{now.value:.4g} ({now.low:.4g}–{now.high:.4g})"
        for now, was in pairs
        if was is not None and now.is_worse(was)
    ]
