"""The ways of a case, one after another, round after round."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from .case import Case, Results, Run, Way
from .commands import make_memory_ready
from .process import CommandFailed, timed

Say = Callable[[str], object]


def in_turns(case: Case, rounds: int, say: Say = lambda text: None, *, ready: bool = False) -> Results:
    """Runs every way once to warm up, then `rounds` times in turns, each time beginning with the next way.

    Who comes first may wait for memory that a virtual machine has returned, or find what another gave up.
    The warm-up also compares the outputs of the compared ways with each other: a fast wrong answer is not
    worth a row.

    Args:
        say: called with the progress of the measurement.
        ready: make the memory ready before each run; see `make_memory_ready`.

    Raises:
        CommandFailed: a way failed, or two outputs differ.
    """
    memory = case.memory if ready else 0
    say("warm-up")
    _warm_up(case, memory)
    results: dict[str, list[Run]] = {way.name: [] for way in case.ways}
    for round in range(rounds):
        say(f"round {round + 1} of {rounds}")
        first = round % len(case.ways)
        for way in (*case.ways[first:], *case.ways[:first]):
            results[way.name].append(_one(way, memory))
            _remove(way.output)
    return results


def _one(way: Way, memory: int) -> Run:
    if way.before:
        way.before()
    if memory:
        make_memory_ready(memory)
    return timed(way.command)


def _warm_up(case: Case, memory: int) -> None:
    digests: dict[bytes, str] = {}
    for way in case.ways:
        _one(way, memory)
        if way.compared and way.output:
            digests[_digest(way.output)] = way.name
        _remove(way.output)
    if len(digests) > 1:
        raise CommandFailed(f"wrote different files: {', '.join(digests.values())}")


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.digest()


def _remove(output: Path | None) -> None:
    if output is None:
        return
    if output.is_dir():
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)
