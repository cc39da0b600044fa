"""The command `ckpttool average`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import counted
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        what = f"'{text}' is not a list of numbers such as 1,1,2"
        raise click.BadParameter(what, param_hint="--weights") from None


def _printed() -> Fields:
    from .average import Averaged

    return rewritten(Averaged)


@options.command("Train on", "The mean of several checkpoints, or SLERP, TIES, DARE", _printed)
@options.inputs_and_output
@options.option("--weights W,W,…", "The weight of each INPUT; equal if not given.", type=_numbers)
@options.option(
    "--method NAME",
    "linear, the mean; slerp; or what the INPUTs learnt, added to --base: task, ties, dare.",
    type=click.Choice(("linear", "slerp", "task", "ties", "dare")),
    default="linear",
    show_default=True,
)
@options.option(
    "--base BASE",
    "The model that the INPUTs were trained from; with slerp, the one that it starts at.",
    type=options.PATH,
    callback=options.note_base,
)
@options.option(
    "--t T", "How far slerp goes from the first to the second, 0 to 1.  [default: 0.5]", type=float
)
@options.option(
    "--lambda X", "task, ties, dare: the sum is multiplied by it.  [default: 1]", "scale", type=float
)
@options.option(
    "--density D",
    "ties, dare: the part of what an INPUT learnt that is kept, 0 to 1.  [default: 1]",
    type=float,
)
@options.option("--seed N", "dare: of the random choice of that part.  [default: 0]", type=int)
@options.writing_options
def average(job: options.WriteJob, weights: list[float] | None, method: str, **settings: Any) -> None:
    """Write the mean of several checkpoints of one model: only its state, every number rounded once.

    Means are computed with twice the precision of float64, whatever the dtype. Integers and booleans, such as
    BatchNorm's counters, are never averaged: where the files differ, those of the last INPUT are taken.
    Names, dtypes and shapes must be the same in all. Tied tensors stay tied.

    The other methods are those of mergekit: slerp goes from one model to another on a sphere, tensor by
    tensor; task adds the weighted sum of what each INPUT learnt, INPUT - BASE, to BASE; ties first keeps the
    largest part (--density) of each tensor, and of what is left only the sign that prevails; dare keeps a
    random part, the same for the same --seed. They compute in float64.

    \b
    Examples:
      ckpttool average epoch8.pt epoch9.pt mean.safetensors
      ckpttool average epoch8.pt epoch9.pt mean.pt --weights 1,3
      ckpttool average epoch8.pt epoch9.pt ties.pt --method ties --base base.pt
    """
    from dataclasses import replace

    from ..core import formats
    from . import average as transforms

    job.require_new_output()
    *others, last_path = job.inputs

    def transform(last: Checkpoint, target: Target) -> Change:
        files = [*map(formats.open, others), last]
        new, averaged = transforms.average(
            files, weights=weights, state=target.state, method=method, **settings
        )
        did, how = ("averaged", "") if method == "linear" else ("merged", f" by {method}")
        done = f"{did} {counted(len(averaged.averaged), 'tensor')} of {counted(averaged.files, 'file')}{how}"
        rest = last.outside(last.state(target.state))
        outcome = Outcome(done, left_out=rest, where="", result=averaged)
        if method != "linear":
            outcome.casting = averaged.casting
        if averaged.taken:
            names = job.console.names(averaged.taken)
            outcome.notes.append(f"have no mean, and differ: taken from {last_path}: {names}")
        if averaged.statistics:
            outcome.notes.append(
                f"{len(averaged.statistics)} running statistics of BatchNorm were averaged too; the averaged "
                "model's own would differ: estimate them again on training data "
                "(torch.optim.swa_utils.update_bn)"
            )
        return new, outcome

    base = settings["base"]
    rewrite(replace(job, input=last_path, inputs=(*job.inputs, *([base] if base else []))), transform)
