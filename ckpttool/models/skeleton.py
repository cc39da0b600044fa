"""Models without memory for their parameters, to be filled from a file. Imports torch when it is called."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import UsageFault
from . import factory

if TYPE_CHECKING:
    import torch


@contextmanager
def skeletons() -> Iterator[None]:
    """While this lasts, modules keep their parameters on the meta device: shapes and types, no values.

    Buffers are real, as what a constructor computes (positions, masks) need not be in any file. A parameter
    takes memory for the moment between its making and its registration, and one that is registered twice
    stays one.
    """
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
    """The model that a SPEC names, without memory for its parameters where its constructor allows that.

    Raises:
        UsageFault: as `factory.build`, or the result is not a module.
    """
    import torch

    try:
        with skeletons():
            model = factory.build(spec)
    except UsageFault:
        model = None  # a constructor that reads values fails without them; any other fails again below
    if model is None or (isinstance(model, torch.nn.Module) and _lost_values(model)):
        model = factory.build(spec)
    if not isinstance(model, torch.nn.Module):
        raise UsageFault(f"{spec}: made a {type(model).__name__}, not a torch.nn.Module")
    return model


def _lost_values(model: torch.nn.Module) -> bool:
    """Whether a constructor kept, in a buffer or aside, what it had worked out from its parameters."""
    import torch

    aside = (value for module in model.modules() for value in vars(module).values())
    kept = (value for value in (*model.buffers(), *aside) if isinstance(value, torch.Tensor))
    return any(value.is_meta for value in kept)


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a live module without memory, for trying what a load would do."""
    import copy

    import torch

    without_memory = {
        id(tensor): torch.nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, without_memory)
