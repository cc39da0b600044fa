"""The configuration of a run, and the checks on it that need no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.errors import UsageFault
from train import launch

# The defaults of each optimizer.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    "adamw": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 1e-2},
}


class Every(NamedTuple):
    """An interval: a number of steps or epochs."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    def in_steps(self, steps_per_epoch: int) -> int:
        """Return the interval in optimizer steps."""
        return self.number * (steps_per_epoch if self.unit == "epochs" else 1)


NO_WARMUP = Every(0, "epochs")
EACH_EPOCH = Every(1, "epochs")


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how its images become numbers. `mean`, `std`: None for the default."""

    data: str = "digits"
    data_root: str = "data"
    download: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | None = None


@dataclass(frozen=True)
class TrainConfig(DataConfig):
    """The whole configuration of a run. The field names are the flags' names."""

    model: str = "simple-cnn"
    epochs: int = 10
    batch_size: int = 64
    accumulate: int = 1
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float = OPTIMIZERS["sgd"]["lr"]
    momentum: float = OPTIMIZERS["sgd"]["momentum"]
    weight_decay: float = OPTIMIZERS["sgd"]["weight_decay"]
    scheduler: str = "cosine"
    warmup: Every = NO_WARMUP
    seed: int = 0
    deterministic: bool = False
    batchnorm: str = "plain"
    workers: int = 0
    backend: str = "auto"
    timeout: float = 600.0
    spawn: int | None = None
    out: str | None = None
    save_every: Every = EACH_EPOCH
    keep: int = 0
    resume: str | None = None
    force: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the fields as primitives, as stored in a checkpoint."""
        fields = dataclasses.asdict(self)
        return fields | {"warmup": str(self.warmup), "save_every": str(self.save_every)}


def check(config: TrainConfig) -> None:
    """Refuse values that are wrong whatever the data and the model.

    Raises:
        UsageFault: flags contradict each other, one lacks another that it needs, or the batch is smaller
            than the number of ranks or passes; names the flag.
    """
    if config.optimizer != "sgd" and config.momentum:
        raise UsageFault(f"--momentum: {config.optimizer} has none", hint="leave it out")
    if config.resume == "auto" and config.out is None:
        raise UsageFault("--resume auto: needs a folder", hint="give it as --out")
    if config.resume and config.force:
        raise UsageFault("--force starts over and --resume continues", hint="give one of them")
    if config.accumulate > config.batch_size:
        raise UsageFault(
            f"--accumulate {config.accumulate}: more passes than the {config.batch_size} samples in a batch"
        )
    if config.spawn and launch.started_by_torchrun():
        raise UsageFault(
            "--spawn starts ranks, but torchrun already started this one", hint="leave out --spawn"
        )
    check_batch(config.batch_size, config.spawn or launch.world_size())
    check_pictures(config)


def check_batch(batch_size: int, world_size: int) -> None:
    """Raise UsageFault if the global batch has fewer samples than there are ranks."""
    if batch_size < world_size:
        raise UsageFault(
            f"--batch-size {batch_size}: leaves a rank without samples in every step, on {world_size} ranks",
            hint=f"give --batch-size {world_size} or more, or start fewer ranks",
        )


def check_pictures(config: DataConfig) -> None:
    """Raise UsageFault if `--std` is not positive, or `--resize` is given without a folder of images."""
    if config.std and not all(value > 0 for value in config.std):
        raise UsageFault(f"--std {_joined(config.std)}: must be above 0")
    if config.resize and not config.data.startswith("folder:"):
        raise UsageFault("--resize: works only with --data folder:PATH", hint="leave it out")


def _joined(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)
