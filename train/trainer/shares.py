"""`--rank-share auto`: each rank's share of a batch by its measured speed, so that all are done together."""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ckpttool.distributed import collectives
from ckpttool.distributed.dummy_pass import leaving_no_trace
from ckpttool.distributed.plan import Plan
from train.data.batches import batch_of
from train.model import wrapping
from train.trainer.trainer import Trainer

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
    if trainer.config.rank_share != "auto" or ranks == 1:
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
    loading, workers = load / len(indices), trainer.config.workers
    return Speed(pause, max(per_sample, loading / workers) if workers else per_sample + loading)


def _pass(trainer: Trainer, indices: list[int]) -> Callable[[], None]:
    """Return a function that passes samples through the model, forward and backward, on this rank alone."""
    task, device, batch = trainer.task, trainer.place.device, trainer.feed.batch_of(indices)
    model = trainer.ddp.module  # DDP itself would wait for the other ranks

    def run() -> None:
        with trainer.updater.precision.autocast():
            loss, count = task.loss(task.forward(model, batch), batch)
        with trainer.backward_of(loss, count):
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
