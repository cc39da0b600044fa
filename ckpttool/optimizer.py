"""The state of an optimizer: kept by index or by parameter name, with the names beside it.

torch keys it by the index of a parameter. An optimizer built from `named_parameters()` (torch 2.6) also
keeps `param_names` in each group, which loading ignores: they are the only record of which index is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .inert import remade


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """An optimizer's state dict with its parameters renamed; names that are not in `names` stay.

    Args:
        optimizer: a dict with `state` and `param_groups`.
        names: old name -> new name.
    """
    new = remade(optimizer, optimizer.items())
    if isinstance(optimizer["state"], dict):
        state = optimizer["state"]
        new["state"] = remade(state, ((_new_name(key, names), value) for key, value in state.items()))
    if isinstance(optimizer["param_groups"], list):
        new["param_groups"] = [_rename_group(group, names) for group in optimizer["param_groups"]]
    return new


def _rename_group(group: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(group, dict):
        return group
    new = remade(group, group.items())
    for field in ("params", "param_names"):  # `params` holds names when the state is keyed by name
        if isinstance(group.get(field), list):
            new[field] = [_new_name(name, names) for name in group[field]]
    return new


def _new_name(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name
