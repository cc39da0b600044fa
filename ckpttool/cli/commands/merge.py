"""The command `ckpttool merge`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from ...errors import NothingToDo, RanksDiffer, Refused
from .. import options
from ..console import Console, counted
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("merge")
@options.inputs_and_output
@options.to_option
@options.full_option
@click.option(
    "--dtype", metavar="TYPE", help="Cast the model's floating-point tensors to bf16, fp16, fp32 or fp64."
)
@click.option(
    "--take-rank",
    type=click.IntRange(0),
    metavar="R",
    help="Where ranks should hold the same values, take those of rank R instead of comparing all.",
)
@click.option(
    "--take-step",
    type=click.IntRange(0),
    metavar="N",
    help="Where files state different training steps, take them all the same, as those of step N.",
)
@options.writing_options
def command(
    inputs: tuple[str, ...],
    to: str | None,
    full: bool,
    dtype: str | None,
    take_rank: int | None,
    take_step: int | None,
    **given: Any,
) -> None:
    """Write what many ranks wrote as one checkpoint: a FOLDER, or the files of all ranks.

    Sharded tensors become whole: files of each rank with DTensors or FSDP's shards, DCP folders (also those
    of accelerate, Lightning and Megatron), DeepSpeed's ZeRO, shards of Hugging Face. Values that several
    ranks hold are compared, bit by bit. A rank that is missing, there twice or of another run is an error. A
    .pt OUTPUT holds the optimizer too, by the names of parameters where they are certain.

    \b
    Examples:
      ckpttool merge checkpoint/actor model.safetensors --dtype bf16
      ckpttool merge checkpoint/actor run.pt
      ckpttool merge rank0.pt rank1.pt model.safetensors
    """
    from ... import formats

    console = options.console(given)
    options.require_new_output(inputs, given["output"], given["force"], alone=False)

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        return _merged(checkpoint, dtype, target)

    def opening() -> Checkpoint:
        return formats.open_ranks(
            inputs[0] if len(inputs) == 1 else inputs, take_rank=take_rank, take_step=take_step
        )

    try:
        rewrite({**given, "input": inputs[0]}, transform, opening=opening, full=full or None, to=to)
    except RanksDiffer:
        with opening() as checkpoint:
            raise _all_that_differ(console, checkpoint) from None


def _merged(checkpoint: Checkpoint, dtype: str | None, target: Target) -> tuple[Checkpoint, Outcome]:
    """Return the checkpoint to write: its state cast, its optimizer keyed by names if it is in the output."""
    from ...checkpoint.dotted_names import contents
    from ...checkpoint.flat_optimizers import is_flat
    from ...tensors.cast import target as dtype_of
    from ...transforms.selection import cast

    outcome = Outcome(f"merged {_in_words(checkpoint)}", of_state=bool(dtype))
    if checkpoint.ranks is not None:
        ranks = checkpoint.ranks
        names = ("framework", "world_size", "mesh", "step")
        outcome.fields = {"ranks": {name: getattr(ranks, name) for name in names}}
        if checkpoint.format == "safetensors-ranks":
            outcome.notes.append(
                f"no file says how many ranks there were; those of {len(ranks.held)} were found"
            )
    holds_flat = (is_flat(value) for _, value in checkpoint.named(contents))
    stays_flat = target.place.format == "dcp" and any(holds_flat)  # torchtitan loads no other form
    if target.place.holds_all and not stays_flat:
        checkpoint = with_names(
            checkpoint, outcome, shlex.quote(target.place.path), as_text=target.place.format == "dcp"
        )
    if dtype:
        to = dtype_of(dtype.lower())
        try:
            checkpoint, outcome.casting = cast(checkpoint, to, state=target.state)
        except NothingToDo:  # to merge is something to do
            outcome.notes.append(f"no tensor had to be cast: none has a float dtype other than {to.name}")
        else:
            count = counted(outcome.casting.tensors, "tensor", "tensors")
            outcome.done += f", {count} cast to {to.name}"
    return checkpoint, outcome


def with_names(checkpoint: Checkpoint, outcome: Outcome, file: str, *, as_text: bool = False) -> Checkpoint:
    """Key the optimizer by names if they are certain; else note how, in `file` (quoted for a shell)."""
    from ...transforms.optimizer.rekey import to_names

    try:
        return to_names(checkpoint)[0]
    except NothingToDo:
        pass
    except Refused as fault:
        keys = "it stays keyed by numbers, which one process loads too"
        keys = "DCP keeps its numbers as text" if as_text else keys
        outcome.notes.append(
            f"{fault.reason}: {keys}; for names, if it lists "
            f"parameters in the state's order: ckpttool optimizer {file} NAMED --to names --order state"
        )
    return checkpoint


def _in_words(checkpoint: Checkpoint) -> str:
    if checkpoint.ranks is None:
        return checkpoint.format
    ranks = checkpoint.ranks
    count = f"{counted(ranks.world_size, 'rank', 'ranks')} of " if ranks.world_size is not None else ""
    return f"{count}{ranks.framework}{f', {ranks.axes}' if ranks.axes else ''}"


def _all_that_differ(console: Console, checkpoint: Checkpoint) -> RanksDiffer:
    """Return the error that names every tensor in which ranks differ."""
    from ...analysis.verify import tensors_that_differ

    first, *others = tensors_that_differ(checkpoint).items()
    message = str(first[1])
    if others:
        verb = "other tensor differs" if len(others) == 1 else "other tensors differ"
        message += f"; {len(others)} {verb} too: {console.names([name for name, _ in others])}"
    return RanksDiffer(message, hint=f"take one rank's values: --take-rank {first[1].ranks[0]}")
