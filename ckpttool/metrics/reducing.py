"""Metrics and rows of all ranks, joined on every rank. Imports torch when called."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .. import distributed
from .base import Metric

if TYPE_CHECKING:
    import torch

M = TypeVar("M", bound="Metric[Any]")


def reduce(metric: M) -> M:
    """Return the metric over the samples of all ranks, on every rank. A collective.

    The ranks' integers are added, in any order to the same bits. This rank's metric stays as it is.

    Args:
        metric: of the same class and settings on every rank.

    Raises:
        RanksDiffer: the ranks reduce metrics of different classes or settings.
        NeedsTorch: torch is not installed.
    """
    whole = copy.deepcopy(metric)
    for number, packed in enumerate(distributed.gather_rows.gather_arrays(metric.pack(), repr(metric))):
        if number != distributed.rank():
            whole.merge_packed(packed)
    return whole


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, **choices: Any
) -> dict[str, torch.Tensor]:
    """Return rows of all ranks, joined by sample, on every rank: for what can't be reduced. A collective.

    Args, Returns and Raises are those of `ckpttool.distributed.gather_rows.gather`; and:

    Raises:
        NeedsTorch: torch is not installed.
    """
    return distributed.gather_rows.gather(index, columns, samples=samples, **choices)
