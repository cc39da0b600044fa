"""What an interrupted command has written of an output, and how the next one goes on with it.

The bytes lie next to the target as `.NAME.ckpttool.part`, a file or a folder, never under its name. A record
says which of them are on the disk, and of which plan they are: sources with their versions, and what was
asked. Only an output that is copied from elsewhere is written so: a local conversion is quicker begun again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from bisect import bisect_right
from typing import Any, BinaryIO

from .temporaries import PART, begin_of

RECORD = f"{PART}.json"
KEPT: list[str] = []  # what this process has left to be gone on with

NOTED = 64 << 20  # bytes, or seconds, after which the record is brought up to date
NOTED_AFTER = 10.0
LEAST = 1 << 20  # bytes for which it is worth keeping what was written


def plan_of(facts: object) -> str:
    """Return what differs whenever any of some facts does."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


class Written:
    """Which stretches of a file are on the disk."""

    def __init__(self, attempt: Attempt, file: BinaryIO, stretches: list[tuple[int, int]]) -> None:
        self._attempt, self.file = attempt, file
        self.computed = attempt.computed
        self._starts = [start for start, _ in stretches]
        self._stops = [stop for _, stop in stretches]

    def covers(self, position: int, nbytes: int) -> bool:
        """Return whether all of a stretch was written by an earlier attempt, or by this one."""
        number = bisect_right(self._starts, position) - 1
        return number >= 0 and position + nbytes <= self._stops[number]

    def add(self, position: int, nbytes: int) -> None:
        """Note a stretch that was written."""
        stop = position + nbytes
        at = bisect_right(self._starts, position)
        if at and self._stops[at - 1] >= position:
            at -= 1
            position, stop = self._starts[at], max(stop, self._stops[at])
            del self._starts[at], self._stops[at]
        while at < len(self._starts) and self._starts[at] <= stop:
            stop = max(stop, self._stops[at])
            del self._starts[at], self._stops[at]
        self._starts.insert(at, position)
        self._stops.insert(at, stop)
        self._attempt.count(nbytes)

    @property
    def stretches(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))


class Attempt:
    """An output that is being written for the first time, or again."""

    def __init__(self, target: str, plan: str, *, resume: bool, computed: bool) -> None:
        """Look at what there is; nothing is created or removed yet.

        Args:
            target: the output's path, all links followed.
            plan: differs whenever other bytes would be written.
            resume: go on with what was written of this plan; else what is there gives way.
            computed: bytes that are not copied but computed need not be made again either.
        """
        folder = os.path.join(os.path.dirname(target), f".{begin_of(target)}")
        self.place, self._record = folder + PART, folder + RECORD
        self._plan, self.computed = plan, computed
        record = self._read() if resume else None
        self.is_other = record is not None and record.get("plan") != plan  # what is there is of another plan
        self._before: dict[str, Any] = record["files"] if record and not self.is_other else {}
        self.is_resumed = bool(self._before)
        self.is_kept = False
        self._files: dict[str, Written] = {}
        self._unnoted, self._noted = 0, time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, TypeError), open(self._record, "rb") as file:
            record = json.loads(file.read())
            if isinstance(record, dict) and isinstance(record.get("files"), dict):
                return record
        return None

    def claim_file(self, mode: int) -> tuple[int, str] | None:
        """Return a descriptor of the part, which locks it, and its path; None if another process has it.

        It is empty unless the attempt is resumed.
        """
        fd = os.open(self.place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        if not self._lock(fd):
            return None
        if not self.is_resumed:
            os.ftruncate(fd, 0)
        return fd, self.place

    def claim_folder(self, mode: int) -> tuple[int, str] | None:
        """Return a descriptor of the part as `claim_file` does, of a folder."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.place, mode)
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not self._lock(fd):
            return None
        if not self.is_resumed:
            for name in os.listdir(self.place):
                os.unlink(os.path.join(self.place, name))
        return fd, self.place

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:  # a file system without locks
            pass
        if not self.is_resumed:
            self._forget()
        return True

    def written(self, file: BinaryIO) -> Written:
        """Return what is on the disk of a file of this output, which is open now."""
        name = os.path.basename(file.name) if isinstance(file.name, str) else ""
        size = os.fstat(file.fileno()).st_size
        before = [(start, stop) for start, stop in self._before.get(name, []) if 0 <= start < stop <= size]
        self._files[name] = Written(self, file, before)
        return self._files[name]

    def count(self, nbytes: int) -> None:
        """Bring the record up to date from time to time."""
        self._unnoted += nbytes
        if self._unnoted >= NOTED or time.monotonic() > self._noted + NOTED_AFTER:
            self.note()

    def note(self) -> None:
        """Record what is on the disk, once it is there."""
        files = {**self._before}
        for name, written in self._files.items():
            if not written.file.closed:  # what is closed was flushed before
                os.fdatasync(written.file.fileno())
            files[name] = written.stretches
        new = f"{self._record}.new"
        with open(new, "wb") as file:
            file.write(json.dumps({"plan": self._plan, "files": files}).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._record)
        self._unnoted, self._noted = 0, time.monotonic()

    def give_up(self, *, keep: bool) -> None:
        """End an attempt that failed: keep what can be gone on with, or remove all of it."""
        nbytes = sum(stop - start for written in self._files.values() for start, stop in written.stretches)
        if keep and nbytes >= LEAST:
            with contextlib.suppress(OSError):  # the last record stands
                self.note()
            self.is_kept = os.path.exists(self._record)
            KEPT.append(self.place)
        if not self.is_kept:
            self._forget()
            shutil.rmtree(self.place, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self.place)

    def end(self) -> None:
        """Forget the record of an output that is in its place."""
        self._forget()

    def _forget(self) -> None:
        for path in (self._record, f"{self._record}.new"):
            with contextlib.suppress(OSError):
                os.unlink(path)
