"""What is known of stores while one operation looks at them: each thing is asked once."""

from __future__ import annotations

import contextlib
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial

from ..errors import Unreadable
from ..files.failures import no_room_named
from ..tensors.source import Source
from .store import TRAFFIC, Facts, ListedEntry, Missing, Store
from .urls import HUB, WEB, place_of

TELLING = (  # what a folder holds that nobody lists
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", ".metadata"),
    *("model.safetensors", "pytorch_model.bin", "config.json"),
)
WAITING = 24  # objects that are opened before they are asked for, each with up to half a megabyte of it
SPOOLED = 1 << 30  # bytes of an object that is read from front to back, since its server knows no ranges


class Visit:
    """The stores that one operation has looked at, their listings, and what is being opened."""

    def __init__(self) -> None:
        self.stores: dict[tuple[str, ...], Store] = {}
        self.listings: dict[str, list[ListedEntry] | None] = {}
        self.opened: dict[str, Callable[[], Source]] = {}  # what waits for each
        self.next: dict[str, None] = {}  # to be opened when some of those before were handed out
        self.before: set[str] = set()
        self.versions: set[str] = set()  # of all files and objects that were opened, as text

    def store(self, url: str) -> tuple[Store, str]:
        """Return the store of a URL, and the key in it."""
        place = place_of(url)
        if place.scheme == HUB:
            from .hub.repository import Repository, split

            location = split(place.key)
            name: tuple[str, ...] = (HUB, location.kind, location.repo, location.revision or "")
            if name not in self.stores:
                self.stores[name] = Repository(location.repo, location.kind, location.revision)
            return self.stores[name], location.path
        name = (place.scheme, place.store, place.query)
        if name not in self.stores:
            if place.scheme in WEB:
                from .web.https import Https

                self.stores[name] = Https(f"{place.scheme}://{place.store}", place.query)
            else:
                from .buckets.bucket import bucket

                self.stores[name] = bucket(place.scheme, place.store)
        return self.stores[name], place.key

    def entries(self, folder: str) -> list[ListedEntry] | None:
        """Return what is in a folder; None where nothing can list it."""
        folder = folder.rstrip("/")
        if folder not in self.listings:
            store, key = self.store(folder)
            self.listings[folder] = store.entries(key.rstrip("/"))
        return self.listings[folder]

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; where nothing lists it, those that tell what checkpoint it is."""
        if (entries := self.entries(folder)) is not None:
            return sorted(entry.name for entry in entries)
        urls = {posixpath.join(folder, name): name for name in TELLING}
        for url in urls:
            self.begun(url)
        found, failed = list[str](), list[Exception]()
        for url, name in urls.items():
            try:
                self.begun(url)()
                found.append(name)
            except Missing:  # noqa: PERF203
                pass
            except Exception as error:  # raised where nothing else is there
                failed.append(error)
        if failed and not found:
            raise failed[0]
        return found

    def entry(self, url: str) -> ListedEntry | None:
        """Return what the listing of its folder says of a name, if that folder was listed."""
        folder, name = os.path.split(url.rstrip("/"))
        return next((entry for entry in self.listings.get(folder) or () if entry.name == name), None)

    def source(self, url: str) -> Source:
        """Open an object."""
        outcome = self.begun(url)
        del self.opened[url]
        self.before.discard(url)
        self.prepare(())
        return outcome()

    def prepare(self, urls: Sequence[str]) -> None:
        """Begin to ask for the beginnings of several objects; `source` hands each out when it is there."""
        self.next |= dict.fromkeys(url for url in urls if url not in self.opened)
        while self.next and len(self.before) < WAITING:
            self.before.add(url := next(iter(self.next)))
            self.begun(url)

    def begun(self, url: str) -> Callable[[], Source]:
        """Have an object opened, unless it is already; return what waits for it."""
        from .ahead import begin

        self.next.pop(url, None)
        if url not in self.opened:
            self.store(url)  # in this thread: each once
            self.opened[url] = begin(partial(self._open, url))
        return self.opened[url]

    def _open(self, url: str) -> Source:
        from . import cache
        from .source import GUESS, RemoteSource, guessed

        store, key = self.store(url)
        if key.endswith("/") or not key:
            raise Unreadable(url, "is a folder", hint="name the checkpoint file")
        entry = self.entry(url)
        facts = entry and entry.facts
        known = cache.kept(url, facts) if facts else {}
        was_kept = bool(known)
        if not known or facts is None:
            head, facts = store.head(key, guessed(facts.size) if facts else GUESS)
            known = cache.kept(url, facts)
            was_kept, known = bool(known), known or {0: head}
        if not facts.is_ranged and facts.size > len(known[0]):
            return _spooled(url, store, key, facts)
        source = RemoteSource(url, store, key, facts)
        source.know(known, cache.keeper(url, facts, known if was_kept else {}))
        if known[0][:4] == b"PK\x03\x04":  # the directory is at its end
            source.read(source.size - 1, 1)
        return source


def _spooled(url: str, store: Store, key: str, facts: Facts) -> Source:
    """Read an object once from front to back into a temporary file, where its server knows no ranges."""
    spool = getattr(store, "spool", None)
    if spool is None or facts.size > SPOOLED:
        what = f"is sent only as a whole, {facts.size} bytes: its server ignores ranges"
        raise Unreadable(url, what, hint="download it first")
    with no_room_named(tempfile.gettempdir()), tempfile.TemporaryFile() as file:
        spool(key, facts, file, SPOOLED)
        file.flush()
        TRAFFIC.remark(f"{url}: its server ignores ranges, so all of it was read")
        return Source(url, os.dup(file.fileno()))


current_visit: ContextVar[Visit | None] = ContextVar("visit", default=None)


@contextlib.contextmanager
def visit() -> Iterator[Visit]:
    """Ask stores each thing once until the block ends; within another visit it is a part of that."""
    current = current_visit.get()
    if current is not None:
        yield current
        return
    current = Visit()
    token = current_visit.set(current)
    try:
        yield current
    finally:
        current_visit.reset(token)
