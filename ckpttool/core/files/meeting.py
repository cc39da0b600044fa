"""Where the parts of an output meet: records that all of them find, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...errors import Unreadable, UsageFault
from .. import system
from .resuming import OLD, PART, begin_of, temporary_name, write_record

FOLDER = f"{PART}s"  # `.NAME.ckpttool.parts` holds the plan, what is staged, and a record of each part
PLAN = "plan.json"


def folder_of(path: str) -> str:
    """Return the folder where the parts of an output meet."""
    target = system.real(path)
    return os.path.join(os.path.dirname(target), f".{begin_of(target)}{FOLDER}")


class Meeting(Protocol):
    """Where the parts of an output meet, on whatever machines they are."""

    shown: str
    staging: str  # the folder of this machine where the output is staged

    @property
    def again(self) -> str:
        """What to do so that all begins again."""

    def read(self, name: str) -> bytes | None:
        """Return what is there under a name; None where nothing is."""

    def write(self, name: str, record: object, *, exclusive: bool = False) -> None:
        """Put a record there, whole; an `exclusive` one only where nothing is."""

    def is_in_place(self) -> bool:
        """Return whether there is something under the output's name."""

    def finishing(self) -> AbstractContextManager[bool]:
        """Keep others from finishing meanwhile, as far as that can be; yield False where one already does."""

    def remove(self) -> None:
        """Remove all that is there, first what makes it the place of parts."""


class MeetingFolder:
    """A folder beside the output, which all processes see."""

    def __init__(self, path: str) -> None:
        self._target, self.shown = system.real(path), folder_of(path)
        self.staging = self.shown

    @property
    def again(self) -> str:
        return f"begin again: rm -r {shlex.quote(self.shown)}"

    def read(self, name: str) -> bytes | None:
        try:
            with open(os.path.join(self.shown, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, record: object, *, exclusive: bool = False) -> None:
        path = os.path.join(self.shown, name)
        write_record(f"{path}.{os.urandom(6).hex()}", path, record, exclusive=exclusive)

    def is_in_place(self) -> bool:
        return os.path.lexists(self._target)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[bool]:
        try:
            lock = system.lock_folder(self.shown)
        except (BlockingIOError, FileNotFoundError):
            yield False
            return
        try:
            yield True
        finally:
            os.close(lock)

    def remove(self) -> None:
        """Remove the folder, in one step: a part that comes late finds all of it or nothing."""
        gone = temporary_name(self._target, OLD)
        with contextlib.suppress(OSError):
            os.rename(self.shown, gone)
            shutil.rmtree(gone, ignore_errors=True)


def plan_of(path: str, meeting: Meeting) -> dict[str, Any]:
    """Return the plan of an output that is being written in parts. Raises UsageFault where there is none."""
    if (plan := record_in(meeting, PLAN)) is None:
        if meeting.is_in_place():
            what = f"{path}: is in place, and no part of it is left to finish"
            raise UsageFault(what, hint=f"read all of it: ckpttool verify {shlex.quote(path)}")
        raise UsageFault(f"{path}: no part of it is here", hint="write its parts: --part 1/2, --part 2/2")
    return plan


def record_in(meeting: Meeting, name: str) -> dict[str, Any] | None:
    """Return a record; None where there is none."""
    if (content := meeting.read(name)) is None:
        return None
    with contextlib.suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    raise Unreadable(os.path.join(meeting.shown, name), "is not the record of a part", hint=meeting.again)
