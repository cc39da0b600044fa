"""The learning rate over the steps of a whole training. Imports torch."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpttool.errors import UsageFault
from train.config.training import TrainConfig


def check(config: TrainConfig, steps_per_epoch: int) -> None:
    """Raise UsageFault if the training ends before its warm-up does."""
    warmup, steps = config.warmup.in_steps(steps_per_epoch), total_steps(config, steps_per_epoch)
    if warmup >= steps:
        raise UsageFault(
            f"--warmup {config.warmup}: is {warmup} steps, but the whole training has only {steps}"
        )


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the steps that the schedule spans: of `--epochs` or `--max-steps`, whichever ends first.

    `--max-time` does not count: it interrupts a training run, which may be resumed.
    """
    steps = config.epochs * steps_per_epoch
    return min(steps, config.max_steps) if config.max_steps else steps


def build_scheduler(
    config: TrainConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int | None = None
) -> LambdaLR:
    """Return the scheduler, to be called after each step that was not skipped."""
    warmup = config.warmup.in_steps(steps_per_epoch or total_steps // config.epochs)
    return LambdaLR(optimizer, lambda step: rate(config.scheduler, step, total_steps, warmup))


def rate(course: str, step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `steps`.

    `cosine` and `linear` would reach 0 in step `steps`, which is never taken.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if course == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if course == "linear":
        return 1.0 - done
    if course == "step":  # as for the ResNets of arXiv 1512.03385
        return 0.1 ** ((step >= steps / 2) + (step >= steps * 3 / 4))
    return 1.0
