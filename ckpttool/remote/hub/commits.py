"""Files that go to a repository of the hub in one commit, and are compared with it afterwards."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...errors import Damaged, Refused, UsageFault, already_exists
from ..patience import Patience
from ..store import Facts, Progress
from ..web.transport import Transport
from .api import About
from .calls import call, client
from .tree import SHA, Commit, look

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

T = TypeVar("T")


class Upload:
    """Local files on their way to a branch of a repository."""

    def __init__(
        self, about: About, files: Mapping[str, str], patience: Patience, transport: Transport
    ) -> None:
        """Look at the files: path in the repository -> local path."""
        from huggingface_hub import CommitOperationAdd

        if about.revision and SHA.fullmatch(about.revision):
            raise UsageFault(f"{about.url}: a commit takes no files", hint="name a branch")
        absent = (
            f"make it first: `hf repos create {about.argument}`, signed in by `hf auth login` or HF_TOKEN"
        )
        self._about, self._patience, self._transport = about._replace(absent=absent), patience, transport
        self._paths = {key: os.path.abspath(path) for key, path in files.items()}
        try:
            self._additions = [CommitOperationAdd(key, path) for key, path in self._paths.items()]
        except ValueError as error:  # no file is there, or a name that git has no place for
            raise UsageFault(f"{about.url}: {error}") from None

    def commit(self, *, replace: bool, progress: Progress | None) -> Commit:
        """Send the files, and add them by one commit, which is returned. Raises as `Store.put` does."""
        # The library warns of names that it finds unusual, and of its own ways.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._compared(self._sent(replace, progress))

    def _sent(self, replace: bool, progress: Progress | None) -> Commit:
        head = self._head(replace)
        # One after another: an interrupt would have to wait for all that a pool of threads has begun.
        for addition in self._additions:
            self._call(partial(self._send, addition))
            if progress:
                progress(addition.upload_info.size)
        for _ in range(self._patience.attempts):
            sha = self._call(partial(self._add, None if replace else head.sha))
            if sha is not None:
                return self._look(sha)
            head = self._head(replace)
        raise Refused(self._about.url, "others commit to it all the time", hint="run the command again")

    def _call(self, do: Callable[[], T]) -> T:
        return call(self._about, do, self._patience)

    def _look(self, revision: str | None) -> Commit:
        return look(self._about, revision, self._transport)

    def _head(self, replace: bool) -> Commit:
        """Return the branch's newest commit, which has none of the files, if they are not to be replaced."""
        head = self._look(self._about.revision)
        if not replace and (there := next(filter(head.facts, self._paths), None)):
            raise already_exists(f"{self._about.url}/{there}")
        return head

    def _send(self, addition: CommitOperationAdd) -> None:
        client().preupload_lfs_files(
            self._about.name,
            [addition],
            repo_type=self._about.kind,
            revision=self._about.revision,
            free_memory=False,
        )

    def _add(self, parent: str | None) -> str | None:
        """Commit the files; return the commit's hash, or None if the branch is no longer at `parent`."""
        from huggingface_hub.errors import HfHubHTTPError

        names = list(self._paths)
        message = f"Add {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        try:
            done = client().create_commit(
                self._about.name,
                self._additions,
                commit_message=f"{message} with ckpttool",
                repo_type=self._about.kind,
                revision=self._about.revision,
                parent_commit=parent,
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            return None
        return done.oid

    def _compared(self, commit: Commit) -> Commit:
        for addition in self._additions:
            key = addition.path_in_repo
            if not self._is_same(addition, commit.facts(key)):
                url = f"{self._about.url}/{key}"
                raise Damaged(url, "the hub does not have what was sent", hint="run the command again")
        return commit

    def _is_same(self, addition: CommitOperationAdd, facts: Facts | None) -> bool:
        if facts is None or facts.size != addition.upload_info.size:
            return False
        if facts.content:
            return facts.content == f"sha256:{addition.upload_info.sha256.hex()}"
        with open(self._paths[addition.path_in_repo], "rb") as file:
            git = hashlib.sha1(b"blob %d\0" % facts.size, usedforsecurity=False)
            while block := file.read(1 << 20):
                git.update(block)
        return facts.identity == f"git:{git.hexdigest()}"
