"""An output that several processes write, on any number of machines, without talking to each other.

Each makes the same plan from the same inputs, and writes its part of the blocks into one staged output. A
record beside it says which are on the disk, with their CRC-32s. Whoever finds the records of all parts writes
the rest (headers, small tensors), reads the headers back, and gives the output its name. So no byte depends
on the number of parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import Damaged, Unreadable, UsageFault, already_exists
from .. import system
from .crc import Rows, rows_in
from .resuming import OLD, PART, Attempt, Written, begin_of, temporary_name, write_record

FOLDER = f"{PART}s"  # `.NAME.ckpttool.parts` holds what follows, and a record of each part
STAGED, PLAN = f"staged{PART}", "plan.json"
FINISH, COUNT, WORDS, BEGUN = "finish", "number of parts", "words", "begun"
RESULT = "result"  # what parts that only read have instead of an output, in the folder where they meet


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One of `count` parts, from 1. Number 0 writes none and finishes, of as many as there are.

    `wait` waits for the others where this process has started them, so that it is the one that finishes.
    """

    number: int
    count: int
    wait: Callable[[], object] = list

    @classmethod
    def parse(cls, text: str) -> OutputPart:
        """Return the part that `3/16` or `finish` names. Raises UsageFault for anything else."""
        if text == FINISH:
            return cls(0, 0)
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise UsageFault(
                f"'{text[:80]}' is not a part", hint="say which of how many, from 1: --part 3/16"
            )
        return part

    def window(self, total: int) -> range:
        """Return where the blocks begin that this part writes, of an output of `total` bytes."""
        begin, end = (-(-total * number // self.count) for number in (self.number - 1, self.number))
        return range(begin, end)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def folder_of(path: str) -> str:
    """Return the folder where the parts of an output meet."""
    target = system.real(path)
    return os.path.join(os.path.dirname(target), f".{begin_of(target)}{FOLDER}")


def plan_of(path: str) -> dict[str, Any]:
    """Return the plan of an output that is being written in parts. Raises UsageFault where there is none."""
    if (plan := _found(os.path.join(folder_of(path), PLAN))) is None:
        if os.path.exists(path):
            what = f"{path}: is in place, and no part of it is left to finish"
            raise UsageFault(what, hint=f"read all of it: ckpttool verify {shlex.quote(path)}")
        raise UsageFault(f"{path}: no part of it is here", hint="write its parts: --part 1/2, --part 2/2")
    return plan


def _found(path: str) -> dict[str, Any] | None:
    """Return a record; None where there is none."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreadable(path, "is not the record of a part", hint=_again(os.path.dirname(path)))
    return found


def _with_no_more(mode: int, fd: int) -> int:
    """Return a descriptor of a file that has no more permissions than `mode`."""
    if system.HAS_OWNERS:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & mode)
    return fd


def _again(folder: str) -> str:
    return f"begin again: rm -r {shlex.quote(folder)}"


class OutputParts(Attempt):
    """The place where the parts of one output meet.

    Attributes:
        part: the one that this process writes.
        is_written: all of it is on the disk.
    """

    def __init__(
        self,
        path: str,
        part: OutputPart,
        plan: Mapping[str, Any],
        sizes: Mapping[str, int],
        words: Sequence[str] = (),
    ) -> None:
        """Find the place, or make it.

        Args:
            path: the output.
            part: the one that this process writes.
            plan: what all parts have in common, by the words of messages.
            sizes: the bytes of each file of the output by name; of an output that is a file under "".
            words: the command that finishes the output.

        Raises:
            UsageFault: parts of another plan are there, or the place can't be written.
            Unreadable: something there was removed or changed.
        """
        target, self._folder = system.real(path), folder_of(path)
        self._target, self.place = target, self._in_folder(STAGED)
        if not part.number:
            part = OutputPart(0, OutputPart.parse(f"1/{plan_of(path).get(COUNT)}").count)
        self._path, self.part, self._sizes, self.computed = path, part, sizes, True
        self._record = self._in_folder(f"{part.number}-of-{part.count}.json")
        self._all: list[dict[str, Any]] | None = None  # the records of all parts, where this process finishes
        self._is_claimed, self._is_forgotten = True, False
        try:
            self._agree({**plan, COUNT: part.count}, words)
            self._stage()
        except OSError as error:
            from .commit import not_writable

            if isinstance(error, FileNotFoundError) and os.path.lexists(target):
                raise already_exists(path) from None  # another process has finished just now
            raise not_writable(path, error) from error
        before = self._recorded(part.number) or {}
        self._begin(before)
        self.is_written = not part.number or bool(before.get("done"))

    def _in_folder(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _agree(self, plan: Mapping[str, Any], words: Sequence[str]) -> None:
        """Note the plan if this is the first part; else compare it with the first one's."""
        os.makedirs(self._folder, 0o700, exist_ok=True)  # the inputs may be private
        place = self._in_folder(PLAN)
        if (begun := _found(place)) is None:
            first = {**plan, WORDS: words, BEGUN: os.urandom(8).hex()}
            write_record(self._new(place), place, first, exclusive=True)
            begun = _found(place) or {}
        known = [what for what in {**begun, **plan} if what not in (WORDS, BEGUN)]
        if differing := next((what for what in known if begun.get(what) != plan.get(what)), None):
            what = f"{self._path}: is being written in parts of another plan: the {differing} differs"
            raise UsageFault(what, hint=f"finish that with its own command, or {_again(self._folder)}")
        # Where the place was removed and begun anew, a part of before has written into a file that is gone.
        self._plan = str(begun.get(BEGUN))

    def _stage(self) -> None:
        """Make each staged file, with its size, unless it is there."""
        places = [os.path.join(self.place, name) if name else self.place for name in self._sizes]
        if any(not os.path.exists(place) for place in places) and any(self._records()):
            raise Unreadable(
                self.place, "is gone, though parts of it were written", hint=_again(self._folder)
            )
        if "" not in self._sizes:
            os.makedirs(self.place, exist_ok=True)
        for place, size in zip(places, self._sizes.values(), strict=True):
            with open(os.open(place, system.CREATE, 0o666), "r+b") as file:
                if os.fstat(file.fileno()).st_size < size:
                    file.truncate(size)
        system.sync_folder(self._folder)

    def _records(self) -> Iterator[dict[str, Any] | None]:
        """Return the record of each part."""
        return map(self._recorded, range(1, self.part.count + 1))

    def _recorded(self, number: int) -> dict[str, Any] | None:
        """Return the record of a part; None where it has none, or one of before all was begun anew."""
        found = _found(self._in_folder(f"{number}-of-{self.part.count}.json"))
        return found if found and found.get("plan") == self._plan else None

    def _new(self, path: str) -> str:
        return f"{path}.{os.urandom(6).hex()}"

    def note(self, *, done: bool = False) -> None:
        """Record what is on the disk, once it is there."""
        if self._all is None:
            self._note(self._new(self._record), done=done)

    def require_place(self, *, force: bool) -> None:
        """Raise OutputExists if the output was finished just before this part began."""
        if os.path.isfile(self._target) and not (force or any(self._records())):
            self.forget()
            raise already_exists(self._path)

    @contextlib.contextmanager
    def unless_finished(self) -> Iterator[None]:
        """Write a part that another process writes too, and may finish meanwhile."""
        try:
            yield
        except OSError:
            if not (self.is_finished and os.path.lexists(self._target)):
                raise

    @property
    def is_finished(self) -> bool:
        """Whether another process has put the output in place, and taken the place of the parts away."""
        return (_found(self._in_folder(PLAN)) or {}).get(BEGUN) != self._plan  # a late part begins another

    @property
    def nbytes(self) -> int:
        """The bytes of this part that are on the disk."""
        files = self._files.items() if self._files else ()
        rows = [rows for _, written in files for rows in written.rows.values()]
        rows += [
            rows
            for name, size in self._sizes.items()
            if name not in self._files
            for rows in rows_in(self._before.get(name), size).values()
        ]
        return sum(nbytes for each in rows for _, nbytes, _ in each)

    def waiting(self) -> list[int]:
        """Return the numbers of the parts that are not written yet."""
        return [n for n, record in enumerate(self._records(), 1) if not record or not record.get("done")]

    @contextlib.contextmanager
    def finishing(self) -> Iterator[bool]:
        """Hold the lock of the one process that finishes; yield False where another does, or has."""
        try:
            lock = system.lock_folder(self._folder)
        except (BlockingIOError, FileNotFoundError):
            yield False
            return
        try:
            found = [*self._records()]
            self._all = [record for record in found if record and record.get("done")]
            yield len(self._all) == self.part.count
        finally:
            os.close(lock)
            if self._is_forgotten:  # Windows moves nothing that is open
                self.forget()

    @property
    def sums(self) -> list[Mapping[str, Any]]:
        """What each part has summed of the inputs."""
        return [record.get("seen", {}) for record in self._all or ()]

    def written(self, file: BinaryIO) -> Written:
        """Return what this process writes of an open staged file."""
        name = "" if "" in self._sizes else os.path.basename(file.name)
        if self._all is not None:
            rows: Rows = {}
            for record in self._all:
                for place, more in rows_in(record["files"].get(name), self._sizes[name]).items():
                    rows[place] = [*rows.get(place, ()), *more]
            rows = {place: sorted(found) for place, found in rows.items()}
            return Written(self, file, rows, range(0))
        offset = sum(size for other, size in self._sizes.items() if other < name)
        window = self.part.window(max(sum(self._sizes.values()), 1))
        before = rows_in(self._before.get(name), self._sizes[name])
        window = range(window.start - offset, window.stop - offset)
        self._files[name] = Written(self, file, before, window, has_rest=False)
        return self._files[name]

    # Where this process finishes, it is what an Attempt is: a place whose bytes are there already.

    def claim_file(self, mode: int) -> tuple[int, str]:
        """Return a descriptor of the staged file, and its path."""
        return _with_no_more(mode, os.open(self.place, system.CHANGE)), self.place

    def claim_folder(self, mode: int) -> tuple[int, str]:
        """Return a descriptor of the staged folder, and its path."""
        return _with_no_more(mode, system.hold_folder(self.place)), self.place

    def count(self, nbytes: int) -> None:
        if self._all is None:
            super().count(nbytes)

    def give_up(self, error: BaseException) -> None:
        """Keep all that is there, as the same command goes on with it, unless it is damaged."""
        if isinstance(error, Damaged):
            self.forget()

    def forget(self) -> None:
        """Remove the place, in one step: a part that comes late finds all of it or nothing."""
        self._is_forgotten = True
        gone = temporary_name(self._target, OLD)
        with contextlib.suppress(OSError):
            os.rename(self._folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
