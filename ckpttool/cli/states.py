"""Saying which state of a file was chosen."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from .console import Console, printable

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint


def note_state(console: Console, checkpoint: Checkpoint, asked: str | None, *, named: bool = False) -> None:
    """Note which state was chosen, if --state did not name it and there are others.

    Args:
        console: where to print.
        checkpoint: the file.
        asked: the value of --state.
        named: begin with the file's name, because the command reads several.
    """
    taken = next(iter(checkpoint.states()), None) if asked is None else None
    if taken is not None and (others := checkpoint.other_states(taken)):
        where = f"'{printable('.'.join(taken))}'" if taken else "the file itself"
        flags = [f"--state {shlex.quote(other)}" for other in others]
        file = f"{printable(checkpoint.path)}: " if named else ""
        console.note(f"{file}state: {where}; also available: {console.names(flags)}")
