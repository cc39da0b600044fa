"""The faults of a scenario in the order in which they are tried, and the trials of many scenarios."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.fault.holes import HOLES
from tests.fault.judge import Bench
from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.supervised import CALLS, CHANGE, KILL, MOVE, SHORT, SHORTENED, TERM, Fault, Ran
from tests.fault.trials import Tried, place_for_runs

LEAST = 10  # faults of each scenario that are tried however late it is
ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EINTR")
HOW = (*ERRORS, SHORT, KILL, TERM)


def ways(name: str) -> tuple[str, ...]:
    """Return how calls of a name can fail."""
    short = (SHORT,) if name in SHORTENED else ()
    if CALLS[name].kind == CHANGE or (CALLS[name].kind == MOVE and "read" not in name):
        return (*ERRORS, *short, KILL, TERM)
    return ("EIO", "EINTR", *short, TERM) if CALLS[name].kind == MOVE else ("EIO", TERM)


def faults(dry: Ran, seed: int) -> list[Fault]:
    """Return every fault, from the system calls of a run without one: first and last calls first."""
    counts = Counter(seen.call.name for seen in dry.seen)
    ends, others = [], []
    for name, count in counts.items():
        for how in ways(name):
            ends += [Fault(name, nth, how) for nth in {1, count}]
            others += [Fault(name, nth, how) for nth in range(2, count)]
    drawn = random.Random(seed)
    drawn.shuffle(ends)
    drawn.shuffle(others)
    return ends + others


def try_scenario(
    scenario: Scenario, given: Path, place: Path, seed: int, most: float, until: float, hole: str = ""
) -> Tried:
    """Try the faults of a scenario."""
    tried = Tried(scenario)
    place.mkdir()
    bench = Bench(scenario, given, place, HOLES.get(hole))
    tried.calls = len(bench.dry.seen)
    tried.wrong += [f"{scenario.name}: without a fault: {each}" for each in bench.wrong]
    tried.try_faults(faults(bench.dry, seed), bench.try_fault, most=most, until=until, least=LEAST)
    for name in ("pristine", "run"):
        shutil.rmtree(place / name, ignore_errors=True)
    return tried


# How many scenarios no process has begun; shared by the processes
_left: Any = None


def _share(left: Any) -> None:
    global _left
    _left = left


def _try_in_turn(
    scenario: Scenario, given: Path, seed: int, most: float, until: float, jobs: int, hole: str
) -> Tried:
    """Try a scenario in its part of the time that is left."""
    with _left.get_lock():
        rest, _left.value = max(_left.value, 1), _left.value - 1
    part = (until - time.monotonic()) * jobs / max(rest, jobs)
    place = given.parent / f"{SCENARIOS.index(scenario)}"
    return try_scenario(scenario, given, place, seed, most, time.monotonic() + part, hole)


def try_all(
    scenarios: Sequence[Scenario], *, seed: int, seconds: float, most: float, jobs: int, hole: str = ""
) -> Iterator[Tried]:
    """Try scenarios in several processes; yield what came of each."""
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    left = context.Value("i", len(scenarios))
    with tempfile.TemporaryDirectory(dir=place_for_runs()) as folder:
        given = Path(folder).resolve() / "inputs"
        given.mkdir()

        def tried(some: list[Scenario], pool: ProcessPoolExecutor) -> Iterator[Tried]:
            files_first = sorted(some, key=lambda each: [Path(t).suffix == "" for t in each.targets])
            more = (given, seed, most, until, jobs, hole)
            for future in [pool.submit(_try_in_turn, each, *more) for each in files_first]:
                yield future.result()

        with ProcessPoolExecutor(jobs, context, _share, (left,)) as pool:
            for _ in pool.map(time.sleep, [0.01] * jobs):  # start the processes before torch is imported
                pass
            from tests.fault import inputs

            inputs.write(given)
            for each in tried([each for each in scenarios if not each.imports_torch], pool):
                yield _checked(each, given.parent)
        with ProcessPoolExecutor(jobs, context, _share, (left,)) as pool:
            for each in tried([each for each in scenarios if each.imports_torch], pool):
                yield _checked(each, given.parent)


def _checked(tried: Tried, folder: Path) -> Tried:
    """Look with torch at what a scenario writes without a fault."""
    from tests.fault import inputs

    scenario = tried.scenario
    if scenario.wanted:
        place = folder / f"{SCENARIOS.index(scenario)}" / "done"
        try:
            inputs.check(place / scenario.targets[0], scenario.wanted)
        except AssertionError as error:
            tried.wrong.append(f"{scenario.name}: without a fault: {error}")
    return tried
