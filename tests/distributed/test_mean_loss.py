"""The gradient of the mean over all ranks' samples, whatever each rank has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool.distributed import global_mean_loss


def gradient(rank: int, world_size: int) -> float:
    """Return the gradient of one sample on rank 0 and three on rank 1."""
    samples = [torch.tensor([[8.0]]), torch.tensor([[1.0], [2.0], [3.0]])][rank]
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    global_mean_loss(ddp(samples).sum(), 4).backward()
    return float(ddp.module.weight.grad)


def test_every_sample_counts_the_same_whatever_its_rank_has(run_ranks: Any) -> None:
    """The mean of 8, 1, 2 and 3 is 3.5; the mean of the means 8 and 2 would be 5."""
    assert run_ranks(2, gradient) == [3.5] * 2


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), -1, -0.5, math.nan])
def test_a_mean_over_nothing_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="has no value"):
        global_mean_loss(torch.zeros(()), count)


def test_the_count_may_be_a_tensor_or_a_sum_of_weights() -> None:
    assert global_mean_loss(torch.tensor(6.0), torch.tensor(4)).item() == 1.5
    for count in (2.5, torch.tensor(2.5), torch.tensor(2.5, dtype=torch.float64)):
        assert global_mean_loss(torch.tensor(5.0), count).item() == 2.0
    assert global_mean_loss(torch.tensor(1.0), 0.5).item() == 2.0  # and not refused as a count of 0
