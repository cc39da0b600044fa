"""Parameters of an optimizer's state under new names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...inert_pickle.values import remade
from ..renaming import PREFIXES, checked

LISTS = ("params", "param_names")
"""The entries of a group that list its parameters; `params` lists names when the state is keyed by name."""


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """Return an optimizer's state dict with its parameters renamed, in its state and its groups.

    Args:
        optimizer: a dict with `state` and `param_groups`; malformed parts stay as they are.
        names: old name -> new name; other parameters keep their names.

    Raises:
        Collision: two parameters would get the same name.
    """
    listed = dict.fromkeys(name for name in _parameter_names(optimizer) if isinstance(name, str))
    checked(listed, lambda name: names.get(name, name), PREFIXES)
    new = remade(optimizer, optimizer.items())
    if isinstance(optimizer["state"], dict):
        state = optimizer["state"]
        new["state"] = remade(state, ((_new_name(key, names), value) for key, value in state.items()))
    if isinstance(optimizer["param_groups"], list):
        new["param_groups"] = [_rename_group(group, names) for group in optimizer["param_groups"]]
    return new


def _parameter_names(optimizer: Any) -> Iterator[object]:
    state, groups = optimizer["state"], optimizer["param_groups"]
    yield from state if isinstance(state, dict) else ()
    for group in groups if isinstance(groups, list) else ():
        for entry in LISTS:
            names = group.get(entry) if isinstance(group, dict) else None
            yield from names if isinstance(names, list) else ()


def _rename_group(group: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(group, dict):
        return group
    new = remade(group, group.items())
    for entry in LISTS:
        if isinstance(group.get(entry), list):
            new[entry] = [_new_name(name, names) for name in group[entry]]
    return new


def _new_name(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name
