"""What every store of objects offers, whoever runs it, and how long it is waited for."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ...errors import Damaged, Unreadable

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


class Unanswered(Exception):
    """An answer did not end in time, though bytes kept arriving; the text is the time."""


def ended(outcome: Future[T], seconds: float) -> T:
    """Return what a job returns. Raises Unanswered after so many seconds."""
    from concurrent.futures import wait  # loads logging

    if wait([outcome], seconds).not_done:  # a library bounds silence, not an answer that drips
        raise Unanswered(f"{seconds:.3g} s")
    return outcome.result()


def started(job: Callable[[], T]) -> Future[T]:
    """Start a job in a daemon thread, so that the wait for it has a time limit, and Ctrl-C ends it."""
    # A library that waits itself lets no signal in: signals reach the main thread only outside of it.
    from concurrent.futures import Future  # loads logging

    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(job())
        except BaseException as error:  # whatever it is, the waiting thread must hear of it
            outcome.set_exception(error)

    threading.Thread(target=run, name="ckpttool request", daemon=True).start()
    return outcome


# ---- Patience: how long a store is waited for, and how often it is asked again


# Bytes a second below which an answer counts as stalled, though one byte comes after the other.
SLOWEST = 1000


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of one request."""

    stall: float = 30.0  # seconds without a byte, and for a connection
    attempts: int = 5  # of one request, the first included
    first_wait: float = 0.5  # seconds before the second attempt; each later wait is twice as long
    longest_wait: float = 30.0  # that a server may ask for (Retry-After)

    @classmethod
    def usual(cls) -> Patience:
        """Return the bounds, with the seconds that the user allows: CKPTTOOL_TIMEOUT."""
        try:
            stall = float(os.environ.get("CKPTTOOL_TIMEOUT", ""))
        except ValueError:
            return cls()
        # Who waits shorter for a byte does not want to wait longer between attempts either.
        bounds = {"first_wait": min(0.5, stall / 10), "longest_wait": min(30.0, stall)}
        return cls(stall, **bounds) if stall > 0 else cls()  # type: ignore[arg-type]

    @property
    def longest(self) -> float:
        """Seconds that all attempts may take together, without the bytes that arrive."""
        return self.attempts * (self.stall + self.longest_wait)

    def wait(self, attempt: int, asked: float | None = None) -> None:
        """Sleep before attempt number 1, 2, …: as long as the server asked, or longer each time."""
        # Spread, so that many processes that were refused together do not come back together.
        doubled = self.first_wait * 2 ** (attempt - 1) * (0.75 + random.random() / 2)
        time.sleep(min(doubled if asked is None else asked, self.longest_wait))


# ---- A busy store: when to come back, or to ask for less at a time


LONGEST = 86_400  # seconds to which a user may be asked to come back

CODE = re.compile(r"<Code>(\w{1,60})</Code>")  # a store's word for an error, of XML

SLOWER = {  # those that ask for fewer requests, of S3, Google, Azure and what speaks like them
    *("SlowDown", "ServiceUnavailable", "TooManyRequests", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "RequestThrottled", "BandwidthLimitExceeded", "ServerBusy"),
    *("OperationTimedOut", "rateLimitExceeded", "userRateLimitExceeded"),
}


def seconds_asked(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds a server wants to be left alone (RFC 9110, 10.2.3)."""
    told = headers.get("Retry-After", "")
    if re.fullmatch(r"[0-9]{1,9}", told):
        return float(told)
    with suppress(ValueError, OverflowError):
        from email.utils import parsedate_to_datetime  # loads urllib

        return max(0.0, parsedate_to_datetime(told).timestamp() - time.time())
    return None


def next_step(code: str = "", seconds: float | None = None) -> str | None:
    """Return as a hint what an answer says to do next, by its code and its Retry-After; None if nothing."""
    seconds = seconds if seconds and seconds <= LONGEST else None
    if code in SLOWER and seconds:
        return f"the store asks for fewer requests ({code}), in {seconds:.0f} s: run this alone then"
    if code in SLOWER:
        return f"the store asks for fewer requests ({code}): wait a minute, and run fewer commands at a time"
    if seconds:
        return f"the server asks to be left alone for {seconds:.0f} s: run the command again after that"
    return None


# ---- The interface of a store, and a count of all requests


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
