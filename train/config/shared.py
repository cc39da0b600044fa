"""The settings that trainings and evaluations share, and what makes a field a flag. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageFault
from train.config.values import integer, number, numbers


def flag(default: Any, group: str, text: str, **options: Any) -> Any:
    """Return a dataclass field with what makes it a flag.

    Args:
        default: the field's default.
        group: the heading below which the help lists it.
        text: its help.
        options: for argparse.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **options})


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how its images become numbers. `mean`, `std`: None for the default."""

    data: str = flag(
        "digits",
        "data",
        "digits (the default), cifar10, mnist, folder:PATH (PATH/train/<class>/* and PATH/test/..., or one "
        "level of classes), fake:N, or file.py:factory, which returns (train, test)",
        metavar="DATA",
    )
    data_root: str = flag("data", "data", "where cifar10 and mnist are stored (data)", metavar="DIR")
    download: bool = flag(False, "data", "download cifar10 or mnist if it is missing")
    mean: tuple[float, ...] | None = flag(
        None,
        "data",
        "subtracted from each channel in [0, 1] (colour images: 0.485,0.456,0.406; others: none)",
        type=numbers,
        metavar="M,M,M",
    )
    std: tuple[float, ...] | None = flag(
        None, "data", "each channel is then divided by it (0.229,0.224,0.225)", type=numbers, metavar="S,S,S"
    )
    resize: int | None = flag(
        None, "data", "resize a folder's images to N by N", type=integer(1), metavar="N"
    )
    task: str = flag(
        "classification",
        "task",
        "what the outputs are compared with, and how they are scored: classification (the default), "
        "regression, language-model, model-loss (the model returns its mean loss), or file.py:factory",
        metavar="TASK",
    )
    eval_batch: int = flag(
        128, "task", "test samples in one forward pass (128)", type=integer(1), metavar="N"
    )


@dataclass(frozen=True)
class RanksConfig:
    """How the ranks start and wait for each other."""

    workers: int = flag(
        0,
        "ranks",
        "processes that load data, per rank (0: the rank itself)",
        type=integer(0),
        metavar="N",
    )
    backend: str = flag(
        "auto",
        "ranks",
        "auto: nccl if each rank has a GPU, otherwise gloo on the CPU",
        choices=("auto", "gloo", "nccl"),
    )
    timeout: float = flag(
        600.0,
        "ranks",
        "how long a rank waits for the others (600)",
        type=number(above=0),
        metavar="SECONDS",
    )
    hang_timeout: float = flag(
        300.0,
        "ranks",
        "end the run, naming the rank, when others wait for one that does nothing for so long; 0: no (300)",
        type=number(least=0),
        metavar="SECONDS",
    )
    join_timeout: float = flag(
        60.0,
        "ranks",
        "how long a rank waits for the others to come, at the start (60, or as long as it took itself)",
        type=number(above=0),
        metavar="SECONDS",
    )
    spawn: int | None = flag(
        None, "ranks", "start N ranks on this machine, without torchrun", type=integer(1), metavar="N"
    )


def check_pictures(config: DataConfig) -> None:
    """Raise UsageFault if `--std` is not positive, or `--resize` is given without a folder of images."""
    if config.std and not all(value > 0 for value in config.std):
        raise UsageFault(f"--std {_joined(config.std)}: must be above 0")
    if config.resize and not config.data.startswith("folder:"):
        raise UsageFault("--resize: works only with --data folder:PATH", hint="leave it out")


def _joined(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
