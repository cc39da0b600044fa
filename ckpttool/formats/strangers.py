"""What lies where a checkpoint should, by its first bytes: an LFS pointer, a web page, another format."""

from __future__ import annotations

import shlex

from ..errors import Unsupported

# What is found in the place of a checkpoint, by its first bytes: what it is, and what to do.
STRANGERS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
    (b"<!doctype html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"<html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first: gunzip"),
    (b"GGUF", "is a GGUF model, another format", None),
    (b"\x89HDF", "is an HDF5 file, another format", None),
)


def known(name: str, head: bytes) -> Unsupported | None:
    """Return the error for a file that begins as something else does; None for one that begins otherwise."""
    for start, what, hint in STRANGERS:
        if head.lstrip()[: len(start)].lower() == start.lower():
            return Unsupported(name, what, hint=hint)
    return None


def stranger(name: str, head: bytes) -> Unsupported:
    """Return the error for a file that is no checkpoint."""
    if (fault := known(name, head)) is not None:
        return fault
    if head[:1] == b"\x80":
        listed = f"see what is in it, without running it: python -m pickletools {shlex.quote(name)}"
        return Unsupported(name, "is a pickle, but not one that torch.save wrote", hint=listed)
    return Unsupported(name, "is not a checkpoint in any format known here")
