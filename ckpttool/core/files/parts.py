"""An output that several processes write, on any number of machines, without talking to each other.

Each makes the same plan from the same inputs, and writes its part of the blocks into one staged output. A
record beside it says which are on the disk, with their CRC-32s. Whoever finds the records of all parts writes
the rest (headers, small tensors), reads the headers back, and gives the output its name. So no byte depends
on the number of parts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import Damaged, PartMissing, Unreadable, UsageFault, already_exists
from .. import system
from ..words import first_few
from .crc import Rows, rows_in
from .meeting import PLAN, Meeting, MeetingFolder, plan_of, record_in
from .resuming import PART, Attempt, Written

STAGED = f"staged{PART}"
FINISH, COUNT = "finish", "number of parts"
WORDS, BEGUN, UPLOADS = "words", "begun", "uploads"  # of a plan, that differ with who was the first
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


def _with_no_more(mode: int, fd: int) -> int:
    """Return a descriptor of a file that has no more permissions than `mode`."""
    if system.HAS_OWNERS:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & mode)
    return fd


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
        meeting: Meeting | None = None,
    ) -> None:
        """Find the place, or make it.

        Args:
            path: the output.
            part: the one that this process writes.
            plan: what all parts have in common, by the words of messages.
            sizes: the bytes of each file of the output by name; of an output that is a file under "".
            words: the command that finishes the output.
            meeting: where the parts meet; None for the folder beside the output.

        Raises:
            UsageFault: parts of another plan are there, or the place can't be written.
            Unreadable: something there was removed or changed.
        """
        self._path, self._meeting = path, meeting or MeetingFolder(path)
        self.again, folder = self._meeting.again, self._meeting.staging
        self.place = os.path.join(folder, STAGED)
        if not part.number:
            count = plan_of(path, self._meeting).get(COUNT)
            part = OutputPart(0, OutputPart.parse(f"1/{count}").count)
        self.part, self._sizes, self.computed = part, sizes, True
        self._all: list[dict[str, Any]] | None = None  # the records of all parts, where this process finishes
        self._is_claimed, self._is_forgotten = True, False
        try:
            os.makedirs(folder, 0o700, exist_ok=True)  # the inputs may be private
            self._agree({**plan, COUNT: part.count}, words)
            self._stage()
        except OSError as error:
            from .commit import not_writable

            if isinstance(error, FileNotFoundError) and self._meeting.is_in_place():
                raise already_exists(path) from None  # another process has finished just now
            raise not_writable(path, error) from error
        before = self._recorded(part.number) or {}
        self._begin(before)
        self.is_written = not part.number or bool(before.get("done"))

    def _agree(self, plan: Mapping[str, Any], words: Sequence[str]) -> None:
        """Note the plan if this is the first part; else compare it with the first one's."""
        if (begun := record_in(self._meeting, PLAN)) is None:
            self._begin_plan({**plan, WORDS: words, BEGUN: os.urandom(8).hex()})
            begun = record_in(self._meeting, PLAN) or {}
        known = [what for what in {**begun, **plan} if what not in (WORDS, BEGUN, UPLOADS)]
        if differing := next((what for what in known if begun.get(what) != plan.get(what)), None):
            path, is_read = self._path, os.path.basename(self._path) == RESULT and not self._sizes
            what = f"{path}: is being written in parts of another plan: the {differing} differs"
            if is_read:
                what = f"{os.path.dirname(path)}: parts of another plan meet here: the {differing} differs"
            other = "name another folder, " * is_read
            raise UsageFault(what, hint=f"{other}finish that with its own command, or {self.again}")
        # Where the place was removed and begun anew, a part of before has written into a file that is gone.
        self._plan, self._agreed = str(begun.get(BEGUN)), begun

    def _begin_plan(self, plan: dict[str, Any]) -> None:
        """Note the plan, unless another part has just noted one."""
        self._meeting.write(PLAN, plan, exclusive=True)

    def _staged(self) -> dict[str, int]:
        """Return the staged files by path, and their sizes."""
        files = self._sizes.items()
        return {os.path.join(self.place, name) if name else self.place: size for name, size in files}

    def _stage(self) -> None:
        """Make each staged file, with its size, unless it is there."""
        if not all(map(os.path.exists, self._staged())) and any(self._records()):
            raise Unreadable(self.place, "is gone, though parts of it were written", hint=self.again)
        self._make_staged()
        system.sync_folder(self._meeting.staging)

    def _make_staged(self) -> None:
        links = [place for place in (self.place, *self._staged()) if os.path.islink(place)]
        if links:  # to a file of the user's, perhaps, by whoever may write there
            raise Unreadable(links[0], "is a link, which no part has made", hint=self.again)
        if "" not in self._sizes:
            os.makedirs(self.place, exist_ok=True)
        for place, size in self._staged().items():
            with open(os.open(place, system.CREATE | system.NO_LINK, 0o666), "r+b") as file:
                if os.fstat(file.fileno()).st_size < size:
                    file.truncate(size)

    def _records(self) -> Iterator[dict[str, Any] | None]:
        """Return the record of each part."""
        return map(self._recorded, range(1, self.part.count + 1))

    def _recorded(self, number: int) -> dict[str, Any] | None:
        """Return the record of a part; None where it has none, or one of before all was begun anew."""
        found = record_in(self._meeting, f"{number}-of-{self.part.count}.json")
        is_mine = found and found.get("plan") == self._plan and isinstance(found.get("files"), dict)
        return found if is_mine else None

    def note(self, **facts: object) -> None:
        """Record what is on the disk, once it is there."""
        if self._all is None:
            super().note(**facts)

    def _write_record(self, record: object) -> None:
        self._meeting.write(f"{self.part}.json".replace("/", "-of-"), record)

    def require_place(self, *, force: bool) -> None:
        """Raise OutputExists if the output was finished just before this part began."""
        if os.path.isfile(self._path) and not (force or any(self._records())):
            self.forget()
            raise already_exists(self._path)

    @contextlib.contextmanager
    def unless_finished(self) -> Iterator[None]:
        """Write a part that another process writes too, and may finish meanwhile."""
        try:
            yield
        except OSError:
            if not (self.is_finished and self._meeting.is_in_place()):
                raise

    @property
    def is_finished(self) -> bool:
        """Whether another process has put the output in place, and taken the place of the parts away."""
        return (record_in(self._meeting, PLAN) or {}).get(BEGUN) != self._plan  # a late part begins another

    @property
    def nbytes(self) -> int:
        """The bytes of this part that are on the disk."""
        before = {name: rows_in(self._before.get(name), size) for name, size in self._sizes.items()}
        known = before | {name: written.rows for name, written in self._files.items()}
        return sum(nbytes for rows in known.values() for each in rows.values() for _, nbytes, _ in each)

    def waiting(self) -> list[OutputPart]:
        """Return the parts that are not written yet."""
        left = [n for n, record in enumerate(self._records(), 1) if not record or not record.get("done")]
        return [OutputPart(number, self.part.count) for number in left]

    def lacking(self, path: str, waiting: Sequence[OutputPart]) -> PartMissing:
        """Return the error for parts that are not written, with the command for the first of them."""
        words, part = self._agreed.get(WORDS), f"--part {waiting[0]}"
        hint = f"ckpttool {shlex.join(words)} {part}" if words else f"run its command with {part}"
        return PartMissing(path, f"lacks part{'s' * (len(waiting) > 1)} {first_few(waiting)}", hint=hint)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[bool]:
        """Keep others from finishing; yield False where another does, or has."""
        try:
            with self._meeting.finishing() as is_mine:
                if is_mine:
                    records = [*self._records()]
                    self._all = [record for record in records if record and record.get("done")]
                yield is_mine and len(self._all or ()) == self.part.count
        finally:
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
            return Written(self, file, self._rows_of_all(name), range(0))
        offset = sum(size for other, size in self._sizes.items() if other < name)
        window = self.part.window(max(sum(self._sizes.values()), 1))
        before = rows_in(self._before.get(name), self._sizes[name])
        window = range(window.start - offset, window.stop - offset)
        self._files[name] = Written(self, file, before, window, has_rest=False)
        return self._files[name]

    def _rows_of_all(self, name: str) -> Rows:
        rows: Rows = {}
        for record in self._all or ():
            for place, more in rows_in(record["files"].get(name), self._sizes[name]).items():
                rows[place] = [*rows.get(place, ()), *more]
        return {place: sorted(found) for place, found in rows.items()}

    def put_in_place(self, local: str) -> bool:
        """Go on where the output stands under its name on this machine; return whether it is this one's."""
        return True

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
        """Remove the place where the parts meet."""
        self._is_forgotten = True
        self._meeting.remove()
