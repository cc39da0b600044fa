"""The files of a folder, each under all the names that it has there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .commit import LINK
from .failures import naming


@dataclass(slots=True)
class LinkedFile:
    """A regular file of a folder.

    Attributes:
        names: hard links, at least one, sorted.
        facts: what is known of it.
        symlinks: symbolic links in the folder that lead to it.
    """

    names: list[str]
    facts: os.stat_result
    symlinks: list[str] = field(default_factory=list)


def files_in(folder: str) -> list[LinkedFile]:
    """Return the regular files that lie in a folder; those with a dot before their name are passed over.

    FileError if the disk does not tell.
    """
    found: dict[tuple[int, int], LinkedFile] = {}
    with naming(folder, "listed"):
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))
        for entry in entries:
            if not entry.is_file() or entry.name.startswith("."):
                continue
            facts = os.stat(entry.path)  # on Windows, that of an entry does not tell files apart
            identity = facts.st_dev, facts.st_ino
            if not entry.is_symlink():
                found.setdefault(identity, LinkedFile([], facts)).names.append(entry.name)
            elif identity in found:
                found[identity].symlinks.append(entry.name)
    return list(found.values())


def remove_half_given(folder: str) -> None:
    """Remove the links that a kill in `give_name` has left: to a new file, beside an old one."""
    files = files_in(folder)
    of_name = {name: file for file in files for name in file.names}
    for name, file in of_name.items():
        other = of_name.get(name.removesuffix(LINK))
        if name.endswith(LINK) and other not in (None, file) and file.names[1:]:
            with naming(os.path.join(folder, name), "removed"):
                os.unlink(os.path.join(folder, name))
