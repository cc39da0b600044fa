"""Work done on several cores: while what came before it is being used, or by this thread and others alike."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def cores(most: int) -> int:
    """How many cores this process may use, `most` at the most."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), most)
    return min(os.cpu_count() or 1, most)


def in_order(jobs: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """What the jobs return, in their order, while the next few are under way.

    Threads gain only where the work is done without Python's lock: reading, hashing, numpy. Memory holds the
    results of at most `workers` + 1 jobs.

    Args:
        jobs: taken one after another, as they are needed.
        workers: threads beside this one. Where there is one core the jobs are done in this one.
    """
    todo = iter(jobs)
    first = list(islice(todo, 2))
    if len(first) < 2 or cores(2) < 2:  # nothing to be done beside it, or nowhere
        yield from (job() for job in chain(first, todo))
        return
    from concurrent.futures import ThreadPoolExecutor

    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for job in chain(first, todo):
            pending.append(pool.submit(job))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def together(jobs: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """What the jobs return, in their order; this thread does them too, and others beside it.

    For jobs that use up what they make. Nothing big then goes from one core's cache to another's, which can
    cost more than the second core gains, and Python's lock changes hands less often.

    Args:
        jobs: taken one after another, each by the next thread that is free.
        most: threads, this one included; no more than there are cores.
    """
    todo = iter(jobs)
    first = list(islice(todo, 2))
    todo = chain(first, todo)
    if len(first) < 2 or cores(most) < 2:
        yield from (job() for job in todo)
        return
    work = _Shared(todo)
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(cores(most) - 1)
    try:
        others = [pool.submit(work.do_all) for _ in range(cores(most) - 1)]
        while work.do_one():
            yield from work.results()
        for other in others:
            other.result()
        yield from work.results()
    finally:
        work.stopped = True
        pool.shutdown()


class _Shared(Generic[T]):
    """Jobs that several threads take from one place, and what they returned."""

    def __init__(self, todo: Iterator[Callable[[], T]]) -> None:
        self.stopped = False
        self._todo = enumerate(todo)
        self._lock = Lock()
        self._done: dict[int, T] = {}
        self._given = 0

    def do_all(self) -> None:
        while self.do_one():
            pass

    def do_one(self) -> bool:
        """The next job; False where there is none, or another one failed."""
        with self._lock:
            number, job = (-1, None) if self.stopped else next(self._todo, (-1, None))
        if job is None:
            return False
        try:
            self._done[number] = job()
        except BaseException:
            self.stopped = True
            raise
        return True

    def results(self) -> Iterator[T]:
        """Those not yet given, as far as none is missing."""
        while self._given in self._done:
            yield self._done.pop(self._given)
            self._given += 1
