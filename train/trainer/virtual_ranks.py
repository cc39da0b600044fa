"""`--virtual-ranks V`: the same bits of the weights on any number of ranks that divides V. Imports torch.

Each global batch is dealt to V virtual ranks, and rank r of W computes for V/W of them, one after the other.
What a virtual rank computes depends on nothing but its number and the step: its samples, its random numbers,
and the buffers it starts from. The gradients of all V are then added in the order of their numbers on every
rank. Sums of floating point depend on their order, so DDP's, which is another for each W, can't be used.

This costs V/W gradients of memory on a rank, beside their sum, and each rank receives V gradients per step,
where an all-reduce moves about two. Nothing is sent while backward still computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ckpttool.distributed import collectives, heartbeat, randomness, transport
from ckpttool.distributed.dummy_pass import buffers_restored
from ckpttool.distributed.plan import Step
from ckpttool.errors import UsageFault
from train.config.training import TrainConfig
from train.trainer.progress import Sums
from train.trainer.trainer import Trainer

# Numbers of each virtual rank's gradient that are gathered at once, which bounds the memory for it.
PIECE = 1 << 22


def check(config: TrainConfig, model: nn.Module) -> None:
    """Raise UsageFault if `--virtual-ranks` can't compute a model's gradients apart."""
    if config.virtual_ranks is None:
        return
    for path, layer in model.named_modules():
        reason = None
        if isinstance(layer, nn.SyncBatchNorm) or hasattr(layer, "absent"):
            reason = "is synchronised over ranks, and virtual ranks compute apart"
        elif getattr(layer, "sparse", False) is True:
            reason = "has sparse gradients, and virtual ranks add dense ones"
        if reason:
            what = f"--virtual-ranks {config.virtual_ranks}: '{path}' of {config.model} {reason}"
            raise UsageFault(what, hint="leave out --virtual-ranks, or give another --model")


def steps_of_epoch(trainer: Trainer) -> Iterator[None]:
    """Take the remaining optimizer steps of the current epoch; yield after each. A collective."""
    place, progress, number = trainer.place, trainer.progress, trainer.config.virtual_ranks
    epoch = progress.epoch
    assert number is not None
    per_rank = number // place.world_size
    # Backwards, so that virtual rank 0 is the last of its rank, and the buffers it leaves may stay.
    virtual_ranks = range((place.rank + 1) * per_rank - 1, place.rank * per_rank - 1, -1)
    of_ranks = trainer.feed.plan.of_ranks(progress.epoch, virtual_ranks, number, progress.step)
    in_turn = (step for steps in zip(*of_ranks, strict=True) for step in steps)
    batches = trainer.feed.batches(in_turn, progress)
    gradients = OrderedSum([parameter for _, parameter in trainer.updater.parameters], per_rank)
    for count, steps in enumerate(zip(*of_ranks, strict=True), start=progress.global_step + 1):
        if progress.epoch != epoch:  # a stream has ended
            return
        heartbeat.begin_step(count)
        take_step(trainer, dict(zip(virtual_ranks, steps, strict=True)), batches, gradients)
        yield


def take_step(
    trainer: Trainer, steps: dict[int, Step], batches: Iterator[tuple[Any, int]], gradients: OrderedSum
) -> None:
    """Take one optimizer step, as `train.main.take_step` does, on this rank's virtual ranks (`steps`)."""
    model, sums = trainer.ddp.module, Sums()
    for virtual, step in steps.items():
        with contextlib.nullcontext() if virtual == 0 else buffers_restored(model):
            if _pass_all(trainer, virtual, step, batches, sums):
                trainer.check_gradients()
        gradients.take(virtual % len(steps))
    with trainer.log.phase("reduce"):
        gradients.sum_over_ranks()
        collectives.broadcast_into(model.buffers())  # which are those of virtual rank 0
        trainer.begin_count(sums)
        step, counted = trainer.average_over_count(step, sums)
    with trainer.log.phase("update"):
        norm = trainer.update(counted)
    trainer.end_step(step, sums, norm)


def _pass_all(
    trainer: Trainer, virtual: int, step: Step, batches: Iterator[tuple[Any, int]], sums: Sums
) -> bool:
    """Run the forward and backward passes of one virtual rank; return False if it has no samples."""
    before = sums.samples
    task, precision, log = trainer.task, trainer.updater.precision, trainer.log
    model = trainer.ddp.module  # DDP itself would reduce the gradients
    for number in range(len(step.micro_batches)):
        with log.phase("data"):
            batch, samples = next(batches)
        if batch is None:
            continue
        key = "virtual", trainer.progress.global_step, virtual, number
        randomness.seed_all(randomness.seed_from(trainer.config.seed, *key))
        with log.phase("forward"), precision.autocast():
            outputs = task.forward(model, batch)
            loss, count = task.loss(outputs, batch)
            loss_of_mean = precision.scale(loss / step.global_size)
        with log.phase("backward", loss_of_mean), trainer.backward_of(loss, count):
            loss_of_mean.backward()
        sums.add(loss, count, samples=samples)
        sums.add_correct(task.correct(outputs, batch))
    return sums.samples > before


class OrderedSum:
    """Adds the gradients of all virtual ranks in the order of their numbers, the same on every rank.

    gradients.take(0), gradients.take(1), ...    # after the passes of each virtual rank of this rank
    gradients.sum_over_ranks()
    """

    def __init__(self, parameters: Sequence[nn.Parameter], per_rank: int) -> None:
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        # The parameters of each dtype, how many numbers each has, and a row for each virtual rank.
        self._groups: list[tuple[list[nn.Parameter], list[int], torch.Tensor]] = []
        for group in kinds.values():
            sizes = [parameter.numel() for parameter in group]
            rows = group[0].new_zeros((per_rank, sum(sizes)), requires_grad=False)
            self._groups.append((group, sizes, rows))

    def take(self, row: int) -> None:
        """Take the gradients of this rank's virtual rank number `row` from the parameters; zeros for none."""
        for parameters, sizes, rows in self._groups:
            for parameter, piece in zip(parameters, rows[row].split(sizes), strict=True):
                if parameter.grad is None:
                    piece.zero_()
                else:
                    piece.copy_(parameter.grad.reshape(-1))
                parameter.grad = None

    def sum_over_ranks(self) -> None:
        """Give every parameter the sum of the gradients of all virtual ranks. A collective."""
        for parameters, sizes, rows in self._groups:
            total = torch.empty_like(rows[0])
            for start in range(0, len(total), PIECE):
                piece = _gathered(rows[:, start : start + PIECE].contiguous())
                summed = total[start : start + PIECE].copy_(piece[0])
                for of_virtual in piece[1:]:
                    summed += of_virtual
            for parameter, part in zip(parameters, total.split(sizes), strict=True):
                parameter.grad = part.view(parameter.shape)


def _gathered(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    if collectives.world_size() == 1:
        return rows
    all_rows = rows.new_empty((len(rows) * collectives.world_size(), *rows.shape[1:]))
    transport.all_gather_tensor(all_rows.view(torch.uint8), rows.view(torch.uint8))  # any dtype
    return all_rows
