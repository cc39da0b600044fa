"""What a benchmark is: the types shared by the harness and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class NotHere(Exception):
    """This machine lacks what a benchmark needs."""


@dataclass(frozen=True)
class Run:
    """One process, from its start to its end."""

    seconds: float  # wall-clock time
    cpu: float  # CPU seconds; less than `seconds` if it waited, for a disk or a busy machine
    peak: int  # peak resident memory in bytes, including pages of mapped files


# The runs of each way, by name; the n-th runs of all ways are one round.
Results = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Way:
    """One way to do the job."""

    name: str  # as in the table
    command: Sequence[str | Path]  # run without a shell
    output: Path | None = None  # the file or folder it writes; removed after each run, outside the timed part
    # called before each run, outside the timed part, to restore what a run changes
    before: Callable[[], object] | None = None
    compared: bool = False  # its output must have the same bytes as that of the other compared ways


@dataclass(frozen=True)
class Target:
    """A target for one number; `targets` builds them."""

    text: str  # which number
    measure: Callable[[Results], float]  # computes it
    limit: float  # its maximum, or minimum
    show: Callable[[float], str]  # formats the number with its unit
    way: str  # whose number it is
    at_least: bool = False  # whether the limit is the minimum

    def met(self, results: Results) -> bool:
        measured = self.measure(results)
        return measured >= self.limit if self.at_least else measured <= self.limit


@dataclass(frozen=True)
class Case:
    """A benchmark after setup: its files exist."""

    title: str  # what is done, with the size
    ways: Sequence[Way]  # in the order in which they take turns; the others are compared with the first
    targets: Sequence[Target] = ()
    as_ratio: bool = True  # compare by ratio (long runs), or by seconds beyond the first way (short runs)
    memory: int = 0  # bytes that the largest way needs, output included; made ready on request
    end: Callable[[], object] = lambda: None  # called when all is measured, or failed


@dataclass(frozen=True)
class Need:
    """The most that a benchmark needs at any moment, in bytes: for files, and memory in addition."""

    files: int
    memory: int


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name."""

    name: str
    sized: bool  # run once per requested size, or only once (`size` is then 0)
    need: Callable[[int], Need]  # size -> what it needs
    # (empty folder, size) -> the case, with its input files written to the folder
    set_up: Callable[[Path, int], Case]
