"""The command `ckpttool disarm`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import Console, counted, printable
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.disarm import Disarmed


@click.command("disarm")
@options.input_argument
@options.output_argument
@options.state_option
@options.device_option
@options.companions_option
@options.verify_option
@options.dry_run_option
@options.force_option
@options.reading
def command(**given: Any) -> None:
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
    from ...transforms.disarm import disarm

    output, console = given["output"], options.console(given)
    if format_of_name(output) not in (torch_zip.NAME, None):
        raise UsageFault(
            f"{output}: disarm writes a .pt file",
            hint="safetensors and folders of it hold no objects: ckpttool convert writes them",
        )

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        new, disarmed = disarm(checkpoint, state=target.state)
        count = counted(len(disarmed.changed), "object", "objects")
        changed = [{"name": name, "from": was, "to": now} for name, was, now in disarmed.changed]
        return new, Outcome(
            f"disarmed {count}" if changed else "found only tensors and plain values",
            left_out=disarmed.left_out,
            of_state=False,
            notes=[*_notes(console, disarmed)],
            fields={"changed": changed},
        )

    rewrite(given, transform, to=torch_zip.NAME, state=None)


def _notes(console: Console, disarmed: Disarmed) -> list[str]:
    """Return a line for each kind of change, with the names of the values."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, was, now in disarmed.changed:
        names[was, now].append(name or "the file itself")
    notes = [f"{printable(was)} -> {now}: {console.names(at)}" for (was, now), at in names.items()]
    if disarmed.dtensors:
        notes.append("its DTensors are kept: import torch.distributed.tensor before torch.load")
    return notes
