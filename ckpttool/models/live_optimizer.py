"""The user's optimizer: built, described without values, and asked whether it takes a state. Imports torch.

Everything is tried on a twin: an object of the same class, with the same settings, whose parameters are on
the meta device. It takes no memory, whatever the model's size, and the user's own optimizer does not change.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..core.checkpoint.optimizer_view import KEYS, LISTS, OptimizerView
from ..core.checkpoint.special_tensors import plain_tensor, special_tensor
from ..core.inert_pickle.values import Record
from ..core.tensors.ref import DTYPES, Computed, TensorRef
from ..errors import UsageFault
from . import factory
from .optimizer_layout import Entry, LiveOptimizer, Needs, require_names
from .optimizer_refit import IMPLEMENTATION

if TYPE_CHECKING:
    import torch

MARK = "ckpttool's number of a parameter"  # a key of what is kept of each, to find it again


def built(model_spec: str, spec: str) -> tuple[torch.nn.Module, list[torch.optim.Optimizer | None]]:
    """Build a model and the optimizers that a SPEC makes of it, without memory for parameters if possible.

    A factory gets what it names of `model` and `params`, all of the model's parameters; it may return several
    optimizers, and None for one that is not asked about.
    """
    model = factory.skeleton(model_spec)
    try:
        made = _made(spec, model)
    except UsageFault:  # fused steps refuse the meta device; any other error comes again
        made = None
    if made is None or any(_has_meta(each) for each in made if each is not None):
        model = factory.with_values(model_spec)
        made = _made(spec, model)
    return model, made


def _made(spec: str, model: torch.nn.Module) -> list[torch.optim.Optimizer | None]:
    import torch

    names = inspect.signature(factory.function(spec)).parameters
    given = {"params": [*model.parameters()], "model": model}
    if not given.keys() & names:
        what = f"{spec}: takes neither params nor model, so it can't be the model's optimizer"
        raise UsageFault(what, hint="def factory(params, lr=0.1): return torch.optim.SGD(params, lr)")
    made = factory.build(spec, **{name: value for name, value in given.items() if name in names})
    several = [*made.values()] if isinstance(made, dict) else made
    found = [*several] if isinstance(several, list | tuple) else [made]
    for each in found:
        if not (each is None or isinstance(each, torch.optim.Optimizer)):
            raise UsageFault(f"{spec}: returned a {type(each).__name__}, not a torch.optim.Optimizer")
    return found


def _has_meta(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something is kept already, as Adagrad's sums, that has no values."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return any(getattr(value, "is_meta", False) for value in values)


def described(model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: str) -> LiveOptimizer:
    """Return a live optimizer as descriptions. Raises UsageFault where it has others' parameters."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    held = [group["params"] for group in optimizer.param_groups]
    groups = [[first.get(id(parameter)) for parameter in group] for group in held]
    require_names(groups, spec)
    named = [tuple(map(str, group)) for group in groups]
    fresh = {
        first[id(parameter)]: {key: _inert(value) for key, value in optimizer.state[parameter].items()}
        for group in held
        for parameter in group
        if optimizer.state.get(parameter)
    }
    return LiveOptimizer(
        kind=type(optimizer).__name__,
        groups=named,
        settings=[
            {key: _inert(value) for key, value in group.items() if key not in LISTS}
            for group in optimizer.param_groups
        ],
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        dtypes={name: str(parameter.dtype).split(".")[1] for name, parameter in model.named_parameters()},
        trainable=frozenset(name for name, each in model.named_parameters() if each.requires_grad),
        buffers=frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)),
        ties={name: first[id(each)] for name, each in every if first[id(each)] != name},
        fresh=fresh,
        needs=partial(_needs, optimizer, [*chain(*named)]),
    )


def _inert(value: Any) -> Any:
    """Return a live value as a file holds it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value
    name = str(value.dtype).split(".")[1]
    if value.is_meta:
        return _like(value)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return TensorRef.of_bytes(Computed.in_memory("", raw), DTYPES[name], tuple(value.shape))


def _like(value: Any) -> TensorRef | None:
    """Return the type and the shape of a live tensor; None for anything else."""
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if name not in DTYPES:
        return None
    return TensorRef.of_bytes(Computed.in_memory("", b""), DTYPES[name], tuple(value.shape))


def _needs(optimizer: torch.optim.Optimizer, names: Sequence[str], settings: Sequence[Entry]) -> Needs:
    """Return what a fresh optimizer keeps after a step with some settings, tried on a twin."""
    import torch

    twin = _twin(optimizer)
    first: dict[object, Any] = {}
    for number, (group, given) in enumerate(zip(twin.param_groups, settings, strict=True)):
        plain = {key: value for key, value in given.items() if not isinstance(value, TensorRef | Record)}
        group |= plain | {key: False for key in IMPLEMENTATION if key in group}
        for each in group[KEYS]:  # those of one form are treated alike, and a step on meta tensors is slow
            first[id(each)] = first.setdefault((number, each.shape, each.dtype), each)
            first[id(each)].grad = torch.empty_like(each)
    closure = inspect.signature(twin.step).parameters.get("closure")
    try:
        twin.step(*([lambda: 0.0] if closure is not None and closure.default is closure.empty else []))
    except Exception:  # of the class; what it keeps it has prepared by then, if it reads values at all
        if not any(twin.state.values()):
            return {}
    kept = (twin.state.get(first[id(each)], {}) for each in _parameters(twin))
    entries = zip(names, kept, strict=True)
    return {name: {key: _like(value) for key, value in entry.items()} for name, entry in entries}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group[KEYS])


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings, with its parameters on the meta device."""
    import torch

    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    for each in _parameters(optimizer):
        memo[id(each)] = torch.nn.Parameter(each.detach().to("meta"), each.requires_grad)
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a schedule's wrapper
    try:
        twin.__dict__.update(copy.deepcopy(own, memo))
    except Exception as error:
        what = f"the optimizer, {type(optimizer).__name__}, can't be copied: {factory.described(error)}"
        raise UsageFault(what, hint="a state is tried on a copy of it before it is advised") from error
    return twin


def tried(
    optimizer: torch.optim.Optimizer, live: LiveOptimizer, state: dict[Any, Any]
) -> tuple[dict[str, int], str]:
    """Load a state into a twin.

    Returns:
        Which of the file's parameters, counted through its groups, each of the optimizer's gets the state of;
        and the error that loading ends in, "" if there is none.
    """
    view = OptimizerView(state)
    number = {str(key): place for place, key in enumerate(key for keys in view.keys for key in keys)}
    marked = {**state}
    if not view.is_flat:
        entries = view.state.items()
        marked["state"] = {
            key: {**entry, MARK: number.get(str(key), -1)} if isinstance(entry, dict) else entry
            for key, entry in entries
        }
    twin = _twin(optimizer)
    try:
        twin.load_state_dict(_on_meta(marked))
    except Exception as error:
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    kept = (twin.state.get(each) for each in _parameters(twin))
    places = zip(live.names, kept, strict=True)
    return {name: entry[MARK] for name, entry in places if isinstance(entry, dict) and MARK in entry}, ""


def _on_meta(value: Any) -> Any:
    """Return an inert value as a live one whose tensors have no values; objects are None."""
    import torch

    tensor = plain_tensor(value) or special_tensor(value)
    if tensor is not None and tensor.shape is not None and tensor.dtype is not None:
        dtype = getattr(torch, tensor.dtype.name, torch.uint8)
        return torch.zeros(tensor.shape, dtype=dtype, device="meta" if tensor.shape else "cpu")
    if isinstance(value, dict):
        return {key: _on_meta(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_meta, value))
    return None if isinstance(value, Record) or tensor is not None else value
