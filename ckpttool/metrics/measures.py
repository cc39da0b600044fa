"""Metrics as evaluations take them: how one is made, and what it is updated with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CheckFailed
from .base import Metric


@dataclass(frozen=True)
class Measure:
    """A metric to be computed: how to make one, and what its `update` gets of (outputs, batch)."""

    make: Callable[[], Metric[Any]]
    arguments: Callable[[Any, Any], Sequence[Any]]


def measures(metrics: Mapping[str, Any]) -> dict[str, Measure]:
    """Return metrics, as `evaluate` takes them, in one form; TypeError names one that is something else."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}, not a mapping of names to metrics")
    measured = {}
    for name, given in metrics.items():
        make, arguments = given if isinstance(given, tuple | list) and len(given) == 2 else (given, _compared)
        if isinstance(make, Metric):
            make = partial(copy.deepcopy, make)
        made = make() if callable(make) else make
        if not isinstance(made, Metric):
            raise TypeError(
                f"metrics[{name!r}] makes a {type(made).__name__}, not a metric of ckpttool.metrics"
            )
        if not callable(arguments):
            raise TypeError(f"metrics[{name!r}]: the second of a pair is a function of (outputs, batch)")
        measured[str(name)] = Measure(make, arguments)
    return measured


def update(
    name: str, metric: Metric[Any], arguments: Callable[[Any, Any], Sequence[Any]], outputs: Any, batch: Any
) -> None:
    """Update a metric with a batch; CheckFailed names the metric if it does not take the outputs."""
    try:
        metric.update(*arguments(outputs, batch))  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        hint = "give a pair of the metric and a function: (outputs, batch) -> the arguments of its update"
        raise CheckFailed(f"metric '{name}': {type(error).__name__}: {error}", hint=hint) from error


def _compared(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Return what most metrics are updated with: the outputs, and the last part of the batch."""
    return outputs, batch[-1] if isinstance(batch, tuple | list) else batch
