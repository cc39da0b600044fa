"""Jobs on several threads with results in order, bytes that they read in pieces, and deferred signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from mmap import mmap
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..system import ENDING
from ..tensors.ref import LARGEST, ByteRange, Computed, TensorRef
from ..tensors.values import stream

T = TypeVar("T")
NAME = "ckpttool worker"  # of each thread that runs jobs
GROUP = 1 << 20  # bytes of small pieces that are worth handing to a thread together
MANY = 500  # small pieces that are handed over together at most


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer the signals in `ENDING` until the block ends."""
    # A mask would not do: where one thread blocks a signal, the kernel gives it to another. Handlers run only
    # in the main thread, so in any other there is nothing to do.
    received: list[int] = []
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread():
            after.callback(_raise_all, received)
            for number in ENDING:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: installed by something other than Python
                    after.callback(signal.signal, number, before)
                    signal.signal(number, lambda number, _: received.append(number))
        yield


def _raise_all(numbers: list[int]) -> None:
    for number in numbers:
        signal.raise_signal(number)


class WorkItem(Protocol):
    """Something to be worked on, of a size in bytes."""

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=WorkItem)


def cores(most: int) -> int:
    """Return how many cores this process may use, at most `most`."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), most)
    return min(os.cpu_count() or 1, most)


def cut(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of stretches of at most `most` bytes that make up `nbytes`; none of 0."""
    for start in range(0, nbytes, most):
        yield start, min(most, nbytes - start)


class Workers(Generic[T]):
    """Threads that run jobs together with the caller. Close it, or use it as a context manager."""

    # The caller runs jobs while it waits for a result: on two cores one thread is enough, and nothing is lost
    # where another process keeps the second core busy. Threads help only where the work releases the GIL:
    # reading, writing, hashing, numpy.

    def __init__(self, count: int) -> None:
        """Prepare for `count` jobs at once, the caller's included; no thread starts before two jobs wait."""
        self.count = count if cores(2) > 1 else 1
        self._todo: SimpleQueue[_Task[T] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._pending: deque[_Task[T]] = deque()
        self._threads: list[Thread] = []

    def __enter__(self) -> Workers[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, job: Callable[[], T]) -> None:
        """Queue a job; it starts as soon as a thread is free."""
        task = _Task(job)
        self._pending.append(task)
        self._todo.put(task)
        if len(self._threads) + 1 < min(self.count, len(self._pending)):
            self._start_thread()

    def results(self, pending: int = 0) -> Iterator[T]:
        """Yield the results, or raise the errors, of the oldest jobs until `pending` jobs are left."""
        while len(self._pending) > pending:
            oldest = self._pending[0]
            while oldest.unfinished.locked() and self._run_next():
                pass
            self._pending.popleft()
            yield oldest.result()

    def close(self) -> None:
        """End the threads after their current jobs. Jobs that have not begun are dropped."""
        self._pending.clear()
        self._closing.set()
        with signals_deferred():  # a thread that is not waited for could write to a file that is closed
            with contextlib.suppress(Empty):
                while True:
                    self._todo.get_nowait()
            for _ in self._threads:
                self._todo.put(None)
            for thread in self._threads:
                if thread.ident is not None:  # an interrupt may have come before it was started
                    thread.join()
            self._threads.clear()

    def _start_thread(self) -> None:
        thread = Thread(target=_run_all, args=(self._todo, self._closing), name=NAME, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started, as under a limit on processes
            self._threads.pop()
            self.count = len(self._threads) + 1

    def _run_next(self) -> bool:
        """Run a job that has not begun, from the caller's thread; return whether there was one."""
        try:
            task = self._todo.get_nowait()
        except Empty:
            return False
        assert task is not None
        task.run()  # an interrupt is raised at once
        return True


class _Task(Generic[T]):
    """A job and its outcome. A `Future` would take three times as long to make."""

    __slots__ = ("_error", "_job", "_result", "unfinished")

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._error: BaseException | None = None
        self.unfinished = Lock()
        self.unfinished.acquire()

    def run(self, kept: type[BaseException] = Exception) -> None:
        """Run the job and keep its result or its error; errors of other types are raised."""
        try:
            self._result = self._job()
        except kept as error:
            self._error = error
        self.unfinished.release()

    def result(self) -> T:
        """Wait for the job; return what it returned, or raise its error."""
        with self.unfinished:
            if self._error is not None:
                raise self._error
            return self._result


_of_thread = threading.local()


def is_dropped() -> bool:
    """Return whether the result of the job that this thread runs is no longer wanted."""
    closing = getattr(_of_thread, "closing", None)
    return closing is not None and closing.is_set()


def _run_all(todo: SimpleQueue[_Task[T] | None], closing: threading.Event) -> None:
    """Run jobs until None comes."""
    _of_thread.closing = closing
    while (task := todo.get()) is not None:
        task.run(kept=BaseException)  # else the caller would wait for ever


def in_order(jobs: Iterable[Callable[[], T]], workers: int, ahead: int = 0) -> Iterator[T]:
    """Yield what jobs return, in their order, while the next few run; an error drops those after it.

    At least `ahead` results may wait for an earlier one.
    """
    with Workers[T](workers) as queue:
        for job in jobs:
            queue.add(job)
            yield from queue.results(pending=max(2 * workers - 1, ahead) if queue.count > 1 else 0)
        yield from queue.results()


def map_pieces(
    work: Callable[[P], T], pieces: Iterable[P], workers: int, ahead: int = 0
) -> Iterator[tuple[P, T]]:
    """Yield each piece with `work(piece)`, in order, worked on by several threads."""
    # A thread costs time too: consecutive small pieces are handed over together. Large ones the caller cuts.

    def all_of(group: list[P]) -> list[tuple[P, T]]:
        return [(piece, work(piece)) for piece in group]

    for done in in_order((partial(all_of, group) for group in _groups(pieces)), workers, ahead):
        yield from done


def _groups(pieces: Iterable[P]) -> Iterator[list[P]]:
    group: list[P] = []
    nbytes = 0
    for piece in pieces:
        if group and (nbytes + piece.nbytes > GROUP or len(group) == MANY):
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.nbytes
    if group:
        yield group


# ---- Bytes in pieces that several threads sum, hash or compare


BUFFER = 1 << 20  # bytes moved at a time; whole elements
MOST_THREADS = 8

Progress = Callable[[int], object]
Bytes = ByteRange | Computed | TensorRef


class Buffers:
    """Memory for each thread that reads; a buffer that was given back is used again."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    @contextlib.contextmanager
    def one(self, nbytes: int = 0) -> Iterator[memoryview]:
        """Yield a buffer that no other thread uses, of BUFFER bytes, or of others, LARGEST at most."""
        buffer = self.take()
        yield buffer[: nbytes or BUFFER]
        self.give(buffer)

    def take(self) -> memoryview:
        """Return a buffer of LARGEST bytes, which is the caller's until it is given back."""
        try:
            return self._spare.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            # It begins with a page, which the kernel copies faster; what is not used of it takes no memory.
            return memoryview(mmap(-1, LARGEST))

    def give(self, buffer: memoryview) -> None:
        """Give a buffer back."""
        self._spare.append(buffer)


class BytesPiece(NamedTuple):
    """A stretch of the item with this number, or the whole of a tensor whose values must be made."""

    number: int
    data: Bytes
    nbytes: int
    is_last: bool


def map_bytes(
    work: Callable[[int, Iterator[memoryview]], T],
    items: Iterable[Bytes],
    most: int,
    progress: Progress | None = None,
    sharing: Callable[[Callable[[BytesPiece], T]], Callable[[BytesPiece], T]] = lambda work: work,
) -> Iterator[tuple[BytesPiece, T]]:
    """Yield the pieces of each item, in order, with `work(number, chunks)`, which several threads do.

    Bytes of a file are cut into pieces of at most `most` bytes, other items are one piece each. `sharing`
    makes it work that parts share: see `findings.shared`.
    """
    buffers = Buffers()

    def done(piece: BytesPiece) -> T:
        with buffers.one() as buffer:
            data = piece.data
            chunks = stream(data, buffer=buffer) if isinstance(data, TensorRef) else data.chunks(buffer)
            return work(piece.number, chunks)

    for piece, result in map_pieces(sharing(done), _pieces(items, most), cores(MOST_THREADS)):
        if progress and piece.nbytes:
            progress(piece.nbytes)
        yield piece, result


def _pieces(items: Iterable[Bytes], most: int) -> Iterator[BytesPiece]:
    for number, item in enumerate(items):
        data = item.data if isinstance(item, TensorRef) and item.is_plain else item
        if not isinstance(data, ByteRange) or not data.nbytes:
            yield BytesPiece(number, data, data.nbytes, True)
            continue
        for start, size in cut(data.nbytes, most):
            yield BytesPiece(number, data.part(start, size), size, start + size == data.nbytes)
