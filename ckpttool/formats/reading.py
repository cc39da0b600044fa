"""Opening a file: its format is found by content, never by its name."""

from __future__ import annotations

import os
from typing import Protocol

from ..checkpoint import Checkpoint
from ..errors import Unsupported
from ..tensor import Source
from ..transfer import open_source_descriptor
from . import safetensors, torch_legacy, torch_zip


class Format(Protocol):
    """What one file a format provides: its name, a look at the first 512 bytes, and reading."""

    NAME: str

    def sniff(self, head: bytes) -> bool: ...

    def read(self, source: Source) -> Checkpoint: ...


READERS: tuple[Format, ...] = (torch_zip, torch_legacy, safetensors)
# Things that stand where a checkpoint should be, by how they begin.
STRANGERS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
    (b"<!doctype html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"<html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first: gunzip"),
    (b"GGUF", "is a GGUF model, another format", None),
    (b"\x89HDF", "is an HDF5 file, another format", None),
)


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads what a file holds, without its values, torch, or running anything the file names.

    Args:
        path: a `.pt` file of any torch since 0.4 or a `.safetensors` file, whatever its name; `-` is stdin.

    Raises:
        Unreadable, Damaged, Unsupported: with the file and the reason.
    """
    name = os.fspath(path)
    return read(Source(name, open_source_descriptor(name)))


def read(source: Source) -> Checkpoint:
    """The same of a file that is open already."""
    head = source.read(0, min(source.size, 512))
    if not head:
        raise Unsupported(
            source.path, "is empty", hint="it was never written, or a copy failed; get it again"
        )
    for reader in READERS:
        if reader.sniff(head):
            return reader.read(source)
    raise _stranger(source.path, head)


def _stranger(name: str, head: bytes) -> Unsupported:
    for start, what, hint in STRANGERS:
        if head.lstrip()[: len(start)].lower() == start.lower():
            return Unsupported(name, what, hint=hint)
    if head[257:262] == b"ustar":
        return Unsupported(
            name, "is a tar archive, torch's format before 0.1.12", hint="save it anew with torch"
        )
    if head[:1] == b"\x80":
        return Unsupported(name, "is a pickle, but not one that torch.save wrote")
    return Unsupported(name, "is not a checkpoint in any format known here")
