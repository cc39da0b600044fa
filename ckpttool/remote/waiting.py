"""Waiting for a library that lets no signal in while it waits itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


class Unanswered(Exception):
    """An answer does not end, though its bytes come one after another; the text says within which time."""


def interruptible(job: Callable[[], T], seconds: float) -> T:
    """Run a job, so that Ctrl-C or another signal ends the wait for it; the job then ends by itself.

    Raises Unanswered after so many seconds.
    """
    # A thread of its own: signals reach only a main thread that does not wait in the library, and only so can
    # a time be set.
    return ended(started(job), seconds)


def ended(outcome: Future[T], seconds: float) -> T:
    """Return what a job returns. Raises Unanswered after so many seconds."""
    if wait([outcome], seconds).not_done:  # a library's bound on silence says nothing of an answer that drips
        raise Unanswered(f"{seconds:.3g} s")
    return outcome.result()


def started(job: Callable[[], T]) -> Future[T]:
    """Start a job in a thread of its own, which does not keep the process from ending."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(job())
        except BaseException as error:  # whatever it is, the waiting thread must hear of it
            outcome.set_exception(error)

    threading.Thread(target=run, name="ckpttool request", daemon=True).start()
    return outcome
