"""The folders of the repository, one run of the command line, and its peak memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ---- The folders of the repository, and the result of one run of the command line ---------------------


ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"


@dataclass(frozen=True)
class Ran:
    """One run of the command line: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout parsed as JSON."""
        return json.loads(self.out)


Cli = Callable[..., Ran]
"""The fixture `cli`, which runs a command in this process."""


def open_files() -> Counter[str]:
    """Count the files that this process holds open, by path.

    Threads and garbage of other tests close theirs at any time: what a test left open is what is more than
    before, ``open_files() - before``.
    """
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the listing's own is
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return Counter(path for path in found if path.startswith("/"))  # no sockets, no pipes


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Terminal(io.StringIO):
    """Something that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def within(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Raise AssertionError unless the block takes less time by a clock, which may be `process_time`."""
    began = clock()
    yield
    assert clock() - began < seconds


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the message of the error that a call ends in; two times "" if it ends well."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, getattr(error, "message", str(error))
    return "", ""


def assert_says(ran: Ran, code: int, *words: str) -> None:
    """Raise AssertionError unless a command ended with a code, and said all these words on stderr."""
    missing = [each for each in words if each not in ran.err]
    assert (ran.code, missing) == (code, []), f"exit {ran.code}: {ran.out}{ran.err}"


# ---- The peak memory of a command in a process of its own, by the kernel's figure ---------------------


MOST = 64_000_000

CHILD = """
import os, sys
from ckpttool.core import cli
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
code = cli.run(sys.argv[1:])
peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
os.write(out, f'{code} {peak}'.encode())
"""


def peak(*arguments: object) -> int:
    """The largest resident memory of a command that succeeds, in bytes."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    code, kilobytes = ran.stdout.split()
    assert code == "0", ran.stderr
    return int(kilobytes) * 1024
