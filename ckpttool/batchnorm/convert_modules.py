"""Live BatchNorm layers converted to synchronised ones and back. Imports torch.

torch converts in one direction, by `SyncBatchNorm.convert_sync_batchnorm`, but not back (pytorch#41081). Here
a layer stays the same object and changes only its class, as torch's lazy modules do: parameters, hooks, flags
and all references to the layer stay as they are, and the way back is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageFault
from .convert_states import KINDS, unwrapped
from .sync_batchnorm import SyncBatchNorm

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
