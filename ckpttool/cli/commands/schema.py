"""The command `ckpttool schema`."""

from __future__ import annotations

import json

import click

from ...errors import UsageFault
from .. import options
from ..console import Console
from .skill import all_sections


@click.command("schema")
@click.argument("name", metavar="COMMAND", required=False)
@options.reading
def command(console: Console, name: str | None) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json, also where it fails.

    All of that JSON holds "schema": 1. The number goes up when a field gets another meaning or goes; new
    fields may come at any time.

    \b
    Example:
      ckpttool schema inspect
    """
    from ..contracts.contracts import schema as schema_of

    known = {str(command.name): line for part in all_sections().values() for command, line in part.items()}
    if name is None or name not in known:
        what = "schema needs a COMMAND" if name is None else f"there is no command '{name}'"
        raise UsageFault(what, hint=f"it is one of {', '.join(sorted(known))}")
    document = schema_of(name, known[name])
    console.result(json.dumps(document, indent=2), document)
