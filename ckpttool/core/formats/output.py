"""The place of an output: what may be replaced there, and how the output gets there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...errors import CkptToolError, OutputExists, UsageFault, already_exists
from ..checkpoint.checkpoint import Checkpoint
from ..files.commit import replacing, require_folder
from ..files.commit_folder import NewFolder, Replaced, check_folder, replacing_folder, unmoved
from ..files.parts import OutputPart, OutputParts
from ..files.reflink import NotShared, Reflink
from ..files.resuming import Attempt
from ..files.threads import Progress
from ..remote.places import uploading
from ..remote.urls import canonical, is_url
from ..system import join
from ..tensors.ref import Source
from .folders import File as Identity
from .folders import identity_at, needed_beside, sources_of
from .reading import File, opened
from .strangers import output_at


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where an output goes, and what may be replaced there.

    Without `force` nothing is replaced, not even what appears while the output is made.

    Attributes:
        path: a file, a folder, `-` or a URL, as messages name it.
        force: replace what is there.
        needed: inputs that are needed beside the output, as the base of a delta is. No file of them is
            replaced, with `force` either.
        own: an input that the output may replace, if it is one file, or the folder itself.
        is_uploaded: it is a temporary place, from which the output goes to a URL.
        url: that URL.
    """

    path: str
    force: bool = False
    needed: Collection[File] = ()
    own: Checkpoint | None = None
    is_uploaded: bool = False
    url: str = ""

    @classmethod
    def at(cls, path: str | os.PathLike[str], *rest: Any) -> OutputPlace:
        """Return the place that a path or URL names; `rest` are the other attributes in their order."""
        return cls(output_at(os.fspath(path)), *rest)

    def require(
        self,
        replaced: Replaced | None = None,
        stay: Callable[[], Collection[str]] = tuple,
        form: str = "the output",
        may_be_empty: bool = True,
    ) -> None:
        """Check that nothing is there, or that it may be replaced.

        Args:
            replaced: returns the files of a folder that are replaced; None for an output that is a file.
            stay: returns the names of other files that may be in that folder.
            form: what the folder is called.
            may_be_empty: whether an empty folder is taken for none.

        Raises:
            UsageFault: the place can't be written.
            OutputExists: what is there may not be replaced.
        """
        path, lost = self.path, [self.path]
        if path == "-" or is_url(path):  # `local` looks at what is there
            self._require_no_input(lost)
            return
        require_folder(path)
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):  # writing tells why
            return
        if replaced and os.path.isdir(path):
            if may_be_empty and not unmoved(path, lambda: os.listdir(path)):
                return
            lost = unmoved(path, lambda: [join(path, name) for name in replaced(path)])
        self._require_no_input({*map(identity_at, lost)})
        if replaced:
            check_folder(path, replaced, stay, form)
        elif os.path.isdir(path):
            raise OutputExists(f"{path}: already exists, and is a folder", hint="name a file in it")
        if not self.force:
            raise already_exists(path)

    def _require_no_input(self, lost: Collection[Identity | str | None]) -> None:
        """Raise OutputExists if a file that would be lost is needed."""
        kept = [(self.own.path, needed_beside(self.own, self.path))] if self.own else []
        inputs = itertools.chain(kept, map(_files_of, self.needed))
        name, files = next((each for each in inputs if not each[1].isdisjoint(lost)), ("", set()))
        if not files:
            return
        is_all = identity_at(name) == identity_at(self.path) and (os.path.isdir(name) or len(files) == 1)
        what = f"the input {name}, which is still needed" if is_all else f"a part of the input {name}"
        stem, ending = os.path.splitext(self.path.rstrip("/"))
        names = (f"{stem}-{number}{ending}" for number in itertools.count(2))
        hint = f"name another output, such as {next(name for name in names if not os.path.lexists(name))}"
        raise OutputExists(f"{self.path}: already exists, and is {what}", hint=hint)

    @contextlib.contextmanager
    def local(
        self,
        dry_run: bool = False,
        progress: Progress | None = None,
        expect: Progress | None = None,
        *,
        is_part: bool = False,
    ) -> Iterator[OutputPlace]:
        """Yield where to write on this machine; what is named by a URL is uploaded when the block ends.

        What `is_part` of an output is not: `parts` sends it. `expect` is called before with the number of
        bytes that are sent, and `progress` with those on their way. Raises OutputExists where something at
        the URL may not be replaced.
        """
        if is_url(self.path):
            self._require_no_input({self.path})
        how: dict[str, Any] = {"dry_run": dry_run or is_part, "progress": progress, "expect": expect}
        with uploading(self.path, replace=self.force or is_part, **how) as path:
            to_url = OutputPlace(path, is_part and self.force, is_uploaded=True, url=self.path)
            yield self if path == self.path else to_url

    def require_meeting(self) -> None:
        """Raise UsageFault unless the parts of an output can meet there."""
        if self.path != "-" and (not is_url(self.path) or self.path.startswith("s3://")):
            return
        what = f"{self.path}: is no place where parts can meet: folders are, and buckets of S3 (s3://)"
        hint = "name one of these, and copy the output from there; or leave out --part, --jobs, torchrun"
        raise UsageFault(what, hint=hint)

    def parts(
        self,
        part: OutputPart,
        plan: Mapping[str, object],
        sizes: Mapping[str, int],
        words: Sequence[str],
        **progress: Progress | None,
    ) -> OutputParts:
        """Return the place where the parts of the output meet."""
        if not self.url:
            return OutputParts(self.path, part, plan, sizes, words)
        from ..remote.uploaded_parts import UploadedParts

        return UploadedParts(self.url, self.path, part, plan, sizes, words, force=self.force, **progress)

    def sharing(self, mode: str, sources: Callable[[], Iterable[Source]]) -> Reflink:
        """Return how the output shares blocks with some files. Raises NotShared if it should, and can't."""
        reflink = Reflink.at(mode, self.path)
        if reflink.is_always:
            if self.path == "-" or self.is_uploaded:
                what = "is no file of this machine, which could share blocks"
                raise NotShared(self.path, what, hint="leave out --reflink always")
            reflink.require(self.path, sources())
        return reflink

    @property
    def mode(self) -> int:
        """The permissions of a new file, as of `cp`: the input's, of several those that all have."""
        mode = 0o666
        for file in (*([self.own] if self.own else ()), *self.needed):
            for facts in facts_of(file):
                mode &= facts.st_mode | 0o600
        return mode

    def file(
        self, attempt: Attempt | None = None, changed: int | None = None
    ) -> AbstractContextManager[BinaryIO]:
        """Open a new file that takes this place, as `replacing` does."""
        return replacing(self.path, attempt, changed, exclusive=not self.force, mode=self.mode)

    def folder(
        self, replaced: Replaced, kept: Collection[str] = (), attempt: Attempt | None = None
    ) -> AbstractContextManager[NewFolder]:
        """Make a folder that takes this place, as `replacing_folder` does."""
        return replacing_folder(self.path, replaced, kept, attempt, exclusive=not self.force, mode=self.mode)


def facts_of(file: File) -> Iterator[os.stat_result]:
    """Yield the facts of an input's files on this machine, but of what came by a pipe: that has no name."""
    if isinstance(file, Checkpoint):
        found = [os.fstat(source.fd) for source in file.sources if source.is_local]
        yield from (facts for facts in found if facts.st_nlink)
        return
    path = canonical(os.fspath(file))
    pieces = [path] if is_url(path) or os.path.lexists(path) else path.split("+")
    for piece in pieces:
        inside = [join(piece, name) for name in os.listdir(piece)] if os.path.isdir(piece) else [piece]
        for name in inside:
            with contextlib.suppress(OSError):
                yield os.stat(name)


def _files_of(file: File) -> tuple[str, set[Identity | str]]:
    """Return an input's name and the identities of its files: all that a chain of deltas is read from."""
    if isinstance(file, Checkpoint):
        return file.path, {*sources_of(file)}
    path = canonical(os.fspath(file))
    if is_url(path):
        return path, {path}
    pieces = path.split("+")
    if all(os.path.isfile(piece) or os.path.isdir(piece) for piece in pieces):  # and no pipe is emptied
        with contextlib.suppress(CkptToolError), opened(path) as checkpoint:
            return _files_of(checkpoint)
    names = [join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path, *pieces]
    return path, {found for name in names if (found := identity_at(name))}
