"""A short form of `python -m tests.fault.remote`, and proof that it finds holes, put in on purpose."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fault.remote import scenarios
from tests.fault.remote.holes import HOLES
from tests.fault.remote.judge import Bench, Fault, faults
from tests.fault.remote.runner import LONGEST
from tests.fault.trials import place_for_runs

pytest.importorskip("obstore")
pytest.importorskip("moto")

INSPECT = "inspect, .pt"
FILE, SHARDS = "strip-prefix, .pt over .safetensors", "strip-prefix, index of three shards over shards"
HUB, BUCKET = "inspect, repository of the hub", "convert, .pt over an object in a bucket"

pytestmark = pytest.mark.long

TRIES = 5  # in which threads take turns in more than one order

Benches = Callable[[str], Bench]


@pytest.fixture(scope="module")
def bench() -> Iterator[Benches]:
    """Return a function that starts the bench of a scenario, by its name; the second time it is there."""
    with tempfile.TemporaryDirectory(dir=place_for_runs()) as folder, ExitStack() as stack:
        place, started = Path(folder).resolve(), dict[str, Bench]()
        scenarios.write(place / "inputs")

        def start(name: str) -> Bench:
            if name not in started:
                scenario = next(each for each in scenarios.SCENARIOS if each.name == name)
                room = place / f"{len(started)}"
                room.mkdir()
                started[name] = stack.enter_context(Bench(scenario, place / "inputs", room))
            return started[name]

        yield start


@pytest.mark.parametrize("name", [INSPECT, FILE, SHARDS, HUB, BUCKET])
def test_whatever_an_answer_is_the_output_is_right_or_the_old_one(name: str, bench: Benches) -> None:
    """Some faults of some commands, drawn; `make fault` tries them all."""
    ready = bench(name)
    assert ready.wrong == []
    trials = [ready.try_fault(fault) for fault in faults(ready.requests, seed=1)[:3]]
    assert [f"{trial.fault}: {each}" for trial in trials for each in trial.wrong] == []
    assert any(trial.is_reached for trial in trials)


def test_an_interrupted_conversion_is_gone_on_with(bench: Benches) -> None:
    """The last answer is mostly that of the last tensor, but two are asked for at once."""
    trials = [bench(FILE).try_fault(Fault(0, 3, "to a file")) for _ in range(TRIES)]
    assert any(trial.is_noted for trial in trials)
    assert [(trial.wrong, trial.kind) for trial in trials] == [([], "3")] * TRIES


FOUND = {
    "show-queries": (INSPECT, Fault(0, 0, "404"), "stderr holds a secret"),
    "trust-identities": (SHARDS, Fault(0, 6, "changed"), "not as it should be: out/model/model-0000"),
    "leave-parts": (FILE, Fault(0, 3, "changed"), "leaves out/.* after an error of kind damaged"),
    "wait-for-ever": (INSPECT, Fault(0, 1, "silence"), "takes more than 1 s"),
    "let-errors-through": (INSPECT, Fault(0, 0, "hang up"), "a traceback: "),
    "upload-in-place": (BUCKET, Fault(0, 2, "403"), "the object has [0-9]+ other bytes"),
}
"""By hole: the scenario, the answer that goes wrong, and what is found."""


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_found_and_nothing_without_one(hole: str, bench: Benches) -> None:
    name, fault, wanted = FOUND[hole]
    ready = bench(name)
    longest = 1.0 if hole == "wait-for-ever" else LONGEST
    trials = (ready.try_fault(fault, hole, longest) for _ in range(TRIES))
    assert any(re.search(wanted, "\n".join(trial.wrong)) for trial in trials)
    assert ready.try_fault(fault).wrong == []
