"""Models without memory for their parameters, to be filled or tried out. Imports torch when called."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..checkpoint.state import State
from ..errors import UsageFault
from ..lazy import needing_torch
from ..tensors.to_torch import live_tensors
from . import factory

if TYPE_CHECKING:
    import torch


@contextmanager
def skeletons() -> Iterator[None]:
    """Build modules on the meta device within this context: parameters get no values.

    `ckpttool.reload(path, model, assign=True)` then fills such a model from the file. Buffers are real: what
    a constructor computes (positions, masks) need not be in any file. A parameter takes memory for the moment
    between its creation and its registration; one that is registered twice stays one parameter.

    Yields:
        None. `torch.nn.Module.register_parameter` is replaced until the context ends, in all threads.

    Example:
        >>> import torch
        >>> with ckpttool.skeletons():
        ...     model = torch.nn.Linear(4, 8)
        >>> model.weight.device.type
        'meta'
    """
    with needing_torch("skeletons"):
        import torch

    register = torch.nn.Module.register_parameter
    made: dict[int, tuple[weakref.ref[torch.nn.Parameter], torch.nn.Parameter]] = {}

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta or torch.nn.parameter.is_lazy(param):
            return
        alive, meta = made.get(id(param), (None, None))
        if meta is None or alive is None or alive() is not param:
            meta = _on_meta(param)
            made[id(param)] = weakref.ref(param), meta
        self._parameters[name] = meta

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: torch.nn.Parameter) -> Any:
    kind = type(parameter)
    meta = kind(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    meta.__dict__.update(parameter.__dict__)  # marks that libraries put on their parameters
    return meta


def skeleton(spec: str) -> torch.nn.Module:
    """Build the model that a SPEC names, without memory for its parameters where possible."""
    try:
        with skeletons():
            model = with_values(spec)
    except UsageFault:  # a constructor that reads values fails without them; any other error comes again
        return with_values(spec)
    return with_values(spec) if _lost_values(model) else model


def with_values(spec: str) -> torch.nn.Module:
    """Build the model that a SPEC names, with the values that its constructor gives it."""
    import torch

    model = factory.build(spec)
    if not isinstance(model, torch.nn.Module):
        raise _no_module(spec, model)
    return model


def _no_module(spec: str, made: object) -> UsageFault:
    """Return the error for a factory that returns something else than a model, with what it should return."""
    import torch

    what, hint = f"an object of type {type(made).__name__}", None
    if made is None:
        what, hint = "None", "end the factory with `return model`"
    elif isinstance(made, type):
        what = f"the class {made.__name__}"
        hint = f"call it: return {made.__name__}()" if issubclass(made, torch.nn.Module) else None
    elif isinstance(made, tuple | list) and any(isinstance(item, torch.nn.Module) for item in made):
        hint = "name a factory that returns the model alone"
    elif isinstance(made, dict) and any(isinstance(item, torch.Tensor) for item in made.values()):
        hint = "return the model, not its state"
    elif inspect.iscoroutine(made):
        made.close()  # else Python warns that nobody awaited it
    return UsageFault(f"{spec}: returned {what}, not a torch.nn.Module", hint=hint)


def _lost_values(model: torch.nn.Module) -> bool:
    """Return whether a constructor kept something computed from its parameters, which had no values."""
    import torch

    attributes = (value for module in model.modules() for value in vars(module).values())
    tensors = (value for value in (*model.buffers(), *attributes) if isinstance(value, torch.Tensor))
    return any(tensor.is_meta for tensor in tensors)


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a live module without memory, on which a load can be tried."""
    import copy

    import torch

    without_memory = {
        id(tensor): _on_meta(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, without_memory)


def accepts(model: torch.nn.Module, state: State) -> bool:
    """Return whether modules with loading rules of their own take a state whose names differ from theirs."""
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

    known = torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict
    return type(module)._load_from_state_dict not in known or bool(module._load_state_dict_pre_hooks)


def with_versions(state: State, values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the `_metadata` by which modules recognise states of older versions."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if state.versions is not None:
        versions = {path: dict(entry) for path, entry in state.versions.items() if isinstance(entry, dict)}
        loaded._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return loaded
