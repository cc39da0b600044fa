"""Modules with loading rules of their own: `_metadata`, names that they translate. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.state import State
from ..tensors.to_torch import live_tensors
from .skeleton import on_meta

if TYPE_CHECKING:
    import torch


def accepts(model: torch.nn.Module, state: State) -> bool:
    """Return whether modules with loading rules of their own take a state whose names differ from theirs.

    Weight norm renames what older torch called `weight_g`. Load into a copy without memory to find out.
    """
    import warnings

    if not any(map(_has_own_rules, model.modules())):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a copy into meta tensors does nothing
        try:
            on_meta(model).load_state_dict(with_versions(state, live_tensors(state.tensors)), strict=True)
        except Exception:  # any error means no; the comparison of names says what is wrong
            return False
    return True


def _has_own_rules(module: torch.nn.Module) -> bool:
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    own = type(module)._load_from_state_dict not in (
        torch.nn.Module._load_from_state_dict,
        _NormBase._load_from_state_dict,
    )
    return own or bool(module._load_state_dict_pre_hooks)


def with_versions(state: State, values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the `_metadata` by which modules recognise states of older versions."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if state.versions is not None:
        versions = {path: dict(entry) for path, entry in state.versions.items() if isinstance(entry, dict)}
        loaded._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return loaded
