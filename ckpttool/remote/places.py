"""What lies at a path or at a URL: the one place that knows which of the two it has."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence

from ..errors import Damaged, Unreadable, already_exists
from ..files import open_source
from ..files.open_source import open_source_descriptor
from ..tensors.source import Source
from .store import Forbidden, ListedEntry, Missing, Progress
from .urls import BUCKETS, WEB, is_url, place_of
from .visit import current_visit, visit

MOST_NAMES = 10_000  # of a folder, that are looked at
OF_REPOSITORIES = (".gitattributes", "README.md")  # what a new one holds
LAST = (".index.json", ".metadata")  # without which a folder's other files are no checkpoint
SNAPSHOT = re.compile(r"--[^/]+/snapshots/([0-9a-f]{40})/")  # in the hub's own cache


def open_source_at(path: str, *, shown: str | None = None) -> Source:
    """Open a file or an object for reading, which messages call by another name where `shown` is given.

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
    return source


def open_part(whole: str, what: str, path: str, hint: str) -> Source:
    """Open a file that another one names; where it can't be opened, Damaged of that one says `what` it is."""
    try:
        return open_source_at(path)
    except Unreadable as fault:
        raise Damaged(whole, f"{what} can't be opened: {fault.reason}", hint=hint) from None


def versions() -> list[str]:
    """Return what the current visit has opened, also files of settings: each file and its version."""
    current = current_visit.get()
    return sorted(current.versions) if current else []


def prepare(paths: Sequence[str]) -> None:
    """Begin to open several objects at once, those of them that are remote."""
    urls = [path for path in paths if is_url(path)]
    if urls:
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

    What is written is uploaded when the block ends without an error, the index of a folder last; `expect` is
    told first how many bytes that are, and `progress` each that is on its way.
    Raises OutputExists where there is something at the URL and `replace` is not set.
    """
    if not is_url(path):
        yield path
        return
    is_folder_ = path.endswith("/")
    with visit() as now, tempfile.TemporaryDirectory(prefix="ckpttool-") as room:
        store, key = now.store(path)
        name = os.path.basename(path.rstrip("/"))
        if is_folder_:
            there = [other for other in names_in(path) if other not in OF_REPOSITORIES]
        else:
            there = [name] if exists(path) else []
        if there and not replace:
            raise already_exists(path, f", and holds {', '.join(there[:3])}" * is_folder_)
        # A key may be longer than a name can be here.
        is_short = 0 < len(os.fsencode(name)) < 200
        local = os.path.join(room, name if is_short else f"output{os.path.splitext(name)[1]}")
        yield f"{local}/" if is_folder_ else local
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
        return open_source.names_in(folder)
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
        except (Missing, Forbidden):  # S3 behind https refuses, to who may not list, what is not there
            return False
        except Exception:
            del now.opened[path]
            raise
        return True


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
    """Return what two names of one file or folder share: its device and inode, of a URL itself."""
    if is_url(path):
        return path
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino


def _entries(folder: str) -> list[ListedEntry]:
    with visit() as now:
        return now.entries(folder) or []
