"""A seal written: the SHA-256 of each tensor and each file of a model, and a statement that others sign."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums, with_parts
from ..core.checkpoint.state import elsewhere
from ..core.files.digest import digest_of, tensor_digests
from ..core.files.threads import MOST_THREADS, NAME, Progress, cores, cut, in_order
from ..core.formats.folders import folder_of
from ..core.formats.output import OutputPlace
from ..core.formats.reading import File, opened
from ..core.lazy import hashlib
from ..core.remote.places import folders_in, is_folder, listed, open_source_at
from ..core.remote.urls import canonical, is_url
from ..core.system import join
from ..core.tensors.ref import ByteRange, Source, Storage, TensorRef
from ..errors import Refused

VERSION = 1
IN_FOLDER = "ckpttool.seal.json"
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://model_signing/signature/v1.0"

# What is no part of the model in a folder. model-signing leaves out git's files by itself.
LEFT_OUT = (".cache", ".git", ".gitattributes", ".github", ".gitignore", IN_FOLDER, "model.sig")

CHUNK, AHEAD = 1 << 20, 4  # bytes of a file that are hashed at a time, and how many such are in memory


@dataclass(frozen=True, slots=True)
class SealedModel:
    """What `seal` wrote.

    Attributes:
        path: the seal.
        digest: of the model's state, as `ckpttool digest` prints it; of all tensors where there is no state.
        keys: how many tensors the digest covers.
        files: the names of the files that it covers.
        nbytes: how many bytes they have.
    """

    path: str = field(metadata={"json": "output"})
    digest: str
    keys: int
    files: tuple[str, ...]
    nbytes: int = field(metadata={"json": "bytes"})


def seal(
    file: File,
    path: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> SealedModel:
    """Write the SHA-256 of each tensor and each file of a model, by which `verify` knows it again.

    docs/seal.md defines the file. Every byte is read once; values that are computed are made once more.

    Args:
        file: a path, or an open checkpoint. Of a folder, all files in it are covered.
        path: the seal; None for `FILE.seal.json` beside a file, and `ckpttool.seal.json` in a folder.
        force: replace an existing seal.
        dry_run: write nothing; the same result.
        progress: called with the number of bytes after each piece.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        Where the seal is, and what it covers.

    Raises:
        UsageFault: there is a file already (OutputExists), or the place can't be written.
        Refused: a tensor has values in other files, a file is read that lies elsewhere, or one was changed
            while it was read.
        NoState: its tensors lie beside it, by the trainer's --shard parts.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also for a wrong checksum.

    Example:
        >>> ckpttool.seal("model.safetensors").path
        'model.safetensors.seal.json'
        >>> ckpttool.verify("model.safetensors").sealed
        True
    """
    folder = None if isinstance(file, Checkpoint) else canonical(os.fspath(file))
    with opened(file) as checkpoint:
        if fault := elsewhere(checkpoint.path, checkpoint.tree):
            raise fault
        whole = folder if folder is not None and is_folder(folder) else folder_of(checkpoint)
        scope = SealScope(checkpoint, whole)
        names, versions = scope.files(), [source.version for source in checkpoint.sources]
        place = OutputPlace.at(scope.beside if path is None else path, force, (checkpoint,))
        place.require()
        inside, outside = named_tensors(checkpoint)
        hashes = Hashes([*inside.values(), *outside.values()])
        if expect is not None:
            expect(checkpoint.nbytes)
        with Checksums(checkpoint, checkpoint.storages()) as checksums, hashes:
            sums = dict(scope.hashed(names, progress))
            of_view = hashes.digests(progress)
            checksums.finish(progress)
        if versions != [source.version for source in checkpoint.sources]:
            raise Refused(
                checkpoint.path, "was changed while it was read", hint="wait until its writer is done"
            )
        said = _said(scope, inside, outside, of_view) | {"files": {name: sums[name][0] for name in names}}
        if (of_files := statement(scope, said["files"])) is not None:
            said["statement"] = of_files
        if not dry_run:
            with place.local() as here, here.file() as out:
                out.write(_text(said).encode())
        nbytes = sum(nbytes for _, nbytes in sums.values())
        return SealedModel(place.path, said["digest"], len(inside), tuple(names), nbytes)


def _said(
    scope: SealScope,
    inside: Mapping[str, TensorRef],
    outside: Mapping[str, TensorRef],
    of_view: Mapping[object, str],
) -> dict[str, Any]:
    """Return what a seal says of tensors."""

    def entries(tensors: Mapping[str, TensorRef]) -> dict[str, Any]:
        return {name: _entry(each, scope, of_view[each.view]) for name, each in tensors.items()}

    digest = digest_of(inside, {name: of_view[tensor.view] for name, tensor in inside.items()})
    said: dict[str, Any] = {"seal": VERSION, "format": scope.checkpoint.format, "digest": digest}
    return said | {"tensors": entries(inside), **({"outside": entries(outside)} if outside else {})}


def _entry(tensor: TensorRef, scope: SealScope, digest: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": tensor.shape, "sha256": digest}
    if isinstance(data := tensor.data if tensor.is_plain else None, ByteRange):
        entry["place"] = [scope.name_of(data.source), data.offset, data.nbytes]
    return entry


def _text(said: Mapping[str, Any]) -> str:
    """Return JSON with a line for each tensor and each file."""
    lines = []
    for key, value in said.items():
        text = json.dumps(value)
        if isinstance(value, dict) and key != "statement":
            text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            text = f"{{\n{text}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# ---- What a seal covers


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
        """Return the names of all files. Raises Refused where one lies elsewhere."""
        if self.folder is not None:
            return sorted(_names_below(self.folder))
        path = self.checkpoint.path
        if not (is_url(path) or os.path.isfile(path)):
            raise Refused(path, "is no file that a seal could lie beside", hint="seal the files themselves")
        return sorted(self.own())

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
        if name not in below:
            if is_url(at) or os.path.isfile(join(at, name)):
                yield path
        elif is_url(at) or not os.path.islink(join(at, name)):  # which may lead in a circle
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


# ---- Every byte read once, for the hash of its file and that of its tensor


class Hashes:
    """Hashes tensors' values while their bytes are read for another purpose. A context manager."""

    def __init__(self, tensors: Collection[TensorRef]) -> None:
        self._of_view = {tensor.view: tensor for tensor in tensors}
        self._plain: dict[tuple[object, ...], Storage] = {}  # by place: what has one is hashed once
        for tensor in self._of_view.values():
            if tensor.is_plain:
                self._plain.setdefault(_key(tensor), Storage(tensor.data, tensor.storage.kind, digest=""))
        self._sums = Checksums(None, [("", storage) for storage in self._plain.values()])

    def __enter__(self) -> Hashes:
        self._sums.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._sums.__exit__()

    def digests(self, progress: Progress | None = None) -> dict[object, str]:
        """Return the digest of each tensor by its `view`; what was not read so far is read now."""
        plain = dict(zip(self._plain, self._sums.digests(progress), strict=True))
        others = {f"{n}": each for n, each in enumerate(self._of_view.values()) if not each.is_plain}
        made = {others[n].view: value.decode() for n, value in tensor_digests(others, progress)}
        return {view: made.get(view) or plain[_key(each)] for view, each in self._of_view.items()}


def _key(tensor: TensorRef) -> tuple[object, ...]:
    data = tensor.data
    assert isinstance(data, ByteRange)
    return id(data.source), data.offset, data.nbytes


def _sha256(source: Source, progress: Progress | None) -> str:
    """Return the SHA-256 of a file, hashed in a thread beside this one, in which observers see each byte."""
    value = hashlib.sha256()
    if source.size <= CHUNK:
        value.update(source.read(0, source.size))
        return value.hexdigest()
    full, spare = SimpleQueue[memoryview | None](), SimpleQueue[memoryview]()
    for _ in range(AHEAD):
        spare.put(memoryview(bytearray(CHUNK)))

    def update() -> None:
        while (data := full.get()) is not None:
            value.update(data)
            spare.put(memoryview(data.obj))

    beside = Thread(target=update, name=NAME, daemon=True)
    beside.start()
    try:
        for start, size in cut(source.size, CHUNK):
            data = spare.get()[:size]
            source.fill(start, data)
            full.put(data)
            if progress:
                progress(size)
    finally:
        full.put(None)
        beside.join()
    return value.hexdigest()


# ---- What model-signing verifies, once it is signed


def statement(scope: SealScope, sums: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the in-toto statement of model-signing for these files; None for some files of a folder.

    Source: `model_signing/_signing/signing.py` of version 1.1.1, for signatures since 1.0.
    """
    in_folder, alone = resources(sums)
    rows = alone if scope.folder is None else in_folder
    if rows is None:
        return None
    root = hashlib.sha256(b"".join(bytes.fromhex(row["digest"]) for row in rows)).hexdigest()
    home, name = scope.home, os.path.basename(os.path.abspath(scope.folder or scope.checkpoint.path))
    links = not is_url(home) and any(os.path.islink(join(home, each)) for each in sums)
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": links, "ignore_paths": LEFT_OUT}
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE,
        "predicate": {"serialization": how, "resources": rows},
    }


Rows = list[dict[str, str]]


def resources(sums: Mapping[str, str]) -> tuple[Rows, Rows | None]:
    """Return how a statement lists the files of a folder, and how one that is the model; None for several."""
    names = sorted(sums, key=PurePosixPath)
    rows = [{"name": name, "algorithm": "sha256", "digest": sums[name]} for name in names]
    return rows, [{**rows[0], "name": "."}] if len(rows) == 1 else None
