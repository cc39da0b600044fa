"""The command `ckpttool optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from .. import options
from ..console import counted, stdout_kept_for_results
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.ema_names import Parameters


@click.command("optimizer")
@options.writing
@click.option(
    "--to",
    type=click.Choice(["names", "indices", "flat"]),
    required=True,
    help="What the state is keyed by in OUTPUT: parameter names, torch's indices, torchtitan's flat names.",
)
@click.option(
    "--model",
    metavar="SPEC",
    help="Put the parameters in the order of this model: torchvision:resnet18, file.py:factory(n=10).",
)
@click.option(
    "--order",
    type=click.Choice(["state", "model"]),
    help="An optimizer without names lists its parameters in the order of the file's state, or of --model.",
)
def command(to: str, model: str | None, order: Literal["state", "model"] | None, **given: Any) -> None:
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
    from ...transforms.optimizer.rekey import to_flat, to_indices, to_names

    console = options.console(given)
    parameters = parameters_of(model).shapes if model else None

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        change = {"names": to_names, "indices": to_indices, "flat": to_flat}[to]
        new, rekeyed = change(checkpoint, parameters=parameters, state=target.state, order=order)
        key = "flat names" if to == "flat" else to
        what = counted(len(rekeyed.optimizers), "optimizer", "optimizers")
        done = f"keyed {what} of {counted(rekeyed.parameters, 'parameter', 'parameters')} by {key}"
        if rekeyed.moved:
            done += f", {rekeyed.moved} moved"
        outcome = Outcome(done, result=rekeyed)
        if rekeyed.ordered:
            either = "the model or the file's state, whichever fits"
            whose = {"model": "the model", "state": "the file's state", None: either}[order]
            outcome.notes.append(f"it names no parameters: they were taken in the order of {whose}")
        if rekeyed.absent:
            count = counted(len(rekeyed.absent), "parameter", "parameters")
            outcome.notes.append(f"{count} of the model are in no optimizer: {console.names(rekeyed.absent)}")
        return new, outcome

    rewrite(given, transform, full=True, state=None)


def parameters_of(spec: str) -> Parameters:
    """Return the parameters of a model. Runs the user's code; imports torch."""
    from ...errors import UsageFault
    from ...models import factory, reloading

    with stdout_kept_for_results():
        model = factory.build(spec)
    if not hasattr(model, "named_parameters"):
        raise UsageFault(f"{spec}: made a {type(model).__name__}, not a torch.nn.Module")
    return reloading.parameters_of(model)
