"""The names of parameters in an optimizer's state dict: in its state, and in the lists of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ...checkpoint.flat_optimizers import is_flat, parameters, renamed
from ...inert_pickle.values import remade
from ..renaming import PREFIXES, checked
from ..wrappers import found_prefixes


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """Return an optimizer's state dict with its parameters renamed, in its state and its groups."""

    def new_name(name: Any) -> Any:
        return names.get(name, name) if isinstance(name, str) else name

    checked(dict.fromkeys(_listed_names(optimizer)), new_name, PREFIXES)
    if is_flat(optimizer):
        return renamed(optimizer, names)
    new = remade(optimizer, optimizer.items())
    if isinstance(state := optimizer["state"], dict):
        new["state"] = remade(state, ((new_name(key), value) for key, value in state.items()))
    if isinstance(groups := optimizer["param_groups"], list | tuple):
        copies = (remade(g, g.items()) if isinstance(g, dict) else g for g in groups)
        new["param_groups"] = type(groups)(copies)
    for group, entry in _lists(new):
        group[entry] = type(group[entry])(map(new_name, group[entry]))
    return new


def as_listed(optimizer: Any, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names without the state's wrapper, where the optimizer was made of the model inside it."""
    listed = [*_listed_names(optimizer)]
    if not listed or listed[0] in names:
        return names
    for wrapper in (found.prefix for found in found_prefixes(names)):
        if all(wrapper + name in names for name in listed):
            inside = {old: new for old, new in names.items() if old.startswith(wrapper)}
            return {old.removeprefix(wrapper): new.removeprefix(wrapper) for old, new in inside.items()}
    return names


def _listed_names(optimizer: Any) -> Iterator[str]:
    listed = parameters(optimizer) if is_flat(optimizer) else _parameters(optimizer)
    return (name for name in listed if isinstance(name, str))


def _parameters(optimizer: Any) -> Iterator[object]:
    yield from optimizer["state"] if isinstance(optimizer["state"], dict) else ()
    for group, entry in _lists(optimizer):
        yield from group[entry]


def _lists(optimizer: Any) -> Iterator[tuple[dict[Any, Any], str]]:
    """Yield the groups of an optimizer with the name of each list of parameters in them."""
    groups = optimizer["param_groups"]
    # `params` holds names where the state is keyed by them.
    listed = groups if isinstance(groups, list | tuple) else ()
    for group, entry in product(listed, ("params", "param_names")):
        if isinstance(group, dict) and isinstance(group.get(entry), list | tuple):
            yield group, entry
