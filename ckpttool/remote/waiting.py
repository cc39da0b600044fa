"""Waiting for a library that lets no signal in while it waits itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def interruptible(job: Callable[[], T]) -> T:
    """Run a job, so that Ctrl-C or another signal ends the wait for it; the job then ends by itself."""
    # Handlers run only in the main thread, between its own instructions.
    return job() if threading.current_thread() is not threading.main_thread() else started(job).result()


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
