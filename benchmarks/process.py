"""One command in its own process: its time and its peak memory."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .case import Run

LAUNCHER = [sys.executable, "-I", "-S", str(Path(__file__).parent / "children/launch.py")]

# Python may keep its bytecode, as usual: what counts is a program's second start.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

# macOS counts bytes, everyone else kilobytes.
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


class CommandFailed(Exception):
    """A command that should have succeeded did not, so there is nothing to compare."""


def timed(command: Sequence[str | Path]) -> Run:
    """Runs a command to its end."""
    with tempfile.TemporaryFile() as errors:
        # Its own session, so that it can be killed with everything it started.
        launcher = subprocess.Popen(
            [*LAUNCHER, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        try:
            answer = launcher.communicate()[0].split()
        except BaseException:  # Ctrl-C, SIGTERM: nothing may keep writing to a folder that is removed
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()
            _wait_for_group(launcher.pid)
            raise
        if not answer or int(answer[0]) != 0:
            raise CommandFailed(_reason(command, int(answer[0]) if answer else None, errors.fileno()))
    return Run(seconds=float(answer[1]), cpu=float(answer[2]), peak=int(answer[3]) * PEAK_UNIT)


@functools.cache
def smallest_peak() -> int:
    """The smallest measurable `Run.peak`, in bytes: the launcher's own pages count (see `launch`)."""
    return timed(["true"]).peak


def _wait_for_group(group: int) -> None:
    """Wait until killed processes have ended: one in the middle of a write ends only after it."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)


def _reason(command: Sequence[str | Path], code: int | None, errors: int) -> str:
    size = os.fstat(errors).st_size
    last = os.pread(errors, 2000, max(0, size - 2000)).decode(errors="replace").strip()
    words = " ".join(map(str, command))
    if code == -signal.SIGKILL:
        return f"was killed (out of memory?): {words}"
    how = "could not be started" if code is None else f"failed with exit code {code}"
    return f"{how}: {words}\n{last}"
