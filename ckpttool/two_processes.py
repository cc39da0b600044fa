"""Two processes that write one file, where values are computed for it. Linux.

To cast takes many short steps, and after each of them a thread waits for its turn with Python's lock: two
threads are no faster than one. Two processes share no lock.

The second process is a fork, and walks through the same writing as the first. Of all that is written it puts
down nothing but every other stretch of what is computed, and reports each. What it can't make, or what there
is more to tell of than its bytes, is made by the first one, which then tells it or raises; so is the rest,
should the second one end early. So the file does not depend on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import BinaryIO, NamedTuple

from .ahead import cores
from .checksum import combined
from .tensor import ByteRange, Computed, Storage
from .transfer import STRETCH, DryOutput, Output, Progress

REPORT = struct.Struct("<?I")
"""Whether a stretch stands in the file, and its CRC-32."""

WORTH = 64 << 20
"""Bytes from which on a second process is worth its start."""


ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals at which the first process ends, and the second one with it."""

AHEAD = 64
"""Stretches by which one process may be ahead of the other."""


class _Part(NamedTuple):
    """A stretch of computed bytes, its place in the file, and where its CRC-32 and length go, if anywhere."""

    data: Computed
    position: int
    sums: dict[int, tuple[int, int]] | None

    def put(self, out: Output) -> tuple[int, int]:
        return out.put(self.data, self.position, self.sums is not None)


def is_worth_it(storages: Iterable[tuple[object, Storage]]) -> bool:
    """Whether there is enough that a second process would help with."""
    sizes = {
        id(storage): storage.nbytes
        for _, storage in storages
        if isinstance(storage.data, Computed) and storage.data.noted is not None
    }
    return sum(sizes.values()) >= WORTH


@contextlib.contextmanager
def output(file: BinaryIO, progress: Progress | None, *, fork: bool) -> Iterator[Output]:
    """The output that is a file; all that was written to it is there when the block has ended well.

    Args:
        fork: write with a second process, if this one has no other threads: a fork has copies of their locks,
            and nobody to open them. Where there is one core, or no process to be had, this one writes alone.
    """
    alone = Output(file, progress) if progress else Output(file)
    if not fork or sys.platform != "linux" or cores(2) < 2 or threading.active_count() > 1:
        yield alone
        return
    reports, to_report = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # which the second one leaves to the first
    second = _fork()
    if second == 0:
        try:
            os.close(reports)
            yield _Second(alone, to_report)
        finally:
            os._exit(0)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(to_report)
        with open(reports, "rb") as file_of_reports:
            out = _First(file, progress or alone._progress, file_of_reports)
            yield out
            out.settle()
    finally:
        if second is not None:
            os.kill(second, signal.SIGKILL)
            os.waitpid(second, 0)


def _fork() -> int | None:
    """0 in the second process; None where there can be none, which is as if it had ended at once."""
    try:
        return os.fork()
    except OSError:  # too many processes, or too little memory
        return None


class _First(Output):
    """The output of the process that answers for the file."""

    def __init__(self, file: BinaryIO, progress: Progress, reports: BinaryIO) -> None:
        super().__init__(file, progress)
        self._reports = reports
        self._is_mine = cycle((True, False))
        self._owed: deque[_Part] = deque()

    def make(self, data: Computed) -> None:
        if data.noted is None:
            super().make(data)
        else:
            self._share(data, None)

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        if isinstance(data, ByteRange) or data.noted is None:
            return super().copy_with_crc(data)
        sums: dict[int, tuple[int, int]] = {}
        self._share(data, sums)
        self.settle()
        crc = 0
        for position in sorted(sums):
            crc = combined(crc, *sums[position])
        return crc

    def settle(self, ahead: int = 0) -> None:
        """Waits until the second process is at most so many stretches behind; does what it has not done."""
        while len(self._owed) > ahead:
            part = self._owed.popleft()
            report = self._reports.read(REPORT.size)
            is_there, crc = REPORT.unpack(report) if len(report) == REPORT.size else (False, 0)
            self._done(part, (crc, part.data.nbytes) if is_there else part.put(self))

    def _share(self, data: Computed, sums: dict[int, tuple[int, int]] | None) -> None:
        for part in _parts(data, self.position, sums):
            if next(self._is_mine):
                self._done(part, part.put(self))
            else:
                self._owed.append(part)
            self.settle(AHEAD)
        self.position += data.nbytes

    def _done(self, part: _Part, summed: tuple[int, int]) -> None:
        if part.sums is not None:
            part.sums[part.position] = summed
        self._progress(part.data.nbytes)


class _Second(DryOutput):
    """The output of the process that does nothing but its share."""

    def __init__(self, out: Output, reports: int) -> None:
        super().__init__()
        self._out = out
        self._reports = reports
        self._is_mine = cycle((False, True))

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> None:
        self.position += nbytes

    def make(self, data: Computed) -> None:
        self._share(data, None)

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        if isinstance(data, Computed):
            self._share(data, {})
        else:
            self.position += data.nbytes
        return 0

    def _share(self, data: Computed, sums: dict[int, tuple[int, int]] | None) -> None:
        if data.noted is not None:
            for part in _parts(data, self.position, sums):
                if next(self._is_mine):
                    os.write(self._reports, REPORT.pack(*self._put(part, data.noted)))
        self.position += data.nbytes

    def _put(self, part: _Part, noted: Callable[[], int]) -> tuple[bool, int]:
        before = noted()
        try:
            crc, _ = part.put(self._out)
        except Exception:  # the first process makes the stretch too, and raises what there is to be raised
            return False, 0
        return noted() == before, crc


def _parts(data: Computed, position: int, sums: dict[int, tuple[int, int]] | None) -> Iterator[_Part]:
    for start in range(0, data.nbytes, STRETCH):
        yield _Part(data.part(start, min(STRETCH, data.nbytes - start)), position + start, sums)
