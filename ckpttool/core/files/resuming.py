"""Temporary files and folders next to their targets, and interrupted outputs that can be resumed.

A temporary is called `.NAME.<boot><random>.ckpttool.tmp`. Its writer holds a lock (flock) on it. The kernel
drops the lock however the process ends, so process ids don't matter, nor do containers with their own. The
next save into the same folder removes temporaries whose lock is free. A lock may not reach other machines
(NFS mounted with `nolock`): a temporary of another machine, or of this one before a restart, must also have
been unchanged for a day.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from operator import itemgetter
from typing import Any, BinaryIO

from ...errors import Damaged, OutputExists, Unreadable
from .. import system
from .crc import Row, Rows, joined, rows_in

# Name endings: of a file or folder being written, and of a replaced folder.
TEMPORARY, OLD = ".ckpttool.tmp", ".ckpttool.old"

PART = ".ckpttool.part"  # of an interrupted output that can be resumed

NAME = re.compile(r"\.(?P<begin>.+)\.(?P<boot>[0-9a-f]{8})[0-9a-f]{12}\.ckpttool\.(tmp|old)", re.DOTALL)

LONGEST = 190  # bytes of the target's name that are used: file systems allow 255 for a name
QUIET = 24 * 60 * 60  # seconds without a change: then a temporary of another machine counts as abandoned


def begin_of(target: str) -> str:
    """Return the beginning of the names of a target's temporaries, behind the dot."""
    name = os.fsencode(os.path.basename(target))
    if len(name) <= LONGEST:
        return os.fsdecode(name)
    return os.fsdecode(name[:LONGEST]) + f"~{zlib.crc32(name):08x}"


def temporary_name(target: str, ending: str) -> str:
    """Return an unused path for a temporary of this target."""
    name = f".{begin_of(target)}.{_boot()}{os.urandom(6).hex()}{ending}"
    return os.path.join(os.path.dirname(target), name)


def new_file(target: str, mode: int) -> tuple[int, str]:
    """Create a temporary file that will replace `target`; return its descriptor, which locks it, and path."""
    flags = system.CREATE | os.O_EXCL
    return _new(target, lambda path: os.open(path, flags, mode), os.unlink)


def new_folder(target: str, mode: int) -> tuple[int, str]:
    """Create a temporary folder as `new_file` does a file."""

    def create(path: str) -> int | None:
        os.mkdir(path, mode)
        with contextlib.suppress(FileNotFoundError):  # another process took it for abandoned meanwhile
            return system.hold_folder(path)
        return None

    return _new(target, create, os.rmdir)


def _new(
    target: str, create: Callable[[str], int | None], remove: Callable[[str], object]
) -> tuple[int, str]:
    while True:
        path = temporary_name(target, TEMPORARY)
        try:
            if (fd := create(path)) is not None:
                if _lock_new(fd, path):
                    return fd, path
                os.close(fd)
        except BaseException:  # a signal may come as soon as it is there
            with contextlib.suppress(OSError):
                remove(path)
            raise


def _lock_new(fd: int, path: str) -> bool:
    """Lock a new temporary; return False if another process already removes it as abandoned."""
    try:
        system.lock(fd)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, on which nobody removes anything
        return True
    return is_at(fd, path)


def is_at(fd: int, path: str) -> bool:
    """Return whether a descriptor is that of the file now at a path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def remove_abandoned(folder: str) -> None:
    """Remove the temporaries in `folder` that were still being written when their process ended."""
    # Other users' temporaries stay, and so does what can't be removed: a save does not depend on it.
    for path in abandoned(folder, TEMPORARY):
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                for name in os.listdir(path):  # files alone: no folder is ever made in a temporary one
                    os.unlink(os.path.join(path, name))
                os.rmdir(path)
            else:
                os.unlink(path)


def temporaries_in(folder: str, ending: str, begin: str | None = None) -> list[tuple[str, str]]:
    """Return the paths of temporaries, each with the boot digits of its machine."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    named = (NAME.fullmatch(name) for name in names if name.endswith(ending))
    parts = (match for match in named if match and begin in (None, match["begin"]))
    return [(os.path.join(folder, match[0]), match["boot"]) for match in parts]


def abandoned(folder: str, ending: str, begin: str | None = None) -> Iterator[str]:
    """Yield the paths of abandoned temporaries, each while its lock is held."""
    for path, boot in temporaries_in(folder, ending, begin):
        with _claimed(path, boot) as is_abandoned:
            if is_abandoned:
                yield path


@contextlib.contextmanager
def _claimed(path: str, boot: str) -> Iterator[bool]:
    """Hold the lock of a temporary if no process does; yield whether it is abandoned."""
    with contextlib.ExitStack() as stack:
        fd = None
        with contextlib.suppress(OSError):
            kind = os.lstat(path).st_mode
            if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
                # NFS locks only what is open for writing.
                access = system.CHANGE if stat.S_ISREG(kind) else system.FOLDER
                fd = os.open(path, access | system.NO_LINK)
                stack.callback(os.close, fd)
        yield fd is not None and _is_abandoned(fd, path, boot)


def _is_abandoned(fd: int, path: str, boot: str) -> bool:
    facts = os.fstat(fd)
    if not system.is_mine(facts):
        return False
    try:
        system.lock(fd)
    except OSError:  # its writer lives, or nobody can tell
        return False
    changed = max(facts.st_mtime, facts.st_ctime)
    return is_at(fd, path) and (boot == _boot() or time.time() - changed > QUIET)


@cache
def _boot() -> str:
    """Return eight digits for this start of this kernel: all its containers share them, and its locks."""
    return f"{zlib.crc32(system.boot()):08x}"


# ---- Interrupted outputs, and how the next command resumes them
#
# The bytes lie next to the target as `.NAME.ckpttool.part`, a file or a folder, never under its name. A
# record lists the bytes that are on the disk, and their plan: the sources with their versions, and the
# request. Only outputs copied from other machines are resumed: a local conversion is quicker begun again.


RECORD = f"{PART}.json"

NOTED = 64 << 20  # bytes, or seconds, after which the record is updated
NOTED_AFTER = 10.0
LEAST = 1 << 20  # bytes for which it is worth keeping what was written


class Written:
    """What is on the disk of a file that is being written, and what of it this process is to write."""

    def __init__(
        self,
        attempt: Attempt,
        file: BinaryIO,
        before: Rows,
        window: range | None = None,
        *,
        has_rest: bool = True,
    ) -> None:
        """Note what is there.

        Args:
            attempt: what the file is of.
            file: the file.
            before: what an earlier attempt, or other parts, have written.
            window: where the blocks begin that this process writes; None for all.
            has_rest: it also writes all that is not copied: headers, small pieces.
        """
        self._attempt, self.file, self._before = attempt, file, before
        self._window, self.has_rest, self.computed = window, has_rest, attempt.computed
        self.has_small = has_rest  # small pieces are read, which `takes` or leaves out
        self._new: Rows = defaultdict(list)

    def rows_of(self, place: int) -> list[Row]:
        """Return what was written before of the copy at a place, in order."""
        return self._before.get(place, [])

    def wants(self, place: int, position: int, nbytes: int) -> bool:
        """Return whether a block of the copy at `place` is to be written by this process."""
        return self.counts(place, position, nbytes)

    def counts(self, place: int, position: int, nbytes: int) -> bool:
        """Return whether it is this process that notes a block as written."""
        is_mine = self._window is None or position in self._window
        return is_mine and not self.has(place, position, nbytes)

    def sees(self, position: int, nbytes: int) -> bool:
        """Return whether this process will know the CRC-32 of all bytes of a copy."""
        return self.has_rest

    def takes(self, position: int, nbytes: int, *, is_guess: bool) -> bool:
        """Return whether this process writes bytes that are no copy; a guess stands for a CRC-32 to come."""
        return self.has_rest

    def missing(self, position: int) -> Exception:
        """Return the error for a block that should be there."""
        what = f"lacks the bytes from {position}, which no part has written"
        return Unreadable(self._attempt.place, what, hint=self._attempt.again)

    def has(self, place: int, position: int, nbytes: int) -> bool:
        """Return whether all of a stretch of the copy at `place` was written before."""
        rows = self._before.get(place)
        if not rows or (number := bisect_right(rows, position, key=itemgetter(0)) - 1) < 0:
            return False
        return position + nbytes <= sum(rows[number][:2])

    def add(self, place: int, row: Row) -> None:
        """Note bytes of the copy at `place` that were written."""
        rows = self._new[place]
        if rows and sum(rows[-1][:2]) == row[0]:
            rows[-1:] = joined([rows[-1], row])
        else:
            rows.append(row)
        self._attempt.count(row[1])

    @property
    def rows(self) -> Rows:
        """All that is written, by copy."""
        return {
            place: joined([*self.rows_of(place), *self._new.get(place, ())])
            for place in {*self._before, *self._new}
        }


class Attempt:
    """An output that is being written for the first time, or again."""

    again: str | None = None  # what to do where something is missing

    def __init__(self, target: str, plan: str, *, resume: bool, computed: bool) -> None:
        """Look at what is there; create and remove nothing yet.

        Args:
            target: the output's path, all links followed.
            plan: differs whenever other bytes would be written.
            resume: keep what was written of this plan; else it is removed.
            computed: computed bytes are kept too, not only copied ones.
        """
        folder = os.path.join(os.path.dirname(target), f".{begin_of(target)}")
        self.place, self._record = folder + PART, folder + RECORD
        self._plan, self.computed = plan, computed
        self._begin(self._read() if resume else {})
        self._is_claimed = False

    def _begin(self, before: dict[str, Any]) -> None:
        """Go on with what a record says, if anything."""
        self._before = before.get("files", {})
        self.seen = before.get("seen", {})
        self.is_resumed = bool(self._before)
        self._watched: Callable[[], object] = lambda: self.seen
        self._files: dict[str, Written] = {}
        self._unnoted, self._noted = 0, time.monotonic()

    def _read(self) -> dict[str, Any]:
        """Return the record; an empty one where it is of another plan, or makes no sense."""
        with contextlib.suppress(OSError, ValueError, TypeError), open(self._record, "rb") as file:
            record = json.loads(file.read())
            if isinstance(record, dict) and record.get("plan") == self._plan:
                return record if isinstance(record.get("files"), dict) else {}
        return {}

    def watch(self, seen: Callable[[], object]) -> None:
        """Have the record say also what `seen` returns: the sums of what was read."""
        self._watched = seen

    def claim_file(self, mode: int) -> tuple[int, str] | None:
        """Return a descriptor of the part, which locks it, and its path; None if another process has it.

        It is empty unless the attempt is resumed.
        """
        if os.path.isdir(self.place):
            shutil.rmtree(self.place)
        flags = system.CREATE | system.NO_LINK
        return self._claimed(lambda: os.open(self.place, flags, mode), lambda fd: os.ftruncate(fd, 0))

    def claim_folder(self, mode: int) -> tuple[int, str] | None:
        """Return a descriptor of the part as `claim_file` does, of a folder."""

        def create() -> int:
            if os.path.isfile(self.place):
                os.unlink(self.place)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.place, mode)
            return system.hold_folder(self.place)

        def empty(_: int) -> None:
            for name in os.listdir(self.place):
                os.unlink(os.path.join(self.place, name))

        return self._claimed(create, empty)

    def _claimed(self, create: Callable[[], int], empty: Callable[[int], object]) -> tuple[int, str] | None:
        """Open and lock the part, and empty it unless it is resumed; None if another process has the lock."""
        while True:
            fd = create()
            try:
                system.lock(fd)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:  # a file system without locks
                break
            if is_at(fd, self.place):
                facts = os.fstat(fd)
                if system.is_mine(facts) and (facts.st_nlink == 1 or stat.S_ISDIR(facts.st_mode)):
                    break
                self._remove()  # it is not ours, or has another name too
            os.close(fd)  # it became the output meanwhile, or is gone
        self._is_claimed = True
        if not self.is_resumed:
            self.forget()
            empty(fd)
        return fd, self.place

    def written(self, file: BinaryIO) -> Written | None:
        """Return what is on the disk of an open file of this output; None if the output is not claimed."""
        if not self._is_claimed:
            return None
        name = os.path.basename(file.name) if isinstance(file.name, str) else ""
        size = os.fstat(file.fileno()).st_size
        self._files[name] = Written(self, file, rows_in(self._before.get(name), size))
        return self._files[name]

    def count(self, nbytes: int) -> None:
        """Update the record from time to time."""
        self._unnoted += nbytes
        if self._unnoted >= NOTED or time.monotonic() > self._noted + NOTED_AFTER:
            self.note()

    def note(self, **facts: object) -> None:
        """Record what is on the disk, once it is there, and further facts."""
        files = {**self._before}
        for name, written in self._files.items():
            if not written.file.closed:
                system.sync_data(written.file.fileno())
            else:  # of a folder, or of a part
                with open(os.path.join(self.place, name) if name else self.place, "r+b") as file:
                    system.sync_data(file.fileno())
            files[name] = written.rows
        record = {"plan": self._plan, "files": files, "seen": self._watched(), **facts}
        self._write_record(record)
        self._unnoted, self._noted = 0, time.monotonic()

    def _write_record(self, record: object) -> None:
        new = f"{self._record}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        write_record(new, self._record, record)

    def give_up(self, error: BaseException) -> None:
        """End a failed attempt: keep what can be resumed, and note its place in the error."""
        written = (rows for each in self._files.values() for rows in each.rows.values())
        nbytes = sum(size for rows in written for _, size, _ in rows)
        # After a signal, a fault of network or disk, or where another process took the place, the bytes
        # written before are right. After Damaged they may be wrong.
        is_right = not isinstance(error, Exception) or isinstance(error, Unreadable | OSError | OutputExists)
        if is_right and nbytes >= LEAST:
            try:
                with contextlib.suppress(OSError):  # a full disk: the last record stands
                    self.note()
            except Damaged:  # what was read before the error had another checksum
                self.forget()
            if os.path.exists(self._record):
                error.kept_at = self.place  # type: ignore[attr-defined]
                return
        self.forget()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.place)

    def forget(self) -> None:
        """Remove the record, durably, before anything that it describes is changed."""
        for path in (self._record, f"{self._record}.new"):
            with contextlib.suppress(OSError):
                os.unlink(path)
        with contextlib.suppress(OSError):
            system.sync_folder(os.path.dirname(self.place) or ".")


def write_record(new: str, path: str, record: object, *, exclusive: bool = False) -> None:
    """Write a record, which others find whole or not at all, by way of a new file."""
    with open(new, "xb") as file:
        file.write(json.dumps(record).encode())
        file.flush()
        if not exclusive:
            system.put(file, new, path)
            return
        with contextlib.suppress(FileExistsError):
            system.put(file, new, path, exclusive=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
