"""Read a pickle whose length is known only once it was read, from within a file.

The file is not mapped: when another process shortens a mapped file, touching it ends this process with
SIGBUS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...inert_pickle.machine import CutShort
from ...inert_pickle.reader import Pickle
from ...tensors.ref import Source

# Bytes that are read first, and how many times more each time they were not enough.
FIRST, GROWTH = 1 << 16, 8


def read_unsized(
    source: Source, start: int, end: int, read: Callable[[bytes], Pickle], first: int = FIRST
) -> Pickle:
    """Read the pickle that begins at byte `start` of a file."""
    size = first
    while True:
        data = source.read(start, min(size, end - start))
        try:
            found = read(data)
        except CutShort:
            if size >= end - start:
                raise
            size *= GROWTH
        else:
            return replace(found, end=start + found.end)
