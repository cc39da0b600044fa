"""The command `ckpttool convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted
from ..options import Job
from ..rewriting import Change, Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("convert")
@options.to_option
@options.full_option
@options.option(
    "--dtype TYPE", "Cast floating-point tensors to bf16, fp16, fp32 or fp64 (or bfloat16, float16, half, …)."
)
@options.option("--only GLOB", "Keep only the keys that match, e.g. 'layer1.*'.", multiple=True)
@options.option("--exclude GLOB", "Leave out the keys that match.", multiple=True)
@options.option(
    "--permute GLOB=AXES",
    "Put axes in another order: 'fc.weight=1,0' transposes.",
    type=options.sizes_for,
    multiple=True,
)
@options.option(
    "--reshape GLOB=SHAPE",
    "Give the same elements another shape: 'fc.weight=10,64,1,1'.",
    type=options.sizes_for,
    multiple=True,
)
@options.option(
    "--tie NEW=OLD",
    "Give a tensor a second name: 'lm_head.weight=embed.weight'.",
    type=options.pair,
    multiple=True,
)
@options.option("--drop NAME", "Leave out what is stored there, e.g. optimizer.", multiple=True)
@options.option(
    "--complex",
    "Write complex tensors as pairs NAME.real and NAME.imag, or such pairs as complex tensors.",
    "complex_",
    type=click.Choice(["split", "join"]),
)
@options.option(
    "--metadata NAME=TEXT",
    "Add text to the header of safetensors: 'format=pt', which some readers want.",
    type=options.entry,
    multiple=True,
)
@options.flag("--keep-copies", "Write tied tensors once per name if the format has no ties.")
@options.writing
def command(job: Job, full: bool, keep_copies: bool, to: str | None, **changes: Any) -> None:
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
    from ...tensors import cast

    if changes["dtype"]:
        changes["dtype"] = cast.target(changes["dtype"].lower())

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        outcome = Outcome(f"converted {checkpoint.format}")
        outcome.of_state = any(value for name, value in changes.items() if name not in ("drop", "metadata"))
        checkpoint = _changed(checkpoint, outcome, target.state, changes)
        return _described(checkpoint, dict(changes["metadata"]), target), outcome

    rewrite(job, transform, full=full, keep_copies=keep_copies, to=to)


def _changed(
    checkpoint: Checkpoint, outcome: Outcome, state: str | None, changes: dict[str, Any]
) -> Checkpoint:
    from ...transforms import layout
    from ...transforms.selection import cast, drop, select

    if names := changes["drop"]:
        checkpoint = drop(checkpoint, names)
        outcome.left_out += names
    if changes["only"] or changes["exclude"]:
        patterns = {name: changes[name] for name in ("only", "exclude")}
        checkpoint, selection = select(checkpoint, state=state, **patterns)
        outcome.left_out += selection.left_out
    in_layout = ("permute", layout.permute, "permuted"), ("reshape", layout.reshape, "reshaped")
    for flag, change, done in in_layout:
        if changes[flag]:
            checkpoint, names = change(checkpoint, changes[flag], state=state)
            outcome.done += f", {counted(len(names), 'tensor', 'tensors')} {done}"
    if ties := changes["tie"]:
        checkpoint = layout.tie(checkpoint, ties, state=state)
        outcome.done += f", {counted(len(ties), 'name', 'names')} tied"
    if way := changes["complex_"]:
        change_parts = layout.split_complex if way == "split" else layout.join_complex
        checkpoint, names = change_parts(checkpoint, state=state)
        done = "split" if way == "split" else "joined"
        outcome.done += f", {counted(len(names), 'complex tensor', 'complex tensors')} {done}"
    if (dtype := changes["dtype"]) is not None:
        checkpoint, outcome.casting = cast(checkpoint, dtype, state=state)
        count = counted(outcome.casting.tensors, "tensor", "tensors")
        outcome.done += f", {count} cast to {dtype.name}"
    return checkpoint


def _described(checkpoint: Checkpoint, metadata: dict[str, str], target: Target) -> Checkpoint:
    from ...errors import UsageFault
    from ...transforms.selection import with_metadata

    if metadata and not target.place.has_metadata:
        what = f"--metadata: {target.place.format} has no place for it"
        raise UsageFault(what, hint="write safetensors, or leave it out")
    return with_metadata(checkpoint, metadata, state=target.state) if metadata else checkpoint
