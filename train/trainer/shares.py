"""Shares of a batch by the ranks' measured speeds, or of virtual ranks. Imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool.distributed import collectives, heartbeat, randomness, transport
from ckpttool.distributed.plan import Plan, Step
from ckpttool.distributed.uneven import buffers_restored, leaving_no_trace
from train.data.batches import batch_of
from train.model import wrapping
from train.trainer.progress import Sums
from train.trainer.trainer import Trainer

Batches = Iterator[tuple[Any, int]]

# Passes before the clock starts, and passes whose median counts.
WARM, TIMED = 2, 9


class Speed(NamedTuple):
    """How long a rank takes for its part of a step: `pause + samples * per_sample`, in seconds."""

    pause: float
    per_sample: float


def settle(trainer: Trainer) -> list[str]:
    """Give the ranks shares by their speeds, if `--rank-share auto` asks for it. A collective.

    Speeds are measured before the first step, in passes that leave no trace, on all ranks at once. The shares
    are then part of the plan, and so of the checkpoint: a run that is resumed on as many ranks follows the
    same plan. On another number of ranks they are measured again. Returns remarks for the user.
    """
    ranks, plan = trainer.place.world_size, trainer.feed.plan
    if trainer.config.batch.rank_share != "auto" or ranks == 1:
        return []
    if plan.rank_share:
        return [f"{_flag(plan.rank_share)}, as measured when the run began"]
    if not min(plan.splits(ranks)[0]):
        return ["equal shares: a batch leaves a rank without a sample, so there is nothing to measure"]
    collectives.gather(None)  # all begin together, as they will in the training
    with collectives.fail_together():
        speed = measure(trainer)
    sizes = propose(collectives.gather(speed), plan)
    divisor = math.gcd(*sizes)
    shares = tuple(size // divisor for size in sizes)
    trainer.feed.plan = dataclasses.replace(plan, rank_share=shares)
    return [f"{_flag(shares)}, by measured speed"]


def _flag(shares: Sequence[int]) -> str:
    return f"--rank-share {','.join(map(str, shares))}"


def measure(trainer: Trainer) -> Speed:
    """Return this rank's speed at loading its samples and at forward and backward passes. Leaves no trace.

    Passes of two sizes tell a pause, which each pass takes, from the time that each sample takes.
    """
    feed, place = trainer.feed, trainer.place
    step = feed.plan.of_rank(trainer.progress.epoch, place.rank, place.world_size)[0]
    indices = step.micro_batches[0]
    few = max(1, len(indices) // 4)
    with leaving_no_trace(trainer.ddp, together=False), wrapping.not_compiled():
        passes = _pass(trainer, indices), _pass(trainer, indices[:few])
        load, whole, part = _seconds(lambda: batch_of(feed.samples, feed.collation, indices), *passes)
    trainer.updater.clear_gradients()
    most = whole / len(indices)
    per_sample = min((whole - part) / (len(indices) - few), most) if len(indices) > few else most
    if per_sample <= 0:  # the clock is too coarse, or the passes too short
        per_sample = most
    pause = (whole - per_sample * len(indices)) * len(step.micro_batches)
    loading, workers = load / len(indices), trainer.config.ranks.workers
    return Speed(pause, max(per_sample, loading / workers) if workers else per_sample + loading)


def _pass(trainer: Trainer, indices: list[int]) -> Callable[[], None]:
    """Return a function that passes samples through the model, forward and backward, on this rank alone."""
    task, device, batch = trainer.task, trainer.place.device, trainer.feed.batch_of(indices)
    model = trainer.ddp.module  # DDP itself would wait for the other ranks

    def run() -> None:
        with trainer.updater.precision.autocast():
            outputs = task.forward(model, batch)
            loss, count = task.loss(outputs, batch)
        with trainer.exact.backward_of(loss, outputs, count):
            loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _seconds(*functions: Callable[[], object]) -> list[float]:
    """Return the median time of each function; they take turns, so that a busy moment meets all of them."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(WARM + TIMED):
        for function, its_times in zip(functions, times, strict=True):
            began = time.perf_counter()
            function()
            its_times.append(time.perf_counter() - began)
    return [statistics.median(its_times[WARM:]) for its_times in times]


def propose(speeds: Sequence[Speed], plan: Plan) -> list[int]:
    """Return how many samples of a full batch each rank should get, so that the slowest is done soonest.

    No rank gets so few, in any batch, that a model which normalises by batch statistics fails on them, unless
    it got so few with equal shares too.
    """
    ranks = len(speeds)
    least = min(min(map(min, plan.splits(ranks))), 2 * plan.accumulate)
    sizes = [max(1, least)] * ranks
    waiting = [(s.pause + (sizes[rank] + 1) * s.per_sample, rank) for rank, s in enumerate(speeds)]
    heapq.heapify(waiting)
    for _ in range(plan.batch_size - sum(sizes)):  # each sample to the rank that would be done with it first
        done, rank = waiting[0]
        sizes[rank] += 1
        heapq.heapreplace(waiting, (done + speeds[rank].per_sample, rank))
    while max(sizes) - min(sizes) > 1 and _least(plan, sizes) < least:
        moved = min(max(1, plan.batch_size // 64), (max(sizes) - min(sizes)) // 2)
        most, fewest = sizes.index(max(sizes)), sizes.index(min(sizes))
        sizes[most] -= moved
        sizes[fewest] += moved
    return sizes


def _least(plan: Plan, sizes: list[int]) -> int:
    """Return the fewest samples that a rank gets in a batch."""
    return min(map(min, dataclasses.replace(plan, rank_share=tuple(sizes)).splits(len(sizes))))


# ---- virtual ranks -----------------------------------------------------------------------------------

# Each global batch is dealt to V virtual ranks, and rank r of W computes for V/W of them, one after the
# other. What a virtual rank computes depends on nothing but its number and the step: its samples, its random
# numbers, and the buffers it starts from. The gradients of all V are then added in the order of their numbers
# on every rank. Sums of floating point depend on their order, so DDP's, which is another for each W, can't be
# used.
#
# This costs V/W gradients of memory on a rank, beside their sum, and each rank receives V gradients per step,
# where an all-reduce moves about two. Nothing is sent while backward still computes.


# Numbers of each virtual rank's gradient that are gathered at once, which bounds the memory for it.
PIECE = 1 << 22


def steps_of_virtual_ranks(trainer: Trainer) -> Iterator[None]:
    """Take the remaining optimizer steps of the current epoch; yield after each. A collective."""
    place, progress, number = trainer.place, trainer.progress, trainer.config.batch.virtual_ranks
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
        take_virtual_step(trainer, dict(zip(virtual_ranks, steps, strict=True)), batches, gradients)
        yield


def take_virtual_step(trainer: Trainer, steps: dict[int, Step], batches: Batches, total: OrderedSum) -> None:
    """Take one optimizer step, as `train.main.take_step` does, on this rank's virtual ranks (`steps`)."""
    model, sums = trainer.ddp.module, Sums()
    for virtual, step in steps.items():
        with contextlib.nullcontext() if virtual == 0 else buffers_restored(model):
            if _pass_all(trainer, virtual, step, batches, sums):
                trainer.exact.end_passes()
        total.take(virtual % len(steps))
    with trainer.log.phase("reduce"):
        total.sum_over_ranks()
        collectives.broadcast_into(model.buffers())  # which are those of virtual rank 0
        trainer.exact.begin_count(sums)
        step, counted = trainer.exact.average(step, sums)
    with trainer.log.phase("update"):
        norm = trainer.update(step, counted)
    trainer.end_step(step, sums, norm)


def _pass_all(trainer: Trainer, virtual: int, step: Step, batches: Batches, sums: Sums) -> bool:
    """Run the forward and backward passes of one virtual rank; return False if it has no samples."""
    before = sums.samples
    task, precision, log, exact = trainer.task, trainer.updater.precision, trainer.log, trainer.exact
    model = trainer.ddp.module  # DDP itself would reduce the gradients
    for number in range(len(step.micro_batches)):
        with log.phase("data"):
            batch, samples = next(batches)
        if batch is None:
            continue
        key = "virtual", trainer.progress.global_step, virtual, number
        randomness.seed_all(randomness.seed_from(trainer.config.numbers.seed, *key))
        with log.phase("forward"), precision.autocast():
            outputs = task.forward(model, batch)
            loss, count = task.loss(outputs, batch)
            loss_of_mean = precision.scale(loss / step.global_size)
        with log.phase("backward", loss_of_mean), exact.backward_of(loss_of_mean, outputs, count):
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
                piece = _gathered_rows(rows[:, start : start + PIECE].contiguous())
                summed = total[start : start + PIECE].copy_(piece[0])
                for of_virtual in piece[1:]:
                    summed += of_virtual
            for parameter, part in zip(parameters, total.split(sizes), strict=True):
                parameter.grad = part.view(parameter.shape)


def _gathered_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    if collectives.world_size() == 1:
        return rows
    all_rows = rows.new_empty((len(rows) * collectives.world_size(), *rows.shape[1:]))
    transport.all_gather_tensor(all_rows.view(torch.uint8), rows.view(torch.uint8))  # any dtype
    return all_rows
