"""The commands of what one trains on with: `average` and `optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted, stdout_kept_for_results
from ..options import Job
from ..rewriting import Change, Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.ema_names import Parameters
    from ...transforms.optimizer.parameters import Order
    from ...transforms.optimizer.rekey import Form


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        what = f"'{text}' is not a list of numbers such as 1,1,2"
        raise click.BadParameter(what, param_hint="--weights") from None


@click.command("average")
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
def average(job: Job, weights: list[float] | None, method: str, **settings: Any) -> None:
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

    from ... import formats
    from ...transforms import average as transforms

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


@click.command("optimizer")
@options.writing
@options.option(
    "--to",
    "What the state is keyed by in OUTPUT: parameter names, torch's indices, torchtitan's flat names.",
    type=click.Choice(["names", "indices", "flat"]),
    required=True,
)
@options.option(
    "--model SPEC",
    "Put the parameters in the order of this model: torchvision:resnet18, file.py:factory(n=10).",
)
@options.option(
    "--order",
    "An optimizer without names lists its parameters in the order of the file's state, or of --model.",
    type=click.Choice(["state", "model"]),
)
def optimizer(job: Job, to: Form, model: str | None, order: Order | None) -> None:
    """Key the state of every optimizer in a file by parameter names, or by torch's indices.

    torch keys it by index and loads it by position, so a model whose layers are in another order silently
    gets the momentum of other layers. Names can't be mistaken; and --to indices --model numbers the
    parameters as an optimizer of that model does, group by group.

    Which parameter is which is known from the names in the file (param_names), or from the model's state in
    it if the shapes allow only one answer, whatever the order. Anything else is refused, unless you say in
    which order the optimizer lists its parameters: that of model.parameters() with --model, or of the file's
    state with --order state. An optimizer that was given the new layers first lists them in neither. No
    parameter or group is added or dropped. The rest of the file stays as it is.

    \b
    Examples:
      ckpttool optimizer last.pt named.pt --to names
      ckpttool optimizer run.pt named.pt --to names --order state
      ckpttool optimizer last.pt named.pt --to names --model torchvision:resnet18
    """
    from ...transforms.optimizer.rekey import rekeyed

    parameters = parameters_of(model).shapes if model else None

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, change = rekeyed(checkpoint, to, parameters=parameters, state=target.state, order=order)
        what = counted(len(change.optimizers), "optimizer")
        key = "flat names" if to == "flat" else to
        done = f"keyed {what} of {counted(change.parameters, 'parameter')} by {key}"
        outcome = Outcome(done + (f", {change.moved} moved" if change.moved else ""), result=change)
        if change.ordered:
            either = "the model or the file's state, whichever fits"
            whose = {"model": "the model", "state": "the file's state", None: either}[order]
            outcome.notes.append(f"it names no parameters: they were taken in the order of {whose}")
        if change.absent:
            count = counted(len(change.absent), "parameter")
            names = job.console.names(change.absent)
            outcome.notes.append(f"{count} of the model are in no optimizer: {names}")
        return new, outcome

    rewrite(job, transform, full=True, state=None)


def parameters_of(spec: str) -> Parameters:
    """Return the parameters of a model. Runs the user's code; imports torch."""
    from ...errors import UsageFault
    from ...models import factory, reloading

    with stdout_kept_for_results():
        model = factory.build(spec)
    if not hasattr(model, "named_parameters"):
        raise UsageFault(f"{spec}: made a {type(model).__name__}, not a torch.nn.Module")
    return reloading.parameters_of(model)
