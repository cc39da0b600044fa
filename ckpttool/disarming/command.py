"""The command `ckpttool disarm`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..core.cli import options
from ..core.cli.console import Console, counted, printable
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields
from ..errors import UsageFault

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from .disarm import Disarmed


def _printed() -> Fields:
    change: Fields = {
        "name": (str, "dotted path of the value"),
        "from": (str, "its type before"),
        "to": (str, "what it became"),
    }
    return rewritten({"changed": ([change], "every object that became a plain value")})


@options.command("Convert", "Plain values for objects, as weights_only wants", _printed)
@options.input_argument
@options.output_argument
@options.state_option
@options.device_option
@options.resume_option
@options.job_options
def disarm(job: options.WriteJob) -> None:
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
    from ..core.formats.destination import format_of_name
    from ..core.formats.pytorch import zip as torch_zip
    from . import disarm as transforms

    if format_of_name(job.output) not in (torch_zip.NAME, None):
        hint = "safetensors and folders of it hold no objects: ckpttool convert writes them"
        raise UsageFault(f"{job.output}: disarm writes a .pt file", hint=hint)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, disarmed = transforms.disarm(checkpoint, state=target.state)
        changed = [{"name": name, "from": was, "to": now} for name, was, now in disarmed.changed]
        done = (
            f"disarmed {counted(len(changed), 'object')}"
            if changed
            else "found only tensors and plain values"
        )
        outcome = Outcome(done, left_out=disarmed.left_out, of_state=False, fields={"changed": changed})
        outcome.notes = _notes(job.console, disarmed)
        return new, outcome

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
