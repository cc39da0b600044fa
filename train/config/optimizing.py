"""The settings of the optimizer, of its groups of parameters, and of the learning rate over the steps."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageFault
from train.config.shared import Every, every, flag, number, real

# The defaults of each optimizer; those of another one of torch.optim are at the end.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "adamw": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 1e-2},
    "muon": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 1e-1},
}
OTHER_OPTIMIZERS = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}

COURSES = ("none", "cosine", "linear", "step", "wsd", "onecycle")
NO_WARMUP = Every(0, "epochs")

# Settings of these that a resumed run may change if --change names them.
CHANGEABLE = {
    *("lr", "momentum", "betas", "eps", "nesterov", "weight_decay", "lr_scale", "layer_decay", "clip_norm"),
    *("scheduler", "warmup", "min_lr", "cooldown"),
}


def pattern(text: str) -> str:
    """Read a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def scale(text: str) -> str:
    """Read `REGEX=0.1`."""
    name, equals, factor = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=NUMBER")
    pattern(name)
    number(above=0)(factor)
    return text


def scale_in(text: str) -> tuple[str, float]:
    """Return the expression and the factor of a `--lr-scale`."""
    name, _, factor = text.rpartition("=")
    return name, float(factor)


def fractions(text: str) -> tuple[float, ...]:
    """Read numbers from 0 to below 1, with commas between them."""
    return tuple(map(number(least=0, below=1), text.split(",")))


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change the weights."""

    optimizer: str = flag(
        "sgd",
        "optimizer NAME: sgd (the default), adam, adamw, muon (with adamw for the rest), another class of "
        "torch.optim, or file.py:factory, which gets what it takes of params, model, lr and the flags below",
    )
    lr: float | None = real(
        OPTIMIZERS["sgd"]["lr"], "optimizer: learning rate (sgd 0.1, others 0.001)", above=0
    )
    momentum: float | None = real(
        OPTIMIZERS["sgd"]["momentum"], "optimizer: sgd 0.9, muon 0.95", least=0, below=1
    )
    nesterov: bool = flag(False, "optimizer: momentum that looks ahead, of sgd; muon has it always")
    betas: tuple[float, ...] | None = flag(
        None, "optimizer X,X: decay of the averages of adam and its family (0.9,0.999)", type=fractions
    )
    eps: float | None = real(None, "optimizer: added to what adam and others divide by (1e-8)", above=0)
    fused: str = flag(
        "off",
        "optimizer {auto,on,off}: take the step in one kernel: auto: where all parameters are on a GPU and "
        "the optimizer has one (off)",
    )
    weight_decay: float | None = real(
        OPTIMIZERS["sgd"]["weight_decay"], "optimizer: sgd 0.0001, adamw 0.01, muon 0.1, others 0", least=0
    )
    decay_norms: bool = flag(False, "optimizer: let normalisation layers and biases decay too")
    no_decay: tuple[str, ...] = flag(
        (),
        "optimizer REGEX: let parameters in whose name this is found not decay; may be repeated",
        type=pattern,
        action="append",
    )
    lr_scale: tuple[str, ...] = flag(
        (),
        "optimizer REGEX=X: multiply the learning rate of parameters in whose name REGEX is found; may be "
        "repeated, the first that is found counts",
        type=scale,
        action="append",
    )
    layer_decay: float | None = real(
        None,
        "optimizer: multiply the learning rate by X for each layer below the last; layers are the blocks "
        "that --grad-checkpoint takes, and what lies before and after them",
        above=0,
        below=1,
    )
    muon_for: tuple[str, ...] = flag(
        (),
        "optimizer REGEX: with --optimizer muon: the matrices that it takes, by name (those inside: no "
        "embedding, and not the last); may be repeated",
        type=pattern,
        action="append",
    )
    clip_norm: float | None = real(
        None, "optimizer: scale the gradient down to this norm if it is longer", above=0
    )
    ema: float | None = real(
        None,
        "optimizer: keep an exponential average of the weights with this decay, and score it",
        above=0,
        below=1,
    )
    zero: bool = flag(False, "optimizer: divide the optimizer's state among the ranks (ZeRO-1)")
    scheduler: str = flag(
        "cosine",
        "optimizer SCHEDULE: learning rate schedule: cosine (the default), linear, none; step, which divides "
        "it by ten after half and after three quarters of the steps; wsd: stable, then --cooldown; onecycle: "
        "up from a 25th and down to nearly 0; or file.py:factory, which returns a function of the step, "
        "the factor of the learning rate",
    )
    warmup: Every = flag(
        NO_WARMUP,
        "optimizer N[steps|epochs]: raise the learning rate from zero over this many (0; onecycle: 0.3 of "
        "all)",
        type=every("epochs", "steps", least=0),
    )
    min_lr: float | None = real(
        None, "optimizer: the learning rate in which the schedule ends, instead of 0", above=0
    )
    cooldown: Every | None = flag(
        None,
        "optimizer N[steps|epochs]: with --scheduler wsd: lower the learning rate over this many at the end "
        "(0.2 of all)",
        type=every("epochs", "steps", least=1),
    )


def defaults(optimizer: str) -> dict[str, Any]:
    """Return the learning rate, momentum and weight decay that an optimizer gets where no flag is given.

    A user's own factory gets none: it has its own.
    """
    return (
        dict.fromkeys(OTHER_OPTIMIZERS) if ":" in optimizer else OPTIMIZERS.get(optimizer, OTHER_OPTIMIZERS)
    )


def check(config: OptimizerConfig) -> None:
    """Refuse what is wrong with these settings whatever the model."""
    if config.optimizer in ("adam", "adamw") and config.momentum:
        raise UsageFault(f"--momentum: {config.optimizer} has none", hint="leave it out")
    if config.muon_for and config.optimizer.lower() != "muon":
        raise UsageFault("--muon-for: needs --optimizer muon", hint="give it, or leave --muon-for out")
    if config.zero and ":" in config.optimizer:
        what = f"--zero: the state of {config.optimizer} is not divided among ranks"
        raise UsageFault(what, hint="leave it out")
    if config.no_decay and config.weight_decay == 0:
        raise UsageFault("--no-decay: there is no --weight-decay", hint="give one, or leave --no-decay out")
    if (config.lr_scale or config.layer_decay) and config.lr is None:
        flags = "--lr-scale" if config.lr_scale else "--layer-decay"
        raise UsageFault(f"{flags}: needs --lr, of which it is a part", hint="give --lr")
    _check_schedule(config)


def _check_schedule(config: OptimizerConfig) -> None:
    course, lowest = config.scheduler, config.min_lr
    if course not in COURSES and ":" not in course:
        known = ", ".join(COURSES)
        raise UsageFault(f"--scheduler {course}: no such schedule", hint=f"one of {known} or file.py:factory")
    if config.cooldown is not None and course != "wsd":
        raise UsageFault("--cooldown: needs --scheduler wsd", hint="give it, or leave --cooldown out")
    if lowest is None:
        return
    if course == "none" or ":" in course:
        why = "stays as it is" if course == "none" else "is what the factory's function says"
        raise UsageFault(f"--min-lr: with --scheduler {course} the learning rate {why}", hint="leave it out")
    if config.lr is None:
        raise UsageFault("--min-lr: needs --lr, from which the schedule starts", hint="give --lr")
    if lowest >= config.lr:
        hint = "give a smaller one"
        raise UsageFault(f"--min-lr {lowest:g}: is not below the learning rate, {config.lr:g}", hint=hint)
