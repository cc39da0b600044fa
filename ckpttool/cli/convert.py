"""ckpttool convert"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import counted
from .rewriting import Outcome, rewrite

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


@click.command("convert")
@options.writing
@click.option("--dtype", metavar="TYPE", help="Cast float tensors: bf16, fp16, fp32 or fp64.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only keys that fit, as 'layer1.*'. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not the keys that fit. Repeatable.")
@click.option(
    "--complex",
    "complex_",
    type=click.Choice(["split", "join"]),
    help="Complex tensors as pairs NAME.real, NAME.imag, or such pairs as complex tensors.",
)
@click.option(
    "--drop", multiple=True, metavar="NAME", help="Leave out what stands there: optimizer. Repeatable."
)
@click.option("--full", is_flag=True, help="Everything, also in safetensors: optimizer, counters, settings.")
@click.option("--keep-copies", is_flag=True, help="Tied tensors once for each name, in safetensors.")
@click.option("--shard-size", metavar="SIZE", help="Cut into files of at most 5GB (default), 500MB, 1GiB.")
@click.option("--to", metavar="FORMAT", help="The format, where OUTPUT's name does not tell it.")
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
    --full, everything; a .pt made of that again is what it was before.

    \b
    Examples:
      ckpttool convert model.bin model.safetensors --dtype bf16
      ckpttool convert last.pt last.safetensors --full
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
