"""A task that is a user's object: `--task file.py:factory`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from ckpttool.errors import UsageFault
from ckpttool.metrics.evaluating import measures
from ckpttool.models import factory
from train.data.samples import kind_of
from train.tasks.task import Loss, Task

PAIR = "return (sum, count): the sum of the batch's losses as a tensor, and their number as an integer"


class UserTask(Task):
    """A user's object: what it returns is checked, and what it lacks is taken from `Task`."""

    def __init__(self, made: Any, name: str) -> None:
        self.name, self.made = name, made
        if not callable(getattr(made, "loss", None)):
            raise UsageFault(
                f"--task {name}: {kind_of(made)} has no method loss",
                hint=f"give it loss(self, outputs, batch), and {PAIR}",
            )
        if isinstance(made, nn.Module) and any(parameter.requires_grad for parameter in made.parameters()):
            raise UsageFault(
                f"--task {name}: has parameters, which are not trained", hint="make them part of the model"
            )
        for method in ("forward", "outputs", "sample_count", "batch_to", "check"):
            given = getattr(made, method, None)
            # nn.Module has a `forward`, which means something else.
            if callable(given) and not (method == "forward" and isinstance(made, nn.Module)):
                setattr(self, method, given)
        measured = getattr(made, "metrics", {})
        if isinstance(measured, ModuleType):  # of a task that is a module itself, which has imported ours
            measured = {}
        try:
            self.metrics = measured() if callable(measured) else measured
            measures(self.metrics)
        except Exception as error:
            raise UsageFault(
                f"--task {name}: {factory.described(error)}",
                hint="for example metrics = {'mae': MeanAbsoluteError}, of ckpttool.metrics",
            ) from error

    def loss(self, outputs: Any, batch: Any) -> Loss:
        returned = self.made.loss(outputs, batch)
        wrong = wrong_pair(returned)
        if wrong:
            raise UsageFault(f"--task {self.name}: loss returned {wrong}", hint=PAIR)
        total, count = returned
        return total.reshape(()), count if isinstance(count, torch.Tensor) else int(count)


def wrong_pair(returned: Any) -> str | None:
    """Return what is wrong with a loss that should be (sum, count); None if it is one."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return f"{kind_of(returned)}, not (sum, count)"
    total, count = returned
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        return f"{kind_of(total)} as its sum, not a tensor of one number"
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_floating_point() or count.dtype in (torch.bool, torch.complex64):
            return f"{kind_of(count)} as its count, not an integer"
        if count.device.type != "cpu":  # looking at it would wait for the device
            return None
    elif isinstance(count, bool) or not isinstance(count, int | numpy.integer):
        return f"{count if isinstance(count, float) else kind_of(count)} as its count, not an integer"
    if not 0 <= int(count) < 2**63:
        return f"a count of {int(count)}"
    if int(count) == 0 and total.device.type == "cpu" and float(total.detach()) != 0:
        return f"a count of 0 for a sum of {float(total.detach()):g}"
    return None
