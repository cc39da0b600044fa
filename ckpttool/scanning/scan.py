"""Files scanned: each opened, looked into, and judged."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator

from ..errors import CkptToolError, FileError
from ..files.failures import reason
from ..remote import places
from ..remote.urls import canonical
from ..tensors.source import ByteRange
from .contents import Contents, Part
from .verdicts import Scanned, unreadable
from .walking import Named, files_in


def scan(path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> list[Scanned]:
    """Return what could run in a file, or in each file of a folder, when it is unpickled.

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
    with places.visit():
        return [*scan_each(named_in([path]), allow)]


def named_in(paths: Iterable[str | os.PathLike[str]]) -> list[Named]:
    """Return the files that paths name, those in folders too."""
    return [named for path in paths for named in _named_at(os.fspath(path))]


def _named_at(path: str) -> list[Named]:
    try:
        return [*files_in(canonical(path))]
    except CkptToolError as error:
        return [Named(path, _reason(error))]


def scan_each(files: Iterable[Named], allow: Collection[str] = ()) -> Iterator[Scanned]:
    """Yield what is found in each file, in their order."""
    for path, fault in files:
        yield _scanned(path, allow) if fault is None else unreadable(path, fault)


def _scanned(path: str, allow: Collection[str]) -> Scanned:
    try:
        source = places.open_source_at(path)
    except CkptToolError as error:
        return unreadable(path, _reason(error))
    contents = Contents(source)
    try:
        contents.look(Part(ByteRange(source, 0, source.size)))
    except OSError as error:  # of a disk, or of the temporary file
        return unreadable(path, reason(error))
    finally:
        source.close()
        contents.room.close()
    return Scanned.of(path, contents.names, tuple(contents.problems), contents.pickles, allow)


def _reason(error: CkptToolError) -> str:
    return error.reason if isinstance(error, FileError) else error.message
