"""What a command finds that only reads, where several processes share the reading.

Each runs the command, but does only the work that falls to it, and records what that finds. Whoever finds the
records of all runs it once more with the findings in the place of the work, and does itself what is in none.
So text, JSON and exit code come from one code path: a record saves work, and decides nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from operator import itemgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...errors import Unreadable, UsageFault
from ..lazy import hashlib
from ..tensors.ref import ByteRange, Computed, Source, TensorRef

if TYPE_CHECKING:
    from .parts import OutputParts

P = TypeVar("P")
T = TypeVar("T")
Bytes = ByteRange | Computed | TensorRef
Told = tuple[ByteRange | str, str]  # what some work falls to a part by: a place, or a name; what tells it
NOTED_AFTER, SHARE = 10.0, 20  # seconds until the record is written again, and how often longer than it takes


class _Sums(Protocol):
    """What sums bytes while they are read: `Checksums`."""

    def found(self, *, joined: bool) -> dict[str, object]: ...
    def take(self, seen: Mapping[str, Any]) -> None: ...


class Findings:
    """What the work of one command has found, by what it was done on.

    Attributes:
        joins: this process has the findings of all parts, and does all other work; else only its own.
        whole: how much of its work could not be divided by bytes.
    """

    def __init__(self, meet: Callable[[], OutputParts]) -> None:
        """Prepare; `meet` finds the place of the parts, once the inputs are open."""
        self.joins, self.whole, self._meet = False, 0, meet
        self._parts: OutputParts | None = None
        self._known: dict[str, Any] = {}
        self._sums: dict[str, list[_Sums]] = {}
        self._summed: list[Mapping[str, Any]] = []  # what the records say of sums
        self._versions: dict[Source, str] = {}
        self._pieces = defaultdict[Source, list[tuple[int, int]]](list)
        self._joined: dict[Source, tuple[int, list[tuple[int, int]]]] = {}
        self._lock, self._noted = Lock(), time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether any work was asked for: what fails before fails in all parts alike."""
        return self._parts is not None

    @property
    def parts(self) -> OutputParts:
        """The place where the parts meet."""
        if self._parts is None:
            self._parts = self._meet()
            self._take(self._parts.seen)
            self._parts.watch(self._told)
        return self._parts

    # Records.

    def _told(self, *, joined: bool = False) -> dict[str, object]:
        """Return all that was found, for the record; `joined` with as few rows of sums as there can be."""
        sums = {key: [each.found(joined=joined) for each in some] for key, some in self._sums.items()}
        found = {"found": self._known, "sums": sums}
        return {**found, "hash": _hash(json.dumps(found))}

    def _take(self, seen: Mapping[str, Any]) -> None:
        if not seen:
            return
        given = seen if isinstance(seen, dict) else {}
        found = {name: given.get(name) for name in ("found", "sums")}
        is_whole = all(isinstance(each, dict) for each in found.values())
        if not is_whole or given.get("hash") != _hash(json.dumps(found)):
            folder = os.path.dirname(self.parts.place)
            hint = f"begin again: rm -r {shlex.quote(folder)}"
            raise Unreadable(folder, "has the record of a part that was changed", hint=hint)
        self._known |= seen["found"]
        self._summed.append(seen["sums"])

    def note(self, *, done: bool = False) -> None:
        """Write the record of this part."""
        self.parts.watch(lambda: self._told(joined=done))
        self.parts.note(done=done)
        self._sums = {} if done else self._sums

    def join(self) -> None:
        """Take the findings of all parts."""
        self.joins, self._known, self._summed, self._sums = True, {}, [], {}
        for seen in self.parts.sums:
            self._take(seen)

    # Work.

    def version(self, source: Source) -> str:
        """Return what tells a file, as it is now, on all machines."""
        if (known := self._versions.get(source)) is None:
            known = self._versions[source] = in_words(source.path, source.shared_version)
        return known

    def told(self, data: Bytes, name: str) -> Told:
        """Return where some bytes lie, or a name where they are computed; and what tells them."""
        if isinstance(data, ByteRange):
            return data, f"{self.version(data.source)} {data.offset} {data.nbytes}"
        if isinstance(data, Computed):
            return name, f"{name} in {data.path}"
        place, told = self.told(data.storage.data, name)
        return place, f"{data.view[1:]} of {told}"

    def piece(self, data: Bytes, name: str) -> Told:
        """Return the same of a piece that is read for its values, by whichever part."""
        by, told = self.told(data, name)
        if isinstance(by, ByteRange):
            self._pieces[by.source].append((by.offset, by.offset + by.nbytes))
        return by, told

    def falls_here(self, by: ByteRange | str) -> bool:
        """Return whether some work is that of this part: by where its bytes begin, or by a name."""
        part = self.parts.part
        if self.joins:
            return True
        if not part.number:
            return False
        if isinstance(by, ByteRange):
            return any(begin <= by.offset < end for begin, end in self._window(by))
        is_mine = int(_hash(by), 16) % part.count == part.number - 1
        self.whole += is_mine
        return is_mine

    def _window(self, place: ByteRange) -> Iterator[tuple[int, int]]:
        """Yield the stretches of a file that fall to this part: two at most, as each begins elsewhere."""
        from .copying import is_tiny

        source = place.source
        window = self.parts.part.window(source.size)
        if is_tiny(place) or not (window and self.parts.part.number):  # small ones: by whoever joins
            return
        begin = (window.start + int(_hash(self.version(source)), 16)) % source.size
        end = begin + len(window)
        if end > source.size:
            yield 0, end - source.size
        yield begin, min(end, source.size)

    def stretches(self, data: ByteRange | Computed, name: str | None) -> Iterator[tuple[int, int]]:
        """Yield the start and the size of what falls here of some bytes; by a name alone, if it is given.

        What is read for its values, by whichever part, is left out.
        """
        if name is not None or self.joins or not isinstance(data, ByteRange):
            if self.falls_here(name or data.path):
                yield 0, data.nbytes
            return
        pieces = self._in_a_row(data.source)
        for begin, end in self._window(data):
            at, stop = max(begin, data.offset), min(end, data.offset + data.nbytes)
            number = max(bisect_right(pieces, at, key=itemgetter(0)) - 1, 0)
            while at < stop:
                first, behind = pieces[number] if number < len(pieces) else (stop, stop)
                if at < first:
                    yield at - data.offset, min(first, stop) - at
                at, number = max(at, behind), number + 1

    def _in_a_row(self, source: Source) -> list[tuple[int, int]]:
        """Return where the pieces of a file begin and end, in order, those that touch in one."""
        known, pieces = self._joined.get(source, (0, [])), self._pieces[source]
        if known[0] != len(pieces):
            rows: list[tuple[int, int]] = []
            for begin, end in sorted(pieces):
                if rows and begin <= rows[-1][1]:
                    begin, end = rows[-1][0], max(rows.pop()[1], end)
                rows.append((begin, end))
            known = self._joined[source] = len(pieces), rows
        return known[1]

    def done(
        self,
        kind: str,
        by: ByteRange | str,
        told: str,
        work: Callable[[], T],
        other: T,
        pack: Callable[[T], Any],
        unpack: Callable[[Any], T],
    ) -> T:
        """Return what some work finds; what was found before; or `other`, where it falls to another part."""
        key = _hash(f"{kind} {told}")
        if key in self._known:
            with suppress(ValueError, TypeError, KeyError, AttributeError):  # a record that makes no sense
                return unpack(self._known[key])
        if not self.falls_here(by):
            return other
        found = work()
        if not self.joins:
            with self._lock:
                self._known[key] = pack(found)
                if (now := time.monotonic()) > self._noted:
                    with suppress(OSError):  # a full disk, or a place that is gone: the end says so
                        self.note()
                    self._noted = time.monotonic() + max(NOTED_AFTER, SHARE * (time.monotonic() - now))
        return found

    def add_sums(self, told: str, sums: _Sums) -> None:
        """Keep what sums bytes for the record, and tell it what others have summed."""
        key = _hash(told)
        for record in self._summed if self.parts else ():
            for seen in record.get(key, ()):
                with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):
                    sums.take(seen)
        self._sums.setdefault(key, []).append(sums)


def in_words(path: str, version: tuple[object, ...]) -> str:
    """Return the version of an input as text. Raises UsageFault where its server states none."""
    if version[1] == "":
        what = f"{path}: its server states no version, so it may change between two parts"
        raise UsageFault(what, hint="leave out --part, or torchrun")
    return repr(version)


def _hash(text: str, nbytes: int = 12) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=nbytes).hexdigest()


current: ContextVar[Findings | None] = ContextVar("findings", default=None)


def takes_small() -> bool:
    """Return whether this process reads what is too small to be worth a read of its own: not a part."""
    return (now := current.get()) is None or now.joins


def shared(
    kind: str,
    of: Callable[[Findings, P], Told],
    other: T,
    pack: Callable[[T], Any] = lambda found: found,
    unpack: Callable[[Any], T] = lambda found: found,
) -> Callable[[Callable[[P], T]], Callable[[P], T]]:
    """Return what makes some work one that parts share, if there are any.

    Args:
        kind: what is found, of which the same bytes have only one.
        of: what a piece of work falls to a part by, and what tells it from all others.
        other: what stands for that of another part.
        pack, unpack: turn what is found into JSON, and back.
    """
    now = current.get()
    if now is None:
        return lambda work: work
    now.parts  # noqa: B018 - meet now that the inputs are open, in this thread

    def sharing(work: Callable[[P], T]) -> Callable[[P], T]:
        def done(piece: P) -> T:
            return now.done(kind, *of(now, piece), lambda: work(piece), other, pack, unpack)

        return done

    return sharing
