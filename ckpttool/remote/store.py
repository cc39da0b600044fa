"""What a store of objects does, whoever runs it; and a count of what was asked of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..errors import Damaged, Unreadable

Bytes = bytes | memoryview
Progress = Callable[[int], object]  # called with a number of bytes


class Facts(NamedTuple):
    """What a server tells of one object."""

    size: int
    identity: str = ""  # differs whenever the bytes do: a strong ETag, a version, a hash; "" if none is told
    content: str = ""  # a hash of the bytes, the same wherever equal ones lie: `sha256:…`; "" if not told
    is_ranged: bool = True  # the server sends ranges of it, not only all of it


DATED = "date "  # how an identity begins that is only a time: two versions may share it


class ListedEntry(NamedTuple):
    """What a listing tells of one name in a folder."""

    name: str
    facts: Facts | None  # None: it is a folder


class Store(Protocol):
    """The objects of one host, bucket or repository.

    Keys are the part of a URL behind the store's own, without a leading slash. All calls may come from
    several threads at once, and end in bounded time. Their errors are of `ckpttool.errors`; they name the
    object by `shown(key)`, and hold neither a token nor the query of a signed URL.
    """

    @property
    def commit(self) -> str:
        """The commit that objects are read at, once it is known; "" where there is none."""

    def shown(self, key: str) -> str:
        """Return the URL of an object as messages name it."""

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first `nbytes` bytes of an object, or all of a smaller one, and its facts: one request.

        Raises `Missing` where there is no such object, Unreadable where it can't be read.
        """

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> Bytes:
        """Return bytes of an object. Raises Damaged, by `changed`, if it is no longer the one of `facts`."""

    def entries(self, folder: str) -> list[ListedEntry] | None:
        """Return what is directly in a folder, in any order, [] if nothing; None where nothing can list it.

        `folder` is a key without the last slash, "" for the top.
        """

    def put(self, files: Mapping[str, str], *, replace: bool, progress: Progress | None = None) -> None:
        """Upload files: key -> local path, each visible whole or not at all, in this order.

        What is uploaded is compared by its checksum. After an error or a signal nothing unfinished is left.
        Raises OutputExists where something is there and `replace` is not set, UsageFault where the store
        takes no objects.
        """


class Missing(Unreadable, kind="missing"):
    """There is no such object."""


class Forbidden(Unreadable, kind="forbidden"):
    """The server tells this user nothing of the object, not even whether there is one."""


class Unranged(Unreadable, kind="unranged"):
    """The server sends an object only from front to back, whatever range is asked for."""


def changed(path: str) -> Damaged:
    """Return the error for an object that was replaced between two reads of it."""
    return Damaged(path, "changed while it was read", hint="run the command again")


@dataclass(slots=True)
class Traffic:
    """How much was asked of stores since the process began, by all threads; and what is to be said of it."""

    requests: int = 0
    nbytes: int = 0
    remarks: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, requests: int = 1, nbytes: int = 0) -> None:
        """Count requests, retries and redirects included, and bytes of objects that arrived."""
        with self._lock:
            self.requests += requests
            self.nbytes += nbytes

    def remark(self, text: str) -> None:
        """Say something once."""
        with self._lock:
            if text not in self.remarks:
                self.remarks.append(text)

    def taken(self) -> list[str]:
        """Return what there is to say, and forget it."""
        with self._lock:
            said, self.remarks = self.remarks, []
        return said


TRAFFIC = Traffic()
