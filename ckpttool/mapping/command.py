"""Architectures: the command `maps`, and `convert --map`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..core.cli import options
from ..core.cli.console import Console, counted, table, terminal_width, wrapped
from ..core.cli.convert import Conversion
from ..core.cli.schemas import Fields, fields_like
from ..errors import UsageFault

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint

LISTED: Fields = {
    "name": (str, "as --map takes it"),
    "from": (str, "the architecture that it starts at"),
    "to": (str, "the one that it leads to"),
    "reversible": (bool, "whether --inverse is possible"),
}
MAP: Fields = {"name": (str, "as --map takes it"), "rules": (str, "the rule file's text")}


@options.command("Convert", "The architectures that convert --map changes between", [[LISTED], MAP])
@click.argument("name", metavar="[NAME]", required=False)
@options.reading
def maps(console: Console, name: str | None) -> None:
    """List the maps that `convert --map` takes, or print the rules of one.

    A map is a rule file. What is printed is one for your own changes, which --map takes too.

    \b
    Examples:
      ckpttool maps
      ckpttool maps nanogpt-gpt2
    """
    from . import applying

    if name is not None:
        with open(applying.path_of(name), encoding="utf-8") as file:
            text = file.read()
        console.result(text.rstrip(), {"name": name, "rules": text})
        return
    found = [
        {"name": rules.name, "from": rules.start, "to": rules.end, "reversible": rules.reversible}
        for rules in applying.maps()
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


def _mapped_printed() -> Fields:
    from .applying import Mapped

    return fields_like(Mapped)


@options.adds_to("convert", behind="exclude", prints=_mapped_printed)
@options.option(
    "--map NAME", "Change the architecture by a map (ckpttool maps), or by the rules in a .toml file.", "map_"
)
@options.flag("--inverse", "Apply the --map backwards.")
@options.option("--config FILE", "The model's config, which --map takes numbers from; default: beside INPUT.")
def convert_map(conversion: Conversion, map_: str | None, inverse: bool, config: str | None) -> None:
    """Change the names and shapes by a map."""
    if map_ is None:
        for flag, given in (("--inverse", inverse), ("--config", config)):
            if given:
                hint = "--map NAME; ckpttool maps lists them"
                raise UsageFault(f"{flag} is of --map, which is not given", hint=hint)
        return
    from ..core.checkpoint.optimizer_view import is_numbered
    from ..core.inert_pickle.values import walk
    from .applying import FILES, apply_map

    outcome, target = conversion.outcome, conversion.target
    optimizers = target.place.holds_all  # what is left out need not follow
    conversion.checkpoint, mapped = apply_map(
        conversion.checkpoint, map_, optimizers=optimizers, inverse=inverse, config=config, state=target.state
    )
    outcome.renamed = {old: new for old, new in mapped.renaming.items() if old != new}
    outcome.left_out += mapped.dropped
    outcome.untrue = (*outcome.untrue, *FILES)  # they say the architecture that it was
    outcome.result = mapped
    if optimizers and any(map(is_numbered, walk(conversion.checkpoint.tree))):
        outcome.notes.append(
            "its optimizer numbers the parameters in INPUT's order: if the other side has another, key it by "
            "names first (ckpttool optimizer --to names)"
        )
    outcome.casting = mapped.casting if mapped.casting.reports else None
    outcome.done += f", {counted(len(mapped.names), 'tensor')} made by {map_}"


merge_map = options.also_to("merge", convert_map, behind="dtype")


# ---- Layouts


Sizes = tuple[tuple[str, tuple[int, ...]], ...]


@options.adds_to("convert", behind="exclude")
@options.several(
    "--permute GLOB=AXES", "Put axes in another order: 'fc.weight=1,0' transposes.", options.sizes_for
)
@options.several(
    "--reshape GLOB=SHAPE", "Give the same elements another shape: 'fc.weight=10,64,1,1'.", options.sizes_for
)
@options.several("--tie NEW=OLD", "Give a tensor a second name: 'lm_head.weight=embed.weight'.", options.pair)
def convert_layout(
    conversion: Conversion, permute: Sizes, reshape: Sizes, tie: tuple[tuple[str, str], ...]
) -> None:
    """Give tensors other axes, shapes and second names."""
    from . import layout

    state = conversion.target.state
    for change, rules, done in ((layout.permute, permute, "permuted"), (layout.reshape, reshape, "reshaped")):
        if rules:
            _take(conversion, *change(conversion.checkpoint, rules, state=state), "tensor", done)
    if tie:
        conversion.checkpoint = layout.tie(conversion.checkpoint, tie, state=state)
        conversion.outcome.done += f", {counted(len(tie), 'name')} tied"


@options.adds_to("convert", behind="drop")
@options.option(
    "--complex",
    "Write complex tensors as pairs NAME.real and NAME.imag, or such pairs as complex tensors.",
    "complex_",
    type=click.Choice(["split", "join"]),
)
def convert_complex(conversion: Conversion, complex_: str | None) -> None:
    """Split complex tensors into pairs, or join such pairs."""
    if complex_ is None:
        return
    from . import layout

    split, join = (layout.split_complex, "split"), (layout.join_complex, "joined")
    change, done = split if complex_ == "split" else join
    changed = change(conversion.checkpoint, state=conversion.target.state)
    _take(conversion, *changed, "complex tensor", done)


def _take(conversion: Conversion, new: Checkpoint, names: tuple[str, ...], what: str, done: str) -> None:
    """Go on with a change of form, unless OUTPUT would hold momentum in the old form."""
    from ..core.checkpoint.optimizer_names import require_none

    target = conversion.target
    if target.place.holds_all:
        both = conversion.checkpoint, new
        require_none(conversion.checkpoint, *(each.state(target.state) for each in both))
    conversion.checkpoint = new
    conversion.outcome.done += f", {counted(len(names), what)} {done}"
