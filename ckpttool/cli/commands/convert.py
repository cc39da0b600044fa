"""The commands that write a checkpoint in another form: `convert` and `disarm`."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from ...errors import UsageFault
from .. import options
from ..console import Console, counted, printable
from ..options import WriteJob, entry, pair, sizes_for
from ..quantizing import Quantizing
from ..rewriting import Change, Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.disarm import Disarmed


@click.command("convert")
@options.to_option
@options.full_option
@options.option(
    "--dtype TYPE", "Cast floating-point tensors to bf16, fp16, fp32 or fp64 (or bfloat16, float16, half, …)."
)
@options.several("--only GLOB", "Keep only the keys that match, e.g. 'layer1.*'.")
@options.several("--exclude GLOB", "Leave out the keys that match.")
@options.option(
    "--map NAME", "Change the architecture by a map (ckpttool maps), or by the rules in a .toml file.", "map_"
)
@options.flag("--inverse", "Apply the --map backwards.")
@options.option("--config FILE", "The model's config, which --map takes numbers from; default: beside INPUT.")
@options.several("--permute GLOB=AXES", "Put axes in another order: 'fc.weight=1,0' transposes.", sizes_for)
@options.several(
    "--reshape GLOB=SHAPE", "Give the same elements another shape: 'fc.weight=10,64,1,1'.", sizes_for
)
@options.several("--tie NEW=OLD", "Give a tensor a second name: 'lm_head.weight=embed.weight'.", pair)
@options.several("--drop NAME", "Leave out what is stored there, e.g. optimizer.")
@options.option(
    "--complex",
    "Write complex tensors as pairs NAME.real and NAME.imag, or such pairs as complex tensors.",
    "complex_",
    type=click.Choice(["split", "join"]),
)
@options.several(
    "--metadata NAME=TEXT",
    "Add text to the header of safetensors: 'format=pt', which some readers want.",
    entry,
)
@options.flag("--dequantize", "Make packed tensors plain: fp8, MXFP4, GPTQ, AWQ, bitsandbytes and the like.")
@options.option(
    "--quantize SCHEME",
    "Make the matrices of layers fp8, with a scale per tensor, per channel or per block of 128 × 128.",
    type=click.Choice(["fp8", "fp8-channel", "fp8-block"]),
)
@options.flag("--keep-copies", "Write tied tensors once per name if the format has no ties.")
@options.writing
def convert(job: WriteJob, full: bool, keep_copies: bool, to: str | None, **changes: Any) -> None:
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
      ckpttool convert model.safetensors shards/ --shard-size 500MB
    """
    from ...tensors import cast

    for flag in ("inverse", "config"):
        if changes[flag] and changes["map_"] is None:
            raise UsageFault(
                f"--{flag} is of --map, which is not given", hint="--map NAME; ckpttool maps lists them"
            )
    if changes["dtype"]:
        changes["dtype"] = cast.target(changes["dtype"].lower())

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        of_state = any(value for name, value in changes.items() if name not in ("drop", "metadata"))
        outcome = Outcome(f"converted {checkpoint.format}", of_state=of_state)
        if next(iter(checkpoint.tensors()), None) is None:
            outcome.notes.append(f"{checkpoint.path} holds no tensor")
        packing = Quantizing(job, checkpoint, outcome, target)
        if changes["dtype"]:
            packing.typed(changes["dtype"])
        if changes["dequantize"]:
            checkpoint = packing.undone(changes.pop("dtype"))
            changes["dtype"] = None  # each value is rounded once
        checkpoint = _changed(checkpoint, outcome, target, changes)
        if changes["quantize"]:
            checkpoint = packing.done(checkpoint, changes["quantize"])
        return _described(checkpoint, dict(changes["metadata"]), target), outcome

    rewrite(job, transform, full=full, keep_copies=keep_copies, to=to)


def _changed(checkpoint: Checkpoint, outcome: Outcome, target: Target, changes: dict[str, Any]) -> Checkpoint:
    state = target.state
    from ...tensors.losses import CastReports
    from ...transforms import layout
    from ...transforms.selection import cast, drop, select

    if names := changes["drop"]:
        checkpoint = drop(checkpoint, names)
        outcome.left_out += names
    if changes["only"] or changes["exclude"]:
        only, exclude = changes["only"], changes["exclude"]
        checkpoint, selection = select(checkpoint, only=only, exclude=exclude, state=state)
        outcome.left_out += selection.left_out
        if selection.left_out and target.place.holds_all:
            outcome.notes += _whole_optimizers(checkpoint)
    if changes["map_"] is not None:
        checkpoint = _mapped(checkpoint, outcome, target, changes)
    in_layout = ("permute", layout.permute, "permuted"), ("reshape", layout.reshape, "reshaped")
    for flag, change, done in in_layout:
        if changes[flag]:
            checkpoint, names = _in_form(checkpoint, target, change(checkpoint, changes[flag], state=state))
            outcome.done += f", {counted(len(names), 'tensor')} {done}"
    if ties := changes["tie"]:
        checkpoint = layout.tie(checkpoint, ties, state=state)
        outcome.done += f", {counted(len(ties), 'name')} tied"
    ways = {"split": (layout.split_complex, "split"), "join": (layout.join_complex, "joined")}
    if way := changes["complex_"]:
        change_parts, done = ways[way]
        checkpoint, names = _in_form(checkpoint, target, change_parts(checkpoint, state=state))
        outcome.done += f", {counted(len(names), 'complex tensor')} {done}"
    if (dtype := changes["dtype"]) is not None:
        checkpoint, casting = cast(checkpoint, dtype, state=state)
        outcome.casting = (
            casting if outcome.casting is None else CastReports(reports=[outcome.casting, casting])
        )
        outcome.done += f", {counted(casting.tensors, 'tensor')} cast to {dtype.name}"
    return checkpoint


def _whole_optimizers(checkpoint: Checkpoint) -> list[str]:
    return [
        f"{where} is kept whole, with what it has of parameters that were left out: "
        f"--drop {shlex.quote(where)} leaves it out, and ckpttool slim all but the model"
        for where, _ in checkpoint.optimizers()
    ]


def _in_form(
    checkpoint: Checkpoint, target: Target, changed: tuple[Checkpoint, tuple[str, ...]]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return what a change of form made, unless OUTPUT would hold momentum in the old form."""
    from ...transforms.optimizer.owners import require_none

    if target.place.holds_all:
        require_none(checkpoint, *(each.state(target.state) for each in (checkpoint, changed[0])))
    return changed


def _mapped(checkpoint: Checkpoint, outcome: Outcome, target: Target, changes: dict[str, Any]) -> Checkpoint:
    from ...checkpoint.optimizer_view import is_numbered
    from ...inert_pickle.values import walk
    from ...transforms.mapping.applying import FILES, apply_map

    given = {"inverse": changes["inverse"], "config": changes["config"], "state": target.state}
    optimizers = target.place.holds_all  # what is left out need not follow
    checkpoint, mapped = apply_map(checkpoint, changes["map_"], optimizers=optimizers, **given)
    outcome.renamed = {old: new for old, new in mapped.renaming.items() if old != new}
    outcome.left_out += mapped.dropped
    outcome.untrue = (*outcome.untrue, *FILES)  # they say the architecture that it was
    outcome.result = mapped
    if optimizers and any(map(is_numbered, walk(checkpoint.tree))):
        outcome.notes.append(
            "its optimizer numbers the parameters in INPUT's order: if the other side has another, key it by "
            "names first (ckpttool optimizer --to names)"
        )
    outcome.casting = mapped.casting if mapped.casting.reports else None
    outcome.done += f", {counted(len(mapped.names), 'tensor')} made by {changes['map_']}"
    return checkpoint


def _described(checkpoint: Checkpoint, metadata: dict[str, str], target: Target) -> Checkpoint:
    from ...transforms.selection import with_metadata

    if metadata and not target.place.has_metadata:
        what = f"--metadata: {target.place.format} has no place for it"
        raise UsageFault(what, hint="write safetensors, or leave it out")
    return with_metadata(checkpoint, metadata, state=target.state) if metadata else checkpoint


@click.command("disarm")
@options.input_argument
@options.output_argument
@options.state_option
@options.device_option
@options.resume_option
@options.job_options
def disarm(job: WriteJob) -> None:
    """Write a .pt of tensors and plain values alone, which torch.load(weights_only=True) takes.

    Nothing that INPUT names is imported or called, and OUTPUT names nothing but torch's own tensors and
    types. Every object that became a plain value is named: a Namespace or dataclass becomes a dict, a
    NumPy scalar a number, an array a tensor, a path text, a pickled model its state dict, a function or class
    its name as text. Anything else becomes a dict of what would have been called, with which arguments. The
    model's state stays as it is, and so does its digest.

    \b
    Example:
      ckpttool disarm last.pt safe.pt
    """
    from ...formats.pytorch import zip as torch_zip
    from ...formats.saving.destination import format_of_name
    from ...transforms import disarm as transforms

    if format_of_name(job.output) not in (torch_zip.NAME, None):
        hint = "safetensors and folders of it hold no objects: ckpttool convert writes them"
        raise UsageFault(f"{job.output}: disarm writes a .pt file", hint=hint)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, disarmed = transforms.disarm(checkpoint, state=target.state)
        changed = [{"name": name, "from": was, "to": now} for name, was, now in disarmed.changed]
        return new, Outcome(
            f"disarmed {counted(len(changed), 'object')}"
            if changed
            else "found only tensors and plain values",
            left_out=disarmed.left_out,
            of_state=False,
            notes=_notes(job.console, disarmed),
            fields={"changed": changed},
        )

    rewrite(job, transform, to=torch_zip.NAME, state=None)


def _notes(console: Console, disarmed: Disarmed) -> list[str]:
    """Return a line for each kind of change, with the names of the values."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, was, now in disarmed.changed:
        names[was, now].append(name or "the file itself")
    notes = [f"{printable(was)} -> {now}: {console.names(at)}" for (was, now), at in names.items()]
    if disarmed.dtensors:
        notes.append("its DTensors are kept: import torch.distributed.tensor before torch.load")
    return notes
