"""An object of a store, read like a file, and the cache of what was read to open it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

from ...errors import Refused, Unreadable, Unsupported, UsageFault
from .. import system
from ..files.commit import open_source_descriptor, replacing
from ..files.findings import Findings, Told, shared
from ..lazy import hashlib
from ..tensors.ref import ByteRange, Source
from .ahead import Ahead, Line
from .store import DATED, Facts, Store
from .urls import without_query

# ---- The cache: headers, directories and pickles of remote checkpoints
#
# It holds values only where they lie in the 256 kB that are read at once at the beginning or the end. Each
# version of an object has a file, named by a hash of its URL and identity, in the user's cache folder or in
# CKPTTOOL_CACHE, 100 MB at most. Processes share it: a file appears whole, and a damaged one is ignored.


MOST = 100_000_000  # bytes of all files together
LARGEST = 32 << 20  # bytes of one
ENDING = ".ranges"

Stretches = dict[int, bytes]  # begin -> bytes


def folder() -> str | None:
    """Return the folder of the cache; None where an empty CKPTTOOL_CACHE turns it off."""
    if (named := os.environ.get("CKPTTOOL_CACHE")) is not None:
        return named or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ckpttool") if os.path.isabs(base) else None


def _path(url: str, facts: Facts) -> str | None:
    place = folder()
    if place is None or not facts.identity or facts.identity.startswith(DATED):  # it may have changed since
        return None
    key = json.dumps([url, facts.identity, facts.size])
    return os.path.join(place, hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest() + ENDING)


def kept(url: str, facts: Facts) -> Stretches:
    """Return the stretches that were read when this version of an object was opened before."""
    if (path := _path(url, facts)) is None:
        return {}
    try:
        with open(open_source_descriptor(path), "rb") as file:  # which a pipe does not hold up
            if not system.is_mine_alone(os.fstat(file.fileno())):
                return {}  # another user may have written what is in it
            digest, body = file.read(32), file.read(LARGEST + (1 << 20))
        os.utime(path)  # the least recently used file is removed first
        stretches = _parsed(body) if hashlib.sha256(body).digest() == digest else {}
    except (OSError, ValueError, TypeError, Unreadable):
        return {}
    inside = all(begin + len(data) <= facts.size for begin, data in stretches.items())
    return stretches if inside and 0 in stretches else {}


def _parsed(body: bytes) -> Stretches:
    length = int.from_bytes(body[:4], "little")
    at, stretches = 4 + length, Stretches()
    for begin, nbytes in json.loads(body[4:at]):
        stretches[begin] = body[at : at + nbytes]
        at += nbytes
    return stretches


def keeper(url: str, facts: Facts, known: Stretches) -> Callable[[Stretches], None]:
    """Return a function that keeps the stretches that were read, unless all were known before."""
    had = {begin: len(data) for begin, data in known.items()}

    def keep(stretches: Stretches) -> None:
        path = _path(url, facts)
        nbytes = sum(map(len, stretches.values()))
        if path is None or nbytes > LARGEST or {at: len(data) for at, data in stretches.items()} == had:
            return
        places = json.dumps([[begin, len(data)] for begin, data in stretches.items()]).encode()
        body = b"".join([len(places).to_bytes(4, "little"), places, *stretches.values()])
        # A cache that can't be written (a full disk, a home that is read-only) is only slower.
        with contextlib.suppress(OSError, UsageFault):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with replacing(path) as file:
                file.write(hashlib.sha256(body).digest() + body)
            _shrink(os.path.dirname(path))

    return keep


def _shrink(place: str) -> None:
    """Remove the files that were not used for the longest time, down to MOST bytes."""
    with os.scandir(place) as entries:
        files = [(e.stat().st_mtime, e.stat().st_size, e.path) for e in entries if e.name.endswith(ENDING)]
    left = sum(size for _, size, _ in files) - MOST
    for _, size, path in sorted(files):
        if left <= 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        left -= size


# ---- An object as a source of bytes


MOST_OPENED = 512 << 20  # bytes that are read of an object before its tensors
GUESS, LEAST = 256 << 10, 96 << 10  # bytes of the beginning and of the end that are fetched at once
DESCRIBED = 32  # bytes of a file for one of its header or directory: of a small file less is fetched

Check = Callable[[bytes], None]  # of the bytes before a stretch


def guessed(size: int) -> int:
    """Return how many bytes to fetch of the beginning, or of the end, of an object of `size` bytes."""
    return GUESS if size <= GUESS else min(GUESS, max(LEAST, size // DESCRIBED))


class RemoteSource(Source):
    """An object that is read by ranges, all of them of the same version of it.

    Until `opened()`, all that is read is kept, in the cache too: the directory of an archive, a header, a
    pickle. After it, bytes pass through; `expect` has them fetched ahead of time.
    """

    is_local = False

    def __init__(self, path: str, store: Store, key: str, facts: Facts) -> None:
        """Ask nothing yet: `facts` are known from the first answer, or from a listing."""
        self.path, self.size, self.content = path, facts.size, facts.content
        self.commit = store.commit
        self._url = path
        self.observers = []
        self._store, self._key, self._facts = store, key, facts
        # It does not refer to this source, which would then never end.
        self._ahead = Ahead(lambda begin, end: store.read(key, facts, begin, end - begin))
        self._is_open = True
        # Stretches read while the checkpoint was opened: begin -> bytes, without overlaps.
        self._known: dict[int, bytes] = {}
        self._keep: Callable[[dict[int, bytes]], None] | None = None
        # Stretches whose preceding bytes have to be checked: begin, end, begin of those bytes.
        self._guarded: list[tuple[int, int, int]] = []
        self._checks: dict[int, Check] = {}
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """Raises Unsupported: there is no descriptor."""
        what = "is not on this machine, and this needs a file"
        raise Unsupported(self.path, what, hint="download it first")

    @property
    def place(self) -> str:
        """The URL, whatever messages call it."""
        return self._url

    @property
    def version(self) -> tuple[object, ...]:
        """The object and its version; a link that was signed anew leads to the same one."""
        identity = self._facts.identity
        return without_query(self._url), "" if identity.startswith(DATED) else identity, self._facts.size

    @property
    def shared_version(self) -> tuple[object, ...]:
        return self.version

    @property
    def identity(self) -> tuple[object, object]:
        """A key that two sources share exactly when they are the same version of one object."""
        return self._url, self._facts.identity

    @property
    def unchecked(self) -> int:
        """The number of stretches whose preceding bytes were not checked yet."""
        return len(self._checks)

    def called(self, path: str) -> Source:
        """Return a source, of size 0, that stands for several objects in messages."""
        return RemoteSource(path, self._store, self._key, Facts(0, self._facts.identity))

    def know(self, stretches: dict[int, bytes], keep: Callable[[dict[int, bytes]], None] | None) -> None:
        """Take bytes that were read already; `keep` gets all that were read once the checkpoint is open."""
        self._known, self._keep = dict(stretches), keep

    def opened(self) -> None:
        """Drop what was read to open the checkpoint: from now on values are read."""
        with self._lock:
            if self._keep is not None:
                self._keep(self._known)
            self._known, self._keep = {}, None

    def expect(self, ranges: Sequence[tuple[int, int]], nbytes: int, first: int, line: Line) -> Ahead:
        """Announce what will be read, and return the pieces that the line holds."""
        guarding = (self._guarded_at(begin) for begin, _ in ranges)  # some begin far behind what is checked
        checked_too = [*ranges, *((before, start) for start, _, before in filter(None, guarding))]
        self._ahead.expect(ranges, checked_too, nbytes, first, line)
        return self._ahead

    def guard(self, start: int, nbytes: int, before: int, check: Check) -> None:
        """Have the bytes from `before` to `start` checked before any of those behind them is used."""
        insort(self._guarded, (start, start + nbytes, before))
        self._checks[start] = check

    def check_rest(self) -> None:
        """Check what stands before stretches of which nothing was read."""

        def check_one(guarded: tuple[int, int, int]) -> bool:
            start, _, before = guarded
            if check := self._checks.pop(start, None):
                check(self._read(before, start - before))
            return True

        def told(now: Findings, guarded: tuple[int, int, int]) -> Told:
            return now.told(ByteRange(self, guarded[0], guarded[1] - guarded[0]), "")

        check_each = shared("guard", told, True)(check_one)
        for guarded in self._guarded:
            check_each(guarded)

    def close(self) -> None:
        """Drop everything; a second call does nothing."""
        if getattr(self, "_is_open", False):
            self._is_open = False
            self._ahead.forget()

    def _guarded_at(self, offset: int) -> tuple[int, int, int] | None:
        number = bisect_right(self._guarded, (offset, self.size + 1, 0)) - 1
        if number >= 0 and offset < self._guarded[number][1]:
            return self._guarded[number]
        return None

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def _fill(self, offset: int, view: memoryview) -> None:
        if not self._is_open:
            raise Unreadable(self.path, "is closed", hint="read its tensors inside the `with` block")
        guarded = self._guarded_at(offset)
        if guarded and (check := self._checks.get(guarded[0])):
            before = bytearray(guarded[0] - guarded[2])
            self._fill_here(guarded[2], memoryview(before), counts=False)
            check(bytes(before))
            self._checks.pop(guarded[0], None)  # only now: another thread must not be ahead of it
        self._fill_here(offset, view)

    def _fill_here(self, offset: int, view: memoryview, *, counts: bool = True) -> None:
        if self._keep is None:
            self._ahead.fill(offset, view, counts=counts)
            return
        end = offset + len(view)
        while offset < end:
            begin, data = self._stretch(offset, end)
            part = data[offset - begin : end - begin]
            view[: len(part)] = part
            view, offset = view[len(part) :], offset + len(part)

    def _stretch(self, offset: int, end: int) -> tuple[int, bytes]:
        """Return a known stretch that holds the byte at `offset`, fetched up to `end` if there is none."""
        with self._lock:
            for begin, data in self._known.items():
                if begin <= offset < begin + len(data):
                    return begin, data
            following = min((begin for begin in self._known if begin > offset), default=self.size)
            begin, end = offset, min(max(end, offset + guessed(self.size)), following)
            if end == following == self.size:  # an archive has its directory there, and several ends of it
                before = max((at + len(data) for at, data in self._known.items() if at <= offset), default=0)
                begin = max(before, min(begin, self.size - guessed(self.size)))
            if end - begin + sum(map(len, self._known.values())) > MOST_OPENED:
                what = f"takes more than {MOST_OPENED >> 20} MiB to be opened"
                raise Refused(self.path, what, hint="no ordinary file does; download it first")
            target = bytearray(end - begin)
            self._ahead.fill(begin, memoryview(target))
            self._known[begin] = bytes(target)
            return begin, self._known[begin]

    def __repr__(self) -> str:
        return f"<RemoteSource {shlex.quote(self.path)}>"
