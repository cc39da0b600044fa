"""Layouts: the options of `convert` that give tensors other shapes and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .. import options
from ..console import counted
from .convert import Conversion

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint

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
    from ...transforms import layout

    state = conversion.target.state
    if permute:
        changed = layout.permute(conversion.checkpoint, permute, state=state)
        _take(conversion, *changed, "tensor", "permuted")
    if reshape:
        changed = layout.reshape(conversion.checkpoint, reshape, state=state)
        _take(conversion, *changed, "tensor", "reshaped")
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
    from ...transforms import layout

    change, done = {"split": (layout.split_complex, "split"), "join": (layout.join_complex, "joined")}[
        complex_
    ]
    changed = change(conversion.checkpoint, state=conversion.target.state)
    _take(conversion, *changed, "complex tensor", done)


def _take(conversion: Conversion, new: Checkpoint, names: tuple[str, ...], what: str, done: str) -> None:
    """Go on with a change of form, unless OUTPUT would hold momentum in the old form."""
    from ...transforms.optimizer.owners import require_none

    target = conversion.target
    if target.place.holds_all:
        both = conversion.checkpoint, new
        require_none(conversion.checkpoint, *(each.state(target.state) for each in both))
    conversion.checkpoint = new
    conversion.outcome.done += f", {counted(len(names), what)} {done}"
