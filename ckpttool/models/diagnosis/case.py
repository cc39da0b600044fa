"""A state beside the model that it should fit, and a remedy: a change that is tried before it is advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from .fit import Blueprint, Fit


@dataclass(frozen=True, slots=True)
class Case:
    """A state beside the model that it should fit.

    Attributes:
        checkpoint: holds the state as a dict, where it is found without being named.
        state: the state in it.
        blueprint: of the model.
        fit: how the state fits the model.
        taken_out: flags of the `slim` that takes the state out of the file: `--state NAME` if it has to be
            named, none if it is a pickled model's; None if the file needs no `slim`.
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
    """A change of a checkpoint, both as a command and as the transform behind it.

    Attributes:
        kind: a stable word for scripts.
        message: what is wrong, as a sentence without a capital and a full stop.
        command: the command and its options, without the files.
        apply: return the changed checkpoint; raise CkptToolError where the command would fail.
    """

    kind: str
    message: str
    command: tuple[str, ...]
    apply: Callable[[Checkpoint], Checkpoint]


Finder = Callable[[Case], Iterator[Remedy]]


@dataclass(frozen=True, slots=True)
class Respec:
    """The model built with other arguments.

    Attributes:
        spec: builds it.
        message: which arguments differ, as a sentence without a capital and a full stop.
    """

    spec: str
    message: str


Rebuild = Callable[[Case], Respec | None]
