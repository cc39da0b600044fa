"""Outputs read back before they count: what was written must be what was meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

from ...errors import Damaged, FileError
from ...files.pieces import Progress
from ..safetensors import Tensors

UNFIT = "does not read back as intended, and was not kept"


@contextmanager
def read_back(path: str, folder: str) -> Iterator[None]:
    """Say of what is wrong with the new folder, not yet in its place, that the output was not kept."""
    try:
        yield
    except FileError as fault:
        if fault.path == path:  # from `require_same`
            raise
        reason = fault.message.replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")
        raise Damaged(path, f"{UNFIT}: {reason}") from None


def require_same(
    path: str, written: Tensors, meant: Tensors, *, values: bool, progress: Progress | None
) -> None:
    """Raise Damaged unless tensors were written as meant: names, types and shapes, or values too."""
    if not _are_same(written, meant) or (values and _digest(meant, progress) != _digest(written, progress)):
        raise Damaged(path, UNFIT)


def _are_same(written: Tensors, meant: Tensors) -> bool:
    if written.keys() != meant.keys():
        return False
    both = [*written.values()], [*map(meant.__getitem__, written)]
    columns = map(attrgetter, ("dtype", "shape"))
    return all([*map(column, both[0])] == [*map(column, both[1])] for column in columns)


def _digest(tensors: Tensors, progress: Progress | None) -> str:
    from ...files.digest import digest  # whose hashlib loads OpenSSL

    return digest(tensors, progress)
