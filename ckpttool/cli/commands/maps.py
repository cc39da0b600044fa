"""The command `ckpttool maps`."""

from __future__ import annotations

import sys

import click

from .. import options
from ..console import Console, cut, table, terminal_width


@click.command("maps")
@click.argument("name", metavar="[NAME]", required=False)
@options.reading
def command(console: Console, name: str | None) -> None:
    """List the maps that `convert --map` takes, or print the rules of one.

    A map is a rule file. What is printed is one for your own changes, which --map takes too.

    \b
    Examples:
      ckpttool maps
      ckpttool maps nanogpt-gpt2
    """
    from ...transforms.mapping import builtin

    if name is not None:
        with open(builtin.path_of(name), encoding="utf-8") as file:
            text = file.read()
        console.result(text.rstrip(), {"name": name, "rules": text})
        return
    found = [
        {"name": rules.name, "from": rules.start, "to": rules.end, "reversible": rules.reversible}
        for rules in builtin.maps()
    ]
    ways = [f"{each['from']} {'<->' if each['reversible'] else '->'} {each['to']}" for each in found]
    rows = [(str(each["name"]), way) for each, way in zip(found, ways, strict=True)]
    width = terminal_width(sys.stdout)  # the names, which are to be typed, stay whole
    console.listed("\n".join(cut(line, width) for line in table(rows, (0, 1))), found)
