"""Jobs run on other threads, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


def cores(most: int) -> int:
    """How many cores this process may use, at most `most`."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), most)
    return min(os.cpu_count() or 1, most)


def in_order(jobs: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """What the jobs return, in their order, while the next few are under way.

    Threads help only where the work releases the GIL: reading, hashing, numpy. Memory holds the results of at
    most `workers` + 1 jobs.

    Args:
        jobs: taken one after another, as they are needed.
        workers: threads besides this one, which runs the jobs itself where there is one core or no thread can
            be started.
    """
    todo = iter(jobs)
    first = list(islice(todo, 2))
    if len(first) < 2 or cores(2) < 2:  # nothing to be done beside it, or nowhere
        yield from (job() for job in chain(first, todo))
        return
    from concurrent.futures import ThreadPoolExecutor

    pending: deque[_Task[T]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        has_threads = True
        for job in chain(first, todo):
            pending.append(_Task(job))
            has_threads = has_threads and _is_handed(pool, pending[-1])
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def beside(job: Callable[[], T], here: Callable[[], object]) -> T:
    """Runs `job` on another thread while this one runs `here`.

    Returns the job's result once both are done. Where no thread can be started this one runs both.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        task = _Task(job)
        _is_handed(other, task)
        here()
        return task.result()


def _is_handed(pool: ThreadPoolExecutor, task: _Task[T]) -> bool:
    """Gives a task to a pool; False where a thread could not be started, as under a limit on processes.

    The pool's other threads may do it all the same.
    """
    try:
        pool.submit(task.do)
    except RuntimeError:
        return False
    return True


class _Task(Generic[T]):
    """A job that is done once: by a thread that is free, or else by the one that wants its result."""

    def __init__(self, job: Callable[[], T]) -> None:
        from concurrent.futures import Future

        self._job = job
        self._future = Future[T]()

    def do(self) -> None:
        """Does the job, unless somebody has."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._job())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> T:
        """What the job returns, or its error raised."""
        return self._job() if self._future.cancel() else self._future.result()
