"""ckpttool convert"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import counted
from .rewriting import Outcome, rewrite

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

FORMATS = ("torch-zip", "safetensors", "safetensors-sharded", "torch-sharded", "dcp")


@click.command("convert")
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help=f"Write FORMAT whatever OUTPUT's name is: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
)
@click.option(
    "--full", is_flag=True, help="Keep everything, also in safetensors: optimizer, counters, settings."
)
@click.option(
    "--dtype",
    metavar="TYPE",
    help="Cast floating-point tensors to bf16, fp16, fp32 or fp64 (or bfloat16, float16, half, …).",
)
@click.option(
    "--only", multiple=True, metavar="GLOB", help="Keep only the keys that fit, as 'layer1.*'. Repeatable."
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out the keys that fit. Repeatable.")
@click.option(
    "--drop", multiple=True, metavar="NAME", help="Leave out what stands there, as optimizer. Repeatable."
)
@click.option(
    "--complex",
    "complex_",
    type=click.Choice(["split", "join"]),
    help="Write complex tensors as pairs NAME.real and NAME.imag, or such pairs as complex tensors.",
)
@click.option(
    "--keep-copies", is_flag=True, help="Write tied tensors once for each name, where the format has no ties."
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="Cut a folder's files at this size, as 500MB or 1GiB.  [default: 5GB]",
)
@options.writing
def command(
    dtype: str | None,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    complex_: str | None,
    drop: tuple[str, ...],
    full: bool,
    keep_copies: bool,
    shard_size: str | None,
    to: str | None,
    **given: Any,
) -> None:
    """Write a checkpoint in another format, whole, without running anything in it.

    A .pt OUTPUT holds everything that INPUT does. A .safetensors OUTPUT holds the model's tensors, or, with
    --full, everything; a .pt made of that again is what it was before. A name that ends in / is a folder of
    shards. What a format can't hold is named.

    \b
    Examples:
      ckpttool convert model.bin model.safetensors --dtype bf16
      ckpttool convert last.pt last.safetensors --full
      ckpttool convert model.safetensors shards/ --shard-size 500MB
    """
    from .. import transforms
    from ..cast import target as cast_target
    from ..formats import sharding

    target = cast_target(dtype) if dtype else None

    def transform(checkpoint: Checkpoint) -> tuple[Checkpoint, Outcome]:
        outcome = Outcome(f"converted {checkpoint.format}")
        where = given["state"]
        if drop:
            checkpoint = transforms.drop(checkpoint, drop)
            outcome.left_out += drop
        if only or exclude:
            checkpoint, selection = transforms.select(checkpoint, only=only, exclude=exclude, state=where)
            outcome.left_out += selection.left_out
        if complex_:
            change = transforms.split_complex if complex_ == "split" else transforms.join_complex
            checkpoint, names = change(checkpoint, state=where)
            done = "split" if complex_ == "split" else "joined"
            outcome.done += f", {counted(len(names), 'complex tensor', 'complex tensors')} {done}"
        if target:
            checkpoint, report = transforms.cast(checkpoint, target, state=where)
            outcome.done += f", {counted(report.tensors, 'tensor', 'tensors')} cast to {target.name}"
            outcome.casting = report
        return checkpoint, outcome

    size = sharding.parse_size(shard_size) if shard_size else None
    rewrite(given, transform, full=full, keep_copies=keep_copies, to=to, shard_size=size)
