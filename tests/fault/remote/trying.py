"""The faults of a scenario in the order in which they are tried, and the trials of many scenarios."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.fault.remote.judge import Bench, Fault
from tests.fault.remote.scenarios import Scenario, write
from tests.fault.trials import Tried, place_for_runs
from tests.support.range_server import FAULTS, Request

STATUSES = ("401", "403", "404", "410", "416", "429", "500", "503")
OF_RANGES = ("unranged", "other bytes", "other size")  # which change nothing where no range is asked for
WAYS = (*(name for name in FAULTS if name not in ("redirect", "headers")), *STATUSES)


def faults(requests: Sequence[Sequence[Request]], seed: int) -> list[Fault]:
    """Return every fault of the answers to some requests, in a drawn order."""
    drawn = [
        Fault(front, nth, name)
        for front, those in enumerate(requests)
        for nth, request in enumerate(those)
        for name in WAYS
        if request.range or name not in OF_RANGES
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


def try_scenario(scenario: Scenario, inputs: Path, seed: int, most: int, seconds: float) -> Tried:
    """Try the faults of a scenario."""
    tried, until = Tried(scenario), time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(dir=place_for_runs()) as place,
        Bench(scenario, inputs, Path(place).resolve()) as bench,
    ):
        tried.calls = sum(map(len, bench.requests))
        tried.wrong += [f"{scenario.name}: without a fault: {each}" for each in bench.wrong]
        tried.try_faults(faults(bench.requests, seed), bench.try_fault, most=most, until=until)
    return tried


def try_all(
    scenarios: Sequence[Scenario], *, seed: int, seconds: float, most: int, jobs: int
) -> Iterator[Tried]:
    """Try scenarios in several processes; yield what came of each."""
    part = seconds * jobs / max(len(scenarios), jobs)
    with tempfile.TemporaryDirectory(dir=place_for_runs()) as folder:
        inputs = Path(folder).resolve()
        write(inputs)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(try_scenario, each, inputs, seed, most, part) for each in scenarios]:
                yield future.result()
