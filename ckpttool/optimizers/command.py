"""The command `ckpttool optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import counted
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from ..core.checkpoint.optimizer_names import Form, Order


def _printed() -> Fields:
    from ..core.checkpoint.optimizer_names import Rekeyed

    return rewritten(Rekeyed)


@options.command("Train on", "Optimizer state by name or index, or for another order", _printed)
@options.writing
@options.option(
    "--to",
    "What the state is keyed by in OUTPUT: parameter names, torch's indices, torchtitan's flat names.",
    type=click.Choice(["names", "indices", "flat"]),
    required=True,
)
@options.option(
    "--order",
    "An optimizer without names lists its parameters in the order of the file's state, or of --model.",
    type=click.Choice(["state", "model"]),
)
def optimizer(job: options.WriteJob, to: Form, order: Order | None, **of_model: Any) -> None:
    """Key the state of every optimizer in a file by parameter names, or by torch's indices.

    torch keys it by index and loads it by position, so a model whose layers are in another order silently
    gets the momentum of other layers. Names can't be mistaken; and --to indices --model numbers the
    parameters as an optimizer of that model does, group by group.

    Which parameter is which is known from the names in the file (param_names), or from the model's state in
    it if the shapes allow only one answer, whatever the order. Anything else is refused, unless you say in
    which order the optimizer lists its parameters: that of model.parameters() with --model, or of the file's
    state with --order state. An optimizer that was given the new layers first lists them in neither. One with
    as many parameters as the model has trainable ones (requires_grad) was given those. No parameter or group
    is added or dropped, unless with --optimizer, which rebuilds the groups as that optimizer has them: each
    state follows its parameter by name, a new parameter has what a fresh optimizer keeps of it, and what is
    gone is dropped and named. The rest of the file stays as it is.

    \b
    Examples:
      ckpttool optimizer last.pt named.pt --to names
      ckpttool optimizer run.pt named.pt --to names --order state
      ckpttool optimizer last.pt named.pt --to names --model torchvision:resnet18
    """
    from ..core.checkpoint.optimizer_names import rekeyed

    change_of = next(iter(options.added(of_model)), rekeyed)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, change = change_of(checkpoint, to, state=target.state, order=order)
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
