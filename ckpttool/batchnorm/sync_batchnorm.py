"""BatchNorm over the samples of all ranks, on any device and backend. Imports torch.

torch's SyncBatchNorm raises on a CPU; this is the same mathematics. Forward gathers each rank's count, mean
and sum of squared deviations, and combines them in float64 and in rank order (Chan, Golub and LeVeque 1979,
"Updating formulae and a pairwise algorithm for computing sample variances"), so that all ranks have the same
bits, and a large mean costs no digits. Backward sums two numbers per channel over ranks: the gradient, and
the gradient times the normalised input. A rank without samples takes part with a count of 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageFault
from .convert_states import KINDS, unwrapped

Tensor = torch.Tensor


def moments(input: Tensor) -> Tensor:
    """Return a batch's count, mean and sum of squared deviations of each channel: float64 [3, channels]."""
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    rows = torch.zeros(3, channels, dtype=torch.float64, device=input.device)
    if count:
        mean, variance = _mean_and_variance(input.detach().to(accumulator(input)))
        rows[0], rows[1], rows[2] = count, mean, variance.double() * count
    return rows


def combine(of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, mean and biased variance of each channel over all ranks; of [ranks, 3, channels]."""
    counts, means, deviations = of_ranks.unbind(1)
    count = counts.sum(0)
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / divisor
    return count, mean, variance.masked_fill(count == 0, 1.0)


def update_running(layer: Any, mean: Tensor, variance: Tensor, count: float) -> None:
    """Update a layer's running statistics and counter with a batch, as torch's BatchNorm does."""
    counter, momentum = layer.num_batches_tracked, layer.momentum
    if counter is not None:
        counter.add_(1)
    if momentum is None:  # as in torch, an average without a counter does not change
        momentum = 1.0 / float(counter) if counter is not None else 0.0
    unbiased = variance * (count / (count - 1))
    for buffer, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        buffer.mul_(1 - momentum).add_(new.to(buffer.device, buffer.dtype), alpha=momentum)


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


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of all ranks' samples together.

    Inputs are [N, C, ...], in any memory format; N may differ between ranks and be 0. Every rank must pass
    through each layer equally often, forward and backward. In evaluation, in a single process and in a group
    of one rank, it is plain BatchNorm to the bit. Second derivatives are refused.

    Attributes:
        process_group: the group whose samples are normalised together; None for all ranks.
        plain_kind: the class that the layer had before, such as `BatchNorm2d`; None if not known.
        absent: take part with a count of 0 whatever the input is, for a rank that has no samples but has to
            pass something through the model. The output is normalised as that of the other ranks.

    Raises:
        ValueError: on all ranks, if they have a single value per channel together; on a rank whose input has
            another number of axes or channels.
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
            # The kernel would refuse it too, but too late: other ranks would wait, or abort.
            raise ValueError(f"expected {self.num_features} channels (got an input of {list(input.shape)})")
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not (by_batch and self.training and _size(self.process_group) > 1):
            return self._alone(input, by_batch)
        return _Synchronised.apply(input, self.weight, self.bias, self)  # type: ignore[no-any-return]

    def _alone(self, input: Tensor, by_batch: bool) -> Tensor:
        """Apply plain BatchNorm, as torch's `_BatchNorm.forward`."""
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
        """Save as any layer does, with the kind next to the version in `_metadata`, which loading ignores."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.plain_kind is not None and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["kind"] = self.plain_kind


SyncBatchNorm.__module__ = "ckpttool.batchnorm"  # pickles of whole models name the public place


class _Synchronised(torch.autograd.Function):
    """Normalise by the statistics of all ranks; the gradient is that of the sum of all ranks' losses."""

    # So under DistributedDataParallel, which averages, each rank's loss is weighted before backward. The
    # gradients of weight and bias are of this rank's samples only: what sums those of all parameters over
    # ranks sums these too.

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm
    ) -> Tensor:
        ctx.eps, ctx.group, ctx.absent = layer.eps, layer.process_group, layer.absent
        local = moments(input[:0] if ctx.absent else input)
        counts, mean, variance = combine(_of_all_ranks(local, ctx.group))
        ctx.count = count = float(counts[0]) if len(counts) else 0.0
        if count == 1:
            wanted = "expected more than 1 value per channel on all ranks when training"
            raise ValueError(f"{wanted}, got input {input.shape}")
        if count and layer.track_running_stats and layer.running_mean is not None:
            update_running(layer, mean, variance, count)
        exact = accumulator(input)
        ctx.of_weight = None if weight is None else weight.dtype
        mean, variance = mean.to(exact), variance.to(exact)
        weight, bias = (None if scale is None else scale.to(exact) for scale in (weight, bias))
        ctx.save_for_backward(input, weight, mean, variance)
        return _normalised(input, mean, variance, weight, bias, ctx.eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        summed, times_normalised, direct = _local_gradients(ctx, gradient, input, weight, mean, variance)
        to_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([summed, times_normalised]).double()
            if _size(ctx.group) > 1:
                dist.all_reduce(sums, group=ctx.group)
            if ctx.absent or not input.numel():
                to_input = torch.zeros_like(input)
            else:
                scale = weight if weight is not None else torch.ones_like(mean)
                of_mean, of_variance = (sums / ctx.count).to(mean.dtype)
                slope = -scale * torch.rsqrt(variance + ctx.eps)
                # What the mean and the variance pass back: linear in the normalised input.
                lines = slope * of_variance, slope * of_mean
                to_input = direct.add_(_normalised(input, mean, variance, *lines, ctx.eps))
        to_weight = times_normalised.to(ctx.of_weight) if ctx.needs_input_grad[1] else None
        to_bias = summed.to(ctx.of_weight) if ctx.needs_input_grad[2] else None
        return to_input, to_weight, to_bias, None


def _size(group: Any) -> int:
    """Return the number of ranks in a group; 1 without one."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _of_all_ranks(local: Tensor, group: Any) -> Tensor:
    """Return each rank's tensor, in rank order: [ranks, ...]."""
    if _size(group) == 1:
        return local[None]
    of_ranks = [torch.empty_like(local) for _ in range(_size(group))]
    dist.all_gather(of_ranks, local, group=group)
    return torch.stack(of_ranks)


def _normalised(
    input: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise by torch's own kernel for evaluation: one pass, in the input's memory format."""
    if not input.numel():
        return torch.empty_like(input)
    return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)


def _local_gradients(
    ctx: Any, gradient: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Any]:
    """Return what this rank's samples add to the gradients of bias and weight, and to the input's."""
    # The last as if mean and variance were constants; None on a rank without samples.
    if ctx.absent or not input.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean), None
    wanted, kernel = [ctx.needs_input_grad[0], True, True], torch.ops.aten.native_batch_norm_backward
    direct, times_normalised, summed = kernel(
        gradient, input, weight, mean, variance, None, None, False, ctx.eps, wanted
    )
    return summed, times_normalised, direct


# ---- Live layers converted to synchronised ones and back
#
# torch's `SyncBatchNorm.convert_sync_batchnorm` has no way back (pytorch#41081). Here a layer stays the same
# object and changes only its class, as torch's lazy modules do. Parameters, hooks, flags and all references
# to the layer stay as they are, and the way back is exact.


M = TypeVar("M", bound=nn.Module)

PLAIN = tuple(getattr(nn, kind) for kind in KINDS)
SYNC = (nn.SyncBatchNorm, SyncBatchNorm)

Subclasses = Literal["refuse", "keep"]

COMPILED = ("_orig_mod.",)  # other wrappers' names may be those of a live model's parts


def to_sync(module: M, *, process_group: Any = None, subclasses: Subclasses = "refuse") -> M:
    """Convert every BatchNorm layer of a module to a synchronised one, in place, and return the module.

    On a GPU a layer becomes torch's `SyncBatchNorm`, elsewhere `ckpttool.batchnorm.SyncBatchNorm`, which
    trains on any device; so move the module first. Each layer remembers its kind. A layer that is
    synchronised already stays, except torch's where it can't train: it becomes ours. Modules inside
    `torch.compile` are converted too.

    Args:
        module: the model, or a single layer.
        process_group: the group whose samples are normalised together; None for all ranks.
        subclasses: `refuse` layers of classes derived from BatchNorm, which may do anything else; or `keep`
            them as they are.

    Raises:
        UsageFault: a layer is of a derived class (unless kept), scripted, lazy, or has its own forward; names
            the layer, and nothing was changed.
    """
    layers = list(_layers(module))
    if subclasses == "refuse":
        for path, layer in layers:
            if not (_is_convertible(layer) or isinstance(layer, SYNC)):
                raise _refusal(path, layer)
    for _, layer in layers:
        if _is_convertible(layer):
            layer.process_group, layer.plain_kind = process_group, type(layer).__name__
            layer.__class__ = nn.SyncBatchNorm if _on_gpu(layer) else SyncBatchNorm
        elif type(layer) is nn.SyncBatchNorm and not _on_gpu(layer):
            vars(layer).setdefault("plain_kind", None)
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
    return module


def to_plain(module: M, *, like: nn.Module | None = None, kinds: Mapping[str, str] | None = None) -> M:
    """Convert every synchronised layer of a module back to BatchNorm1d, 2d or 3d, in place; return it.

    The kind is the one that the layer remembers, else that of the same layer in `like`, else in `kinds`. So a
    model that was trained with torch's SyncBatchNorm can be evaluated or trained on a CPU.

    Args:
        module: the model, or a single layer.
        like: a model with the same layers, in their plain kinds.
        kinds: layer -> `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`.

    Raises:
        UsageFault: a layer's kind is not known, or its class is derived from SyncBatchNorm; names the layer,
            and nothing was changed.
    """
    given = {**(kinds or {}), **(kinds_of(like) if like is not None else {})}
    given = {**{unwrapped(path): kind for path, kind in given.items()}, **given}
    chosen = []
    for path, layer in _layers(module):
        if not isinstance(layer, SYNC):
            continue
        if type(layer) not in SYNC or _has_own_forward(layer):
            raise _refusal(path, layer)
        kind = getattr(layer, "plain_kind", None) or given.get(path) or given.get(unwrapped(path))
        if kind not in KINDS:
            reason = f"'{path}' is a SyncBatchNorm, and nothing says whether it was 1d, 2d or 3d"
            raise UsageFault(reason, hint="give a plain model with the same names as like=, or kinds=")
        chosen.append((layer, getattr(nn, kind)))
    for layer, plain in chosen:
        layer.__class__ = plain
        for name in ("process_group", "plain_kind", "absent"):
            layer.__dict__.pop(name, None)
    return module


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Return layer -> kind: `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`. Synchronised layers remember it.

    A layer that appears in several places is named in each. Prefixes of torch.compile are left out.
    """
    kinds = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer).__name__ if type(layer) in PLAIN else getattr(layer, "plain_kind", None)
        if kind in KINDS:
            kinds[unwrapped(path, COMPILED)] = kind
    return kinds


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer of BatchNorm's family once, with its path; scripted ones too."""
    for path, layer in module.named_modules():
        scripted = isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name
        if isinstance(layer, _BatchNorm) or scripted:
            yield path, layer


def _refusal(path: str, layer: Any) -> UsageFault:
    """Say why a layer of BatchNorm's family can't be converted."""
    if isinstance(layer, torch.jit.ScriptModule):
        what, hint = "is scripted", "convert the model before torch.jit.script"
    elif isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        what, hint = "has no parameters yet", "run a batch through the model first"
    elif _has_own_forward(layer):
        what = "has its own forward, which would still be called"
        hint = "remove it, or leave the layer as it is: subclasses='keep'"
    else:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        what, hint = f"is a {name}, which may do more", "leave it as it is: subclasses='keep'"
    return UsageFault(f"'{path or 'the module itself'}' {what}", hint=hint)


def _is_convertible(layer: Any) -> bool:
    return type(layer) in PLAIN and not _has_own_forward(layer)


def _has_own_forward(layer: Any) -> bool:
    """Whether the layer itself has a forward, which a change of its class would not replace."""
    return "forward" in vars(layer)


def _on_gpu(layer: nn.Module) -> bool:
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)
