"""Whether a batch may be taken apart, into passes and over ranks, and still train as in one. Imports torch.

Two things would make the parts another training than the whole: what a pass leaves in the model for the next
one, and a loss of several samples that is not the sum of theirs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ckpttool.core.words import show_names
from ckpttool.distributed.plan import Plan
from ckpttool.distributed.randomness import seeded
from ckpttool.distributed.uneven import buffers_restored, modes_kept
from ckpttool.errors import UsageFault
from ckpttool.models import factory
from train.data.samples import count, digest_of
from train.data.stream import Stream
from train.model import wrapping
from train.tasks.builtin import ModelLoss, UserTask
from train.trainer.trial import Trial

TRIED = 4  # samples, whose loss is compared with that of their halves
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOST, MOST_OF_16_BITS = 1e-4, 1e-2  # of a loss: batches of another size are rounded otherwise


@dataclass(frozen=True)
class Stateful:
    """What each pass changes in a model, by name, besides BatchNorm's statistics.

    A counter of passes, as BatchNorm's `num_batches_tracked`, is left out if the next pass does not depend
    on it.

    Attributes:
        by_samples: whether the samples say how; else only the number of passes does.
    """

    names: tuple[str, ...] = ()
    by_samples: bool = False

    @property
    def why(self) -> str:
        """Why other passes are another training; "" if they are not."""
        return f"each pass changes {show_names(self.names)}" if self.names else ""

    def on_ranks(self, plan: Plan, ranks: int) -> str:
        """Why so many ranks train otherwise than one: all begin each pass with rank 0's buffers."""
        if not self.names or ranks == 1:
            return ""
        if self.by_samples:
            return f"{self.why}, by rank 0's samples alone"
        of_rank_zero = {min(plan.accumulate, sizes[0]) for sizes in plan.splits(ranks)}
        return f"{self.why}, and rank 0 is without samples in some steps" if 0 in of_rank_zero else ""


NOTHING = Stateful()


def stateful(trial: Trial, passed: nn.Module, model: nn.Module, size: int, ranks: int) -> Stateful:
    """Return what a pass has changed in a copy of a model (`passed`), of a batch of `size` samples.

    Raises:
        UsageFault: there are several ranks, and it has changed a parameter by its samples: DDP gives the
            ranks the same buffers, but not the same parameters.
    """
    before, after = _state(model), {name: _copied(value) for name, value in _state(passed).items()}
    names = [name for name, value in after.items() if not _same(value, before.get(name))]
    if not names:
        return NOTHING
    one, other = factory.copy_of(model), factory.copy_of(model)
    try:
        if _pass(trial, one, size, 0) == _pass(trial, passed, size, 0):
            names = [name for name in names if not _counts(before.get(name), after[name])]
        _pass(trial, other, size, min(1, count(trial.samples) - 1))
    except Exception:  # of this sample: it will be named when it is used
        return Stateful(tuple(names), by_samples=bool(names))
    of_one, of_other = _state(one), _state(other)
    of_samples = [name for name in names if not _same(of_one.get(name), of_other.get(name))]
    parameters = {name for name, _ in model.named_parameters()}
    if ranks > 1 and (odd := [name for name in of_samples if name in parameters]):
        what = f"--model {trial.model}: a pass changes parameter {odd[0]} by its samples"
        hint = "make it a buffer, of which all ranks have rank 0's"
        raise UsageFault(f"{what}, and each rank would have another", hint=hint)
    return Stateful(tuple(names), by_samples=bool(of_samples))


def _pass(trial: Trial, model: nn.Module, size: int, sample: int) -> str:
    with seeded("stateful"), torch.no_grad():
        outputs, _ = trial.forward(model, size, sample)
        return digest_of(outputs)


def _state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, extra states, and buffers but BatchNorm's, of which the trainer knows."""
    norms = [path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    buffers = {name: value for name, value in model.named_buffers() if name.rpartition(".")[0] not in norms}
    return {**dict(model.named_parameters()), **buffers, **wrapping.extra_states(model)}


def _copied(value: Any) -> Any:
    # Not a tensor by deepcopy, which refuses one that a pass has left with its graph.
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


@torch.no_grad()
def _same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if tensors and one.shape == other.shape and torch.equal(one, other):
        return True
    return digest_of(one) == digest_of(other)  # NaN is not equal to NaN


def _counts(before: Any, after: Any) -> bool:
    """Return whether a buffer counts passes."""
    if not all(isinstance(each, torch.Tensor) and each.numel() == 1 for each in (before, after)):
        return False
    return after.dtype in INTEGERS and int(after) - int(before) == 1


def coupled(trial: Trial, model: nn.Module) -> str:
    """Return how a loss of several samples differs from the sum of their losses; "" if it does not.

    In-batch and contrastive losses do. The model is asked as in an evaluation, where dropout and BatchNorm
    don't couple samples. Built-in tasks have sums of their own.
    """
    if not isinstance(trial.task, UserTask | ModelLoss):
        return ""
    number = TRIED if isinstance(trial.samples, Stream) else count(trial.samples)
    chosen = sorted({place * number // TRIED for place in range(TRIED)})
    parts = chosen, chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    most = MOST_OF_16_BITS if any(each.element_size() < 4 for each in model.parameters()) else MOST
    try:
        with modes_kept(model), buffers_restored(model), torch.no_grad():
            model.eval()
            whole, first, second = (_loss(trial, model, part, "apart") for part in parts)
            off, size = abs(whole - first - second), max(abs(whole), abs(first) + abs(second))
            if not most * size < off < math.inf or _loss(trial, model, chosen, "again") != whole:
                return ""  # it adds up, or draws numbers
    except Exception:  # of these samples: they will be named when they are used
        return ""
    halves = f"{first:.4g} and {second:.4g} for its halves"
    return f"the loss of {len(chosen)} samples is {whole:.4g}, but {halves}"


def _loss(trial: Trial, model: nn.Module, samples: list[int], seed: Any) -> float:
    batch = trial.batch_of(samples)
    with seeded("coupled", seed):
        total, _ = trial.task.loss(trial.task.forward(model, batch), batch)
    return float(total)
