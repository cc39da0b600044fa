"""Bytes of an object that are wanted, and whether what a server sends are those."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ..store import DATED, Bytes, Facts, Unranged, changed
from .connections import Fault

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


@dataclass(slots=True)
class Wanted:
    """Bytes of an object, and the file that takes them, over all attempts."""

    url: str
    shown: str
    start: int
    stop: int | None  # None: all bytes, and not by a range
    private: Mapping[str, str]
    expected: Facts | None
    file: BinaryIO
    known: Facts | None = None  # expected, or of the answer that the file's first bytes are from

    def __post_init__(self) -> None:
        self.known = self.expected

    @property
    def is_page(self) -> bool:
        return self.stop is None and self.expected is None

    def take(self, chunk: Bytes) -> None:
        """Append what has arrived, if it is not there already."""
        if isinstance(chunk, memoryview):
            self.file.seek(len(chunk), os.SEEK_CUR)
        else:
            self.file.write(chunk)

    def asked(self) -> dict[str, str]:
        """Return the headers that ask for the bytes that are not in the file."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "ckpttool"}
        if self.stop is not None:
            headers["Range"] = f"bytes={self.start + self.file.tell()}-{self.stop - 1}"
        if self.known and self.known.identity.startswith('"'):
            headers["If-Match"] = self.known.identity
        return headers

    def agreed(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        """Return the object's facts, how many bytes of the body to take, and whether these are all of it."""
        return self._part(answer) if answer.status == 206 else self._front(answer)

    def _part(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        told = RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if told is None or self.stop is None:
            raise Fault("the server sends a part and does not tell which")
        if told[3] == "*" and self.known is None:
            raise Fault("the server does not tell its size", passes=False)
        size = self.known.size if told[3] == "*" and self.known else int(told[3])
        facts = self._unchanged(Facts(size, identity(answer, size)))
        begin, end = self.start + self.file.tell(), min(self.stop, size)
        if (int(told[1]), int(told[2]) + 1) != (begin, end):
            what = f"the server sends bytes {told[1]}-{told[2]}, not {begin}-{end - 1}"
            raise Fault(what, passes=False)
        if _length(answer) not in (None, end - begin):
            raise Fault("the server contradicts itself: Content-Length, Content-Range", passes=False)
        return facts, end - begin, True

    def _front(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        """Agree to an answer with the whole object, of which the first bytes may be enough."""
        size = _length(answer)
        if size is None:
            raise Fault("the server does not tell its size", passes=False)
        facts = self._unchanged(Facts(size, identity(answer, size), is_ranged=False))
        if self.stop is not None and self.expected is not None:
            raise Unranged(self.shown, "the server sends it only from front to back")
        self.file.seek(0)
        self.file.truncate()
        nbytes = size if self.stop is None else min(self.stop, size)
        return facts, nbytes, nbytes == size

    def _unchanged(self, facts: Facts) -> Facts:
        known = self.known or facts
        if facts.size != known.size or known.identity not in ("", facts.identity):
            raise changed(self.shown)
        return facts


def identity(answer: BaseHTTPResponse, size: int) -> str:
    """Return the strong ETag, or the time of the last change and the size, or ""."""
    etag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified")
    if re.fullmatch(r'"[!#-~]+"', etag):
        return etag
    return f"{DATED}{modified} {size}" if modified else ""


def _length(answer: BaseHTTPResponse) -> int | None:
    told = answer.headers.get("Content-Length", "")
    return int(told) if re.fullmatch(r"[0-9]{1,19}", told) else None
