"""Live BatchNorm layers converted to synchronised ones and back. Imports torch when called.

torch converts in one direction, by `SyncBatchNorm.convert_sync_batchnorm`, but not back (pytorch#41081). Here
a layer stays the same object and changes only its class, as torch's lazy modules do: parameters, hooks, flags
and all references to the layer stay as they are, and the way back is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import UsageFault
from .convert_states import KINDS, unwrapped

if TYPE_CHECKING:
    import torch

M = TypeVar("M", bound="torch.nn.Module")

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
    from torch.nn import SyncBatchNorm

    from .sync_batchnorm import SyncBatchNorm as OurSyncBatchNorm

    layers = list(_layers(module))
    if subclasses == "refuse":
        for path, layer in layers:
            if not (_is_convertible(layer) or _is_sync(layer)):
                raise _refusal(path, layer)
    for _, layer in layers:
        if _is_convertible(layer):
            layer.process_group, layer.plain_kind = process_group, type(layer).__name__
            layer.__class__ = SyncBatchNorm if _on_gpu(layer) else OurSyncBatchNorm
        elif type(layer) is SyncBatchNorm and not _on_gpu(layer):
            vars(layer).setdefault("plain_kind", None)
            layer.__class__ = OurSyncBatchNorm  # type: ignore[assignment]
    return module


def to_plain(module: M, *, like: torch.nn.Module | None = None, kinds: Mapping[str, str] | None = None) -> M:
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
    import torch

    given = {**(kinds or {}), **(kinds_of(like) if like is not None else {})}
    given = {**{unwrapped(path): kind for path, kind in given.items()}, **given}
    chosen = []
    for path, layer in _layers(module):
        if not _is_sync(layer):
            continue
        if type(layer) not in _sync_classes() or _has_own_forward(layer):
            raise _refusal(path, layer)
        kind = getattr(layer, "plain_kind", None) or given.get(path) or given.get(unwrapped(path))
        if kind not in KINDS:
            raise UsageFault(
                f"'{path}' is a SyncBatchNorm, and nothing says whether it was 1d, 2d or 3d",
                hint="give a plain model with the same names as like=, or kinds=",
            )
        chosen.append((layer, getattr(torch.nn, kind)))
    for layer, plain in chosen:
        layer.__class__ = plain
        for name in ("process_group", "plain_kind", "absent"):
            layer.__dict__.pop(name, None)
    return module


def kinds_of(module: torch.nn.Module) -> dict[str, str]:
    """Return layer -> kind: `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`. Synchronised layers remember it.

    A layer that appears in several places is named in each. Prefixes of torch.compile are left out.
    """
    kinds = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer).__name__ if _is_plain(layer) else getattr(layer, "plain_kind", None)
        if kind in KINDS:
            kinds[unwrapped(path, COMPILED)] = kind
    return kinds


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer of BatchNorm's family once, with its path; scripted ones too."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    for path, layer in module.named_modules():
        scripted = isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in layer.original_name
        if isinstance(layer, _BatchNorm) or scripted:
            yield path, layer


def _refusal(path: str, layer: Any) -> UsageFault:
    """Say why a layer of BatchNorm's family can't be converted."""
    import torch

    if isinstance(layer, torch.jit.ScriptModule):
        what, hint = "is scripted", "convert the model before torch.jit.script"
    elif isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        what, hint = "has no parameters yet", "run a batch through the model first"
    elif _has_own_forward(layer):
        what = "has its own forward, which would still be called"
        hint = "remove it, or leave the layer as it is: subclasses='keep'"
    else:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        what, hint = f"is a {name}, which may do more", "leave it as it is: subclasses='keep'"
    return UsageFault(f"'{path or 'the module itself'}' {what}", hint=hint)


def _is_plain(layer: Any) -> bool:
    import torch

    return type(layer) in [getattr(torch.nn, kind) for kind in KINDS]


def _is_convertible(layer: Any) -> bool:
    return _is_plain(layer) and not _has_own_forward(layer)


def _has_own_forward(layer: Any) -> bool:
    """Whether the layer itself has a forward, which a change of its class would not replace."""
    return "forward" in vars(layer)


def _is_sync(layer: Any) -> bool:
    return isinstance(layer, _sync_classes())


def _sync_classes() -> tuple[type, ...]:
    import torch

    from .sync_batchnorm import SyncBatchNorm

    return torch.nn.SyncBatchNorm, SyncBatchNorm


def _on_gpu(layer: torch.nn.Module) -> bool:
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    return bool(tensors) and all(tensor.is_cuda for tensor in tensors)
