"""Signals deferred while a block of code must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals at which the process ends."""


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer the signals in `ENDING` until the block ends.

    A mask would not do: where one thread blocks a signal, the kernel gives it to another. Handlers run only
    in the main thread, so in any other thread this does nothing, and nothing needs to be done.
    """
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
