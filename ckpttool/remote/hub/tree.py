"""A commit of a repository of the hub, and what it holds: sizes and hashes, mostly by one request."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ..store import Facts
from ..web.transport import Transport
from .api import About, NoEntry, ask, ask_all, understood

SHA = re.compile("[0-9a-f]{40}")

# Of more files the hub's description of a repository may leave some out (huggingface_hub#3565).
SURE = 1000

Folder = dict[str, Facts | None]  # name -> facts of a file, None of a folder


@dataclass
class Commit:
    """A commit, whose folders are asked for when they are needed, or known from the beginning."""

    about: About
    name: str  # of the repository, as the hub calls it today
    sha: str
    transport: Transport
    is_whole: bool  # whether all folders are known
    folders: dict[str, Folder] = field(default_factory=dict)

    def folder(self, folder: str) -> Folder:
        """Return what is directly in a folder; nothing, if there is none."""
        if folder in self.folders or self.is_whole or {".", ".."} & {*folder.split("/")}:
            return self.folders.get(folder, {})
        return self.folders.setdefault(folder, self._tree(folder))

    def facts(self, key: str) -> Facts | None:
        """Return the facts of a file, or None if there is none."""
        folder, _, name = key.rpartition("/")
        return self.folder(folder).get(name)

    def near(self, key: str) -> list[str]:
        """Return the known files whose names are most like this one."""
        known = [
            f"{folder}/{name}" if folder else name
            for folder, names in self.folders.items()
            for name, facts in names.items()
            if facts
        ]
        return difflib.get_close_matches(key, known, n=3)

    def _tree(self, folder: str) -> Folder:
        path = f"{_address(self.about.kind, self.name)}/tree/{self.sha}"
        found = Folder()
        with suppress(NoEntry), understood(self.about):
            for entry in ask_all(self.about, f"{path}/{quote(folder, safe='')}".rstrip("/"), self.transport):
                name = entry["path"].rpartition("/")[2]
                found[name] = _facts_of(entry, "oid") if entry["type"] == "file" else None
        return found


def look(about: About, revision: str | None, transport: Transport) -> Commit:
    """Ask which commit a revision is, and what is in it. Raises Missing, Unreadable."""
    path = _address(about.kind, about.name) + (f"/revision/{quote(revision, safe='')}" if revision else "")
    told = ask(about, f"{path}?blobs=true", transport)
    with understood(about):
        if not SHA.fullmatch(told["sha"]):
            raise ValueError("it names no commit")
        commit = Commit(about, str(told["id"]), told["sha"], transport, is_whole=False)
        siblings = told.get("siblings") or []
        if 0 < len(siblings) <= SURE:
            files = {file["rfilename"]: _facts_of(file, "blobId") for file in siblings}
            commit.folders, commit.is_whole = _by_folder(files), True
    return commit


def _address(kind: str, name: str) -> str:
    return f"/api/{kind}s/{quote(name)}"


def _facts_of(entry: Mapping[str, Any], hashed: str) -> Facts:
    """Return the facts of a file: of a large one the hub knows the SHA-256, of another git's hash."""
    large = entry.get("lfs")
    digest = f"sha256:{large.get('sha256') or large['oid']}" if large else ""
    size = int((large or entry)["size"])
    if size < 0 or not (digest or entry[hashed]):
        raise ValueError("it tells no sizes")
    return Facts(size, digest or f"git:{entry[hashed]}", digest)


def _by_folder(files: Mapping[str, Facts]) -> dict[str, Folder]:
    folders: dict[str, Folder] = {"": {}}
    for path, facts in files.items():
        *parents, name = path.split("/")
        for depth, parent in enumerate(parents):
            folders.setdefault("/".join(parents[:depth]), {})[parent] = None
        folders.setdefault("/".join(parents), {})[name] = facts
    return folders
