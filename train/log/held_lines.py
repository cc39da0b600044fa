"""Lines for a file on a disk that may be full: held until there is room. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ckpttool.errors import FileError
from train import console

Line = TypeVar("Line")


class HeldLines(Generic[Line]):
    """Lines in order. What the disk refuses is held, and written before the next line.

    Args:
        write: adds one to the file whole, or raises FileError.
    """

    def __init__(self, write: Callable[[Line], object]) -> None:
        self._write = write
        self._held: list[Line] = []

    def add(self, line: Line) -> None:
        """Add a line; if it can't be written, say so and go on."""
        self._held.append(line)
        try:
            self.flush()
        except FileError as error:
            if len(self._held) == 1:
                console.warn(f"{error}; training goes on, and tries again")

    def flush(self) -> None:
        """Write what is held. Raise FileError if the disk still refuses it."""
        while self._held:
            self._write(self._held[0])
            del self._held[0]
