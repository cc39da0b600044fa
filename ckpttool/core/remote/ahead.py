"""Bytes of remote objects, fetched by a few threads before they are needed.

An operation announces by `expect` what it will read. Neighbouring ranges are joined, cut into pieces and put
in a line in the order of reading. While one piece is read, threads fetch those behind it, of this object and
of the next. The number of requests and the memory are bounded.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from ...errors import CkptToolError
from .. import system
from ..files.threads import is_dropped
from .store import Bytes

GAP = 256 << 10  # bytes between two ranges that are read along rather than asked for apart
UNDER_WAY = 16  # requests at a time
HELD = 40 << 20  # bytes that are fetched and not yet taken, of all objects: in memory, 64 MB with buffers
LARGEST, SMALLEST = 8 << 20, 64 << 10  # bytes of a piece: one of each object is held, of up to 600

Range = tuple[int, int]  # begin and end
Fetch = Callable[[int, int], Bytes]  # of a range
T = TypeVar("T")


class FetchedPiece:
    """A stretch of an object that is being fetched, or was."""

    __slots__ = ("_done", "_result", "left", "line", "start", "stop")

    def __init__(self, start: int, stop: int, left: int = 0, line: Line | None = None) -> None:
        self.start, self.stop = start, stop
        self.left = left  # bytes that are expected to be taken still
        self.line = line  # in which it stands
        self._done = threading.Event()
        self._result: Any = b""

    def fetch(self, job: Callable[[], object]) -> None:
        """Run the job; whoever waits for the piece gets its result, or its error."""
        try:
            self._result = job()
        except BaseException as error:
            self._result = error
        self._done.set()

    def wait(self) -> Any:
        """Return the bytes, or raise the error. An interrupt, or the end of the work, ends the wait."""
        while not self._done.wait(0.1):
            if is_dropped():
                raise CkptToolError("the work was given up")
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class _Fetching:
    """Threads that fetch pieces, and the pieces that nobody has taken yet."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Callable[[], object], FetchedPiece]] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.lock = threading.RLock()
        self.held: OrderedDict[FetchedPiece, Ahead] = OrderedDict()  # the least recently used first
        self.nbytes = 0

    def start(self, job: Callable[[], object], piece: FetchedPiece) -> FetchedPiece:
        """Have a daemon thread fetch a piece."""
        if self.is_here():  # all of them could be waiting for one another
            piece.fetch(job)
            return piece
        with self.lock:
            if len(self.threads) < UNDER_WAY:
                thread = threading.Thread(target=self.work, name="ckpttool fetcher", daemon=True)
                thread.start()
                self.threads.append(thread)
        self.jobs.put((job, piece))
        return piece

    def is_here(self) -> bool:
        """Return whether the caller is one of the threads."""
        return threading.current_thread() in self.threads

    def work(self) -> None:
        while True:
            job, piece = self.jobs.get()
            piece.fetch(job)

    def hold(self, piece: FetchedPiece, owner: Ahead) -> None:
        """Keep a piece; where the pieces exceed HELD, drop the least recently used."""
        self.held[piece] = owner
        self._count(piece, piece.stop - piece.start)
        while self.nbytes > HELD and next(iter(self.held)) is not piece:
            oldest, theirs = next(iter(self.held.items()))
            theirs.put_off(oldest)

    def drop(self, piece: FetchedPiece) -> None:
        if self.held.pop(piece, None) is not None:
            self._count(piece, piece.start - piece.stop)

    def _count(self, piece: FetchedPiece, nbytes: int) -> None:
        self.nbytes += nbytes
        if piece.line:
            piece.line.held += nbytes


_now = _Fetching()


def _begin_again() -> None:
    """Start afresh in a forked process, which lacks the threads of its parent."""
    global _now
    _now = _Fetching()


system.in_forked(_begin_again)


_lines: WeakSet[Line] = WeakSet()  # of checkpoints that are open


class Line:
    """The pieces of several objects, in the order in which an operation reads of them first."""

    def __init__(self) -> None:
        self.held = 0  # bytes that are fetched and not yet taken
        self._pieces: list[tuple[Ahead, int, int]] = []
        self._places: dict[tuple[Ahead, int], int] = {}
        self._next = 0  # place of the piece that is fetched next
        self._taken = set[int]()  # places of those that were read to their end, in any order
        _lines.add(self)

    def add(self, owner: Ahead, begin: int, end: int) -> None:
        """Append the pieces that hold a range, but for those that are there already."""
        while begin < end and (bounds := owner.bounds(begin)):
            if (owner, bounds[0]) not in self._places:
                self._places[owner, bounds[0]] = len(self._pieces)
                self._pieces.append((owner, *bounds))
            begin = bounds[1]

    def fetch_behind(self, owner: Ahead, begin: int, *, jumped: bool, is_taken: bool) -> None:
        """Have the pieces fetched behind the one that is read now, as far as there is room.

        Lines share the room, as two checkpoints that are compared are read by turns.
        """
        place = self._places.get((owner, begin), -1)
        if jumped and place in self._taken:  # read again, and so will be what stands behind it
            self._taken.clear()
        if is_taken and place >= 0:
            self._taken.add(place)
        self._next = place + 1 if jumped else max(place + 1, self._next)
        room = HELD // max(1, sum(line._next < len(line._pieces) for line in _lines))
        while self._next < len(self._pieces):
            theirs, begin, end = self._pieces[self._next]
            if self._next not in self._taken:
                if self.held + end - begin > room:
                    return
                theirs.begin((begin, end))
            self._next += 1


class Ahead:
    """The pieces of one object that are expected to be read."""

    def __init__(self, fetch: Fetch) -> None:
        """Expect nothing yet: then each stretch is fetched when it is asked for, and no more."""
        self._fetch = fetch
        self._starts: list[int] = []  # of the expected stretches
        self._stops: list[int] = []
        self._nbytes, self._first = LARGEST, 0  # of a piece; of the first of each stretch, 0 for as many
        self._wanted: dict[int, int] = {}  # begin of a piece -> how many of its bytes are read
        self._rest: dict[int, int] = {}  # the same of pieces that had to make room, as far as not read
        self._pieces: dict[int, FetchedPiece] = {}
        self._line: Line | None = None
        self._by = _now

    def expect(
        self, ranges: Iterable[Range], stretches: Iterable[Range], nbytes: int, first: int, line: Line
    ) -> None:
        """Announce the ranges that will be read, and the stretches that hold them, in pieces of `nbytes`."""
        starts, stops = list[int](), list[int]()
        for begin, end in sorted(stretches):
            if stops and begin <= stops[-1] + GAP:
                stops[-1] = max(stops[-1], end)
            elif end > begin:
                starts.append(begin)
                stops.append(end)
        with _now.lock:
            self.forget()
            self._starts, self._stops, self._line = starts, stops, line
            self._nbytes, self._first = nbytes, first
            self._wanted = defaultdict(int)
            for begin, end in ranges:
                while begin < end and (bounds := self.bounds(begin)):
                    self._wanted[bounds[0]] += min(end, bounds[1]) - begin
                    begin = bounds[1]

    def forget(self) -> None:
        """Drop what was fetched and not taken, and expect nothing."""
        with _now.lock:
            for piece in [*self._pieces.values()]:
                self.drop(piece)
            self._starts, self._stops, self._rest, self._line = [], [], {}, None

    def fill(self, offset: int, view: memoryview, *, counts: bool = True) -> None:
        """Fill memory with the bytes from `offset`; they count as taken unless they were not announced."""
        if view and _now.is_here():  # whose lock would keep all others waiting
            view[:] = self._fetch(offset, offset + len(view))
            return
        while view:
            piece = self._taken(offset, len(view), counts=counts)
            data = memoryview(piece.wait())[offset - piece.start :][: len(view)]
            view[: len(data)] = data
            view, offset = view[len(data) :], offset + len(data)

    def bounds(self, offset: int) -> Range | None:
        """Return begin and end of the piece at `offset`; None where nothing is expected."""
        number = bisect_right(self._starts, offset) - 1
        if number < 0 or offset >= self._stops[number]:
            return None
        begin = offset - (offset - self._starts[number] - self._first) % self._nbytes
        return max(begin, self._starts[number]), min(begin + self._nbytes, self._stops[number])

    def _taken(self, offset: int, nbytes: int, *, counts: bool) -> FetchedPiece:
        """Return the piece whose bytes are taken now, and have the pieces behind it fetched."""
        with _now.lock:
            if self._by is not _now:  # this process was forked since
                self._by, self._pieces, self._line = _now, {}, None
            bounds = self.bounds(offset)
            if bounds is None:  # not announced
                piece = FetchedPiece(offset, offset + nbytes)
                return _now.start(partial(self._fetch, piece.start, piece.stop), piece)
            jumped = bounds[0] not in self._pieces
            piece = self.begin(bounds)
            piece.left -= min(nbytes, bounds[1] - offset) if counts else 0
            if piece.left <= 0:
                self.drop(piece)
            else:
                _now.held.move_to_end(piece)
            if self._line:
                self._line.fetch_behind(self, bounds[0], jumped=jumped, is_taken=piece.left <= 0)
        return piece

    def begin(self, bounds: Range) -> FetchedPiece:
        """Return a piece that is fetched, or have it fetched."""
        piece = self._pieces.get(bounds[0])
        if piece is None:
            left = self._rest.pop(bounds[0], self._wanted[bounds[0]])
            piece = self._pieces[bounds[0]] = FetchedPiece(*bounds, left, self._line)
            _now.hold(piece, self)
            _now.start(partial(self._fetch, *bounds), piece)
        return piece

    def put_off(self, piece: FetchedPiece) -> None:
        """Drop a piece that is fetched again when it is read."""
        self.drop(piece)
        self._rest[piece.start] = piece.left

    def drop(self, piece: FetchedPiece) -> None:
        """Drop a piece; whoever waits for it still gets its bytes."""
        _now.drop(piece)
        if self._pieces.get(piece.start) is piece:
            del self._pieces[piece.start]


def begin(job: Callable[[], T]) -> Callable[[], T]:
    """Start a job beside others, UNDER_WAY at a time; return a function that waits for its result."""
    return _now.start(job, FetchedPiece(0, 0)).wait
