"""Moments of a batch per channel, combined over ranks, and the running statistics that follow. Imports torch.

Each rank's count, mean and sum of squared deviations are combined in float64 and in rank order (Chan, Golub
and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances"), so that all
ranks have the same bits, and a large mean costs no digits.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def moments(input: Tensor) -> Tensor:
    """Return a batch's count, mean and sum of squared deviations of each channel.

    Args:
        input: [N, C, ...], of any float dtype and memory format; float16 and bfloat16 are summed in float32.

    Returns:
        float64 [3, C] on the same device; all 0 for an input without values.
    """
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    found = torch.zeros(3, channels, dtype=torch.float64, device=input.device)
    if count:
        mean, variance = _mean_and_variance(input.detach().to(accumulator(input)))
        found[0], found[1], found[2] = count, mean, variance.double() * count
    return found


def combine(of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, mean and biased variance of each channel over all ranks.

    Args:
        of_ranks: float64 [ranks, 3, C], each rank's `moments`.

    Returns:
        float64 [C] each; 0, 0 and 1 of a channel without values.
    """
    counts, means, deviations = of_ranks.unbind(1)
    count = counts.sum(0)
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / divisor
    return count, mean, variance.masked_fill(count == 0, 1.0)


def update_running(layer: Any, mean: Tensor, variance: Tensor, count: float) -> None:
    """Update a layer's running statistics and counter with a batch, as torch's BatchNorm does.

    Args:
        layer: a BatchNorm layer that tracks running statistics.
        mean, variance: [C], of the batch; the variance biased.
        count: values per channel in the batch, at least 2.
    """
    counter, momentum = layer.num_batches_tracked, layer.momentum
    if counter is not None:
        counter.add_(1)
    if momentum is None:  # as in torch, an average without a counter does not change
        momentum = 1.0 / float(counter) if counter is not None else 0.0
    unbiased = variance * (count / (count - 1))
    for kept, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        kept.mul_(1 - momentum).add_(new.to(kept.device, kept.dtype), alpha=momentum)


def accumulator(input: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, and float32 for all others."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _mean_and_variance(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance of each channel, to the last digit of the input's dtype."""
    if input.device.type == "cpu":
        # Plain BatchNorm's kernel is five times as fast as `var_mean`. It sums contiguous values in float64,
        # but channels-last ones in float32, which leaves five digits.
        mean, variance = torch.ops.aten.batch_norm_update_stats(input.contiguous(), None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(input, [0, *range(2, input.dim())], correction=0)
    return mean, variance
