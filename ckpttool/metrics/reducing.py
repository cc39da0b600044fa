"""Metrics and rows of all ranks, joined on every rank. Imports torch when it is called."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .base import Metric

if TYPE_CHECKING:
    import torch

M = TypeVar("M", bound="Metric[Any]")


def reduce(metric: M) -> M:
    """The metric of all ranks, on every rank; this rank's own stays as it is. A collective.

    Each rank's whole numbers travel, and are added: in which order does not matter.

    Raises:
        RanksDiffer: ranks reduce metrics of different kinds or settings.
    """
    from ..distributed.collectives import rank
    from ..distributed.gather_rows import arrays_of_all_ranks

    whole = copy.deepcopy(metric)
    for number, packed in enumerate(arrays_of_all_ranks(metric.pack(), repr(metric))):
        if number != rank():
            whole.merge_packed(packed)
    return whole


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, **choices: Any
) -> dict[str, torch.Tensor]:
    """What can't be reduced: rows of all ranks, joined by sample. See `gathering.gather`."""
    from ..distributed.gather_rows import gather

    return gather(index, columns, samples=samples, **choices)
