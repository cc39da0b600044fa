"""Files scanned, and all that lie in folders, here and behind URLs: each opened, looked into, and judged."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import astuple
from typing import NamedTuple

from ..core.files.commit import reason
from ..core.files.findings import Findings, Told, shared
from ..core.remote.places import MOST_NAMES, folders_in, is_folder, listed, open_source_at, visit
from ..core.remote.urls import canonical, is_url
from ..core.tensors.ref import ByteRange, Source
from ..errors import CkptToolError
from .contents import Contents, FilePart
from .verdicts import SAFE, Scanned, unreadable

PASSED_OVER = (".git",)  # folders whose objects are compressed copies of what lies beside them
MAX_DEEP = 100  # folders in folders


class ScanTarget(NamedTuple):
    """A file to look at, or the reason why it can't be."""

    path: str
    fault: str | None = None


def files_in(path: str) -> Iterator[ScanTarget]:
    """Yield a file, or the files in a folder and in the folders inside it, by name.

    Links are followed, and each folder is looked into once: by its own path, where it lies in this one.
    """
    if path == "-" or not is_folder(path):
        yield ScanTarget(path)
    elif is_url(path):
        yield from _remote(path.rstrip("/"), 0)
    else:
        seen: set[tuple[int, int]] = set()
        links = [(path, 0)]
        while links:
            yield from _local(*links.pop(0), seen, links)


def _local(
    folder: str, level: int, seen: set[tuple[int, int]], links: list[tuple[str, int]]
) -> Iterator[ScanTarget]:
    """Yield the files in a folder, unless it was `seen` by device and inode; add the links to folders."""
    try:
        facts = os.stat(folder)
        if (facts.st_dev, facts.st_ino) in seen:
            return
        seen.add((facts.st_dev, facts.st_ino))
        with os.scandir(folder) as entries:
            listed_here = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        yield ScanTarget(folder, reason(error))
        return
    for entry in listed_here:
        if not _is_folder(entry):
            yield ScanTarget(entry.path)
        elif level == MAX_DEEP:
            yield ScanTarget(entry.path, f"is more than {MAX_DEEP} folders deep")
        elif entry.name in PASSED_OVER:
            continue
        elif entry.is_symlink():
            links.append((entry.path, level + 1))
        else:
            yield from _local(entry.path, level + 1, seen, links)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: opening it says so
        return False


def _remote(url: str, level: int) -> Iterator[ScanTarget]:
    try:
        folders, names = {*folders_in(url)}, listed(url)
    except CkptToolError as error:
        yield ScanTarget(url, error.message.removeprefix(f"{url}: "))
        return
    if len(names) >= MOST_NAMES:
        yield ScanTarget(url, f"has more than {MOST_NAMES} names, of which the rest was not looked at")
    for name in names:
        inside = f"{url}/{name}"
        if name not in folders:
            yield ScanTarget(inside)
        elif level == MAX_DEEP:
            yield ScanTarget(inside, f"is more than {MAX_DEEP} folders deep")
        else:
            yield from _remote(inside, level + 1)


def scan(path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> list[Scanned]:
    """Return what could run when a file, or any file in a folder, is unpickled.

    Nothing that a file names is imported or called. Pickles are found in whatever containers Python's loaders
    open, by content and not by name: zips, tars, compressed streams, arrays of NumPy, files of joblib.

    Args:
        path: a file, a folder, which is looked into recursively, or a URL of either.
        allow: shell patterns of names that count as harmless: `sklearn.*`. One of what pickles are known to
            run code by has to be named itself.

    Returns:
        For each file its verdict, the names that could run something with where each is, and what could not
        be looked at. What can't be opened is `unreadable`, with the reason.

    Raises:
        MemoryError: a pickle takes more memory than there is.

    Example:
        >>> [(file.path, file.verdict) for file in ckpttool.scan("last.pt")]
        [('last.pt', 'safe')]
    """
    with visit():
        return [*scan_each(named_in([path]), allow)]


def named_in(paths: Iterable[str | os.PathLike[str]]) -> list[ScanTarget]:
    """Return the files that paths name, those in folders too."""
    return [named for path in paths for named in _named_at(os.fspath(path))]


def _named_at(path: str) -> list[ScanTarget]:
    try:
        return [*files_in(canonical(path))]
    except CkptToolError as error:
        return [ScanTarget(path, error.reason)]


def scan_each(files: Iterable[ScanTarget], allow: Collection[str] = ()) -> Iterator[Scanned]:
    """Yield what is found in each file, in their order."""
    for path, fault in files:
        yield _scanned(path, allow) if fault is None else unreadable(path, fault)


def _scanned(path: str, allow: Collection[str]) -> Scanned:
    try:
        source = open_source_at(path)
    except CkptToolError as error:
        return unreadable(path, error.reason)

    def look(source: Source) -> Scanned:
        contents = Contents(source)
        try:
            contents.look(FilePart(ByteRange(source, 0, source.size)))
        except OSError as error:  # of a disk, or of the temporary file
            return unreadable(path, reason(error))
        finally:
            contents.room.close()
        return Scanned.of(path, contents.names, tuple(contents.problems), contents.pickles, allow)

    def told(now: Findings, source: Source) -> Told:
        return path, f"{path} {now.version(source)}"

    try:
        return shared("scan", told, Scanned(path, SAFE), astuple, Scanned.told)(look)(source)
    finally:
        source.close()
