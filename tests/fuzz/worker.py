"""A process that examines files one after another, and is watched for hangs and crashes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckpttool.core.checkpoint import prefixes
from tests.fuzz.judge import Outcome, compare, use
from tests.fuzz.seeds import SECRET, Files, put

# Seconds of CPU time after which a file counts as one that hangs
HANGS = 20.0

# The same for the comparison with other libraries, which are not waited for longer
OTHERS_HANG = 4.0

# Seconds of sleep without any work after which it hangs too: it waits for a pipe that nobody writes to
WAITS = 15.0

# Seconds between two looks at it
LOOKS = 1.0

# Bytes of address space beyond those of the start: other libraries allocate what a file claims
ROOM = 4 << 30


class Worker:
    """Examines files in a process of its own, which is started again when one has ended it."""

    def __init__(self, hole: Any = None) -> None:
        self.hole = hole
        self.process: Any = None

    def __enter__(self) -> Worker:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        (self.folder / "secret").write_bytes(SECRET)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def examine(self, files: Files) -> Outcome:
        """Return what comes of a checkpoint."""
        if self.process is None:
            self._start()
        path = self.folder / "in"
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        put(files, path)
        self.pipe.send(str(path))
        outcome = self._answer(HANGS)
        if outcome is None:
            return self._died("the package")
        compared = self._answer(OTHERS_HANG)
        if compared is None:  # another library hangs, or has crashed
            self._end()
            return outcome
        return compared

    def _answer(self, seconds: float) -> Outcome | None:
        """Wait for the worker; return None when it has died, or has worked for longer than `seconds`."""
        started = last = self._state()[1]
        idle = 0.0
        with contextlib.suppress(EOFError, ConnectionError):
            while not self.pipe.poll(LOOKS):
                state, now = self._state()
                idle = idle + LOOKS if state == "S" and now == last else 0.0
                if now - started > seconds or idle >= WAITS or not self.process.is_alive():
                    return None
                last = now
            found: Outcome = self.pipe.recv()
            return found
        return None

    def _state(self) -> tuple[str, float]:
        """Return the letter of the process's state, and its CPU time."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0.0
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _died(self, whose: str) -> Outcome:
        is_alive = self.process.is_alive()
        self._end()
        code = self.process_code
        return Outcome(wrong=f"{whose} hangs" if is_alive else f"{whose} ends the process with {code}")

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.folder, self.hole), daemon=True)
        self.process.start()
        theirs.close()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process_code = self.process.exitcode
            self.pipe.close()
            self.process = None


def _serve(pipe: Connection, folder: Path, hole: Any) -> None:
    """Examine what is asked for, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what C++ says of a file
    prefixes.KEY_SECONDS = 0.5  # what a name may cost by its limit is not a file's cost
    if hole is not None:
        hole()
    gc.disable()  # a collection visits all that torch has imported, which takes longer than a file
    out = folder / f"out{os.getpid()}"
    out.mkdir()
    try:
        for number in itertools.count(1):
            if number % 200 == 0:
                gc.collect()
            path = Path(pipe.recv())
            for left in out.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            outcome = use(path, out)
            pipe.send(outcome)
            try:
                compare(path, out, outcome)
            except BaseException as error:
                outcome.fail(f"the comparison: {type(error).__name__}", error)
            pipe.send(outcome)
    except (EOFError, ConnectionError):
        os._exit(0)
