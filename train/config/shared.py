"""The settings that training and evaluation share: what makes a field a flag, and how its value is read."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.distributed.group import started_by_launcher
from ckpttool.errors import UsageFault

OWN = ""  # the name of --data's own test set, beside those of --also-test
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
SPELLINGS = {
    "steps": ("steps", "step"),
    "epochs": ("epochs", "epoch"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
}


class Every(NamedTuple):
    """An interval: a number of steps, epochs, seconds, minutes or hours."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    @property
    def seconds(self) -> float | None:
        return self.number * SECONDS[self.unit] if self.unit in SECONDS else None

    def in_steps(self, steps_per_epoch: int) -> int:
        return self.number * (steps_per_epoch if self.unit == "epochs" else 1)


def integer(least: int) -> Callable[[str], int]:
    """Read an integer that is not less than `least`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return convert


def number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """Read a number in a range, open at `above` and `below`, closed at `least`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (above < value < below and value >= least):
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    return convert


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    return tuple(map(number(), text.split(",")))


def integers(text: str) -> tuple[int, ...]:
    """Read integers, none negative, with commas between them."""
    return tuple(map(integer(0), text.split(",")))


def integers_or_auto(text: str) -> tuple[int, ...] | str:
    """Read `auto`, or integers with commas between them."""
    return text if text == "auto" else integers(text)


def every(*units: str, least: int) -> Callable[[str], Every]:
    """Read a number with one of the units, the first of which need not be written."""

    def convert(text: str) -> Every:
        value, unit = _divided(text, units)
        return Every(integer(least)(value), unit or units[0])

    return convert


def span(text: str) -> str:
    """Check steps given as `N`, how many, or `N-M`, the first and the last."""
    first, dash, last = text.partition("-")
    if dash and integer(1)(last) < integer(1)(first):
        raise argparse.ArgumentTypeError(f"{text} ends before it begins")
    integer(1)(first)
    return text


def duration(text: str) -> float:
    """Read a time above zero, in seconds if it has no unit: `90`, `90s`, `30min`, `2h`."""
    value, unit = _divided(text, tuple(SECONDS))
    return number(above=0)(value) * SECONDS[unit or "s"]


def mesh(text: str) -> str:
    """Read `2x4`: groups, and ranks in each."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers as 2x4: groups, and ranks in each")
    return text


def _divided(text: str, units: tuple[str, ...]) -> tuple[str, str]:
    """Return the number in a text and its unit, `""` if it has none."""
    parts = re.fullmatch(r"(.*?[\d.])? *([a-z]*)", text.strip().lower())
    if parts is None or not parts[1]:
        return text, ""  # for the caller to refuse
    unit = next((unit for unit in units if parts[2] in SPELLINGS[unit]), "")
    if parts[2] and not unit:
        raise argparse.ArgumentTypeError(f"{text!r} has none of the units {', '.join(units)}")
    return parts[1], unit


def flag(default: Any, text: str, **options: Any) -> Any:
    """Return a dataclass field that is a flag, with argparse's `options`.

    `text` is `heading: help`, `heading METAVAR: help` or `heading {choice,choice}: help`.
    """
    about, _, text = text.partition(": ")
    group, _, form = about.partition(" ")
    if form.startswith("{"):
        options["choices"] = tuple(form[1:-1].split(","))
    elif form:
        options["metavar"] = form
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **options})


def count(default: int | None, text: str, *, least: int = 1) -> Any:
    return flag(default, text, type=integer(least), metavar="N")


def real(default: float | None, text: str, **span: float) -> Any:
    return flag(default, text, type=number(**span), metavar="X")


@dataclass(frozen=True)
class DataConfig:
    """Which data, how its images become numbers, and what the outputs are compared with."""

    data: str = flag(
        "digits",
        "data DATA: digits (the default), cifar10, mnist, folder:PATH (PATH/train/<class>/* and "
        "PATH/test/..., or one level of classes), fake:N, tokens:PATTERN, wds:PATTERN, hf:NAME, or "
        "file.py:factory, which returns (train, test), or train alone",
    )
    test_data: str | None = flag(
        None,
        "data DATA: where the test samples are, if elsewhere: its test samples, or else all it has",
    )
    block_size: int | None = count(
        None, "data: tokens of a sample, of tokens:PATTERN, or of a stream of documents, which are packed"
    )
    shuffle_window: int | None = count(
        None, "data: shuffle a stream within so many samples that follow each other (hf:NAME 1000, others 1)"
    )
    skip_damaged: bool = flag(False, "data: leave out samples that can't be read, and count them")
    data_root: str = flag("data", "data DIR: where cifar10 and mnist are stored (data)")
    download: bool = flag(False, "data: download cifar10 or mnist if it is missing")
    mean: tuple[float, ...] | None = flag(
        None,
        "data M,M,M: subtracted from each channel in [0, 1] (colour images: 0.485,0.456,0.406; others: none)",
        type=numbers,
    )
    std: tuple[float, ...] | None = flag(
        None, "data S,S,S: each channel is then divided by it (0.229,0.224,0.225)", type=numbers
    )
    resize: int | None = count(None, "data: resize a folder's images to N by N")
    task: str = flag(
        "classification",
        "task TASK: what the outputs are compared with, and how they are scored: classification (the "
        "default), regression, language-model, model-loss (the model returns its mean loss), or "
        "file.py:factory",
    )
    eval_batch: int = count(128, "task: test samples in one forward pass (128)")
    also_test: tuple[str, ...] = flag(
        (),
        "scores NAME=DATA: score this test set too, the test part of what --data would take; may be repeated",
        action="append",
    )


@dataclass(frozen=True)
class RanksConfig:
    """How the ranks start and wait for each other."""

    workers: int = count(0, "ranks: processes that load data, per rank (0: the rank itself)", least=0)
    backend: str = flag(
        "auto", "ranks {auto,gloo,nccl}: auto: nccl if each rank has a GPU, otherwise gloo on the CPU"
    )
    mixed_torch: bool = flag(False, "ranks: let ranks run different minor versions of torch")
    timeout: float = real(600.0, "ranks SECONDS: how long a rank waits for the others (600)", above=0)
    hang_timeout: float = real(
        300.0,
        "ranks SECONDS: end the run, naming the rank, when others wait for one that does nothing for so "
        "long; 0: no (300)",
        least=0,
    )
    join_timeout: float = real(
        60.0,
        "ranks SECONDS: how long a rank waits for the others to come, at the start (60, or as long as it "
        "took itself)",
        above=0,
    )
    spawn: int | None = count(None, "ranks: start N ranks on this machine, without torchrun")


def check_shared(config: Any) -> None:
    """Refuse what is wrong with the settings above, whatever the data."""
    if config.spawn and started_by_launcher():
        hint = "leave out --spawn"
        raise UsageFault("--spawn starts ranks, but torchrun already started this one", hint=hint)
    if config.std and not all(value > 0 for value in config.std):
        raise UsageFault(f"--std {','.join(f'{value:g}' for value in config.std)}: must be above 0")
    if config.resize and not config.data.startswith(("folder:", "wds:", "hf:")):
        raise UsageFault("--resize: needs --data folder:PATH, wds:PATTERN or hf:NAME", hint="leave it out")
