"""The files that paths name: files themselves, and all that lie in folders, here and behind URLs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import CkptToolError
from ..files.failures import reason
from ..remote.places import MOST_NAMES, folders_in, is_folder, listed
from ..remote.urls import is_url

PASSED_OVER = (".git",)  # folders whose objects are compressed copies of what lies beside them
MAX_DEEP = 100  # folders in folders


class Named(NamedTuple):
    """A file to look at, or the reason why what is there can't be."""

    path: str
    fault: str | None = None


def files_in(path: str) -> Iterator[Named]:
    """Yield a file, or the files in a folder and in the folders inside it, by name; links are followed."""
    if path == "-" or not is_folder(path):
        yield Named(path)
    elif is_url(path):
        yield from _remote(path.rstrip("/"), 0)
    else:
        yield from _local(path, ())


def _local(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[Named]:
    """Yield the files in a folder; `above` are those that it lies in, by device and inode."""
    try:
        facts = os.stat(folder)
        with os.scandir(folder) as entries:
            listed_here = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        yield Named(folder, reason(error))
        return
    identity = facts.st_dev, facts.st_ino
    if identity in above:  # a link to a folder that it lies in, whose files were seen
        return
    for entry in listed_here:
        if not _is_folder(entry):
            yield Named(entry.path)
        elif len(above) == MAX_DEEP:
            yield Named(entry.path, f"is more than {MAX_DEEP} folders deep")
        elif entry.name not in PASSED_OVER:
            yield from _local(entry.path, (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: opening it says so
        return False


def _remote(url: str, level: int) -> Iterator[Named]:
    try:
        folders, names = {*folders_in(url)}, listed(url)
    except CkptToolError as error:
        yield Named(url, error.message.removeprefix(f"{url}: "))
        return
    if len(names) >= MOST_NAMES:
        yield Named(url, f"has more than {MOST_NAMES} names, of which the rest was not looked at")
    for name in names:
        inside = f"{url}/{name}"
        if name not in folders:
            yield Named(inside)
        elif level == MAX_DEEP:
            yield Named(inside, f"is more than {MAX_DEEP} folders deep")
        else:
            yield from _remote(inside, level + 1)
