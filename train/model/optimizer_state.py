"""An optimizer's state as a checkpoint holds it: collected from the ranks, and put back. Imports torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ckpttool.distributed import nested
from ckpttool.distributed.divided import holds_parts, part_like
from ckpttool.errors import UsageFault


def consolidated(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's whole state, to be saved. A collective if it is divided among ranks.

    Its tensors are the optimizer's own, or copies on the CPU if it is divided; all ranks but 0 then have the
    settings of its groups alone.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=0)
    # Of the others, torch's own class would ask for the whole.
    whole = optimizer.state_dict() if optimizer.rank == 0 else Optimizer.state_dict(optimizer)
    # Or rank 0 would keep all of it until the next time.
    optimizer._all_state_dicts.clear()  # type: ignore[attr-defined]
    return whole


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore a whole state that `consolidated` returned, given on every rank; it is left unchanged."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        parts = {index: _part(entry, parameters.get(index)) for index, entry in state["state"].items()}
        optimizer.load_state_dict({**state, "state": parts})
        for index, entry in parts.items():
            if own := optimizer.state.get(parameters[index]):
                own.update(_as_saved(own, entry, parameters[index]))
        return
    # It puts None in place of what other ranks hold, and keeps a second copy in the outer optimizer.
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    optimizer.load_state_dict({**state, "state": copy.deepcopy(entries)})
    optimizer.state.clear()


def require_of_parameters(optimizer: Optimizer, who: str) -> None:
    """Raise UsageFault for divided tensors in a group: no resume would know how to divide them again."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and holds_parts(value):
                hint = "keep what is of a parameter in state[p][name]"
                raise UsageFault(f"{who} keeps '{name}', in parts of the ranks", hint=hint)


def _part(entry: Any, parameter: torch.nn.Parameter | None) -> Any:
    """Return this rank's part of a parameter's state, as with `--shard`."""
    return entry if parameter is None else nested.mapped(entry, lambda tensor: part_like(tensor, parameter))


def _as_saved(own: Any, saved: Any, parameter: torch.nn.Parameter) -> Any:
    """Return what was loaded, with dtypes and texts as saved: torch gives tensors the parameter's dtype, and
    makes of a text that of a generator."""
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        is_cast = own.dtype == parameter.dtype != saved.dtype
        return saved.to(own.device, copy=True) if is_cast else own
    if isinstance(own, dict) and isinstance(saved, dict):
        return {name: _as_saved(value, saved.get(name), parameter) for name, value in own.items()}
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple) and len(own) == len(saved):
        return type(own)(_as_saved(*pair, parameter) for pair in zip(own, saved, strict=True))
    return saved if isinstance(saved, str | bytes) and isinstance(own, str | bytes) else own
