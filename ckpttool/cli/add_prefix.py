"""The command `ckpttool add-prefix`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import printable
from .rewriting import Outcome, renaming_outcome, rewrite

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint


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
    from ..transforms.keys import add_prefix

    console = options.console(given)

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        new, renaming = add_prefix(checkpoint, prefix, state=given["state"])
        if not prefix.endswith("."):
            first = printable(next(iter(renaming.names.values()), prefix))
            better = printable(shlex.quote(f"{prefix}."))
            console.note(
                f"the prefix ends in no dot, so keys are like '{first}'; with a dot: --prefix {better}"
            )
        return new, renaming_outcome(f"added '{prefix}' to", renaming)

    rewrite(given, transform)
