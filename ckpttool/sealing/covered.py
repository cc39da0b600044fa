"""What a seal covers: files and tensors, each hashed in one pass over every byte."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums, with_parts
from ..core.files.digest import tensor_digests
from ..core.files.threads import MOST_THREADS, NAME, Progress, cores, cut, in_order
from ..core.lazy import hashlib
from ..core.remote.places import folders_in, listed, open_source_at
from ..core.remote.urls import is_url
from ..core.system import join
from ..core.tensors.ref import ByteRange, Source, Storage, TensorRef
from ..errors import Refused

if TYPE_CHECKING:
    from concurrent.futures import Future

IN_FOLDER = "ckpttool.seal.json"

# What is no part of the model in a folder. model-signing leaves out git's files by itself.
LEFT_OUT = (".cache", ".git", ".gitattributes", ".github", ".gitignore", IN_FOLDER, "model.sig")

CHUNK, AHEAD = 1 << 20, 4  # bytes of a file that are hashed at a time, and how many such are in memory


@dataclass(frozen=True, slots=True)
class SealScope:
    """What a seal covers: the files that a checkpoint is read from, or all in a folder.

    Attributes:
        checkpoint: the open model.
        folder: the folder; None for the files alone.
    """

    checkpoint: Checkpoint
    folder: str | None

    @property
    def home(self) -> str:
        """The folder that the names of files are in."""
        return os.path.dirname(self.checkpoint.path) if self.folder is None else self.folder

    @property
    def beside(self) -> str:
        """Where the seal lies, if nobody says otherwise."""
        return f"{self.checkpoint.path}.seal.json" if self.folder is None else join(self.folder, IN_FOLDER)

    def own(self) -> dict[str, Source]:
        """Return the files that the checkpoint is read from, by their names."""
        return {self.name_of(source): source for source in reversed(self.checkpoint.sources)}

    def files(self) -> list[str]:
        """Return the names of all files, and of links and pipes. Raises Refused where one lies elsewhere."""
        if self.folder is not None:
            return sorted(_names_below(self.folder))
        path = self.checkpoint.path
        if not (is_url(path) or os.path.isfile(path)):
            raise Refused(path, "is no file that a seal could lie beside", hint="seal the files themselves")
        return sorted(self.own())

    def is_file(self, name: str) -> bool:
        """Return whether a name is that of a file, and not of a link to a folder or to nowhere, or a pipe."""
        return is_url(self.home) or os.path.isfile(join(self.home, name))

    def name_of(self, source: Source) -> str:
        """Return the name of a file. Raises Refused if it lies elsewhere."""
        place, home = source.place, self.home
        if is_url(home):
            name = place.removeprefix(home.rstrip("/") + "/")
        else:
            name = os.path.relpath(place, home or ".").replace(os.sep, "/")
        if is_url(name) or name.split("/")[0] == "..":
            what = "is read for this model, and lies in another folder"
            raise Refused(place, what, hint="seal it by itself")
        return name

    def hashed(
        self, names: Collection[str], progress: Progress | None = None
    ) -> Iterator[tuple[str, tuple[str, int]]]:
        """Yield files with their SHA-256 and their size; observers see the bytes of the checkpoint's own."""
        own = self.own()

        def work(name: str) -> tuple[str, tuple[str, int]]:
            source = own.get(name) or open_source_at(join(self.home, name))
            return name, (_sha256(source, progress), source.size)

        # Each is read in a thread, which hashes tensors, and hashed as a file in another.
        return in_order((partial(work, name) for name in names), max(1, cores(MOST_THREADS) // 2))


def _names_below(folder: str, inside: str = "") -> Iterator[str]:
    at = join(folder, inside) if inside else folder
    below = set(folders_in(at))
    for name in listed(at):
        path = join(inside, name) if inside else name
        if path in LEFT_OUT:
            continue
        if name not in below or (not is_url(at) and os.path.islink(join(at, name))):
            yield path  # a link to a folder may lead in a circle
        else:
            yield from _names_below(folder, path)


def named_tensors(checkpoint: Checkpoint) -> tuple[dict[str, TensorRef], dict[str, TensorRef]]:
    """Return a model's tensors by the names that `digest` has for them, and all others by dotted paths.

    Without a state, the first are all. Raises Refused where values are in other files.
    """
    checkpoint.require_whole()
    state = checkpoint.found_state()
    if state is None:
        return dict(checkpoint.tensors()), {}
    inside = with_parts(checkpoint.path, state)
    views = {tensor.view for tensor in inside.values()}
    outside = {name: tensor for name, tensor in checkpoint.tensors() if tensor.view not in views}
    return inside, outside


class Hashes(Checksums):
    """Hashes tensors' values while their bytes are read for another purpose. A context manager."""

    def __init__(self, tensors: Collection[TensorRef]) -> None:
        self._of_view = {tensor.view: tensor for tensor in tensors}
        self._plain: dict[tuple[object, ...], Storage] = {}  # by place: what has one is hashed once
        for tensor in self._of_view.values():
            if tensor.is_plain:
                self._plain.setdefault(_key(tensor), Storage(tensor.data, tensor.storage.kind, digest=""))
        super().__init__(None, [("", storage) for storage in self._plain.values()])

    def of_views(self, progress: Progress | None = None) -> dict[object, str]:
        """Return the digest of each tensor by its `view`; what was not read so far is read now."""
        plain = dict(zip(self._plain, self.digests(progress), strict=True))
        others = {f"{n}": each for n, each in enumerate(self._of_view.values()) if not each.is_plain}
        made = {others[n].view: value.decode() for n, value in tensor_digests(others, progress)}
        return {view: made.get(view) or plain[_key(each)] for view, each in self._of_view.items()}


def _key(tensor: TensorRef) -> tuple[object, ...]:
    data = tensor.data
    assert isinstance(data, ByteRange)
    return id(data.source), data.offset, data.nbytes


def _sha256(source: Source, progress: Progress | None) -> str:
    """Return the SHA-256 of a file, hashed in a thread beside this one, in which observers see each byte."""
    from concurrent.futures import ThreadPoolExecutor  # loads logging

    value = hashlib.sha256()
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, NAME) as beside:
        for start, size in cut(source.size, CHUNK):
            source.fill(start, data := memoryview(bytearray(size)))
            waiting.append(beside.submit(value.update, data))
            if len(waiting) == AHEAD:
                waiting.popleft().result()
            if progress:
                progress(size)
    return value.hexdigest()
