"""The command `ckpttool convert`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted
from ..options import Entry, Pair, SizesFor
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint

# Parameters of the options that change the tensors of one state
OF_STATE = ("only", "exclude", "permute", "reshape", "tie", "complex_", "dtype")


@click.command("convert")
@options.to_option
@options.full_option
@click.option(
    "--dtype",
    metavar="TYPE",
    help="Cast floating-point tensors to bf16, fp16, fp32 or fp64 (or bfloat16, float16, half, …).",
)
@click.option(
    "--only",
    multiple=True,
    metavar="GLOB",
    help="Keep only the keys that match, e.g. 'layer1.*'. Repeatable.",
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out the keys that match. Repeatable.")
@click.option(
    "--permute",
    type=SizesFor(),
    multiple=True,
    metavar="GLOB=AXES",
    help="Put axes in another order: 'fc.weight=1,0' transposes. Repeatable.",
)
@click.option(
    "--reshape",
    type=SizesFor(),
    multiple=True,
    metavar="GLOB=SHAPE",
    help="Give the same elements another shape: 'fc.weight=10,64,1,1'. Repeatable.",
)
@click.option(
    "--tie",
    type=Pair(),
    multiple=True,
    metavar="NEW=OLD",
    help="Give a tensor a second name: 'lm_head.weight=embed.weight'. Repeatable.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="NAME",
    help="Leave out what is stored there, e.g. optimizer. Repeatable.",
)
@click.option(
    "--complex",
    "complex_",
    type=click.Choice(["split", "join"]),
    help="Write complex tensors as pairs NAME.real and NAME.imag, or such pairs as complex tensors.",
)
@click.option(
    "--metadata",
    type=Entry(),
    multiple=True,
    metavar="NAME=TEXT",
    help="Add text to the header of safetensors: 'format=pt', which some readers want. Repeatable.",
)
@click.option(
    "--keep-copies", is_flag=True, help="Write tied tensors once per name if the format has no ties."
)
@options.writing
def command(full: bool, keep_copies: bool, to: str | None, dtype: str | None, **given: Any) -> None:
    """Write a checkpoint in another format, whole, without running anything in it.

    A .pt OUTPUT holds everything that INPUT does. A .safetensors OUTPUT holds the model's tensors, or, with
    --full, everything; a .pt made from that again is what it was before. A name that ends in / is a folder of
    shards. What a format can't hold is listed.

    \b
    Examples:
      ckpttool convert model.bin model.safetensors --dtype bf16
      ckpttool convert last.pt last.safetensors --full
      ckpttool convert model.safetensors shards/ --shard-size 500MB
    """
    from ...tensors.cast import target

    changes = {**given, "dtype": target(dtype.lower()) if dtype else None}

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        outcome = Outcome(f"converted {checkpoint.format}", of_state=any(changes[name] for name in OF_STATE))
        for step in (_fewer, _laid_out, _complex, _cast):
            checkpoint = step(checkpoint, outcome, changes)
        return _described(checkpoint, changes["metadata"], target), outcome

    rewrite(given, transform, full=full, keep_copies=keep_copies, to=to)


def _fewer(checkpoint: Checkpoint, outcome: Outcome, options: dict[str, Any]) -> Checkpoint:
    from ...transforms.selection import drop, select

    if options["drop"]:
        checkpoint = drop(checkpoint, options["drop"])
        outcome.left_out += options["drop"]
    if options["only"] or options["exclude"]:
        patterns = {name: options[name] for name in ("only", "exclude", "state")}
        checkpoint, selection = select(checkpoint, **patterns)
        outcome.left_out += selection.left_out
    return checkpoint


def _laid_out(checkpoint: Checkpoint, outcome: Outcome, options: dict[str, Any]) -> Checkpoint:
    from ...transforms import layout

    for flag, change, done in (
        ("permute", layout.permute, "permuted"),
        ("reshape", layout.reshape, "reshaped"),
    ):
        if options[flag]:
            checkpoint, names = change(checkpoint, options[flag], state=options["state"])
            outcome.done += f", {counted(len(names), 'tensor', 'tensors')} {done}"
    if options["tie"]:
        checkpoint = layout.tie(checkpoint, options["tie"], state=options["state"])
        outcome.done += f", {counted(len(options['tie']), 'name', 'names')} tied"
    return checkpoint


def _complex(checkpoint: Checkpoint, outcome: Outcome, options: dict[str, Any]) -> Checkpoint:
    from ...transforms.layout import join_complex, split_complex

    if options["complex_"]:
        change, done = (
            (split_complex, "split") if options["complex_"] == "split" else (join_complex, "joined")
        )
        checkpoint, names = change(checkpoint, state=options["state"])
        outcome.done += f", {counted(len(names), 'complex tensor', 'complex tensors')} {done}"
    return checkpoint


def _cast(checkpoint: Checkpoint, outcome: Outcome, options: dict[str, Any]) -> Checkpoint:
    from ...transforms.selection import cast

    if (dtype := options["dtype"]) is not None:
        checkpoint, report = cast(checkpoint, dtype, state=options["state"])
        outcome.done += f", {counted(report.tensors, 'tensor', 'tensors')} cast to {dtype.name}"
        outcome.casting = report
    return checkpoint


def _described(checkpoint: Checkpoint, metadata: Sequence[tuple[str, str]], target: Target) -> Checkpoint:
    from ...errors import UsageFault
    from ...transforms.selection import with_metadata

    if not metadata:
        return checkpoint
    if not target.place.has_metadata:
        what = f"--metadata: {target.place.format} has no place for it"
        raise UsageFault(what, hint="write safetensors, or leave it out")
    return with_metadata(checkpoint, dict(metadata), state=target.state)
