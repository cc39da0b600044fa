"""The command `convert`: another format, a choice of tensors, other element types.

Other capabilities (maps, layouts, packed numbers) add options, whose changes take place before tensors are
chosen, then, or once they are cast.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UsageFault
from . import options
from .console import counted
from .rewriting import Change, Outcome, Target, rewrite, rewritten

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..tensors.ref import DType


@dataclass(slots=True)
class Conversion:
    """One call of the command: each change replaces the checkpoint, and adds to what is told."""

    job: options.WriteJob
    target: Target
    outcome: Outcome
    original: Checkpoint  # as it was read
    checkpoint: Checkpoint  # as it is now
    dtype: DType | None  # that of --dtype; None once that is done


@options.command("Convert", "Write another format, or other element types", rewritten)
@options.to_option
@options.full_option
@options.option(
    "--dtype TYPE", "Cast floating-point tensors to bf16, fp16, fp32 or fp64 (or bfloat16, float16, half, …)."
)
@options.several("--only GLOB", "Keep only the keys that match, e.g. 'layer1.*'.")
@options.several("--exclude GLOB", "Leave out the keys that match.")
@options.several("--drop NAME", "Leave out what is stored there, e.g. optimizer.")
@options.several(
    "--metadata NAME=TEXT",
    "Add text to the header of safetensors: 'format=pt', which some readers want.",
    options.entry,
)
@options.flag("--keep-copies", "Write tied tensors once per name if the format has no ties.")
@options.writing
def convert(job: options.WriteJob, full: bool, keep_copies: bool, to: str | None, **changes: Any) -> None:
    """Write a checkpoint in another format, whole, without running anything in it.

    A .pt OUTPUT holds everything that INPUT does. A .safetensors OUTPUT holds the model's tensors, or, with
    --full, everything; a .pt made from that again is what it was before. A name that ends in / is a folder of
    shards. What a format can't hold is listed. How tensors are packed is told by their names and by the
    config.json beside them.

    \b
    Examples:
      ckpttool convert model.bin model.safetensors --dtype bf16
      ckpttool convert last.pt last.safetensors --full
      ckpttool convert fp8-model/ plain/ --dequantize --companions
      ckpttool convert normed.pt plain.pt --fold norm
      ckpttool convert model.safetensors shards/ --shard-size 500MB
    """
    from ..tensors import cast

    of_state = any(value for name, value in changes.items() if name not in ("drop", "metadata"))
    dtype = cast.target(changes["dtype"].lower()) if changes["dtype"] else None

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        outcome = Outcome(f"converted {checkpoint.format}", of_state=of_state)
        if next(iter(checkpoint.tensors()), None) is None:
            outcome.notes.append(f"{checkpoint.path} holds no tensor")
        conversion = Conversion(job, target, outcome, checkpoint, checkpoint, dtype)
        options.added(changes, conversion, when="first")
        _choose(conversion, changes)
        options.added(changes, conversion)
        _cast(conversion)
        options.added(changes, conversion, when="last")
        return _described(conversion.checkpoint, dict(changes["metadata"]), target), outcome

    rewrite(job, transform, full=full, keep_copies=keep_copies, to=to)


def _choose(conversion: Conversion, changes: Mapping[str, Any]) -> None:
    """Leave out what the options --drop, --only and --exclude say."""
    from ..checkpoint.selection import drop, select

    outcome, target = conversion.outcome, conversion.target
    if names := changes["drop"]:
        conversion.checkpoint = drop(conversion.checkpoint, names)
        outcome.left_out += names
    globs = {"only": changes["only"], "exclude": changes["exclude"]}
    if any(globs.values()):
        conversion.checkpoint, selection = select(conversion.checkpoint, **globs, state=target.state)
        outcome.left_out += selection.left_out
        is_noted = selection.left_out and target.place.holds_all
        for where, _ in conversion.checkpoint.optimizers() if is_noted else ():
            what = f"{where} is kept whole, with what it has of parameters that were left out"
            way = f"--drop {shlex.quote(where)} leaves it out, and ckpttool slim all but the model"
            outcome.notes.append(f"{what}: {way}")


def _cast(conversion: Conversion) -> None:
    from ..checkpoint.selection import cast
    from ..tensors.cast import CastReports

    if (dtype := conversion.dtype) is None:
        return
    outcome = conversion.outcome
    conversion.checkpoint, report = cast(conversion.checkpoint, dtype, state=conversion.target.state)
    outcome.casting = report if outcome.casting is None else CastReports(reports=[outcome.casting, report])
    outcome.done += f", {counted(report.tensors, 'tensor')} cast to {dtype.name}"


def _described(checkpoint: Checkpoint, metadata: dict[str, str], target: Target) -> Checkpoint:
    from ..checkpoint.selection import with_metadata

    if metadata and not target.place.has_metadata:
        what = f"--metadata: {target.place.format} has no place for it"
        raise UsageFault(what, hint="write safetensors, or leave it out")
    return with_metadata(checkpoint, metadata, state=target.state) if metadata else checkpoint
