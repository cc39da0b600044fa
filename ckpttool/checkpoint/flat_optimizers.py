"""Optimizer states as one flat dict, as torchtitan saves them: `state.NAME.exp_avg`, `param_groups.NAME.lr`.

torch writes it for `StateDictOptions(flatten_optimizer_state_dict=True)` (`_flatten_optim_state_dict` in
torch/distributed/checkpoint/state_dict.py). Which parameters were in one group is not kept: those with the
same settings are one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..inert_pickle.values import in_brief, remade, tensor_of

STATE, GROUPS = "state.", "param_groups."
LEVELS = 8  # of dicts that an optimizer keeps of a parameter, as Shampoo does
BY_NAMES = "--to names keeps it"
SMALL = 64  # bytes of a setting that is a tensor, such as a learning rate on the device


def is_flat(value: object) -> bool:
    """Return whether a value is an optimizer's state in one flat dict."""
    if not isinstance(value, dict) or not value:
        return False
    # Asked of every dict of a file: the first key alone rules out nearly all of them.
    if not all(isinstance(key, str) and key.startswith((STATE, GROUPS)) for key in value):
        return False
    return any(key.startswith(GROUPS) and key.count(".") > 1 for key in value)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state as torch nests it; parameters stay in the order in which the groups have them."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(GROUPS):
            name, _, setting = key.removeprefix(GROUPS).rpartition(".")
            settings.setdefault(name, {})[setting] = value
    groups: dict[object, dict[str, Any]] = {}
    for name, values in settings.items():
        same = tuple(sorted((setting, _comparable(value)) for setting, value in values.items()))
        groups.setdefault(same, {**values, "params": []})["params"].append(name)
    state: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith(STATE):
            name = owner(key.removeprefix(STATE), settings)
            _put(state.setdefault(name, {}), key.removeprefix(f"{STATE}{name}.").split("."), value)
    in_order = {name: state[name] for name in settings if name in state}
    return {"state": in_order | state, "param_groups": [*groups.values()]}


class BadOptimizer(ValueError):
    """An optimizer's state that can't be used; the message reads on after "the optimizer"."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that is keyed by names as torch flattens it. Raises BadOptimizer."""
    flat = {}
    for name, entry in optimizer["state"].items():
        todo = [(f"{STATE}{name}", entry)]
        while todo:
            key, value = todo.pop()
            if isinstance(value, dict):
                _require_flattenable(key, value, may_be_empty=value is entry)
                todo += [(f"{key}.{step}", inner) for step, inner in reversed(value.items())]
            else:
                flat[key] = value
    for number, group in enumerate(optimizer["param_groups"]):
        _require_flattenable(f"{GROUPS}{number}", group, may_be_empty=True)
        for name in group["params"]:
            flat |= {f"{GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat


def _require_flattenable(where: str, value: Mapping[Any, Any], *, may_be_empty: bool) -> None:
    """Check that a dict can be made again from the dotted names of its entries."""
    if not (value or may_be_empty):
        raise BadOptimizer(f"keeps an empty dict as '{where[:80]}', which a flat state can't hold", BY_NAMES)
    for key in value:
        if not isinstance(key, str) or "." in key:
            what = f"keeps '{in_brief(key)[:80]}' ({type(key).__name__}) in '{where[:80]}'"
            raise BadOptimizer(f"{what}, and the keys of a flat state are text without dots", BY_NAMES)


def parameters(flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of parameters, each as often as it has settings."""
    return (key.removeprefix(GROUPS).rpartition(".")[0] for key in flat if key.startswith(GROUPS))


def renamed(flat: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a flat state under other names of parameters; those that are not in `names` stay."""
    known = dict.fromkeys(parameters(flat))

    def new(key: str) -> str:
        begin = STATE if key.startswith(STATE) else GROUPS
        name = owner(key.removeprefix(begin), known)
        return f"{begin}{names.get(name, name)}{key.removeprefix(begin + name)}"

    return remade(flat, ((new(key), value) for key, value in flat.items()))


def owner(key: str, known: Mapping[str, object]) -> str:
    """Return the parameter whose entry a key is: the longest known name that it begins with."""
    name = key.rpartition(".")[0]
    for _ in range(LEVELS):
        if not name or name in known:
            break
        name = name.rpartition(".")[0]
    return name if name in known else key.rpartition(".")[0]


def _put(entry: dict[str, Any], steps: list[str], value: object) -> None:
    for step in steps[:-1]:
        inner = entry.setdefault(step, {})
        entry = inner if isinstance(inner, dict) else {}
    entry[steps[-1]] = value


def _comparable(value: object) -> tuple[str, ...]:
    """Return what two equal settings have in common; values of other kinds are equal to themselves alone."""
    tensor = tensor_of(value)
    if tensor is not None and tensor.is_plain and tensor.nbytes <= SMALL:
        return "tensor", tensor.dtype.name, str(tensor.shape), tensor.data.read().hex()
    parts = value if isinstance(value, tuple | list) and len(value) <= SMALL else (value,)
    if all(part is None or isinstance(part, bool | int | float | str) for part in parts):
        return type(value).__name__, *map(in_brief, parts)
    return "object", str(id(value))
