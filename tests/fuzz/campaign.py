"""Many changed files of every format, drawn by number, so that each can be made again."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.judge import Outcome
from tests.fuzz.mutations import change_one
from tests.fuzz.seeds import Files, Odd, put, seeds
from tests.fuzz.worker import Worker
from tests.support.crafting import attacks_of
from tests.support.running import ROOT

# Costs are told apart by the size of the file, up to these many bytes
SIZES = (4 << 10, 64 << 10, 4 << 20)

MEMORY, MEMORY_PER_BYTE = 128 << 20, 100
# What a file may cost at most: a constant and so much for each of its bytes
SECONDS, SECONDS_PER_BYTE = 5.0, 20e-6


@dataclass(slots=True)
class Found:
    """A file that something is wrong with."""

    kind: str
    number: int
    files: Files
    wrong: str
    details: str

    @property
    def name(self) -> str:
        """A name for the corpus: the format and a digest of the file."""
        short = "".join(letter if letter.isalnum() else "-" for letter in self.kind).strip("-")
        raw = b"".join(name.encode() + b"\0" + data for name, data in sorted(self.files.items()))
        return f"{short}-{hashlib.sha256(raw).hexdigest()[:8]}"


@dataclass(slots=True)
class Tally:
    """What came of the files of one format."""

    # Files `tried`, `read` and, by library, read by others too
    counts: Counter[str] = field(default_factory=Counter)
    # For each of SIZES the most that a file cost
    memory: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))
    # By what is wrong, the first file with it
    found: dict[str, Found] = field(default_factory=dict)

    def note(self, files: Files, outcome: Outcome) -> None:
        """Count a file."""
        self.counts["tried"] += 1
        self.counts["read"] += outcome.accepted
        self.counts.update(outcome.also if outcome.accepted else ())
        size = sum(map(len, files.values()))
        for column, most in enumerate(SIZES):
            if size <= most:
                self.memory[column] = max(self.memory[column], outcome.memory)
                self.seconds[column] = max(self.seconds[column], outcome.seconds)
                break

    def add(self, other: Tally) -> None:
        """Join the tally of another process."""
        self.counts += other.counts
        self.memory = [*map(max, self.memory, other.memory)]
        self.seconds = [*map(max, self.seconds, other.seconds)]
        self.found = other.found | self.found


def files_of(kind: str, seed: int, number: int) -> Files:
    """Return a changed file of a format: the same for the same numbers."""
    random = Random(f"{seed}/{kind}/{number}")
    files = random.choice(seeds(kind))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        files = change_one(files, random)
    return files


def judged(worker: Worker, files: Files) -> Outcome:
    """Examine a checkpoint, its cost included."""
    outcome = worker.examine(files)
    size = sum(map(len, files.values()))
    if outcome.memory > MEMORY + MEMORY_PER_BYTE * size:
        outcome.fail("takes too much memory", f"{outcome.memory >> 20} MiB for {size} bytes")
    if outcome.seconds > SECONDS + SECONDS_PER_BYTE * size:
        outcome.fail("takes too long", f"{outcome.seconds:.1f} s for {size} bytes")
    return outcome


def kind_of_attack(name: str) -> str:
    """Return the format of an attack, which its name begins with."""
    kinds = {
        "tar": "tar",
        "legacy": "legacy .pt",
        "safetensors": "safetensors",
        "exported": "exported program",
    }
    kinds |= {kind: kind for kind in ("GGUF", "ONNX", "NumPy")}
    return kinds.get(name.partition(":")[0], "zip .pt")


def attacks(kind: str) -> Iterator[tuple[str, Files]]:
    """Yield files of a format that were made by hand to cost much, by name."""
    for name, write in attacks_of().items():
        if kind_of_attack(name) == kind:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder) / "in")
                yield name, {"": (Path(folder) / "in").read_bytes()}


def fuzz(
    kinds: Sequence[str],
    *,
    seed: int = 0,
    until: float,
    most: float = float("inf"),
    job: int = 0,
    jobs: int = 1,
    hole: Callable[[], Any] | None = None,
) -> dict[str, Tally]:
    """Examine files of all formats in turn, every `jobs`-th number of each, and what was made by hand."""
    tallies = {kind: Tally() for kind in kinds}

    def examine(kind: str, number: int, files: Files) -> None:
        outcome = judged(worker, files)
        tallies[kind].note(files, outcome)
        if outcome.wrong and outcome.wrong not in tallies[kind].found:
            is_same = functools.partial(_has, worker, outcome.wrong)
            small = minimised(files, is_same, min(time.monotonic() + 15, until + 15))
            found = Found(kind, number, small, outcome.wrong, outcome.details)
            tallies[kind].found[outcome.wrong] = found

    with Worker(hole) as worker:
        if job == 0:
            for kind in kinds:
                for _, files in attacks(kind):
                    if time.monotonic() < until:
                        examine(kind, -1, files)
        number = job
        while number < most and time.monotonic() < until:
            for kind in kinds:
                examine(kind, number, files_of(kind, seed, number))
            number += jobs
    return tallies


def _has(worker: Worker, wrong: str, files: Files) -> bool:
    return judged(worker, files).wrong == wrong


def fuzz_in_processes(kinds: Sequence[str], *, seed: int, seconds: float, jobs: int) -> dict[str, Tally]:
    """Do as `fuzz` in several processes."""
    for kind in kinds:
        seeds(kind)
    context = multiprocessing.get_context("fork")
    until = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, context) as pool:
        futures = [
            pool.submit(fuzz, kinds, seed=seed, until=until, job=job, jobs=jobs) for job in range(jobs)
        ]
        joined = {kind: Tally() for kind in kinds}
        for future in futures:
            for kind, tally in future.result().items():
                joined[kind].add(tally)
    return joined


def minimised(files: Files, is_same: Callable[[Files], bool], until: float) -> Files:
    """Return a smaller checkpoint with the same fault: files and bytes are taken out, others zeroed."""
    for name in sorted(files):
        if name:
            fewer = {other: raw for other, raw in files.items() if other != name}
            if fewer and time.monotonic() < until and is_same(fewer):
                files = fewer
    for name in sorted(files, key=lambda each: -len(files[each])):
        for emptied in (lambda size: b"", bytes):
            files = _without_stretches(files, name, emptied, is_same, until)
    return files


def _without_stretches(
    files: Files,
    name: str,
    emptied: Callable[[int], bytes],
    is_same: Callable[[Files], bool],
    until: float,
) -> Files:
    """Replace stretches of one file, halves first and ever shorter ones, where the fault stays."""
    size = len(files[name]) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(files[name]) and time.monotonic() < until:
            raw = files[name]
            piece = raw[at : at + size]
            tried = {**files, name: raw[:at] + emptied(len(piece)) + raw[at + size :]}
            if tried[name] != raw and is_same(tried):
                files = tried
            if files[name][at : at + size] == piece or emptied is bytes:
                at += size
        size //= 2
    return files


CORPUS = ROOT / "tests" / "corpus"


def keep(found: Found) -> Path:
    """Write a file, or a folder, into the corpus; return where."""
    path = CORPUS / found.name
    if not path.exists():  # git keeps no pipes, so what is no regular file is told by a text
        put({f"{name}{'.odd' * isinstance(raw, Odd)}": bytes(raw) for name, raw in found.files.items()}, path)
    return path


def kept() -> dict[str, Files]:
    """Return everything in the corpus, by name."""
    found = {}
    for path in sorted(CORPUS.iterdir()):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if path.suffix != ".md":
            named = ((("" if file == path else file.name), file.read_bytes()) for file in files)
            found[path.name] = {
                name.removesuffix(".odd"): Odd(raw) if name.endswith(".odd") else raw for name, raw in named
            }
    return found
