"""The command `ckpttool maps`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from .. import options
from ..console import Console
from ..layout import table, terminal_width, wrapped


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
    console.listed("\n".join(_lines(rows, terminal_width(sys.stdout))), found)


def _lines(rows: list[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Yield each name, which is to be typed, and what it changes, beside or below it."""
    beside = max(len(name) for name, _ in rows) + 2
    if width is None or all(beside + len(way) <= width for _, way in rows):
        yield from table(rows, (0, 1))
        return
    for name, way in rows:
        yield name
        yield from (f"    {line}" for line in wrapped(way, max(width - 4, 20)))
