"""A commit of a repository of the hub, and what it holds: sizes and hashes, mostly by one request."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..patience import Patience
from ..store import Facts
from .calls import About, call, client

if TYPE_CHECKING:
    from huggingface_hub.hf_api import BlobLfsInfo

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
    patience: Patience
    is_whole: bool  # whether all folders are known
    folders: dict[str, Folder] = field(default_factory=dict)

    def folder(self, folder: str) -> Folder:
        """Return what is directly in a folder; nothing, if there is none."""
        if folder in self.folders or self.is_whole or {".", ".."} & {*folder.split("/")}:
            return self.folders.get(folder, {})
        return self.folders.setdefault(
            folder, call(self.about, lambda: self._tree(folder), self.patience, reconnects=False)
        )

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
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        found = Folder()
        tree = client().list_repo_tree(
            self.name, folder or None, repo_type=self.about.kind, revision=self.sha
        )
        try:
            for entry in tree:
                facts = None
                if isinstance(entry, RepoFile):
                    facts = facts_of(entry.size, entry.blob_id, entry.lfs)
                found[entry.path.rpartition("/")[2]] = facts
        except EntryNotFoundError:
            return {}
        return found


def look(about: About, revision: str | None, patience: Patience) -> Commit:
    """Ask which commit a revision is, and what is in it. Raises Missing, Unreadable."""

    def do() -> Commit:
        told = client().repo_info(about.name, repo_type=about.kind, revision=revision, files_metadata=True)
        if not SHA.fullmatch(told.sha or ""):
            raise ValueError("it names no commit")
        commit = Commit(about, told.id, str(told.sha), patience, is_whole=False)
        siblings = getattr(told, "siblings", None) or []
        if 0 < len(siblings) <= SURE:
            files = {file.rfilename: facts_of(file.size, file.blob_id, file.lfs) for file in siblings}
            commit.folders, commit.is_whole = _by_folder(files), True
        return commit

    return call(about, do, patience)


def facts_of(size: int | None, blob: str | None, large: BlobLfsInfo | None) -> Facts:
    """Return the facts of a file: of a large one the hub knows the SHA-256, of another git's hash."""
    if large is not None:
        return Facts(large.size, f"sha256:{large.sha256}", f"sha256:{large.sha256}")
    if size is None or not blob:
        raise ValueError("it tells no sizes")
    return Facts(size, f"git:{blob}")


def _by_folder(files: Mapping[str, Facts]) -> dict[str, Folder]:
    folders: dict[str, Folder] = {"": {}}
    for path, facts in files.items():
        *parents, name = path.split("/")
        for depth, parent in enumerate(parents):
            folders.setdefault("/".join(parents[:depth]), {})[parent] = None
        folders.setdefault("/".join(parents), {})[name] = facts
    return folders
