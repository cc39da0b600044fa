"""The optimizer and its learning rate schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from train.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer, built from named parameters, so that its state says which entry is whose."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if config.optimizer == "adamw":
        return AdamW(named, lr=config.lr, weight_decay=config.weight_decay)
    return SGD(named, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def build_scheduler(config: TrainConfig, optimizer: Optimizer, steps_per_epoch: int) -> LambdaLR:
    """Return the scheduler, which is to be called after each step."""
    warmup, steps = config.warmup.in_steps(steps_per_epoch), config.epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: rate(config.scheduler, step, steps, warmup))


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of one step (from 0), from the same schedule."""
    warmup, steps = config.warmup.in_steps(steps_per_epoch), config.epochs * steps_per_epoch
    return config.lr * rate(config.scheduler, step, steps, warmup)


def rate(course: str, step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `steps`.

    Args:
        course: `none`, `cosine` or `step`.
        warmup: steps over which the factor rises to 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    if course == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if course == "step":  # as for the ResNets of arXiv 1512.03385
        return 0.1 ** ((step >= steps / 2) + (step >= steps * 3 / 4))
    return 1.0
