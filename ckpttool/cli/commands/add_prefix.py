"""The command `ckpttool add-prefix`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..rewriting import Outcome, renaming_outcome, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("add-prefix")
@click.option(
    "--prefix", default="module.", show_default=True, help="What to put before keys, including the dot."
)
@options.writing
def command(prefix: str, **given: Any) -> None:
    """Put a wrapper's prefix before every key: the inverse of strip-prefix.

    For a script that loads into a model it has already wrapped in DistributedDataParallel.

    \b
    Example:
      ckpttool add-prefix model.safetensors for-ddp.pt
    """
    from ...transforms.keys import add_prefix

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        new, renaming = add_prefix(checkpoint, prefix, state=given["state"])
        outcome = renaming_outcome(f"added '{prefix}' to", renaming)
        if not prefix.endswith("."):
            first = next(iter(renaming.names.values()), prefix)
            better = f"--prefix {shlex.quote(f'{prefix}.')}"
            outcome.notes.append(
                f"the prefix ends in no dot, so keys are like '{first}'; with a dot: {better}"
            )
        if twice := sum(name.startswith(prefix) for name in renaming.names):
            keys = f"{twice} of {len(renaming.names)} keys"
            outcome.notes.append(f"{keys} had '{prefix}' already, and now begin with '{prefix * 2}'")
        return new, outcome

    rewrite(given, transform)
