"""One file to one object, in parts of which several are on their way, and none stays behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, BinaryIO, Literal

from ...files.failures import naming
from ..store import TRAFFIC, Progress
from ..waiting import Unanswered, ended, started

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART = 8 << 20  # bytes; small, since an upload is aborted when one has arrived
PIECE = 1 << 20  # bytes of a part that are handed over together
AT_ONCE = 6  # parts on their way; the library holds one or two more
MOST_PARTS = 10_000  # of one object, on S3
WHOLE = 16 << 20  # bytes that go out in one request
BACK = 8 << 20  # bytes that are read back at a time
ENDING = 2.0  # seconds that an interrupted upload may take to be aborted
LAST = 3  # times what one part may take: the last parts, and the answer to all


@dataclass(slots=True)
class Sent:
    """What went out: bytes, the MD5 of each part, and whether that was all in one request."""

    size: int = 0
    digests: list[bytes] = field(default_factory=list)
    is_whole: bool = False

    @property
    def etag(self) -> str:
        """The ETag that S3 gives to such an object, unless it is encrypted with a key of KMS."""
        if self.is_whole:
            return self.digests[0].hex()
        together = hashlib.md5(b"".join(self.digests), usedforsecurity=False)
        return f"{together.hexdigest()}-{len(self.digests)}"


class UploadStopped(BaseException):
    """The upload was given up; raised where the library asks for the next bytes."""


def upload(
    store: ObjectStore,
    key: str,
    path: str,
    replace: bool,
    progress: Progress,
    before_end: Callable[[], object],
    longest: float,
) -> Sent:
    """Upload a file; return what was sent.

    Args:
        progress: called in this thread.
        before_end: called once the last part was handed over; what it raises aborts the upload.
        longest: seconds that one part may take.

    Raises Unanswered, and whatever the library does: AlreadyExistsError, if it is a single part and nothing
    may be replaced. An error has the attribute `unfinished` if parts may be left that nobody has removed.
    """
    with contextlib.ExitStack() as stack:
        with naming(path, "read"):
            file = stack.enter_context(open(path, "rb"))
        if os.fstat(file.fileno()).st_size <= WHOLE:
            return _put_whole(store, key, file, replace, progress, longest)
        return _put_parts(store, key, file, progress, before_end, longest)


def _put_whole(
    store: ObjectStore, key: str, file: BinaryIO, replace: bool, progress: Progress, longest: float
) -> Sent:
    import obstore

    with naming(file.name, "read"):
        data = file.read()
    sent = Sent(len(data), [hashlib.md5(data, usedforsecurity=False).digest()], is_whole=True)
    mode: Literal["overwrite", "create"] = "overwrite" if replace else "create"
    TRAFFIC.count()
    ended(started(lambda: obstore.put(store, key, data, mode=mode, use_multipart=False)), LAST * longest)
    progress(len(data))
    return sent


def _put_parts(
    store: ObjectStore,
    key: str,
    file: BinaryIO,
    progress: Progress,
    before_end: Callable[[], object],
    longest: float,
) -> Sent:
    import obstore

    sent, stop = Sent(), threading.Event()
    handed_over: SimpleQueue[int | None] = SimpleQueue()
    size = max(PART, -(-os.fstat(file.fileno()).st_size // MOST_PARTS))

    def pieces() -> Iterator[bytes]:
        # An error here, whatever its type, makes the library abort the upload and then raise it.
        for piece in _pieces(file, size, sent):
            if stop.is_set():
                raise UploadStopped
            yield piece
            handed_over.put(len(piece))
        started(before_end).result()  # in a thread of its own: in this one the library does not call itself
        if stop.is_set():
            raise UploadStopped
        handed_over.put(None)

    def put() -> None:
        try:
            obstore.put(store, key, pieces(), use_multipart=True, chunk_size=size, max_concurrency=AT_ONCE)
        finally:
            handed_over.put(None)

    outcome = started(put)
    try:
        while (nbytes := _next(handed_over, LAST * longest)) is not None:
            progress(nbytes)
        ended(outcome, LAST * longest)
    except BaseException as error:
        stop.set()
        # Until the library has asked for the next part, and aborted the upload.
        unfinished = bool(wait([outcome], ENDING).not_done)
        error.unfinished = unfinished  # type: ignore[attr-defined]
        error.is_there = not unfinished and outcome.exception() is None  # type: ignore[attr-defined]
        raise
    TRAFFIC.count(len(sent.digests) + 2)
    return sent


def _next(handed_over: SimpleQueue[int | None], seconds: float) -> int | None:
    """Return how many bytes the library takes next. Raises Unanswered where it still waits for a server."""
    try:
        return handed_over.get(timeout=seconds)
    except Empty:
        raise Unanswered(f"{seconds:.3g} s") from None


def _pieces(file: BinaryIO, part: int, sent: Sent) -> Iterator[bytes]:
    """Yield a file in pieces, none over the end of a part, and note each part in `sent`."""
    digest, left = hashlib.md5(usedforsecurity=False), part
    while True:
        with naming(file.name, "read"):
            piece = file.read(min(PIECE, left))
        if piece:
            digest.update(piece)
            sent.size, left = sent.size + len(piece), left - len(piece)
            yield piece
        if not left or (not piece and left < part):
            sent.digests.append(digest.digest())
            digest, left = hashlib.md5(usedforsecurity=False), part
        if not piece:
            return
