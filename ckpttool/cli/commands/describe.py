"""The commands that describe the tool itself to programs: `schema` and `skill`."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from ...errors import UsageFault
from .. import options
from ..console import Console

Sections = Mapping[str, Mapping[click.Command, str]]  # by title, each command with its line of help


@click.command("schema")
@click.argument("name", metavar="COMMAND", required=False)
@options.reading
def schema(console: Console, name: str | None) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json, also where it fails.

    All of that JSON holds "schema": 1. The number goes up when a field gets another meaning or goes; new
    fields may come at any time.

    \b
    Example:
      ckpttool schema inspect
    """
    from ..contracts.contracts import schema as schema_of

    known = {str(command.name): line for part in _sections().values() for command, line in part.items()}
    if name is None or name not in known:
        what = "schema needs a COMMAND" if name is None else f"there is no command '{name}'"
        raise UsageFault(what, hint=f"it is one of {', '.join(sorted(known))}")
    document = schema_of(name, known[name])
    console.result(json.dumps(document, indent=2), document)


@click.command("skill")
@options.reading
def skill(console: Console) -> None:
    """Print a page for coding assistants: what each command is for, its flags, and what to rely on.

    It is made from the help, in the form of a skill: save it as skills/ckpttool/SKILL.md where your assistant
    looks for skills.

    \b
    Example:
      ckpttool skill
    """
    from ..skill import NAME, page

    text = page(_sections())
    console.result(text.rstrip(), {"name": NAME, "text": text})


def _sections() -> Sections:
    """Return the commands by section: those of the group that this one was called from."""
    sections: Sections = click.get_current_context().find_root().command.sections  # type: ignore[attr-defined]
    return sections
