"""Bytes from file to file: shared blocks, small pieces together, large ones by several threads."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from heapq import merge
from itertools import chain, zip_longest
from operator import attrgetter, itemgetter
from threading import Lock
from time import perf_counter
from typing import BinaryIO, NamedTuple

from .. import system
from ..tensors.ref import ByteRange, Computed, Source
from .crc import combined, crc32
from .reflink import Reflink
from .resuming import Written
from .threads import BUFFER, MOST_THREADS, Buffers, Progress, cores, cut, in_order

# ---- Small pieces of a file, read in a few large reads and written in a few large writes
#
# A system call for each of 100,000 tensors costs more than its bytes do.


USUALLY = Reflink()
TINY = 1 << 12  # bytes from which a piece is worth system calls of its own: it may share a block
MOST_BYTES, MOST_PIECES = 1 << 20, 2000  # that are gathered before they are written


def is_tiny(data: ByteRange) -> bool:
    """Return whether a range is worth no system call of its own, and lies in a file of this machine."""
    return data.nbytes < TINY and data.source.is_local


def read_together(ranges: Sequence[ByteRange]) -> list[bytes]:
    """Return the bytes of small ranges; neighbours are read together. Damaged where a file ends."""
    found: list[bytes] = [b""] * len(ranges)
    of_source = defaultdict[Source, list[tuple[int, int, int]]](list)
    for number, (source, offset, nbytes) in enumerate(ranges):
        of_source[source].append((offset, nbytes, number))
    for source, wanted in of_source.items():
        wanted.sort()
        near = source.read_near([(offset, nbytes) for offset, nbytes, _ in wanted])
        for (_, _, number), data in zip(wanted, near, strict=True):
            found[number] = data
    return found


def in_rows(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield pieces and their places, which ascend, with those that follow without a gap in one."""
    parts, begin, end = list[bytes](), 0, 0
    for position, piece in pieces:
        if position != end and parts:
            yield begin, b"".join(parts)
            parts = []
        begin = begin if parts else position
        parts.append(piece)
        end = position + len(piece)
    if parts:
        yield begin, b"".join(parts)


class Gathered:
    """Pieces for places of a file that wait to be written."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, bytes]] = []
        self._nbytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to write."""
        return self._nbytes >= MOST_BYTES or len(self._pieces) >= MOST_PIECES

    def add(self, position: int, data: bytes) -> None:
        """Take a piece."""
        self._pieces.append((position, data))
        self._nbytes += len(data)

    def taken(self) -> Iterator[tuple[int, bytes]]:
        """Return the pieces, those without a gap between them in one, and begin again."""
        pieces, self._pieces, self._nbytes = self._pieces, [], 0
        return in_rows(sorted(pieces, key=itemgetter(0)))


# ---- Bytes from file to file, in blocks that several threads read, sum and write


# Bytes of one write. The kernel takes memory for a file in pieces as large as the write, where it can, and
# large ones are slow to find in some virtual machines.
WRITTEN = 1 << 17

SMALL = 1 << 17  # bytes that are moved at once: handing them to a thread costs more

# The most that work on one file: only one at a time can write to it, while the others read, sum or compute.
THREADS = 4

PLANNED = 10_000  # copies that an output remembers before it writes them
FLUSHED = 16 << 20  # bytes that are sent to the disk together, long before the fsync that waits for them

Then = Callable[[int], object]
Bytes = ByteRange | Computed
Near = ByteRange | None
Data = Bytes | Iterable[memoryview]


@dataclass(slots=True)
class _Copy:
    """Bytes for a place of an output: what is left of them, and the CRC-32s of those that are written."""

    data: Data
    position: int
    nbytes: int
    then: Then | None
    near: ByteRange | None  # where the bytes come from
    left: int
    is_shared: bool = False  # they are in the output already, and only to be summed
    sums: list[tuple[int, int, int]] = field(default_factory=list)  # of stretches: position, CRC-32, bytes

    def took(self, data: Data, position: int) -> bool:
        """Take in bytes that follow these in both files; return whether they do."""
        mine, end = self.data, self.position + self.nbytes
        if self.then or not (isinstance(mine, ByteRange) and isinstance(data, ByteRange)):
            return False
        if (data.source, data.offset, position) != (mine.source, mine.offset + mine.nbytes, end):
            return False
        self.data = mine._replace(nbytes=mine.nbytes + data.nbytes)
        self.nbytes = self.left = self.data.nbytes
        return True

    def wrote(self, position: int, crc: int, nbytes: int) -> None:
        """Note a stretch that was written; after the last, tell the CRC-32 of all."""
        self.left -= nbytes
        if self.then is None:
            return
        self.sums.append((position, crc, nbytes))
        if not self.left:
            self.then(reduce(lambda crc, each: combined(crc, *each[1:]), sorted(self.sums), 0))


Place = tuple[str, int]  # where bytes lie: what sorts them so
HERE: Place = ("", 0)  # of those of this machine


class _Stretch(NamedTuple):
    """Bytes of a copy that are written together, and where they come from if that is elsewhere."""

    copy: _Copy
    start: int
    nbytes: int
    near: ByteRange | None = None

    @property
    def place(self) -> Place:
        return (self.near.source.place, self.near.offset) if self.near else HERE


class _Ways:
    """Ways to copy blocks of a file: the first ones, copied by turns, show which is the fastest here.

    A block is read and summed by any thread, and written by the caller, at once or in pieces of WRITTEN. Or
    the kernel copies it, and any thread sums what was written. No rule holds for all machines.
    """

    KERNEL = 0  # in place of the bytes of a write
    TRIED, TURN = 60, 4  # blocks

    def __init__(self) -> None:
        self.all: list[int] = [BUFFER, WRITTEN, *([self.KERNEL] if hasattr(os, "copy_file_range") else ())]
        self._begun = 0
        self._seconds: dict[tuple[int, bool], list[float]] = defaultdict(list)  # by way; of the caller or not

    def next(self) -> int:
        """Return the way of the next block."""
        if len(self.all) > 1 and self._begun == self.TRIED:
            self.all = [min(self.all, key=self._cost)]
        self._begun += 1
        return self.all[self._begun // self.TURN % len(self.all)]

    def took(self, way: int, seconds: float, *, caller: bool) -> None:
        """Note what a block took, of the caller's time or another thread's."""
        if len(self.all) > 1:
            self._seconds[way, caller].append(seconds)

    def _cost(self, way: int) -> float:
        """Return the seconds of a block: those of the caller, or of all threads if these are what binds."""
        rows = self._seconds[way, True], self._seconds[way, False]
        # The medians: the first blocks wait for memory.
        alone, shared = (sorted(row or [0.0])[len(row) // 2] for row in rows)
        return max(alone, (alone + shared) / cores(THREADS))

    def drop(self, way: int) -> None:
        """Leave out a way that is not possible here."""
        self.all = [each for each in self.all if each != way] or [BUFFER]


class Output:
    """A file being written, front to back or at chosen places. Use it as a context manager.

    `write` takes bytes from memory, `copy` bytes of another file or computed ones. They are in the file once
    the block has ended, or `settle` was called; until then an error of theirs may come late.
    """

    _waits = False  # what is appended tells of a CRC-32 that only another process knows
    _is_guess = False  # so does what is being written

    def __init__(
        self,
        file: BinaryIO,
        progress: Progress | None = None,
        written: Written | None = None,
        in_a_row: int | None = None,
        announce: Callable[[list[ByteRange]], object] | None = None,
        reflink: Reflink = USUALLY,
    ) -> None:
        """Begin at the start of a file, of which an earlier attempt, or another part, may have written some.

        Of copied bytes each thread takes `in_a_row`, a multiple of BUFFER, which it is when None. `announce`
        is told what is elsewhere, before it is read.
        """
        self.fd = file.fileno()
        self._written, self._in_a_row, self.announce = written, in_a_row or BUFFER, announce
        self.reflink, self.shared = reflink, 0  # bytes that it shares with its inputs
        self.position = 0
        self._progress: Progress = progress or (lambda _: None)
        self._planned: list[_Copy] = []
        self._gathered = Gathered()
        self._writing = Lock()
        self._ways = _Ways()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.settle()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._is_guess = self._waits
        self.write_at(self.position, data)
        self._is_guess = False
        self.position += len(data)

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes to a place of the file; `position` stays."""
        if self._written and not self._written.takes(position, len(data), is_guess=self._is_guess):
            return
        if len(data) >= TINY:
            self._write_now(position, data)
        else:
            self._gathered.add(position, bytes(data))
            self._write_gathered(unless_few=True)

    def _write_now(self, position: int, data: bytes | bytearray | memoryview, at_once: int = WRITTEN) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        end = position + len(view)
        with self._writing:  # in the kernel a second thread would wait too, but turning on its core
            while view:
                done = system.pwrite(self.fd, view[:at_once], position)
                view = view[done:]
                position += done
        self._flush(end - len(data), end)

    def _flush(self, start: int, end: int) -> None:
        """Have what was written sent to the disk, if a stretch of it is complete."""
        if end // FLUSHED > start // FLUSHED:
            _start_flushing(self.fd, (end // FLUSHED - 1) * FLUSHED)

    def write_all(self, chunks: Iterable[memoryview], nbytes: int, near: Near = None) -> None:
        """Append chunks of `nbytes` bytes together, each valid until the next is asked for."""
        self._plan(chunks, nbytes, None, near)

    def copy(self, data: Bytes, then: Then | None = None, near: Near = None) -> None:
        """Append bytes from elsewhere; `then` gets their CRC-32, in the caller's thread, once read.

        `near` tells where computed bytes come from.
        """
        near = data if isinstance(data, ByteRange) else near
        is_here = near is None or near.source.is_local
        waits = self._planned or self._written or self.reflink.is_always  # for one that shares its block
        if data.nbytes <= SMALL and is_here and not waits:
            crc, _ = self._write_chunks(self.position, [data.read()], self._progress, sums=bool(then))
            self.position += data.nbytes
            if then:
                then(crc)
        else:
            self._plan(data, data.nbytes, then, near)

    def taken(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of small ranges of files that are to be written, read together."""
        if self._written and not self._written.has_small:
            return [b""] * len(ranges)
        self._progress(sum(data.nbytes for data in ranges))
        return read_together(ranges)

    def write_pieces(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write pieces to places that ascend, those that lie in a row at once; `position` stays."""
        for position, row in in_rows(pieces):
            self.write_at(position, row)

    def settle(self) -> None:
        """Write all that was appended. Raises whatever goes wrong on the way."""
        settle_together([self])

    def _write_gathered(self, *, unless_few: bool = False) -> None:
        if unless_few and not self._gathered.is_full:
            return
        for position, data in self._gathered.taken():
            self._write_now(position, data)

    def _plan(self, data: Data, nbytes: int, then: Then | None, near: Near) -> None:
        if then and self._written and not self._written.sees(self.position, nbytes):
            self._waits = self._is_guess = True
            then(0)
            then, self._is_guess = None, False
        last = self._planned[-1] if self._planned and self.reflink.is_always else None
        if not (last and not then and last.took(data, self.position)):
            self._planned.append(_Copy(data, self.position, nbytes, then, near, nbytes))
        self.position += nbytes
        # What is elsewhere is announced in the order in which all of it lies.
        if len(self._planned) >= PLANNED and (near is None or near.source.is_local):
            self.settle()

    def _stretches(self) -> list[_Stretch]:
        """Return what was planned: what is elsewhere in the order in which it lies, all else as it came."""
        planned, self._planned = self._planned, []
        stretches = list[_Stretch]()
        for copy in planned:
            data, near, start = copy.data, copy.near, 0
            if near is None or near.source.is_local:
                stretches.append(_Stretch(copy, 0, copy.nbytes))
            elif isinstance(data, Computed) and (parts := data.stretches()):
                for nbytes, place in parts:
                    stretches.append(_Stretch(copy, start, nbytes, place))
                    start += nbytes
            else:
                stretches.append(_Stretch(copy, 0, copy.nbytes, near))
        return sorted(stretches, key=attrgetter("place"))

    def reads(self, stretch: _Stretch) -> Iterator[ByteRange]:
        """Yield what of a stretch is read from elsewhere, as far as it is known."""
        runs = list[tuple[int, int]]()
        for position, nbytes in self._cut(stretch) if stretch.near else ():
            if not self._is_left(stretch.copy, position, nbytes):
                is_next = bool(runs) and sum(runs[-1]) == position
                before, size = runs.pop() if is_next else (position, 0)
                runs.append((before, size + nbytes))
        for position, nbytes in runs:
            if stretch.near and isinstance(stretch.copy.data, ByteRange):
                yield stretch.near.part(position - stretch.copy.position - stretch.start, nbytes)
            elif stretch.near and nbytes == stretch.nbytes:
                yield stretch.near

    def _cut(self, stretch: _Stretch) -> Iterator[tuple[int, int]]:
        """Yield the place and the size of each block in which a stretch is written."""
        data, nbytes = stretch.copy.data, stretch.nbytes
        most = max(nbytes, 1)
        if isinstance(data, ByteRange) or (isinstance(data, Computed) and data.is_divisible):
            together = data.together if isinstance(data, Computed) else 0
            most = max(self._in_a_row, together) if nbytes > SMALL else most
        start = stretch.copy.position + stretch.start
        return ((start + at, size) for at, size in cut(nbytes, most))

    def _blocks(self, stretch: _Stretch, buffers: Buffers, *, alone: bool) -> Iterator[Callable[[], _Block]]:
        """Yield the jobs that write a stretch; of an output that is `alone`, the caller writes.

        What takes no job is written in between.
        """
        copy, first = stretch.copy, stretch.copy.position + stretch.start
        data = copy.data
        most = max(data.together if isinstance(data, Computed) else 0, BUFFER)  # of a buffer
        for begin, nbytes, crc in self._written.rows_of(copy.position) if self._written else ():
            if first <= begin < first + stretch.nbytes:
                self._progress(nbytes)
                copy.wrote(begin, crc, nbytes)
        copy.is_shared = isinstance(data, ByteRange) and self._shares(copy)
        if copy.is_shared and not copy.then:
            return
        for position, nbytes in self._cut(stretch):
            if self._is_left(copy, position, nbytes):
                continue
            if not isinstance(data, ByteRange | Computed):
                self._put_here(copy, position, data)
            elif nbytes <= SMALL:
                with buffers.one() as buffer:
                    self._put_here(copy, position, data.part(position - copy.position, nbytes).chunks(buffer))
            elif isinstance(data, Computed) and not data.is_divisible:
                self._put_here(copy, position, data.make(position - copy.position, nbytes))
            else:
                part = data.part(position - copy.position, nbytes)
                if (
                    not alone
                    or copy.is_shared
                    or nbytes > most
                    or (isinstance(data, Computed) and not data.fill)
                ):
                    yield partial(self._put, buffers, copy, part, position, nbytes)
                else:
                    yield self._job(buffers, copy, part, position)
        if not stretch.nbytes and copy.then:
            copy.then(0)

    def _shares(self, copy: _Copy) -> bool:
        """Let the file share the bytes that are to be copied; return False where it can't."""
        data, position = copy.data, copy.position
        if (
            self._written
            or copy.nbytes <= SMALL
            or not isinstance(data, ByteRange)
            or not data.source.is_local
        ):
            return False
        shared = self.reflink.share(data, self.fd, position)
        for part in (range(shared.start), range(shared.stop, copy.nbytes)) if shared else ():
            self._write_now(position + part.start, data.part(part.start, len(part)).read())
        if shared and not copy.then:
            self._progress(copy.nbytes)
        self.shared += len(shared)
        return bool(shared)

    def _put_here(self, copy: _Copy, position: int, chunks: Iterable[memoryview | bytes]) -> None:
        """Write chunks of a copy from this thread, with progress after each."""
        crc, end = self._write_chunks(position, chunks, self._progress, **self._of(copy))
        self._noted(copy, position, crc, end - position)

    def _of(self, copy: _Copy) -> dict[str, bool]:
        return {"sums": bool(copy.then or self._written), "writes": not copy.is_shared}

    def _put(self, buffers: Buffers, copy: _Copy, data: Bytes, position: int, nbytes: int) -> _Block:
        """Write a block, from any thread; progress is for the caller's."""
        with buffers.one(data.together if isinstance(data, Computed) else 0) as buffer:
            chunks = data.chunks(buffer)
            crc, _ = self._write_chunks(position, chunks, lambda _: None, **self._of(copy))
        return self, copy, position, crc, nbytes, None

    def _job(self, buffers: Buffers, copy: _Copy, data: Bytes, position: int) -> Callable[[], _Block]:
        """Return what any thread has to do for a block before the caller has it `_done`."""
        way, sums, nbytes = BUFFER, self._of(copy)["sums"], data.nbytes
        if isinstance(data, ByteRange) and data.source.is_local:
            way = self._ways.next()
            if way == _Ways.KERNEL and self._kernel_copies(data, position):
                if not (sums or data.source.observers):
                    return lambda: (self, copy, position, 0, nbytes, None)
                # What was written is summed, not what lies in the source by now.
                data = Computed.filling("", nbytes, partial(self._read_back, data, position))
            elif way == _Ways.KERNEL:
                self._ways.drop(way)
                way = BUFFER

        def job() -> _Block:
            begin, buffer = perf_counter(), buffers.take()
            (view,) = data.chunks(buffer[:nbytes])
            crc = crc32(view) if sums else 0
            self._ways.took(way, perf_counter() - begin, caller=False)
            return self, copy, position, crc, nbytes, (buffers, way, buffer)

        return job

    def _is_left(self, copy: _Copy, position: int, nbytes: int) -> bool:
        """Return whether a block is written already, or by another part."""
        written = self._written
        if not written or written.wants(copy.position, position, nbytes):
            return False
        if written.has_rest and not written.has(copy.position, position, nbytes):
            raise written.missing(position)
        return True

    def _write_chunks(
        self,
        position: int,
        chunks: Iterable[memoryview | bytes],
        progress: Progress,
        *,
        sums: bool,
        writes: bool = True,
    ) -> tuple[int, int]:
        """Write chunks one after another; return their CRC-32, 0 unless it `sums` them, and their end."""
        crc = 0
        for chunk in chunks:
            if writes:
                self._write_now(position, chunk)
            position += len(chunk)
            crc = crc32(chunk, crc) if sums else 0
            progress(len(chunk))
        return crc, position

    def _kernel_copies(self, data: ByteRange, position: int) -> bool:
        """Copy bytes within the kernel; return False where that failed, which reading and writing explain."""
        begin, done, moved = perf_counter(), 0, 1
        with contextlib.suppress(OSError):
            while moved and done < data.nbytes:
                place = data.offset + done, position + done
                moved = os.copy_file_range(data.source.fd, self.fd, data.nbytes - done, *place)
                done += moved
        self._flush(position, position + done)
        self._ways.took(_Ways.KERNEL, perf_counter() - begin, caller=True)
        return done == data.nbytes

    def _read_back(self, data: ByteRange, position: int, start: int, view: memoryview) -> None:
        """Fill memory with bytes that the kernel has copied, and show them as those of the source."""
        done = 0
        while done < len(view):
            done += (moved := system.preadv(self.fd, [view[done:]], position + start + done))
            if not moved:
                raise OSError(errno.EIO, "the output became shorter while it was written")
        data.source.seen(data.offset + start, view)

    def _done(self, copy: _Copy, position: int, crc: int, nbytes: int, held: _Held | None) -> None:
        if held is not None:
            buffers, way, buffer = held
            if way != _Ways.KERNEL:
                begin = perf_counter()
                self._write_now(position, buffer[:nbytes], way)
                self._ways.took(way, perf_counter() - begin, caller=True)
            buffers.give(buffer)
        self._progress(nbytes)
        self._noted(copy, position, crc, nbytes)

    def _noted(self, copy: _Copy, position: int, crc: int, nbytes: int) -> None:
        if self._written and not self._written.counts(copy.position, position, nbytes):
            return
        if self._written and (self._written.computed or isinstance(copy.data, ByteRange)):
            self._written.add(copy.position, (position, nbytes, crc))
        copy.wrote(position, crc, nbytes)


_Held = tuple[Buffers, int, memoryview]  # the bytes of a block, which the caller writes, and how
# Of a block: where, a part of what, from which place on, CRC-32, bytes; held if it is to be written
_Block = tuple[Output, _Copy, int, int, int, "_Held | None"]


def settle_together(outputs: Sequence[Output]) -> None:
    """Write what was appended to several outputs, by turns: the kernel lets one thread write to a file."""
    for output in outputs:  # first: a file that has its length can share its last block
        output._write_gathered()
    buffers = Buffers()
    planned = [[(output, stretch) for stretch in output._stretches()] for output in outputs]
    if outputs and (announce := outputs[0].announce):
        announce([read for row in planned for output, stretch in row for read in output.reads(stretch)])

    def blocks(stretches: Iterable[tuple[Output, _Stretch]]) -> Iterator[Callable[[], _Block]]:
        for output, stretch in stretches:
            yield from output._blocks(stretch, buffers, alone=len(outputs) == 1)

    # What comes from elsewhere is read in the order in which it lies: there the link is what is slow.
    by_turns: Iterable[Callable[[], _Block] | None]
    if all(stretch.place == HERE for stretches in planned for _, stretch in stretches):
        by_turns = chain.from_iterable(zip_longest(*map(blocks, planned)))
    else:
        by_turns = blocks(merge(*planned, key=lambda each: each[1].place))
    jobs: Iterator[Callable[[], _Block]] = filter(None, by_turns)
    for block in in_order(jobs, cores(min(THREADS * len(outputs), MOST_THREADS))):
        block[0]._done(*block[1:])
    for output in outputs:
        output._write_gathered()  # headers, whose checksums are known only now


def _start_flushing(fd: int, start: int) -> None:
    """Let the kernel begin to write FLUSHED bytes to the disk. In a tmpfs this does nothing."""
    # The advice drops pages that are on the disk, and begins to write the others; none of these is there yet.
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # an advice; whatever fails is an error of fsync
            os.posix_fadvise(fd, start, FLUSHED, os.POSIX_FADV_DONTNEED)


# ---- Outputs that write nothing: the size of a file, and its sources


class DryOutput(Output):
    """An output that takes everything and keeps nothing but the size."""

    def __init__(self, reflink: Reflink = USUALLY) -> None:
        self.position, self.reflink, self.shared = 0, reflink, 0

    def __exit__(self, *_: object) -> None:
        pass

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        pass

    def write_all(self, chunks: Iterable[memoryview], nbytes: int, near: Near = None) -> None:
        self.position += nbytes  # the chunks are not asked for

    def copy(self, data: Bytes, then: Then | None = None, near: Near = None) -> None:
        self.position += data.nbytes
        if then:
            then(0)

    def taken(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        return [b""] * len(ranges)

    def write_pieces(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        pass

    def settle(self) -> None:
        pass


class Planned(DryOutput):
    """A dry output that tells plans apart: a hash of what is written, and of where all else comes from."""

    def __init__(self, facts: object, reflink: Reflink = USUALLY) -> None:
        import hashlib  # loads OpenSSL, which most commands do without

        super().__init__(reflink)
        self.hash = hashlib.sha256(repr(facts).encode())

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        self.hash.update(b"%d %d " % (position, len(data)))
        self.hash.update(data)

    def write_all(self, chunks: Iterable[memoryview], nbytes: int, near: Near = None) -> None:
        self._note(near, nbytes)
        super().write_all(chunks, nbytes, near)

    def copy(self, data: Bytes, then: Then | None = None, near: Near = None) -> None:
        self._note(data if isinstance(data, ByteRange) else near, data.nbytes)
        super().copy(data, then, near)

    def taken(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        for data in ranges:
            self._note(data, data.nbytes)
        return super().taken(ranges)

    def _note(self, place: ByteRange | None, nbytes: int) -> None:
        where = (place.source.shared_version, place.offset, place.nbytes) if place else ()
        self.hash.update(repr((self.position, nbytes, where)).encode())
