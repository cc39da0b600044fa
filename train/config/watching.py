"""The settings by which a training is followed and ended: scores, trackers, hooks; and files of settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageFault
from train.config.shared import Every, count, every, flag, span


@dataclass(frozen=True)
class WatchConfig:
    """What changes no step of a training."""

    best: str | None = flag(
        None,
        "scores METRIC: what best.pt is best by: accuracy, loss or a metric of the task, as mae or "
        "mae:min, and of another test set as NAME/loss (accuracy, or else loss)",
    )
    keep_best: int = count(0, "scores K: also keep the K best of them, as best-<number>.pt (0)", least=0)
    stop_early: int | None = count(
        None, "scores: end after this many evaluations in a row that were not the best so far"
    )
    tracker: tuple[str, ...] = flag(
        (),
        "log {tensorboard,wandb,mlflow,trackio}: also log there; may be repeated. Training goes on while its "
        "server is away",
        action="append",
    )
    every: tuple[str, str] | None = flag(
        None,
        "log N[steps|epochs] FILE.py:FUNCTION: call function(model, step, folder) on rank 0 after every N "
        "steps, with a copy of the model",
        nargs=2,
    )
    profile: str | None = flag(
        None,
        "log N|N-M: record these steps with torch's profiler, for N the N after the tenth, in "
        "profile/trace.json.gz",
        type=span,
    )
    config: str | None = flag(
        None, "settings FILE.toml: take settings from a file, under the names of the flags, which win"
    )
    like: str | None = flag(
        None, "settings RUN: take the settings of a run, from its config.toml, and name what differs"
    )
    unset: tuple[str, ...] = flag(
        (),
        "settings NAME: with --config or --like: leave out this setting of the file; may be repeated",
        action="append",
    )
    print_config: bool = flag(False, "settings: print the settings as such a file, and train nothing")


def check(config: Any) -> None:
    """Refuse what is wrong with the settings above, whatever the data."""
    if config.every:
        hook_interval(config.every)


def hook_interval(given: tuple[str, str]) -> Every:
    """Return how often the function of `--every` is called."""
    try:
        return every("steps", "epochs", least=1)(given[0])
    except argparse.ArgumentTypeError as error:
        raise UsageFault(f"--every: {error}", hint="for example: --every 100steps own.py:sample") from None
