"""Whether the ranks compute the same: what no state dict has may differ unseen. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import torch
from torch import nn

from ckpttool.distributed import collectives, randomness
from ckpttool.distributed.dummy_pass import leaving_no_trace
from train.config.training import TrainConfig
from train.model import wrapping
from train.tasks.task import Task

# By which the loss of one sample may differ: the devices of ranks need not be of one kind.
MOST = 0.01


def compare(config: TrainConfig, task: Task, model: nn.Module, batch: Any) -> str:
    """Return what differs if a sample has another loss on each rank; "" if it has not. A collective.

    The ranks have the same weights and draw the same numbers, so it would depend on an attribute that a
    factory has drawn, say, or on code that is another on each machine.

    Args:
        model: as it is trained; with `--shard` the one that is divided.
        batch: of one sample, the same on all ranks.
    """
    if collectives.world_size() == 1:
        return ""
    eager = wrapping.not_compiled() if config.compile else contextlib.nullcontext()
    model = model if config.shard else copy.deepcopy(model)  # one may count its passes
    with torch.no_grad(), leaving_no_trace(model, together=False), eager:
        randomness.seed_all(randomness.seed_from("a pass"))  # on GPUs too
        loss, _ = task.loss(task.forward(model, batch), batch)
    losses = collectives.gather(float(loss))
    other = next((rank for rank, one in enumerate(losses) if not _near(one, losses[0])), 0)
    if not other:
        return ""
    where = f"{losses[0]:.4g} on rank 0 and {losses[other]:.4g} on rank {other}"
    by = f"--model {config.model} and --task {task.name}"
    return f"by {by} a sample has the loss {where}, with the same weights and random numbers"


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=MOST, abs_tol=1e-6) or not (one == one or other == other)
