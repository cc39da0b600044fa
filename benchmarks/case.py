"""What a benchmark is: the types shared by the harness and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One process, from its start to its end.

    Attributes:
        seconds: wall-clock time.
        cpu: CPU seconds; less than `seconds` if it waited, for a disk or a busy machine.
        peak: peak resident memory in bytes, including pages of mapped files.
    """

    seconds: float
    cpu: float
    peak: int


Results = Mapping[str, Sequence[Run]]
"""The runs of each way, by name; the n-th runs of all ways are one round."""


@dataclass(frozen=True)
class Way:
    """One way to do the job.

    Attributes:
        name: as in the table.
        command: run without a shell.
        output: the file or folder it writes; removed after each run, outside the timed part.
        before: called before each run, outside the timed part, to restore what a run changes.
        compared: its output must have the same bytes as that of the other compared ways.
    """

    name: str
    command: Sequence[str | Path]
    output: Path | None = None
    before: Callable[[], object] | None = None
    compared: bool = False


@dataclass(frozen=True)
class Target:
    """A target for one number; `targets` builds them.

    Attributes:
        text: which number.
        measure: computes it.
        limit: its maximum, or minimum.
        show: formats the number with its unit.
        way: whose number it is.
        at_least: whether the limit is the minimum.
    """

    text: str
    measure: Callable[[Results], float]
    limit: float
    show: Callable[[float], str]
    way: str
    at_least: bool = False

    def met(self, results: Results) -> bool:
        measured = self.measure(results)
        return measured >= self.limit if self.at_least else measured <= self.limit


@dataclass(frozen=True)
class Case:
    """A benchmark after setup: its files exist.

    Attributes:
        title: what is done, with the size.
        ways: in the order in which they take turns; the others are compared with the first.
        as_ratio: compare by ratio (long runs), or by seconds beyond the first way (short runs).
        memory: bytes that the largest way needs, output included; made ready on request.
    """

    title: str
    ways: Sequence[Way]
    targets: Sequence[Target] = ()
    as_ratio: bool = True
    memory: int = 0


@dataclass(frozen=True)
class Need:
    """The most that a benchmark needs at any moment, in bytes: for files, and memory in addition."""

    files: int
    memory: int


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name.

    Attributes:
        sized: run once per requested size, or only once (`size` is then 0).
        need: size -> what it needs.
        set_up: (empty folder, size) -> the case, with its input files written to the folder.
    """

    name: str
    sized: bool
    need: Callable[[int], Need]
    set_up: Callable[[Path, int], Case]
