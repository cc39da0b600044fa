"""ckpttool add-prefix"""

from __future__ import annotations

from typing import Any

import click

from . import options
from .rewriting import rewrite


@click.command("add-prefix")
@options.writing
@click.option("--prefix", default="module.", show_default=True, help="What to put before every key.")
def command(prefix: str, **given: Any) -> None:
    """Put a wrapper's prefix before every key: the inverse of strip-prefix.

    For a script that loads into a model it has already wrapped in DistributedDataParallel.

    \b
    Example:
      ckpttool add-prefix model.safetensors for-ddp.pt
    """
    from ..keys import add_prefix

    rewrite(given, f"added '{prefix}' to", lambda ck: add_prefix(ck, prefix, state=given["state"]))
