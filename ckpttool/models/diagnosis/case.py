"""A state beside the model that it should fit, and what a remedy for it is.

A remedy is a pure change of the checkpoint together with the command that makes the same change, so that it
can be tried before it is advised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...checkpoint.checkpoint import Checkpoint, State
from .fit import Blueprint, Fit


@dataclass(frozen=True, slots=True)
class Case:
    """A state beside the model that it should fit.

    Attributes:
        checkpoint: holds the state as a dict, where it is found without being named.
        taken_out: what it took to have that: `--state NAME` when the state had to be named, no words when it
            was a pickled model's; None when the file is as it was.
        original: the state as it lies in the file.
    """

    checkpoint: Checkpoint
    state: State
    blueprint: Blueprint
    fit: Fit
    taken_out: tuple[str, ...] | None
    original: State


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of a checkpoint, twice: as a command and as the transform behind it.

    Attributes:
        kind: a stable word for scripts.
        message: what is wrong, as a sentence without a capital and a full stop.
        command: the command and its options, without the files.
        apply: makes the new checkpoint; raises CkptToolError where the command would fail.
    """

    kind: str
    message: str
    command: tuple[str, ...]
    apply: Callable[[Checkpoint], Checkpoint]


Finder = Callable[[Case], Iterator[Remedy]]
