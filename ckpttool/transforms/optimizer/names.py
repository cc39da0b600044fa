"""The names of parameters in an optimizer's state dict: in its state, and in the lists of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoint.optimizer_view import OptimizerView
from ..renaming import PREFIXES, checked
from ..wrappers import found_prefixes


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """Return an optimizer's state dict with its parameters renamed, in its state and its groups."""

    view = OptimizerView(optimizer)
    checked(dict.fromkeys(view.mentioned), lambda name: names.get(name, name), PREFIXES)
    return view.renamed(names)


def as_listed(optimizer: Any, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names without the state's wrapper, where the optimizer was made of the model inside it."""
    listed = [*OptimizerView(optimizer).mentioned]
    if not listed or listed[0] in names:
        return names
    for wrapper in (found.prefix for found in found_prefixes(names)):
        if all(wrapper + name in names for name in listed):
            inside = {old: new for old, new in names.items() if old.startswith(wrapper)}
            return {old.removeprefix(wrapper): new.removeprefix(wrapper) for old, new in inside.items()}
    return names
