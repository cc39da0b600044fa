"""The commands of what one trains on with: `average`, `merge-lora` and `optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
@options.writing_options
def average(job: Job, weights: list[float] | None) -> None:
    """Write the mean of several checkpoints of one model: only its state, every number rounded once.

    Means are computed with twice the precision of float64, whatever the dtype. Integers and booleans, such as
    BatchNorm's counters, are never averaged: where the files differ, those of the last INPUT are taken.
    Names, dtypes and shapes must be the same in all. Tied tensors stay tied.

    \b
    Examples:
      ckpttool average epoch8.pt epoch9.pt mean.safetensors
      ckpttool average epoch8.pt epoch9.pt mean.pt --weights 1,3
    """
    from dataclasses import replace

    from ... import formats
    from ...transforms import average as transforms

    job.require_new_output()
    *others, last_path = job.inputs

    def transform(last: Checkpoint, target: Target) -> Change:
        files = [*map(formats.open, others), last]
        new, averaged = transforms.average(files, weights=weights, state=target.state)
        done = f"averaged {counted(len(averaged.averaged), 'tensor')} of {averaged.files} files"
        outcome = Outcome(done, left_out=last.outside(last.state(target.state)), where="", result=averaged)
        if averaged.taken:
            names = job.console.names(averaged.taken)
            outcome.notes.append(f"integers that differ, taken from {last_path}: {names}")
        if averaged.statistics:
            outcome.notes.append(
                f"{len(averaged.statistics)} running statistics of BatchNorm were averaged too; the averaged "
                "model's own would differ: estimate them again on training data "
                "(torch.optim.swa_utils.update_bn)"
            )
        return new, outcome

    rewrite(replace(job, input=last_path), transform)


@click.command("merge-lora")
@click.argument("input", metavar="BASE", type=click.Path(), callback=options.note_inputs)
@click.argument("adapter", metavar="ADAPTER", type=click.Path())
@options.output_argument
@options.writing_options
def merge_lora(job: Job, adapter: str) -> None:
    """Add a LoRA adapter to its base model, as PEFT's merge_and_unload does.

    BASE is the model's file or folder of shards, ADAPTER the folder that PEFT wrote. Each value is computed
    in float64 and rounded once to the weight's own type, a few rows at a time; tensors that ADAPTER holds
    whole take that of the model's, too. A layer tied to a module that ADAPTER holds whole keeps BASE's values
    and is written apart, so config.json must then say "tie_word_embeddings": false. DoRA and other kinds that
    do more than add a product are refused by name.

    \b
    Example:
      ckpttool merge-lora model.safetensors adapter merged.safetensors
    """
    from ...transforms.lora import merge
    from ...transforms.lora.adapter import open_adapter

    opened = open_adapter(adapter)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, merged = merge.merge_lora(checkpoint, opened, state=target.state)
        done = f"added {counted(len(merged.updated), 'update')} of {adapter}"
        settings = {"tie_word_embeddings": False} if merged.untied else {}
        return new, Outcome(done, casting=merged.casting, settings=settings, result=merged)

    with opened.checkpoint:
        rewrite(job, transform)


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
      ckpttool optimizer last.pt fitting.pt --to names --model torchvision:resnet18
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
