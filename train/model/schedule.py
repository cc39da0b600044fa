"""The learning rate over the steps of a whole training: a factor of each group's own rate. Imports torch.

A schedule is a function of the step alone, so a run continues with it wherever it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpttool.errors import UsageFault
from ckpttool.models import factory
from train.config.training import TrainConfig

Rate = Callable[[int], float]  # step, from 0 -> factor

TRIED = 256  # steps whose factor is asked for twice before training
COOLDOWN = 0.2  # of all steps, as arXiv 2405.18392 found enough
# As torch.optim.lr_scheduler.OneCycleLR, of arXiv 1708.07120.
RISE, BEGIN, END = 0.3, 1 / 25, 1 / 25e4


def check(config: TrainConfig, steps_per_epoch: int) -> None:
    """Raise UsageFault if a part of the schedule is longer than the training, or a user's is no schedule."""
    steps = total_steps(config, steps_per_epoch)
    warmup = config.warmup.in_steps(steps_per_epoch)
    if warmup >= steps:
        what = f"--warmup {config.warmup}: is {warmup} steps, but the whole training has only {steps}"
        raise UsageFault(what)
    if config.cooldown is not None and warmup + config.cooldown.in_steps(steps_per_epoch) > steps:
        cooldown = config.cooldown.in_steps(steps_per_epoch)
        what = f"--cooldown {config.cooldown}: is {cooldown} steps, and the warm-up {warmup}, but the whole "
        raise UsageFault(f"{what}training has only {steps}")
    tried = sorted({0, steps // 2, steps - 1, *range(0, steps, max(1, steps // TRIED))})
    rate, again = (rate_of(config, steps, steps_per_epoch) for _ in range(2))
    first = {step: rate(step) for step in tried}
    for step in reversed(tried):  # a resumed run asks a new one, and not from the first step on
        if first[step] != again(step):
            what = f"--scheduler {config.scheduler}: gives step {step} another factor each time"
            raise UsageFault(what, hint="let it depend on the step alone")


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
    return LambdaLR(optimizer, rate_of(config, total_steps, steps_per_epoch or total_steps // config.epochs))


def rate_of(config: TrainConfig, steps: int, steps_per_epoch: int) -> Rate:
    """Return the schedule of `--scheduler`, of `steps` in all."""
    warmup = config.warmup.in_steps(steps_per_epoch)
    if ":" in config.scheduler:
        return _own(config.scheduler, steps=steps, warmup=warmup, steps_per_epoch=steps_per_epoch)
    lowest = config.min_lr / config.lr if config.min_lr and config.lr else None
    if config.scheduler == "onecycle":
        return partial(
            one_cycle, steps=steps, rise=warmup or RISE * steps, end=END if lowest is None else lowest
        )
    cooldown = config.cooldown.in_steps(steps_per_epoch) if config.cooldown else round(COOLDOWN * steps)
    course = partial(rate, config.scheduler, steps=steps, warmup=warmup, cooldown=cooldown)
    return partial(_above, course, lowest, warmup) if lowest else course


def rate(course: str, step: int, steps: int, warmup: int, cooldown: int = 0) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `steps`.

    `cosine`, `linear` and `wsd` would reach 0 in step `steps`, which is never taken.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if course == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if course == "linear":
        return 1.0 - done
    if course == "wsd":
        return max(0.0, min(1.0, (steps - step) / max(1, cooldown)))
    tenths = (step >= steps / 2) + (step >= steps * 3 / 4)  # as for the ResNets of arXiv 1512.03385
    return 0.1**tenths if course == "step" else 1.0


def _above(course: Rate, lowest: float, warmup: int, step: int) -> float:
    """Return the factor of a schedule that ends in `lowest` instead of 0."""
    factor = course(step)
    return factor if step < warmup else lowest + (1 - lowest) * factor


def one_cycle(step: int, *, steps: int, rise: float, end: float) -> float:
    """Return the factor of a schedule that rises from a 25th to 1 within `rise` steps, then falls to `end`.

    Both along a cosine; `end` is that of the last step. Source: torch's OneCycleLR, whose momentum this
    leaves as it is.
    """
    top = rise - 1
    if step <= top:
        return _along(BEGIN, 1.0, step / top if top else 1.0)
    return _along(1.0, end, min(1.0, (step - top) / max(1e-9, steps - 1 - top)))


def _along(first: float, last: float, part: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * part))


def _own(spec: str, **known: int) -> Rate:
    """Return the function that a user's factory returns, checked in each step."""
    made: Any = factory.build(spec, **known)
    if not callable(made) or isinstance(made, type) or hasattr(made, "get_last_lr"):
        what = f"--scheduler {spec}: returned a {type(made).__name__}, not a function of the step"
        hint = "def factory(steps, warmup): return lambda step: 1 - step / steps"
        raise UsageFault(what, hint=hint)
    return partial(_checked, spec, made)


def _checked(spec: str, made: Callable[[int], Any], step: int) -> float:
    try:
        factor = float(made(step))
    except Exception as error:
        raise UsageFault(f"--scheduler {spec}: fails in step {step}: {factory.described(error)}") from error
    if not 0 <= factor < math.inf:
        what = f"--scheduler {spec}: gives step {step} the factor {factor:g}"
        raise UsageFault(what, hint="return 0 or more, by which the learning rate is multiplied")
    return factor
