"""What a benchmark is: the words that the harness and each benchmark share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One process, from its start to its end.

    Attributes:
        seconds: by the wall clock.
        cpu: seconds of processor; fewer than `seconds` where it waited, for a disk or a busy machine.
        peak: largest resident memory in bytes, pages of mapped files included.
    """

    seconds: float
    cpu: float
    peak: int


Results = Mapping[str, Sequence[Run]]
"""The runs of each way by its name; the n-th runs of all ways are one round."""


@dataclass(frozen=True)
class Way:
    """One way to do the job.

    Attributes:
        name: as it stands in the table.
        command: what is run, without a shell.
        output: the file or folder it writes, removed after each run, outside the timed part.
        before: called before each run, outside the timed part: for what a run uses up.
        compared: the file it writes must have the same bytes as those of the other compared ways.
    """

    name: str
    command: Sequence[str | Path]
    output: Path | None = None
    before: Callable[[], object] | None = None
    compared: bool = False


@dataclass(frozen=True)
class Target:
    """What one number should be; `targets` makes them.

    Attributes:
        text: which number.
        measure: works it out.
        limit: what it should be at most, or at least.
        show: the number with its unit.
    """

    text: str
    measure: Callable[[Results], float]
    limit: float
    show: Callable[[float], str]
    at_least: bool = False

    def met(self, results: Results) -> bool:
        measured = self.measure(results)
        return measured >= self.limit if self.at_least else measured <= self.limit


@dataclass(frozen=True)
class Case:
    """A benchmark that is set up: its files exist.

    Attributes:
        title: what is done, with the size.
        ways: in the order in which they take turns; the first is what the others are compared with.
        as_ratio: compare by ratio (the long ones), or by seconds beyond the first (the short ones).
        memory: bytes that the largest of the ways takes, its output included: what is made ready on request.
    """

    title: str
    ways: Sequence[Way]
    targets: Sequence[Target] = ()
    as_ratio: bool = True
    memory: int = 0


@dataclass(frozen=True)
class Need:
    """What a benchmark takes at most at one moment, in bytes: of files, and of memory beside them."""

    files: int
    memory: int


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name.

    Attributes:
        sized: done once for each size asked for, or once (`size` is then 0).
        need: size -> what it takes.
        set_up: (empty folder, size) -> the case, its input files written into the folder.
    """

    name: str
    sized: bool
    need: Callable[[int], Need]
    set_up: Callable[[Path, int], Case]
