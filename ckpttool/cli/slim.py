"""The command `ckpttool slim`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import show_bytes
from .rewriting import Outcome, rewrite

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint


@click.command("slim")
@options.writing
def command(**given: Any) -> None:
    """Write only the model's state, without bytes that none of its tensors uses.

    Optimizer, counters and arguments stay behind, and so does the rest of a storage that a view was cut from.

    \b
    Example:
      ckpttool slim last.pt weights.pt
    """
    from ..transforms.selection import slim

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        found = checkpoint.state(given["state"])
        new = slim(checkpoint, state=given["state"])
        done = f"slimmed {show_bytes(checkpoint.nbytes)}"
        return new, Outcome(done, left_out=checkpoint.outside(found), where="")

    rewrite(given, transform)
