"""Saying which state of a file was chosen, and what of it is not read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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
    taken = checkpoint.found_state() if asked is None else None
    if taken is not None:
        file = f"{checkpoint.path}: " if named else ""
        note_choice(console, taken.where, checkpoint.other_states(taken.path), file)


def note_unread(console: Console, *checkpoints: Checkpoint) -> None:
    """Note what a comparison of checkpoints can't see, such as values that differ between ranks."""
    for each in checkpoints:
        if each.unread:
            console.note(f"not compared, of {printable(each.path)}: {console.names(each.unread)}")


def note_choice(console: Console, where: str, others: Sequence[str], file: str = "") -> None:
    """Note that the state at `where` was chosen, if there are `others`; `file` comes first."""
    if others:
        taken = f"'{where}'" if where else "the file itself"
        flags = [f"--state {shlex.quote(other)}" for other in others]
        console.note(f"{printable(file)}state: {printable(taken)}; also available: {console.names(flags)}")
