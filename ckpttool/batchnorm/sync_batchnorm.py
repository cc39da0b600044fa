"""BatchNorm over the samples of all ranks, on any device and backend. Imports torch.

torch's SyncBatchNorm raises on a CPU. This is the same mathematics: each rank sends the count, the mean and
the sum of squared deviations of its samples, and combines those of all in float64 and in rank order (Chan,
Golub and LeVeque 1979), so that all ranks have the same bits, and large means cost no digits. Backward sums
two numbers per channel over ranks: the gradient, and the gradient times the normalised input. A rank without
samples takes part with a count of 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of all ranks' samples together.

    Inputs are (N, C, ...), of any memory format; N may differ between ranks and be 0. Every rank must come
    through each layer equally often, forward and backward. In evaluation, in a process by itself, and in a
    group of one, it is plain BatchNorm. Gradients of gradients are not there.

    Attributes:
        process_group: of whose ranks the statistics are; None for all.
        plain_kind: the class it was before, `BatchNorm2d`; None when not known.
        absent: take part with a count of 0 whatever the input: for a rank that has no samples, and passes
            something through the model all the same. Its output is normalised as that of the others.
    """

    absent = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group
        self.plain_kind: str | None = None

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            # If only the kernel checked, it would be too late: other ranks would wait, or abort.
            raise ValueError(f"expected {self.num_features} channels (got an input of {list(input.shape)})")
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not (by_batch and self.training and _size(self.process_group) > 1):
            return self._alone(input, by_batch)
        running = None
        if self.track_running_stats and self.running_mean is not None:
            running = _Running(self)
        return _Synchronised.apply(  # type: ignore[no-any-return]
            input, self.weight, self.bias, self.eps, running, self.process_group, self.absent
        )

    def _alone(self, input: Tensor, by_batch: bool) -> Tensor:
        """Plain BatchNorm, as torch's `_BatchNorm` does it."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        keeps = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if keeps else (None, None)
        return F.batch_norm(input, mean, variance, self.weight, self.bias, by_batch, momentum, self.eps)

    def _check_input_dim(self, input: Tensor) -> None:
        if self.plain_kind is not None:
            getattr(torch.nn, self.plain_kind)._check_input_dim(self, input)
        elif input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As any layer, with the kind beside the version in `_metadata`; loading passes over it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.plain_kind is not None and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["kind"] = self.plain_kind


class _Running:
    """The running statistics of a layer, to be brought up to date with a batch of all ranks."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        self.layer = layer

    def update(self, mean: Tensor, variance: Tensor, count: float) -> None:
        layer, counter = self.layer, self.layer.num_batches_tracked
        if counter is not None:
            counter.add_(1)
        momentum = layer.momentum
        if momentum is None:  # as in torch, an average without a counter stays as it is
            momentum = 1.0 / float(counter) if counter is not None else 0.0
        unbiased = variance * (count / (count - 1))
        for kept, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            kept.mul_(1 - momentum).add_(new.to(kept.dtype), alpha=momentum)  # type: ignore[union-attr]


class _Synchronised(torch.autograd.Function):
    """Normalises by the statistics of all ranks; its gradient is that of the sum of all ranks' losses.

    So under DistributedDataParallel, which averages, each rank's loss is weighted before backward. The
    gradients of weight and bias are only of this rank's samples: they are summed by what sums those of
    all parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: _Running | None,
        group: Any,
        absent: bool,
    ) -> Tensor:
        mean, variance, count = _combine(_moments(input, absent), group)
        if count == 1:
            raise ValueError(
                f"expected more than 1 value per channel on all ranks when training, got input {input.shape}"
            )
        if running is not None and count:
            running.update(mean, variance, count)
        exact = _accumulator(input)
        ctx.of_weight = None if weight is None else weight.dtype
        mean, variance = mean.to(exact), variance.to(exact)
        weight, bias = (None if one is None else one.to(exact) for one in (weight, bias))
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.group, ctx.absent, ctx.count = eps, group, absent, count
        return _normalised(input, mean, variance, weight, bias, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        whole = ctx.needs_input_grad[0]
        own, times_normalised, direct = _local_gradients(ctx, gradient, input, weight, mean, variance)
        to_input = None
        if whole:
            sums = torch.stack([own, times_normalised]).double()
            if _size(ctx.group) > 1:
                dist.all_reduce(sums, group=ctx.group)
            if ctx.absent or not input.numel():
                to_input = torch.zeros_like(input)
            else:
                scale = weight if weight is not None else torch.ones_like(mean)
                one, other = (sums / ctx.count).to(mean.dtype)
                slope = -scale * torch.rsqrt(variance + ctx.eps)
                # What the mean and the variance pass back: linear in the normalised input.
                to_input = direct.add_(
                    _normalised(input, mean, variance, slope * other, slope * one, ctx.eps)
                )
        to_weight = times_normalised.to(ctx.of_weight) if ctx.needs_input_grad[1] else None
        to_bias = own.to(ctx.of_weight) if ctx.needs_input_grad[2] else None
        return to_input, to_weight, to_bias, None, None, None, None


def _size(group: Any) -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _accumulator(input: Tensor) -> torch.dtype:
    """The type to compute in: float32 for narrower ones."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _moments(input: Tensor, absent: bool) -> Tensor:
    """This rank's [mean, sum of squared deviations, count], (3, C) in float64; all 0 without samples."""
    channels = input.shape[1]
    count = 0 if absent else input.numel() // max(channels, 1)
    moments = torch.zeros(3, channels, dtype=torch.float64, device=input.device)
    if count:
        mean, variance = _mean_and_variance(input.detach().to(_accumulator(input)))
        moments[0], moments[1], moments[2] = mean, variance.double() * count, count
    return moments


def _mean_and_variance(input: Tensor) -> tuple[Tensor, Tensor]:
    """A value a channel of each, the variance biased; to the last digit of the input's type."""
    if input.device.type == "cpu":
        # Plain BatchNorm's own kernel, in a fifth of the time of `var_mean`. It sums contiguous values in
        # float64, but channels-last ones in float32: with them five digits are left.
        mean, variance = torch.ops.aten.batch_norm_update_stats(input.contiguous(), None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(input, [0, *range(2, input.dim())], correction=0)
    return mean, variance


def _combine(moments: Tensor, group: Any) -> tuple[Tensor, Tensor, float]:
    """Mean, biased variance and count of all ranks, from each rank's moments; 0, 1 and 0 of no samples."""
    all_moments = [moments]
    if _size(group) > 1:
        all_moments = [torch.empty_like(moments) for _ in range(_size(group))]
        dist.all_gather(all_moments, moments, group=group)
    means, deviations, counts = torch.stack(all_moments).unbind(1)
    count = float(counts[:, 0].sum())
    if not count:
        return torch.zeros_like(means[0]), torch.ones_like(means[0]), 0.0
    mean = (counts * means).sum(0) / count
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / count
    return mean, variance, count


def _normalised(
    input: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """torch's own kernel, as in evaluation: one pass, in the input's memory format."""
    if not input.numel():
        return torch.empty_like(input)
    return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)


def _local_gradients(
    ctx: Any, gradient: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Any]:
    """This rank's sums, over all but channels, of the gradient and of it times the normalised input; and what
    goes straight to the input, as if mean and variance were constants (None of a rank without samples)."""
    if ctx.absent or not input.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean), None
    direct, times_normalised, own = torch.ops.aten.native_batch_norm_backward(
        gradient,
        input,
        weight,
        mean,
        variance,
        None,
        None,
        False,
        ctx.eps,
        [ctx.needs_input_grad[0], True, True],
    )
    return own, times_normalised, direct
