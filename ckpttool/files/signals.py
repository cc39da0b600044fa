"""Signals blocked or deferred while a block of code must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals at which the parent ends, and the child with it."""


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """No signal that would end the process is heard before the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Signals that end the process wait until the block has ended.

    A mask would not do: where one thread blocks a signal, the kernel gives it to another. Handlers run in the
    main thread alone, so every other thread is undisturbed already, and may set none.
    """
    heard: list[int] = []
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread():
            after.callback(_raise_all, heard)
            for number in ENDING:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: set by what is not Python
                    after.callback(signal.signal, number, before)
                    signal.signal(number, lambda number, _: heard.append(number))
        yield


def _raise_all(heard: list[int]) -> None:
    for number in heard:
        signal.raise_signal(number)
