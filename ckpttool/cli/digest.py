"""The command `ckpttool digest`."""

from __future__ import annotations

from typing import Any

import click

from . import options
from .console import printable


@click.command("digest", context_settings=options.MORE_FILES)
@options.file_argument
@options.state_option
@options.reading
def command(file: str, state: str | None, **given: Any) -> None:
    """Print one SHA-256 for the model's names, types, shapes and values.

    It is the same in every format; docs/digest.md defines it.

    \b
    Example:
      ckpttool digest model.safetensors
    """
    from .. import formats
    from ..analysis.state_digest import state_digest

    options.require_one_file(file)
    console = options.console(given)
    with formats.open(file) as checkpoint:
        found = checkpoint.state(state)
        with console.progress(checkpoint.nbytes, "hashing") as progress:
            value = state_digest(checkpoint, found, progress)
    data = {"digest": value, "state": found.where, "keys": len(found.tensors), "path": file}
    console.result(f"{value}  {printable(file)}", data)
