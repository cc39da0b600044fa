"""The commands that leave something behind: `slim`, which keeps the model, and `disarm`, plain values."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import click

from .. import options
from ..console import Console, counted, printable, show_bytes
from ..options import Job
from ..rewriting import Change, Outcome, Target, rewrite
from .training import parameters_of

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.disarm import Disarmed


@click.command("slim")
@options.writing
@options.option(
    "--model SPEC", "Name the tensors of an average that lists them in the order of this model's parameters."
)
def slim(job: Job, model: str | None) -> None:
    """Write only the model's state, without bytes that none of its tensors uses.

    Optimizer, counters and arguments stay behind, and so does the rest of a storage that a view was cut from.
    An average without names, such as --state ema.shadow_params, gets those of --model.

    \b
    Example:
      ckpttool slim last.pt weights.pt
    """
    from ...transforms.ema_names import with_names
    from ...transforms.selection import slim

    parameters = parameters_of(model) if model else None

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        named = with_names(checkpoint, target.state, parameters) if parameters else None
        if named is not None:
            count = counted(len(named.checkpoint.state("").tensors), "tensor", "tensors")
            done = f"named {count} by {model}"
            return slim(named.checkpoint), Outcome(done, left_out=named.left_out, where="")
        left_out = checkpoint.outside(checkpoint.state(target.state))
        done = f"slimmed {show_bytes(checkpoint.nbytes)}"
        return slim(checkpoint, state=target.state), Outcome(done, left_out=left_out, where="")

    rewrite(job, transform)


@click.command("disarm")
@options.input_argument
@options.output_argument
@options.state_option
@options.device_option
@options.job_options
def disarm(job: Job) -> None:
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
    from ...errors import UsageFault
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
            f"disarmed {counted(len(changed), 'object', 'objects')}"
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
