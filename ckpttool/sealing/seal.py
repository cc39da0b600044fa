"""A seal written: the SHA-256 of each tensor and each file of a model, and a statement that others sign."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums
from ..core.checkpoint.state import elsewhere
from ..core.files.digest import digest_of
from ..core.files.threads import Progress
from ..core.formats.folders import folder_of
from ..core.formats.output import OutputPlace
from ..core.formats.reading import File, opened
from ..core.lazy import hashlib
from ..core.remote.places import is_folder
from ..core.remote.urls import canonical, is_url
from ..core.system import join
from ..core.tensors.ref import ByteRange, TensorRef
from ..errors import Refused
from .covered import LEFT_OUT, Hashes, SealScope, named_tensors

VERSION = 1
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://model_signing/signature/v1.0"


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
        Refused: a tensor has values in other files, a file is read that lies elsewhere, one was changed
            while it was read, or in the folder is a link to a folder or to nowhere, or a pipe.
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
        if odd := next((name for name in names if not scope.is_file(name)), None):
            hint = "put the files themselves in its place, or take it out of the folder"
            raise Refused(join(scope.home, odd), "is no file, and a seal covers files alone", hint=hint)
        inside, outside = named_tensors(checkpoint)
        hashes = Hashes([*inside.values(), *outside.values()])
        if expect is not None:
            expect(checkpoint.nbytes)
        with Checksums(checkpoint, checkpoint.storages()) as checksums, hashes:
            sums = dict(scope.hashed(names, progress))
            of_view = hashes.of_views(progress)
            checksums.finish(progress)
        if versions != [source.version for source in checkpoint.sources]:
            hint = "wait until its writer is done"
            raise Refused(checkpoint.path, "was changed while it was read", hint=hint)
        files = {name: sums[name][0] for name in names}
        digest = digest_of(inside, {name: of_view[tensor.view] for name, tensor in inside.items()})
        said: dict[str, Any] = {"seal": VERSION, "format": checkpoint.format, "digest": digest}
        for part, tensors in (("tensors", inside), ("outside", outside)):
            entries = {name: _entry(each, scope, of_view[each.view]) for name, each in tensors.items()}
            said |= {part: entries} if entries or part == "tensors" else {}
        said["files"] = files
        if (of_files := statement(scope, files)) is not None:
            said["statement"] = of_files
        if not dry_run:
            with place.local() as here, here.file() as out:
                out.write(_text(said).encode())
        nbytes = sum(nbytes for _, nbytes in sums.values())
        return SealedModel(place.path, digest, len(inside), tuple(names), nbytes)


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
