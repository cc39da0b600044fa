"""Open bytes in every way in which Python's loaders open them, and tell whether code in them ran.

Nothing that the bytes call is done: an audit hook refuses it, and notes that it was asked for. A process of
its own opens them, because loaders hang, crash and allocate what a file claims.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CANARY = "canary"  # what a payload makes a folder of
DEEP, IN_A_ROW = 4, 3000
# Seconds of CPU time for a file, and for an object in it: what is not opened by then does not count. joblib
# loops on streams that are cut short.
SECONDS, SECONDS_FOR_ONE = 2.0, 0.15
ROOM = 3 << 30  # bytes of address space beyond those of the start
STEP = 8192  # what Python's own readers of streams ask for at a time

# Events of Python that a file may not cause. (mkdir is the payload's.)
FORBIDDEN = (
    "os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill os.putenv os.rename "
    "os.link os.symlink os.truncate os.chmod os.chown os.mkdir shutil.move subprocess.Popen "
    "socket.connect socket.bind urllib.Request webbrowser.open ctypes.dlopen pty.spawn signal.pthread_kill"
)


class _Late(Exception):
    """A loader takes too long."""


def _stop(*_: object) -> None:
    raise _Late


class Explorer:
    """Opens bytes, and what they hold, with all loaders."""

    def __init__(self) -> None:
        import joblib
        import numpy as np
        import torch

        torch.set_num_threads(1)
        self.ran = False
        self.until = 0.0
        forbidden = frozenset(FORBIDDEN.split())
        self.in_a_row: tuple[Callable[[Any], Any], ...] = (
            pickle.load,
            lambda file: np.load(file, allow_pickle=True),
            joblib.load,
            lambda file: torch.load(file, weights_only=False),
        )

        def watch(event: str, args: tuple[Any, ...]) -> None:
            if event == "os.mkdir" and CANARY in str(args[0]):
                self.ran = True
            elif event == "os.mkdir" and str(args[0]).startswith(tempfile.gettempdir()):
                return  # torch unpacks its oldest format there
            if event in forbidden:
                raise PermissionError(event)

        sys.addaudithook(watch)
        signal.signal(signal.SIGPROF, _stop)

    def runs(self, data: bytes) -> bool:
        """Return whether some loader runs code."""
        self.ran, self.until = False, time.process_time() + SECONDS
        self._explore(data, 0)
        return self.ran

    def _explore(self, data: bytes, depth: int) -> None:
        if depth > DEEP or not data:
            return
        for opened in (self._row, self._joblib, self._zip, self._tar, *STREAMS):
            if self.ran or time.process_time() > self.until:
                return
            with contextlib.suppress(Exception):
                for inner in opened(self, data) if opened in STREAMS else opened(data):
                    self._explore(bytes(inner), depth + 1)

    def _row(self, data: bytes) -> Iterator[bytes]:
        """Read objects one after another: at each place where a loader goes on, with every one."""
        places, seen = [0], {0}
        for at in places:
            for number, load in enumerate(self.in_a_row):
                if number == 3 and data[at : at + 1] not in (b"\x80", b"P"):
                    continue
                file = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
                file.seek(at)
                try:
                    made = self._limited(load, file)
                    for name in getattr(made, "files", ()):  # of numpy's zip
                        self._limited(made.__getitem__, name)
                except _Late:
                    return
                except Exception:
                    continue
                if (end := file.tell()) not in seen and len(seen) < IN_A_ROW:
                    places.append(end)
                    seen.add(end)
            if self.ran or time.process_time() > self.until:
                return
        yield b""

    def _joblib(self, data: bytes) -> Iterator[bytes]:
        """Read a file of joblib before 0.10, which it takes by name alone."""
        if data.startswith(b"ZF"):
            Path("old.joblib").write_bytes(data)
            self._limited(self.in_a_row[2], "old.joblib")
        yield b""

    @staticmethod
    def _limited(load: Callable[[Any], Any], given: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_FOR_ONE)
        try:
            return load(given)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _zip(self, data: bytes) -> Iterator[bytes]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                with contextlib.suppress(Exception):
                    yield from _as_far_as_it_goes(archive.open(info))

    def _tar(self, data: bytes) -> Iterator[bytes]:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for info in archive:
                with contextlib.suppress(Exception):
                    if file := archive.extractfile(info):
                        yield from _as_far_as_it_goes(file)


def _as_far_as_it_goes(file: Any) -> Iterator[bytes]:
    read = bytearray()
    with contextlib.suppress(Exception):
        while len(read) < 64 << 20 and (piece := file.read(STEP)):
            read += piece
    yield bytes(read)


def _zlib(_: Explorer, data: bytes) -> Iterator[bytes]:
    made, stream = bytearray(), zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        while not stream.eof and len(made) < 64 << 20:
            piece = stream.decompress(stream.unconsumed_tail or data, 1 if len(made) < STEP else STEP)
            if not piece:
                break
            made += piece
            data = b""
    yield bytes(made)


STREAMS: tuple[Callable[[Explorer, bytes], Iterator[bytes]], ...] = (
    lambda _, data: _as_far_as_it_goes(gzip.GzipFile(fileobj=io.BytesIO(data))),
    lambda _, data: _as_far_as_it_goes(bz2.BZ2File(io.BytesIO(data))),
    lambda _, data: _as_far_as_it_goes(lzma.LZMAFile(io.BytesIO(data))),  # noqa: SIM115
    _zlib,
)


class Loaders:
    """A process with an explorer, which is started again when a file has ended it."""

    def __enter__(self) -> Loaders:
        self.process: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, data: bytes) -> bool:
        """Return whether a loader runs code in these bytes; a crash or a hang counts as none."""
        if self.process is None:
            context = multiprocessing.get_context("fork")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.pipe.send_bytes(data)
            if self.pipe.poll(60):
                return bool(self.pipe.recv())
        except (EOFError, ConnectionError):
            pass
        self._end()
        return False

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _serve(pipe: Any) -> None:
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    explorer = Explorer()
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
        os.chdir(folder)
        tempfile.tempdir = folder
        while True:
            pipe.send(explorer.runs(pipe.recv_bytes()))
