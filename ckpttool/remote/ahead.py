"""Bytes of remote objects, fetched by a few threads: what is asked for, and what will be asked for next.

What an operation is going to read is announced by `expect`: sorted, neighbours joined, and cut into pieces.
Whoever reads one piece has the next ones fetched meanwhile, within bounds of requests and of memory.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

from ..errors import CkptToolError
from ..files.threads import is_dropped
from ..tensors.ref import ByteRange, Source

GAP = 256 << 10  # bytes between two ranges that are read along rather than asked for apart
UNDER_WAY = 16  # requests at a time
STALE = 2.0  # seconds after which a piece that was fetched ahead gives way to others
HELD = 64 << 20  # bytes that are fetched and not yet taken, of all objects together
LARGEST, SMALLEST = 8 << 20, 64 << 10  # bytes of a piece: two of each object are held, of up to 512

Fetch = Callable[[int, int], bytes]  # of a stretch, by its begin and end
T = TypeVar("T")


class Piece:
    """A stretch of an object that is being fetched, or was."""

    __slots__ = ("_done", "_result", "left", "start", "stop")

    def __init__(self, start: int, stop: int, left: int = 0) -> None:
        self.start, self.stop = start, stop
        self.left = left  # bytes that are expected to be taken still
        self._done = threading.Event()
        self._result: bytes | BaseException = b""

    def settle(self, result: bytes | BaseException) -> None:
        self._result = result
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> bytes:
        """Return the bytes, or raise what went wrong. Neither an interrupt nor the end of the work waits."""
        while not self._done.wait(0.1):
            if is_dropped():
                raise CkptToolError("the work was given up")
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class _Fetching:
    """Threads that fetch, and the pieces that they have fetched, or will, and nobody has taken yet."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Callable[[], bytes], Piece]] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.lock = threading.RLock()
        self.held: OrderedDict[Piece, Ahead] = OrderedDict()  # the least recently used first
        self.nbytes = 0

    def start(self, job: Callable[[], bytes], piece: Piece) -> Piece:
        """Have a piece fetched by a thread that nobody has to wait for when the process ends."""
        if threading.current_thread() in self.threads:  # all of them could be waiting for one another
            _do(job, piece)
            return piece
        with self.lock:
            if len(self.threads) < UNDER_WAY:
                thread = threading.Thread(target=self.work, name="ckpttool fetcher", daemon=True)
                thread.start()
                self.threads.append(thread)
        self.jobs.put((job, piece))
        return piece

    def work(self) -> None:
        while True:
            _do(*self.jobs.get())

    def hold(self, piece: Piece, owner: Ahead) -> None:
        """Keep a piece, and drop the oldest ones where that is too much."""
        self.held[piece] = owner
        self.nbytes += piece.stop - piece.start
        while self.nbytes > HELD and next(iter(self.held)) is not piece:
            oldest, theirs = next(iter(self.held.items()))
            theirs.drop(oldest)

    def has_room(self, nbytes: int) -> bool:
        """Return whether so many bytes more may be held; what nobody has read for a while gives way."""
        limit = time.monotonic() - STALE
        for piece, owner in [*self.held.items()] if self.nbytes + nbytes > HELD else ():
            if owner.used < limit:
                owner.drop(piece)
        return self.nbytes + nbytes <= HELD

    def drop(self, piece: Piece) -> None:
        if self.held.pop(piece, None) is not None:
            self.nbytes -= piece.stop - piece.start


def _do(job: Callable[[], bytes], piece: Piece) -> None:
    try:
        piece.settle(job())
    except BaseException as error:  # whoever waits for the piece raises it
        piece.settle(error)


_now = _Fetching()


def _begin_again() -> None:
    """In a forked process there are no threads, and nobody will settle what they were fetching."""
    global _now
    _now = _Fetching()


os.register_at_fork(after_in_child=_begin_again)


class Ahead:
    """The pieces of one object that are expected to be read, about in the order in which they lie."""

    def __init__(self, fetch: Fetch) -> None:
        """Expect nothing yet: then each stretch is fetched when it is asked for, and no more."""
        self._fetch = fetch
        self._starts: list[int] = []  # of the expected stretches
        self._stops: list[int] = []
        self._nbytes, self._depth = LARGEST, 1  # of a piece, and how many are fetched ahead
        self._wanted: dict[int, int] = {}  # begin of a piece -> how many of its bytes are read
        self._pieces: dict[int, Piece] = {}
        self._by, self.used = _now, 0.0  # when bytes were taken for the last time

    def expect(self, ranges: Iterable[tuple[int, int]], nbytes: int, depth: int) -> None:
        """Announce what will be read: in pieces of how many bytes, and how many of them ahead."""
        starts, stops = list[int](), list[int]()
        ranges = sorted(ranges)
        for begin, end in ranges:
            if stops and begin <= stops[-1] + GAP:
                stops[-1] = max(stops[-1], end)
            elif end > begin:
                starts.append(begin)
                stops.append(end)
        with _now.lock:
            self.forget()
            self._starts, self._stops, self._nbytes, self._depth = starts, stops, nbytes, depth
            self._wanted = self._shares(ranges)

    def _shares(self, ranges: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return how many bytes are read of each piece: what lies between two ranges nobody takes."""
        shares: dict[int, int] = defaultdict(int)
        for begin, end in ranges:
            while begin < end and (bounds := self._bounds(begin)):
                shares[bounds[0]] += min(end, bounds[1]) - begin
                begin = bounds[1]
        return shares

    def forget(self) -> None:
        """Drop what was fetched and not taken."""
        with _now.lock:
            for piece in [*self._pieces.values()]:
                self.drop(piece)

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill memory with the bytes from `offset`."""
        while view:
            piece = self._taken(offset, len(view))
            data = memoryview(piece.wait())[offset - piece.start :][: len(view)]
            view[: len(data)] = data
            view, offset = view[len(data) :], offset + len(data)

    def _bounds(self, offset: int) -> tuple[int, int] | None:
        """Return begin and end of the piece at `offset`; None where nothing is expected."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0 or offset >= self._stops[number]:
            return None
        begin = offset - (offset - self._starts[number]) % self._nbytes
        return begin, min(begin + self._nbytes, self._stops[number])

    def _following(self, bounds: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the pieces behind one."""
        at = bounds[1]
        while True:
            number = bisect_right(self._stops, at)
            if number == len(self._starts):
                return
            found = self._bounds(max(at, self._starts[number]))
            assert found is not None
            yield found
            at = found[1]

    def _taken(self, offset: int, nbytes: int) -> Piece:
        """Return the piece of which some bytes are taken now, and have those behind it fetched."""
        with _now.lock:
            if self._by is not _now:  # this process was forked since
                self._by, self._pieces = _now, {}
            self.used = time.monotonic()
            bounds = self._bounds(offset)
            if bounds is None:  # nobody has said that this would be read
                piece = Piece(offset, offset + nbytes)
                return _now.start(partial(self._fetch, piece.start, piece.stop), piece)
            piece = self._pieces.get(bounds[0]) or self._begin(bounds)
            piece.left -= min(nbytes, bounds[1] - offset)
            if piece.left <= 0:
                self.drop(piece)
            else:
                _now.held.move_to_end(piece)
            for begin, end in islice(self._following(bounds), self._depth):
                if begin not in self._pieces and _now.has_room(end - begin):
                    self._begin((begin, end))
        return piece

    def _begin(self, bounds: tuple[int, int]) -> Piece:
        piece = self._pieces[bounds[0]] = Piece(*bounds, self._wanted[bounds[0]])
        _now.hold(piece, self)
        return _now.start(partial(self._fetch, *bounds), piece)

    def drop(self, piece: Piece) -> None:
        """Let a piece go; whoever waits for it still gets its bytes."""
        _now.drop(piece)
        if self._pieces.get(piece.start) is piece:
            del self._pieces[piece.start]


def expect(ranges: Iterable[ByteRange]) -> None:
    """Announce what an operation will read of remote objects, each byte about once and in order."""
    of_source: dict[Source, list[tuple[int, int]]] = defaultdict(list)
    for place in ranges:
        if not place.source.is_local:
            of_source[place.source].append((place.offset, place.offset + place.nbytes))
    count = max(len(of_source), 1)
    nbytes = max(SMALLEST, min(LARGEST, HELD // (2 * count)))
    for source, stretches in of_source.items():
        source.expect(stretches, nbytes, max(1, HELD // nbytes // count - 1))


def all_at_once(jobs: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Return what some jobs return, or the error of each, having run UNDER_WAY of them at a time."""
    outcomes: dict[int, T | Exception] = {}

    def run(number: int, job: Callable[[], T]) -> bytes:
        try:
            outcomes[number] = job()
        except Exception as error:
            outcomes[number] = error
        return b""

    pieces = [_now.start(partial(run, number, job), Piece(0, 0)) for number, job in enumerate(jobs)]
    for piece in pieces:
        piece.wait()
    return [outcomes[number] for number in range(len(jobs))]
