"""The command `ckpttool slim`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted, show_bytes
from ..rewriting import Outcome, Target, rewrite
from .optimizer import parameters_of

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("slim")
@options.writing
@click.option(
    "--model",
    metavar="SPEC",
    help="Name the tensors of an average that lists them in the order of this model's parameters.",
)
def command(model: str | None, **given: Any) -> None:
    """Write only the model's state, without bytes that none of its tensors uses.

    Optimizer, counters and arguments stay behind, and so does the rest of a storage that a view was cut from.
    An average without names, such as --state ema.shadow_params, gets those of --model.

    \b
    Example:
      ckpttool slim last.pt weights.pt
    """
    from ...transforms.ema_names import with_names
    from ...transforms.selection import slim

    parameters = parameters_of(model) if model else None

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        named = with_names(checkpoint, target.state, parameters) if parameters else None
        if named is not None:
            count = counted(len(named.checkpoint.state("").tensors), "tensor", "tensors")
            done = f"named {count} by {model}"
            return slim(named.checkpoint), Outcome(done, left_out=named.left_out, where="")
        state = checkpoint.state(target.state)
        new = slim(checkpoint, state=target.state)
        done = f"slimmed {show_bytes(checkpoint.nbytes)}"
        return new, Outcome(done, left_out=checkpoint.outside(state), where="")

    rewrite(given, transform)
