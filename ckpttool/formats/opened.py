"""Take a path or an open checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..checkpoint.checkpoint import Checkpoint
from .reading import open as open_checkpoint

# A checkpoint that `open` returned, or the path of one.
File = Checkpoint | str | os.PathLike[str]


@contextmanager
def opened(file: File) -> Iterator[Checkpoint]:
    """Give a checkpoint; one that was opened from a path is closed at the end."""
    if isinstance(file, Checkpoint):
        yield file
        return
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"takes a path or an open checkpoint, not {type(file).__name__}")
    with open_checkpoint(file) as checkpoint:
        yield checkpoint
