"""One view of an optimizer's state, nested or flat: the parameters of each group.

A flat state is one dict, as torchtitan saves it: `state.NAME.exp_avg`, `param_groups.NAME.lr`. torch
writes it for `StateDictOptions(flatten_optimizer_state_dict=True)` (`_flatten_optim_state_dict` in
torch/distributed/checkpoint/state_dict.py). It does not keep which parameters were in one group: parameters
with the same settings form one group here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from ..inert_pickle.values import Record, in_brief, remade, tensor_of
from .special_tensors import Shape, SpecialTensor, plain_tensor, special_tensor

STATE, FLAT_GROUPS = "state.", "param_groups."
LEVELS = 8  # of dicts that an optimizer keeps of a parameter, as Shampoo does
BY_NAMES = "--to names keeps it"
SMALL = 64  # bytes of a setting that is a tensor, such as a learning rate on the device


def is_flat(value: object) -> bool:
    """Return whether a value is an optimizer's state in one flat dict."""
    if not isinstance(value, dict) or not value:
        return False
    # Asked of every dict of a file: the first key alone rules out nearly all of them.
    if not all(isinstance(key, str) and key.startswith((STATE, FLAT_GROUPS)) for key in value):
        return False
    return any(key.startswith(FLAT_GROUPS) and key.count(".") > 1 for key in value)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state as torch nests it; parameters stay in the order in which the groups have them."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(FLAT_GROUPS):
            name, _, setting = key.removeprefix(FLAT_GROUPS).rpartition(".")
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
        _require_flattenable(f"{FLAT_GROUPS}{number}", group, may_be_empty=True)
        for name in group["params"]:
            flat |= {f"{FLAT_GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"}
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
    return (key.removeprefix(FLAT_GROUPS).rpartition(".")[0] for key in flat if key.startswith(FLAT_GROUPS))


def renamed(flat: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a flat state under other names of parameters; those that are not in `names` stay."""
    known = dict.fromkeys(parameters(flat))

    def new(key: str) -> str:
        begin = STATE if key.startswith(STATE) else FLAT_GROUPS
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


# ---- The view.
#
# torch numbers the parameters through all groups and keys the state by these numbers; loading goes by
# index. An optimizer built from `named_parameters()` (torch 2.6) also keeps `param_names` in each group,
# which loading ignores: they are the only record of which index is which. By name, `state` has parameter
# names for keys and each group lists names as its `params`; DCP has numbers as text.


GROUPS = "param_groups"
KEYS, NAMES = "params", "param_names"
LISTS = (KEYS, NAMES)  # the entries of a group that name its parameters; the others are settings

# Entries in the shape of the parameter: those of torch's optimizers, and others' under the same names.
MOMENTA = (
    *("exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax", "exp_avg_diff", "exp_avg_slow", "hessian"),
)


def is_optimizer(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is an optimizer's state dict, nested or flat."""
    return is_nested_optimizer(value) or is_flat(value)


def is_nested_optimizer(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is an optimizer's state dict as torch nests it."""
    return isinstance(value, dict) and GROUPS in value and "state" in value


def is_numbered(value: object) -> bool:
    """Return whether a value is an optimizer's state dict that knows its parameters by numbers alone."""
    return is_optimizer(value) and any(isinstance(key, int) for key in chain(*OptimizerView(value).keys))


class OptimizerParameter(NamedTuple):
    """A parameter in an optimizer's group."""

    key: int | str
    name: str | None  # if the file has it
    entry: Any  # what the optimizer keeps of it; None for nothing

    @property
    def shape(self) -> Shape | None:
        """The shape of its momentum; None without one (plain SGD, or never stepped)."""
        for value in map(self.entry.get, MOMENTA) if isinstance(self.entry, dict) else ():
            tensor = plain_tensor(value) or special_tensor(value) or value
            is_tensor = isinstance(tensor, SpecialTensor) or not isinstance(tensor, Record)
            if is_tensor and (shape := getattr(tensor, "shape", None)) is not None:
                return tuple(shape)
        return None


OptimizerGroups = list[list[OptimizerParameter]]


class OptimizerView:
    """An optimizer's state dict as groups of parameters. Nothing of it is changed.

    Only `parameters` and `written` require the usual form; elsewhere what has another form is left out.

    Attributes:
        value: the state dict as the file has it, nested or flat, under any kind of keys.
        is_flat: whether it is one flat dict.
        nested: the state dict as torch nests it; by names if it was flat.
        state: what is kept of each parameter, by its key.
        all_groups: the groups, among them those that are no dicts.
        groups: those that are dicts, of settings and lists of parameters.
        keys: the keys of parameters that each of them lists.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.is_flat = value, is_flat(value)
        whole = value if isinstance(value, dict) else {}
        self.nested: dict[Any, Any] = nested(whole) if self.is_flat else whole
        state = self.nested.get("state")
        self.state: dict[Any, Any] = state if isinstance(state, dict) else {}
        self.all_groups = _listed(self.nested.get(GROUPS))
        self.groups = [group for group in self.all_groups if isinstance(group, dict)]
        self.keys = [_listed(group.get(KEYS)) for group in self.groups]

    @property
    def entries(self) -> Iterator[dict[Any, Any]]:
        """What is kept of each parameter, in the state's order."""
        return (entry for entry in self.state.values() if isinstance(entry, dict))

    def keeps_numbers(self, kind: type) -> bool:
        """Return whether the state has keys of this type for parameters that the groups list as numbers."""
        numbers = {str(key) for key in chain(*self.keys) if type(key) is int}
        return any(type(key) is kind and str(key) in numbers for key in self.state)

    @property
    def names(self) -> dict[str, str]:
        """The names of parameters by their keys, both as text."""
        names: dict[str, str] = {}
        for group, keys in zip(self.groups, self.keys, strict=True):
            told = keys if group.get(NAMES) is None else _listed(group[NAMES])
            if len(told) == len(keys):
                names |= zip(map(str, keys), map(str, told), strict=True)
        return names

    @property
    def mentioned(self) -> Iterator[str]:
        """The names of parameters wherever they stand, some of them again and again."""
        if self.is_flat:
            return parameters(self.value)
        lists = (_listed(group.get(name)) for group in self.groups for name in LISTS)
        return (name for name in chain(self.state, *lists) if isinstance(name, str))

    def parameters(self) -> OptimizerGroups:
        """Return the parameters of each group, in their order.

        Raises:
            BadOptimizer: the state does not have the usual form, or contradicts itself.
        """
        groups = self.nested.get(GROUPS)
        if not isinstance(self.nested.get("state"), dict) or not isinstance(groups, list):
            raise BadOptimizer(f"has no `state` and `{GROUPS}` of the usual form")
        listed = [self._in_group(group) for group in groups]
        keys = [parameter.key for parameter in chain(*listed)]
        known = {*map(str, keys)}
        if len(known) != len(keys):
            raise BadOptimizer("lists a parameter twice")
        if twice := [key for key in self.state if type(key) is int and str(key) in self.state]:
            what = f"keeps two states of parameter {twice[0]}: under the number and under its text"
            raise BadOptimizer(what)
        for key in self.state:
            if str(key) not in known:
                raise BadOptimizer(f"keeps state of '{str(key)[:80]}', which is in no group")
        return listed

    def _in_group(self, group: Any) -> list[OptimizerParameter]:
        keys = group.get(KEYS) if isinstance(group, dict) else None
        if not isinstance(keys, list) or not all(type(key) in (int, str) for key in keys):
            raise BadOptimizer("has a group without a list of `params`")
        names = group.get(NAMES)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            # torch's converter to DCP turns numbers into text.
            is_by_name = any(isinstance(key, str) and not key.isdecimal() for key in keys)
            names = keys if is_by_name else [None] * len(keys)
        if len(names) != len(keys):
            raise BadOptimizer(f"has {len(keys)} parameters and {len(names)} names in one group")
        entries = (self.state[key] if key in self.state else self.state.get(str(key)) for key in keys)
        return [*map(OptimizerParameter, keys, names, entries)]

    def written(
        self, groups: OptimizerGroups, state: Iterable[tuple[Any, Any]], *, flat: bool | None = None
    ) -> dict[Any, Any]:
        """Return the state dict with other parameters in its groups.

        Args:
            groups: the parameters of each group, by their new keys.
            state: what is kept of them, by their new keys.
            flat: whether to return one flat dict; None keeps the form of the file.

        Raises:
            BadOptimizer: a flat dict can't hold it.
        """
        new = remade(self.nested, self.nested.items())
        new["state"] = remade(self.state, state)
        new[GROUPS] = [remade(group, group.items()) for group in self.groups]
        for group, listed in zip(new[GROUPS], groups, strict=True):
            group[KEYS] = [parameter.key for parameter in listed]
            if NAMES in group:
                group[NAMES] = [parameter.name for parameter in listed]
        return flattened(new) if (self.is_flat if flat is None else flat) else new

    def renamed(self, names: Mapping[str, str]) -> dict[Any, Any]:
        """Return the state dict in its own form under other names; parameters not in `names` keep theirs."""
        if self.is_flat:
            return renamed(self.value, names)

        def new_name(name: Any) -> Any:
            return names.get(name, name) if isinstance(name, str) else name

        def in_group(group: Any) -> Any:
            lists = {key: group[key] for key in LISTS if isinstance(group, dict) and _listed(group.get(key))}
            new = {key: type(old)(map(new_name, old)) for key, old in lists.items()}
            return remade(group, (group | new).items()) if new else group

        new = remade(self.nested, self.nested.items())
        if self.state:
            new["state"] = remade(self.state, ((new_name(key), entry) for key, entry in self.state.items()))
        if self.groups:
            new[GROUPS] = type(self.all_groups)(map(in_group, self.all_groups))
        return new


def of_names(state: dict[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the nested state dict of what is kept by names, and of groups that list these names."""
    return {"state": state, GROUPS: [*groups]}


def _listed(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()
