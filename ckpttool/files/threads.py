"""Jobs run on several threads, their results taken in order."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

GROUP = 1 << 20
"""Bytes of small pieces that are worth handing to a thread together."""

MANY = 500
"""Small pieces handed to a thread together at most."""


class Piece(Protocol):
    """Something to be worked on, of a size in bytes."""

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Piece)


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
    """Threads that run jobs while the caller goes on. Close it, or use it as a context manager.

    Threads help only where the work releases the GIL: reading, hashing, numpy. Where the process has one
    core, where no thread can be started, and for a single job, the caller's thread runs the job itself when
    its result is asked for.
    """

    def __init__(self, count: int) -> None:
        """Prepare up to `count` threads; none is started before there are two jobs."""
        self._count = count if cores(2) > 1 else 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[_Task[T]] = deque()

    @property
    def is_threaded(self) -> bool:
        """Whether there may be threads besides the caller's."""
        return self._count > 0

    def __enter__(self) -> Workers[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, job: Callable[[], T]) -> None:
        """Queue a job; it starts as soon as a thread is free."""
        self._pending.append(_Task(job))
        if self._count and len(self._pending) > 1 and self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self._count)
            self._hand_over(self._pending[0])
        if self._pool is not None:
            self._hand_over(self._pending[-1])

    def results(self, pending: int = 0) -> Iterator[T]:
        """Yield the results of the oldest jobs, in order, until at most `pending` jobs are left.

        Raises:
            Exception: whatever a job raised, in its turn.
        """
        while len(self._pending) > pending:
            yield self._pending.popleft().result()

    def close(self) -> None:
        """End the threads. Jobs that have not begun are dropped."""
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _hand_over(self, task: _Task[T]) -> None:
        assert self._pool is not None
        # The error says that no thread could be started, as under a limit on processes. Those there are may
        # do it all the same, or `result` does.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(task.do)


class _Task(Generic[T]):
    """A job that is done once: by a thread that is free, or else by the one that wants its result."""

    def __init__(self, job: Callable[[], T]) -> None:
        from concurrent.futures import Future

        self._job = job
        self._future = Future[T]()

    def do(self) -> None:
        """Run the job, unless another thread has."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._job())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> T:
        """Return what the job returns, or raise its error."""
        return self._job() if self._future.cancel() else self._future.result()


def in_order(jobs: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """Yield what jobs return, in their order, while the next few are under way.

    Args:
        jobs: taken one after another, as they are needed.
        workers: threads besides the caller's; results of at most `workers` + 1 jobs are held.

    Raises:
        Exception: whatever a job raised, in its turn; the jobs after it are dropped.
    """
    with Workers[T](workers) as queue:
        for job in jobs:
            queue.add(job)
            yield from queue.results(pending=workers if queue.is_threaded else 0)
        yield from queue.results()


def map_pieces(work: Callable[[P], T], pieces: Iterable[P], workers: int) -> Iterator[T]:
    """Yield `work(piece)` for each piece, in order, worked on by several threads.

    A thread costs time too: consecutive small pieces are handed over together. Large tensors are cut into
    pieces by the caller (see `cut`).

    Args:
        work: releases the GIL for most of its time.
        pieces: taken as they are needed.
        workers: threads besides the caller's.
    """

    def all_of(group: list[P]) -> list[T]:
        return [work(piece) for piece in group]

    for done in in_order((partial(all_of, group) for group in _groups(pieces)), workers):
        yield from done


def _groups(pieces: Iterable[P]) -> Iterator[list[P]]:
    group: list[P] = []
    held = 0
    for piece in pieces:
        if group and (held + piece.nbytes > GROUP or len(group) == MANY):
            yield group
            group, held = [], 0
        group.append(piece)
        held += piece.nbytes
    if group:
        yield group
