"""The parameters of an optimizer's state: key, name and shape of each.

torch numbers the parameters through all groups and keys the state by these numbers; loading goes by index.
An optimizer built from `named_parameters()` (torch 2.6) also keeps `param_names` in each group, which loading
ignores: they are the only record of which index is which. By name, `state` has parameter names for keys and
each group lists names as its `params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...checkpoint.rebuilt_tensors import plain_tensor, special_tensor
from ...checkpoint.special_tensors import SpecialTensor
from ...inert_pickle.values import Record

MOMENTA = (
    *("exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax", "exp_avg_diff", "exp_avg_slow", "hessian"),
)
"""Entries in the shape of the parameter: those of torch's optimizers, and others' under the same names."""

FLAT = ("old_dirs", "prev_flat_grad")
"""Entries of LBFGS that hold all parameters in one vector, in their order."""

Shape = tuple[int, ...]


class BadOptimizer(ValueError):
    """An optimizer's state that can't be used; the message reads on after "the optimizer"."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Slot(NamedTuple):
    """One parameter's place in an optimizer: its key, its name if the file has it, and its shape.

    `shape` is that of its momentum; None when it has none (plain SGD, or never stepped).
    """

    key: int | str
    name: str | None
    shape: Shape | None


def slots(optimizer: Mapping[Any, Any]) -> list[list[Slot]]:
    """Return the parameters of each group, in their order.

    Args:
        optimizer: a dict with `state` and `param_groups`; its tensors are torch's or a file's TensorRefs.

    Raises:
        BadOptimizer: the state is malformed, lists a parameter twice, or keeps state of one that is in no
            group.
    """
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise BadOptimizer("has no `state` and `param_groups` of the usual form")
    found = [_slots(group, state) for group in groups]
    keys = [slot.key for group in found for slot in group]
    known = set(map(str, keys))
    if len(known) != len(keys):
        raise BadOptimizer("lists a parameter twice")
    for key in state:
        if str(key) not in known:
            raise BadOptimizer(f"keeps state of '{str(key)[:80]}', which is in no group")
    return found


def _slots(group: Any, state: dict[Any, Any]) -> list[Slot]:
    keys = group.get("params") if isinstance(group, dict) else None
    if not isinstance(keys, list) or not all(type(key) in (int, str) for key in keys):
        raise BadOptimizer("has a group without a list of `params`")
    names: list[Any] = list(keys) if any(map(is_name, keys)) else [None] * len(keys)
    told = group.get("param_names")
    if isinstance(told, list) and all(isinstance(name, str) for name in told):
        if len(told) != len(keys):
            raise BadOptimizer(f"has {len(keys)} parameters and {len(told)} names in one group")
        names = told
    return [Slot(key, name, _shape(entry_of(state, key))) for key, name in zip(keys, names, strict=True)]


def is_name(key: object) -> bool:
    """Return whether a key is a parameter's name; torch's converter to DCP turns numbers into text."""
    return isinstance(key, str) and not key.isdecimal()


def entry_of(state: Mapping[Any, Any], key: int | str) -> Any:
    """Return the state of one parameter, whose key may have become text; None when there is none."""
    return state[key] if key in state else state.get(str(key))


def _shape(entry: Any) -> Shape | None:
    if isinstance(entry, dict):
        for name in MOMENTA:
            value = entry.get(name)
            found = plain_tensor(value) or special_tensor(value) or value
            if isinstance(found, SpecialTensor) or (found is not None and not isinstance(found, Record)):
                shape = getattr(found, "shape", None)
                if shape is not None:
                    return tuple(shape)
    return None


def without_prefix(names: Iterable[str], parameters: Mapping[str, object]) -> list[str]:
    """Return names without the prefix by which the first known one differs from the model's.

    Args:
        names: names of parameters in a file.
        parameters: the model's parameters by name.
    """
    listed = list(names)
    lengths = sorted({len(name) for name in parameters}, reverse=True)
    prefix = next((found for name in listed if (found := _prefix(name, parameters, lengths)) is not None), "")
    return [name.removeprefix(prefix) for name in listed]


def _prefix(name: str, parameters: Mapping[str, object], lengths: Iterable[int]) -> str | None:
    """Return what stands before a parameter's name, whole parts alone; None when the name ends in none."""
    for length in lengths:
        start = len(name) - length
        if start >= 0 and name[start - 1 : start] in (".", "") and name[start:] in parameters:
            return name[:start]
    return None
