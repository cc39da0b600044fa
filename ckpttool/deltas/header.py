"""What a delta says of itself in the header of its file (docs/deltas.md defines it)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.commit import naming
from ..core.formats import safetensors
from ..core.formats.safetensors import DELTA, parse_object
from ..core.system import join
from ..core.tensors import ref
from ..errors import CkptToolError, Damaged, FileError, Unreadable, Unsupported

VERSION = 1
ENTRY = DELTA  # in the header's metadata: what this file reads
TREE = "ckpttool.delta.tree"  # beside it: the newer checkpoint's tree, as docs/full-format.md has it

BLOCK = 1 << 20  # bytes of a tensor that are packed together, and that a reader makes at once

# How a tensor is kept: as the base's, as places and values, as the packed XOR with the base's, or whole.
SAME, SPARSE, XOR, NEW = "same", "sparse", "xor", "new"
PARTS = {SAME: 0, SPARSE: 2, XOR: 1, NEW: 1}  # how many tensors of the file each of them takes

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Base:
    """The older checkpoint; the checksums of its tensors are in the entries of those that are made of them.

    Attributes:
        name: its file or folder, which may lie beside the delta; "" for standard input.
        prefix: what stands before the names of its state's tensors, `model.`.
    """

    name: str
    prefix: str


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """How one tensor is kept.

    Attributes:
        kind: SAME, SPARSE, XOR or NEW.
        dtype, shape: its own.
        crc32, digest: of its values; the digest as docs/digest.md defines that of a tensor.
        parts: the tensors of the file that hold it -> the CRC-32 of their bytes.
        base: the name of the base's tensor; None for NEW.
        base_crc32: of that tensor's values.
    """

    kind: str
    dtype: ref.DType
    shape: tuple[int, ...]
    crc32: int
    digest: str
    parts: Mapping[str, int]
    base: str | None = None
    base_crc32: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return 0 if 0 in self.shape else ref.extent(self.shape)

    def over(self, storage: ref.Storage) -> ref.TensorRef:
        """Return the tensor, its values those of a storage."""
        return ref.TensorRef(storage, self.dtype, self.shape, ref.contiguous_stride(self.shape))

    def to_json(self) -> dict[str, Any]:
        """Return the object that stands in the header."""
        said: dict[str, Any] = {"as": self.kind, "dtype": self.dtype.name, "shape": self.shape}
        said |= {"crc32": self.crc32, "digest": self.digest, "in": self.parts}
        return said if self.base is None else {**said, "base": self.base, "base_crc32": self.base_crc32}


@dataclass(frozen=True, slots=True)
class Header:
    """What a delta says.

    Attributes:
        base: the older checkpoint.
        digest: of the newer one's state, as `ckpttool digest` prints it; None where it has none, or it can't
            be said which.
        tree: the SHA-256 of the text of the newer one's tree.
        full: the newer one is a file of tensors that held a whole checkpoint.
        metadata: the newer one's text in a header of safetensors.
        tensors: how each tensor of the newer one is kept, by the name that `--full` gives it.
    """

    base: Base
    digest: str | None
    tree: str
    full: bool
    metadata: Mapping[str, str]
    tensors: Mapping[str, DeltaEntry] = field(repr=False)

    @property
    def whole(self) -> str:
        """The digest of all tensors of the newer one, which follows from what is said of each."""
        from ..core.files.digest import digest_of  # whose hashlib loads OpenSSL

        return digest_of(self.tensors, {name: entry.digest for name, entry in self.tensors.items()})

    def to_text(self) -> str:
        """Return the text of the entry."""
        new = {"full": self.full, "metadata": self.metadata, "tree": self.tree}
        said = {
            "version": VERSION,
            "block": BLOCK,
            "base": {"name": self.base.name, "prefix": self.base.prefix},
            "new": {**new, "digest": self.digest, "whole": self.whole},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def is_delta(checkpoint: Checkpoint) -> bool:
    """Return whether a file of tensors is a delta."""
    return ENTRY in checkpoint.metadata


class BadHeader(ValueError):
    """Something in a header that no delta has; its text follows the entry's name."""


def read_header(file: Checkpoint) -> Header:
    """Return what a delta says of itself.

    Raises:
        Damaged: it breaks the rules of docs/deltas.md.
        Unsupported: it is of a later version.
    """
    said = parse_object(file.path, file.metadata[ENTRY].encode(), f"its entry '{ENTRY}'")
    if said.get("version") != VERSION or said.get("block") != BLOCK:
        version = f"{said.get('version')!r}"[:20]
        raise Unsupported(file.path, f"is a delta of version {version}, and this reads {VERSION}")
    try:
        tensors = {name: _entry(name, entry) for name, entry in _object(said.get("tensors")).items()}
        base, new = _object(said.get("base")), _object(said.get("new"))
        found = Base(_file_name(base.get("name")), _text(base.get("prefix")))
        metadata = {name: _text(text) for name, text in _object(new.get("metadata")).items()}
        of_state = None if new.get("digest") is None else _digest(new.get("digest"))
        header = Header(found, of_state, _tree(file, new), new.get("full") is True, metadata, tensors)
    except BadHeader as fault:
        raise Damaged(file.path, f"its entry '{ENTRY}' {fault}") from None
    if new.get("whole") != header.whole:
        what = f"its entry '{ENTRY}' has another digest than follows from what it says of its tensors"
        raise Damaged(file.path, what)
    return header


def base_name(path: str, text: str) -> str:
    """Return the name that an entry states for the base; "" for none. Raises Damaged."""
    said = parse_object(path, text.encode(), f"its entry '{ENTRY}'")
    try:
        return _file_name(_object(said.get("base")).get("name"))
    except BadHeader as fault:
        raise Damaged(path, f"its entry '{ENTRY}' {fault}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadHeader("lacks something, or has it in another form")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadHeader("has a name that is no text")
    return value


def _tree(file: Checkpoint, new: Mapping[str, Any]) -> str:
    """Return the digest of the tree's text, which must be that of the text in the file."""
    if new.get("tree") != (found := digest_of_tree(file.metadata.get(TREE, ""))):
        raise BadHeader(f"has the digest of another tree than that in '{TREE}'")
    return found


def digest_of_tree(text: str) -> str:
    """Return the SHA-256 of the text of a tree."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def _file_name(value: Any) -> str:
    name = _text(value)
    if name and (name != os.path.basename(name) or name in (".", "..") or "\0" in name):
        raise BadHeader(f"names the base {name[:80]!r}, which is no name of a file beside it")
    return name


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise BadHeader("has a digest that is none")
    return value


def _entry(name: str, value: Any) -> DeltaEntry:
    said = _object(value)
    kind, parts, shape = _text(said.get("as")), _object(said.get("in")), said.get("shape")
    dtype = ref.ALL_DTYPES.get(_text(said.get("dtype")))
    if dtype is None or dtype.safetensors is None:
        raise BadHeader(f"has a type of '{name[:80]}' that safetensors lacks")
    if not isinstance(shape, list) or len(shape) > ref.MAX_AXES or not all(map(ref.is_count, shape)):
        raise BadHeader(f"has a malformed shape of '{name[:80]}'")
    if ref.extent(shape) * dtype.itemsize > ref.MAX_BYTES:
        raise BadHeader(f"has a shape of '{name[:80]}' larger than any file")
    base, digest = said.get("base"), _digest(said.get("digest"))
    sums = [said.get("crc32"), *parts.values(), *([said.get("base_crc32")] if "base" in said else [])]
    if PARTS.get(kind) != len(parts) or not all(map(_is_crc, sums)) or (kind == NEW) != (base is None):
        raise BadHeader(f"has a malformed entry for '{name[:80]}'")
    if kind == SAME and sums[0] != sums[-1]:
        raise BadHeader(f"says that '{name[:80]}' is the base's, with another checksum")
    of_base = () if base is None else (_text(base), sums[-1])
    return DeltaEntry(kind, dtype, tuple(shape), sums[0], digest, parts, *of_base)


def _is_crc(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


# ---- Which files deltas are built on: nothing but their headers is read.


def base_of(path: str) -> str | None:
    """Return where the base of a delta lies if it lies beside it; None of a file that is no delta.

    Raises:
        Unreadable: it is not there.
        FileError: the disk refuses to read it.
        Damaged: it is a delta that states no base, or has no header where one should be.
    """
    try:
        with naming(path, "read"), open(path, "rb") as file:
            head = file.read(9)
            if not safetensors.sniff(head):
                return None
            raw = head[8:] + file.read(int.from_bytes(head[:8], "little") - 1)
    except FileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise Unreadable(path, "is not there") from error
        raise
    metadata = parse_object(path, raw, "its header").get(safetensors.METADATA)
    text = metadata.get(ENTRY) if isinstance(metadata, dict) else None
    return join(os.path.dirname(path), base_name(path, text)) if isinstance(text, str) else None


def chain(path: str) -> list[str]:
    """Return a file and what it is built on, down to one that is no delta.

    Raises:
        Unreadable, FileError, Damaged: as `base_of`, for any of them; Unreadable also for a circle.
    """
    found = [path]
    while (base := base_of(found[-1])) is not None:
        if base in found:
            raise Unreadable(path, "is its own base, by way of others")
        found.append(base)
    return found


def needed_by(paths: Iterable[str]) -> set[str]:
    """Return files, and what they are built on as far as it can be read."""
    found: set[str] = set()
    for path in paths:
        below: str | None = path
        while below is not None and below not in found:
            found.add(below)
            with suppress(CkptToolError):
                below = base_of(below)
    return found
