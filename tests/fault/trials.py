"""Trials of faults, whoever makes them: what came of each, how they are counted, and their program."""

from __future__ import annotations

import datetime
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.generated_page import PAGE, options, regenerate


@dataclass(slots=True)
class Trial:
    """A run with a fault, and what is wrong with it: nothing, if all held."""

    # What went wrong on purpose; its text says it
    fault: object
    # What it is counted under in the table
    kind: str
    is_reached: bool
    # Whether the command did what the table counts besides: wrote the new output, or went on
    is_noted: bool = False
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tried:
    """What came of a scenario."""

    scenario: Any
    # System calls, or requests, of a run without a fault
    calls: int = 0
    # How many faults there are
    possible: int = 0
    held: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    noted: int = 0
    # Faults whose call or answer was not met, as when threads take turns in another order
    unreached: int = 0
    # Seconds of a run
    longest: float = 0.0
    # What did not hold, with the fault in words
    wrong: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.held.total() + self.failed.total()

    def try_faults(
        self,
        faults: Sequence[Any],
        try_fault: Callable[[Any], Trial],
        most: float,
        until: float,
        least: int = 0,
    ) -> None:
        """Try so many faults until a time of `time.monotonic`, but `least` however late it is."""
        self.possible = len(faults)
        for number, fault in enumerate(faults):
            if number >= most or (number >= least and time.monotonic() > until):
                break
            self.note(try_fault(fault))

    def note(self, trial: Trial) -> None:
        """Count a trial."""
        self.longest = max(self.longest, trial.seconds)
        if not trial.is_reached and not trial.wrong:
            self.unreached += 1
            return
        self.noted += trial.is_noted
        (self.failed if trial.wrong else self.held)[trial.kind] += 1
        self.wrong += [f"{self.scenario.name}: {trial.fault}: {each}" for each in trial.wrong]


def totals(all_tried: Iterable[Tried]) -> tuple[int, int]:
    """Return how many faults were tried, and how many held."""
    counts = [(each.tried, each.held.total()) for each in all_tried]
    return sum(tried for tried, _ in counts), sum(held for _, held in counts)


def words_of_errors(err: str, code: int) -> list[str]:
    """Examine what was printed: one error in one line, after an exit code that stands for one."""
    if "Traceback" in err or "panicked" in err:
        return [f"a traceback: {err.strip().splitlines()[-1]}"]
    count = sum(line.startswith("error:") for line in err.splitlines())
    wanted = int(code in (1, 2, 3))
    return [] if count == wanted else [f"{count} lines of errors, not {wanted}: {err[-300:]!r}"]


def place_for_runs() -> str | None:
    """Return a folder in memory, where runs leave the disk in peace; None for the usual one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run_campaign(
    name: str,
    doc: str | None,
    scenarios: Sequence[Any],
    try_all: Callable[..., Iterator[Tried]],
    table: Callable[[Sequence[Tried]], list[str]],
    marks: tuple[str, str],
    holes: Iterable[str] = (),
) -> int:
    """Try the scenarios that the command line chooses, print the table, and return the exit code.

    Args:
        table: makes its lines, the totals last.
        marks: what it stands between in docs/security.md.
        holes: what --hole takes: names of what can be broken on purpose, to see that it is found.
    """
    parser = options(name, doc, "scenarios")
    parser.add_argument("--most", type=int, default=1 << 30, help="the most faults of each scenario")
    if holes:
        parser.add_argument(
            "--hole", choices=holes, default="", help="break something, to see that it is found"
        )
    given = parser.parse_args()
    how = {name: value for name, value in vars(given).items() if name in ("seed", "seconds", "most", "hole")}
    chosen = [each for each in scenarios if given.only in each.name]
    started, tried = time.monotonic(), []
    for each in try_all(chosen, jobs=max(1, given.jobs), **how):
        tried.append(each)
        held = f"{each.held.total()} of {each.tried} held" + f", {each.longest:.1f} s at most" * (
            each.longest > 0
        )
        print(f"{each.scenario.name}: {held}", *each.wrong, sep="\n  ", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    *rows, total = table(tried)
    made = "\n".join([*rows, "", f"{total} {datetime.date.today()}, seed {given.seed}, {seconds:.0f} s.", ""])
    print(made)
    if given.write:
        regenerate(PAGE, *marks, made)
    return 0 if tried and all(each.tried and not each.wrong for each in tried) else 1
