"""A run that is told to end by SIGTERM, SIGINT or SIGUSR1 saves and ends after the same step on every rank.

A handler of Python's runs only between two of its instructions, and a rank that waits for another one is not
there for a long time. So the handlers here do nothing, and a thread learns of each signal from the file
descriptor to which the interpreter writes its number at once (`signal.set_wakeup_fd`). It also ends the
process when `--grace` is over, and at the second SIGINT, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpttool.distributed.group import started_by_launcher
from ckpttool.errors import CkptToolError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # of a scheduler, a terminal, SLURM's warning

# Seconds in which another SIGINT is no second one: a terminal sends one to the launcher too, which sends it
# on to the ranks.
REPEATED = 2.0

WAKE = 0  # a byte that is no signal: something has changed that the thread should look at


class ToldToEnd(CkptToolError):
    """A signal has come during an evaluation, which may take longer than the grace."""

    kind = "told-to-end"


class Stop:
    """Whether this process was told to end. A context manager: inside, the signals do nothing else.

    Attributes:
        number: of the signal; 0 if none has come.
        since: when it came, by `time.monotonic`.
    """

    def __init__(self, grace: float, left_undone: Callable[[], str] = lambda: "") -> None:
        """Take the seconds from a signal to the end of the process, and what it then says of the run.

        Entering the block has an effect only in the main thread.
        """
        self.grace, self.number, self.since = grace, 0, 0.0
        self._left_undone = left_undone
        self._before: dict[int, Any] = {}
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._open = False

    def __enter__(self) -> Stop:
        global _active
        if threading.current_thread() is not threading.main_thread():
            return self
        if _active is not None:
            _active.__exit__()  # what listened while the run started has nothing to do any more
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._open, _active = True, self
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):  # None: installed by something other than Python
                self._before[number] = before
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if not self._open:
            return
        self.restore()
        signal.set_wakeup_fd(self._fd_before)
        _active, self._open = None, False
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def restore(self) -> None:
        """Give the signals back to the handlers from before the block."""
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):  # in a process that another thread has forked
                signal.signal(number, before)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def seconds(self) -> float:
        return time.monotonic() - self.since

    def raise_if_told(self) -> None:
        if self.number:
            raise ToldToEnd(f"told to end by {self.name}")

    def heard(self, number: int, seconds: float) -> None:
        """Take over the signal that any rank has got, some seconds ago."""
        since = time.monotonic() - seconds
        self.since = min(since, self.since) if self.number else since
        self.number = number  # last: another thread takes it as a sign that `since` is set
        if self._open:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there is something to read already
            self._writer.send(bytes([WAKE]))

    def _watch(self) -> None:
        while self._open:
            self._reader.settimeout(max(1e-3, self.grace - self.seconds()) if self.number else None)
            try:
                arrived = self._reader.recv(64)
            except TimeoutError:
                arrived = b""
            for number in arrived:
                if number in SIGNALS:
                    self._take(number)
            if self._open and self.number and self.seconds() >= self.grace:
                came = f"{self.name} came {self.seconds():.0f} s ago, and the run has not ended"
                self._end(1, f"error: --grace {self.grace:g}: {came}")

    def _take(self, number: int) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            os._exit(128 + number)  # the launcher was killed, and this signal is the kernel's: no one asks
        if not self.number:
            self.since = time.monotonic()
            self.number = number
        elif number == signal.SIGINT and (not started_by_launcher() or self.seconds() > REPEATED):
            self._end(128 + number, "\ninterrupted")

    def _end(self, code: int, why: str) -> None:
        """End the process at once. A file that is being written has no name yet; the next run removes it."""
        undone = self._left_undone()
        if undone:
            with contextlib.suppress(OSError):
                os.write(2, f"{why}; {undone}\n".encode())
        os._exit(code)


class Starting(Stop):
    """A context in which a signal ends the process at once, with one line on rank 0: nothing is trained yet.

    It ends where a `Stop` begins. A handler of Python's would have to wait for ranks that are late.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(0.0, lambda: "nothing more was trained" if rank == 0 else "")

    def _take(self, number: int) -> None:
        if self._launcher is not None and number == signal.SIGTERM:
            os._exit(128 + number)  # so a launcher ends ranks when another one has failed, and said why
        self._end(128 + number, f"ended by {signal.Signals(number).name} before the first step")


# ---- processes that are forked -----------------------------------------------------------------------------

_active: Stop | None = None
_mask: Any = None


def _before_fork() -> None:
    # A signal in a child that still has the descriptor would be taken for one of ours.
    global _mask
    if _active is not None:
        _mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_in_parent() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _after_in_child() -> None:
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        _active.restore()
        _active = None
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
