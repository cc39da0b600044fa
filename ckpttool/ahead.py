"""Jobs run on other threads, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

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
        workers: threads besides this one. With a single core the jobs run in this one.
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


def beside(job: Callable[[], T], here: Callable[[], object]) -> T:
    """Runs `job` on another thread while this one runs `here`.

    Returns the job's result once both are done.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        result = other.submit(job)
        here()
        return result.result()
