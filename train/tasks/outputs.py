"""Where the target lies in a batch, and the scores or the loss in what a model returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy
import torch

TARGETS = ("labels", "label", "targets", "target", "y")
"""The names by which a batch that is a mapping may hold its target."""


def target_of(batch: Any) -> Any:
    """Return the target of a batch or a sample: the last of a tuple, or a mapping's labels; else itself."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[-1] if isinstance(batch, tuple | list) else batch


def numbers_of(target: Any) -> int:
    """Return how many numbers a sample's target is."""
    return target.numel() if isinstance(target, torch.Tensor) else int(numpy.size(target))


def loss_in(outputs: Any) -> tuple[torch.Tensor, Any]:
    """Return the loss in what a model returned, and its count if there is one."""
    found: Any = None
    count = None
    if isinstance(outputs, Mapping):
        found, count = outputs.get("loss"), outputs.get("count")
    elif isinstance(outputs, tuple | list):
        scalars = [one for one in outputs if _is_scalar(one) and not one.dim()]
        found = scalars[0] if len(scalars) == 1 else None
    elif isinstance(outputs, torch.Tensor):
        found = outputs
    else:
        found, count = getattr(outputs, "loss", None), getattr(outputs, "count", None)
    if not _is_scalar(found):
        raise TypeError(
            f"the model returned {kind_of(outputs)}, in which there is no loss, a tensor of one number"
        )
    return found, count


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def scores_in(outputs: Any) -> torch.Tensor:
    """Return outputs that are a tensor, or have one as `logits`; those of 16 bits as float32."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"the model returned {kind_of(outputs)}, not a tensor")
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the axes of length 1 at its end, apart from the first."""
    kept = list(shape)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return tuple(kept)


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} with the shape {list(value.shape)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
