"""The command `ckpttool average`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("average")
@options.inputs_and_output
@click.option("--weights", metavar="W,W,…", help="The weight of each INPUT; equal if not given.")
@options.writing_options
def command(inputs: tuple[str, ...], weights: str | None, **given: Any) -> None:
    """Write the mean of several checkpoints of one model: only its state, every number rounded once.

    Means are computed with twice the precision of float64, whatever the dtype. Integers and booleans, such as
    BatchNorm's counters, are never averaged: where the files differ, those of the last INPUT are taken.
    Names, dtypes and shapes must be the same in all. Tied tensors stay tied.

    \b
    Examples:
      ckpttool average epoch8.pt epoch9.pt mean.safetensors
      ckpttool average epoch8.pt epoch9.pt mean.pt --weights 1,3
    """
    from ... import formats
    from ...transforms.average import average

    console = options.console(given)
    options.require_new_output(inputs, given["output"], given["force"])
    shares = _numbers(weights) if weights is not None else None

    def transform(last: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        others = [formats.open(path) for path in inputs[:-1]]
        new, averaged = average([*others, last], weights=shares, state=target.state)
        done = f"averaged {counted(len(averaged.averaged), 'tensor', 'tensors')} of {averaged.files} files"
        left_out = last.outside(last.state(target.state))
        outcome = Outcome(done, left_out=left_out, where="", result=averaged)
        if averaged.taken:
            names = console.names(averaged.taken)
            outcome.notes.append(f"integers that differ, taken from {inputs[-1]}: {names}")
        if averaged.statistics:
            count = len(averaged.statistics)
            outcome.notes.append(
                f"{count} running statistics of BatchNorm were averaged too; the averaged model's own would "
                "differ: estimate them again on training data (torch.optim.swa_utils.update_bn)"
            )
        return new, outcome

    rewrite({**given, "input": inputs[-1]}, transform)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"'{text}' is not a list of numbers such as 1,1,2", param_hint="--weights"
        ) from None
