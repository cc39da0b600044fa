"""How the values of flags are read: each function returns one that argparse calls with the text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""The units of time, in seconds."""


class Every(NamedTuple):
    """An interval: a number of steps, epochs, or of a unit of time."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    @property
    def seconds(self) -> float | None:
        """The interval in seconds; None if it is one of steps or epochs."""
        return self.number * SECONDS[self.unit] if self.unit in SECONDS else None

    def in_steps(self, steps_per_epoch: int) -> int:
        """Return an interval of steps or epochs in optimizer steps."""
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
    convert = number()
    return tuple(convert(part) for part in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Read integers, none negative, with commas between them."""
    convert = integer(0)
    return tuple(convert(part) for part in text.split(","))


def integers_or_auto(text: str) -> tuple[int, ...] | str:
    """Read `auto`, or integers with commas between them."""
    return text if text == "auto" else integers(text)


def every(*units: str, least: int) -> Callable[[str], Every]:
    """Read a number with one of the units, the first of which need not be written."""

    def convert(text: str) -> Every:
        for unit in sorted(units, key=len, reverse=True):
            if text.endswith(unit):
                return Every(integer(least)(text.removesuffix(unit)), unit)
        return Every(integer(least)(text), units[0])

    return convert


def duration(text: str) -> float:
    """Read a time above zero, in seconds if it has no unit: `90`, `90s`, `30min`, `2h`."""
    for unit in sorted(SECONDS, key=len, reverse=True):
        if text.endswith(unit):
            return number(above=0)(text.removesuffix(unit)) * SECONDS[unit]
    return number(above=0)(text)
