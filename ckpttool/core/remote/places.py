"""Files and objects by path or URL: the one place that knows which of the two a name is."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial

from ...errors import WEB, Damaged, Unreadable, UsageFault, already_exists, masked
from ..files import commit
from ..files.commit import no_room_named, open_source_descriptor
from ..tensors.ref import Source
from . import ahead
from .store import TRAFFIC, Facts, Forbidden, ListedEntry, Missing, Progress, Store
from .urls import BUCKETS, HUB, is_url, place_of

# ---- A visit: what one operation knows of stores, each thing asked once

TELLING = (  # names that are looked for in a folder that can't be listed
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
        self.opened: dict[str, Callable[[], Source]] = {}  # waits for the source
        self.next: dict[str, None] = {}  # to be opened when some of `before` were handed out
        self.before: set[str] = set()
        self.versions: set[str] = set()  # of all opened files and objects, as text
        self.shared_versions: dict[str, tuple[object, ...]] = {}  # by path, for all machines

    def store(self, url: str) -> tuple[Store, str]:
        """Return the store of a URL, and the key in it."""
        place = place_of(url)
        try:
            url.encode("utf-8", "surrogateescape" if place.scheme in WEB else "strict")
        except UnicodeEncodeError:
            raise Unreadable(url, "holds what no URL can: half of a character") from None
        if place.scheme == HUB:
            from .hub import Repository, split

            at = split(place.key)
            name: tuple[str, ...] = (HUB, at.kind, at.repo, at.revision or "")
            if name not in self.stores:
                self.stores[name] = Repository(at.repo, at.kind, at.revision)
            return self.stores[name], at.path
        name = (place.scheme, place.store, place.query)
        if name not in self.stores:
            if place.scheme in WEB:
                from .web import Https

                self.stores[name] = Https(f"{place.scheme}://{place.store}", place.query)
            else:
                from .buckets import Bucket

                self.stores[name] = Bucket(place.scheme, place.store)
        return self.stores[name], place.key

    def entries(self, folder: str) -> list[ListedEntry] | None:
        """Return what is in a folder; None where nothing can list it."""
        folder = folder.rstrip("/")
        if folder not in self.listings:
            store, key = self.store(folder)
            self.listings[folder] = store.entries(key.rstrip("/"))
        return self.listings[folder]

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; where it can't be listed, those of TELLING that are there."""
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
        """Return the entry of a name in its folder's listing, if that folder was listed."""
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
        """Have an object opened, unless it is already; return a function that waits for it."""
        self.next.pop(url, None)
        if url not in self.opened:
            self.store(url)  # in this thread: each once
            self.opened[url] = ahead.begin(partial(self._open, url))
        return self.opened[url]

    def _open(self, url: str) -> Source:
        from . import source as cache

        store, key = self.store(url)
        if key.endswith("/") or not key:
            raise Unreadable(url, "is a folder", hint="name the checkpoint file")
        facts = entry.facts if (entry := self.entry(url)) else None
        known = kept = cache.kept(url, facts) if facts else {}
        if not known or facts is None:
            head, facts = store.head(key, cache.guessed(facts.size) if facts else cache.GUESS)
            kept = cache.kept(url, facts)
            known = kept or {0: head}
        if not facts.is_ranged and facts.size > len(known[0]):
            return _spooled(url, store, key, facts)
        if not facts.identity and facts.size > len(known[0]):  # several answers, and nothing ties them
            told = "an object that changes while it is read, and keeps its size, goes unnoticed"
            TRAFFIC.remark(f"{url}: its server sends neither an ETag nor Last-Modified: {told}")
        source = cache.RemoteSource(url, store, key, facts)
        source.know(known, cache.keeper(url, facts, kept))
        if known[0][:4] == b"PK\x03\x04":  # the directory is at its end
            source.read(source.size - 1, 1)
        return source


def _spooled(url: str, store: Store, key: str, facts: Facts) -> Source:
    """Read an object from front to back into a temporary file, as its server ignores ranges."""
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
    """Ask stores each thing once until the block ends; a nested visit is a part of the outer one."""
    if (current := current_visit.get()) is not None:
        yield current
        return
    current = Visit()
    token = current_visit.set(current)
    try:
        yield current
    finally:
        current_visit.reset(token)


# ---- Paths and URLs


MOST_NAMES = 10_000  # of a folder, that are looked at
OF_REPOSITORIES = (".gitattributes", "README.md")  # the files of a new repository
LAST = (".index.json", ".metadata")  # uploaded last, as only they make the other files a checkpoint
SNAPSHOT = re.compile(r"--[^/]+/snapshots/([0-9a-f]{40})/")  # in the hub's own cache


def open_source_at(path: str, *, shown: str | None = None) -> Source:
    """Open a file or an object for reading; messages name it `shown`, if that is given.

    Raises Unreadable where there is none, or it may not be read.
    """
    if not is_url(path):
        source = Source(shown or path, open_source_descriptor(path))
        source.commit = found[1] if (found := SNAPSHOT.search(path)) else ""
    else:
        with visit() as now:
            source = now.source(path)
        source.path = shown or path
    if (current := current_visit.get()) is not None:
        current.versions.add(repr(source.version))
        current.shared_versions[source.path] = source.shared_version
    return source


def open_part(whole: str, what: str, path: str, hint: str) -> Source:
    """Open a file that the file `whole` names. Raises Damaged of `whole`: `what` can't be opened."""
    try:
        return open_source_at(path)
    except Unreadable as fault:
        raise Damaged(whole, f"{what} can't be opened: {fault.reason}", hint=hint) from None


def versions() -> list[str]:
    """Return the versions of all files and objects that the current visit has opened."""
    current = current_visit.get()
    return sorted(current.versions) if current else []


def shared_versions() -> dict[str, tuple[object, ...]]:
    """Return the same by path, as all machines see them that share the files."""
    current = current_visit.get()
    return {**current.shared_versions} if current else {}


def prepare(paths: Sequence[str]) -> None:
    """Begin to open the remote ones of several objects at once."""
    if urls := [path for path in paths if is_url(path)]:
        with visit() as now:
            now.prepare(urls)


@contextlib.contextmanager
def uploading(
    path: str,
    *,
    replace: bool,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Iterator[str]:
    """Yield where to write an output: at its path, or in a temporary folder from which it is uploaded.

    The output is uploaded when the block ends without an error, the index of a folder last. Before it,
    `expect` gets the number of bytes; `progress` gets those of each part under way.
    Raises OutputExists where there is something at the URL and `replace` is not set.
    """
    if not is_url(path):
        yield path
        return
    to_folder = path.endswith("/")
    with visit() as now, tempfile.TemporaryDirectory(prefix="ckpttool-") as room:
        store, key = now.store(path)
        name = os.path.basename(path.rstrip("/"))
        if "?" in os.path.splitext(name)[1]:
            what = f"{masked(path, whole=True)}: has a query, with which nothing is written"
            raise UsageFault(what, hint="name it without")
        there = names_in(path) if to_folder else [name] * exists(path)
        there = [other for other in there if not (to_folder and other in OF_REPOSITORIES)]
        if there and not replace:
            raise already_exists(path, f", and holds {', '.join(there[:3])}" * to_folder)
        # A key may be longer than a name can be here.
        is_short = 0 < len(os.fsencode(name)) < 200
        local = os.path.join(room, name if is_short else f"output{os.path.splitext(name)[1]}")
        yield f"{local}/" if to_folder else local
        if dry_run:
            return
        written = os.listdir(local) if os.path.isdir(local) else []
        names = sorted(written, key=lambda name: (name.endswith(LAST), name))
        files = {posixpath.join(key, name): os.path.join(local, name) for name in names} or {key: local}
        if expect is not None:
            expect(sum(map(os.path.getsize, files.values())))
        store.put(files, replace=replace, progress=progress)


def names_in(folder: str) -> list[str]:
    """Return the names in a folder, sorted, MOST_NAMES at most; none where it can't be read."""
    if not is_url(folder):
        return commit.names_in(folder)
    with visit() as now:
        return now.names(folder)[:MOST_NAMES]


def listed(folder: str) -> list[str]:
    """Return the names in a folder, sorted. Raises OSError, or Unreadable, where it can't be listed."""
    return names_in(folder) if is_url(folder) else sorted(os.listdir(folder))


def folders_in(folder: str) -> list[str]:
    """Return the names of the folders in a folder, sorted; links to folders count."""
    if is_url(folder):
        return sorted(entry.name for entry in _entries(folder) if entry.facts is None)
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if os.path.isdir(entry.path))
    except OSError:
        return []


def is_folder(path: str) -> bool:
    """Return whether there is a folder at a path or URL."""
    if not is_url(path):
        return os.path.isdir(path)
    if path.endswith("/"):
        return True
    with visit() as now:
        if (entry := now.entry(path)) is not None:
            return entry.facts is None
        scheme = place_of(path).scheme
        if scheme in WEB:
            return False
        if not now.store(path)[1]:
            return True
        if scheme in BUCKETS:  # a file has an ending, and asking costs a request
            return not os.path.splitext(path)[1] and bool(now.entries(path))
        now.entries(os.path.dirname(path))
        return (entry := now.entry(path)) is not None and entry.facts is None


def exists(path: str) -> bool:
    """Return whether there is something at a path, if only a link that leads nowhere, or at a URL."""
    if not is_url(path):
        return os.path.lexists(path)
    with visit() as now:
        listed = now.entries(os.path.dirname(path.rstrip("/")))
        if listed is not None:
            return now.entry(path) is not None
        try:
            now.begun(path)()
        except (Missing, Forbidden):  # S3 behind https refuses a missing object to a user who may not list
            return False
        except Exception:
            now.opened.pop(path, None)
            raise
        return True


def is_plain(folder: str, name: str) -> bool:
    """Return whether a name that a file states leads down from its folder, whatever reads it as a path."""
    odd = "\\\0%?#" if is_url(folder) else "\\\0"  # a URL has other ways to say ".."
    return not {"", ".", ".."} & {*name.split("/")} and not {*odd} & {*name}


def is_inside(folder: str, name: str) -> bool:
    """Return whether a file lies in the folder itself; a link may lead to the blobs of its own hub cache."""
    if is_url(folder):
        return True
    home, place = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
    # The hub's cache has snapshots/REVISION/onnx/config.json -> ../../../blobs/HASH.
    cache, of_cache, _ = f"{home}/".rpartition("/snapshots/")
    try:
        common = os.path.commonpath([home, place])
    except ValueError:  # on another drive
        return False
    return common == home or (bool(of_cache) and os.path.dirname(place) == os.path.join(cache, "blobs"))


def is_file(path: str) -> bool:
    """Return whether there is a file, or an object, at a path or URL."""
    return exists(path) and not is_folder(path) if is_url(path) else os.path.isfile(path)


def nbytes_of(path: str) -> int:
    """Return the size of a file or object, or of all that are directly in a folder; 0 where there is none."""
    if is_url(path):
        if is_folder(path):
            return sum(entry.facts.size for entry in _entries(path) if entry.facts)
        with visit() as now:
            return now.source(path).size if exists(path) else 0
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def identity_of(path: str) -> object:
    """Return a key that all names of one file or folder share: device and inode, or the URL."""
    if is_url(path):
        return path
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino


def _entries(folder: str) -> list[ListedEntry]:
    with visit() as now:
        return now.entries(folder) or []
