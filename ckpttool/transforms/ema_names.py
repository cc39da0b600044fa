"""Name the tensors of an average that was saved without its model's names.

Sources: `ExponentialMovingAverage.state_dict()` of torch_ema and `EMAModel.state_dict()` of diffusers keep
`shadow_params`, a list in the order of the parameters; LitEma of latent diffusion registers buffers under
the parameters' names without their dots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dotted_names import follow
from ..checkpoint.rebuilt_tensors import plain_tensor
from ..checkpoint.state import State, make_state
from ..checkpoint.states import path_of
from ..errors import CkptToolError, Mismatch
from ..inert_pickle.values import OrderedDict_
from ..tensors.ref import TensorRef


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model, in the order of `model.parameters()`.

    Attributes:
        shapes: shape by name.
        trainable: names of those with `requires_grad`; some averages list only these.
    """

    shapes: Mapping[str, tuple[int, ...]]
    trainable: tuple[str, ...]


class NamedAverage(NamedTuple):
    """An average under the names of a model's parameters."""

    checkpoint: Checkpoint
    left_out: tuple[str, ...]


def with_names(checkpoint: Checkpoint, where: str | None, parameters: Parameters) -> NamedAverage | None:
    """Return the average at a place under the names of a model's parameters."""
    path = path_of(checkpoint.tree, where) if where is not None else None
    listed = None if path is None else follow(checkpoint.tree, path)
    if isinstance(listed, list | tuple) and listed and where is not None and path is not None:
        tensors = [tensor for item in listed if (tensor := plain_tensor(item)) is not None]
        if len(tensors) < len(listed):
            return None
        named = _by_position(checkpoint, where, tensors, parameters)
        return _named(checkpoint, named, make_state(path, {}))
    try:
        state = checkpoint.state(where)
    except CkptToolError:
        return None  # whoever loads it says why
    without_dots = _without_dots(state.container, parameters)
    return None if without_dots is None else _named(checkpoint, without_dots, state)


def _named(checkpoint: Checkpoint, tensors: Mapping[str, object], state: State) -> NamedAverage:
    new = replace(checkpoint, tree=OrderedDict_(tensors), opened=(), full=False)
    return NamedAverage(new, checkpoint.outside(state))


def _by_position(
    checkpoint: Checkpoint, where: str, listed: Sequence[TensorRef], parameters: Parameters
) -> dict[str, TensorRef]:
    choices = ([*parameters.shapes], parameters.trainable)
    names = next((names for names in choices if len(names) == len(listed)), None)
    what = f"{checkpoint.path}: '{where}' lists {len(listed)} tensors by position, and"
    if names is None:
        counts = f"{len(parameters.shapes)} parameters, {len(parameters.trainable)} of them trainable"
        raise Mismatch(f"{what} the model has {counts}")
    named = dict(zip(names, listed, strict=True))
    shapes = ((name, tensor.shape, parameters.shapes[name]) for name, tensor in named.items())
    wrong = tuple((name, str([*theirs]), str([*mine])) for name, theirs, mine in shapes if theirs != mine)
    if wrong:
        name, theirs, mine = wrong[0]
        reason = f"the one at the place of '{name}' has shape {theirs}, not {mine}"
        raise Mismatch(f"{what} {reason}", mismatched=wrong)
    return named


def _without_dots(container: Mapping[object, object], parameters: Parameters) -> dict[str, object] | None:
    """Return a state under the parameters' names; None unless it has all trainable ones without dots."""
    names = {name.replace(".", ""): name for name in parameters.trainable}
    if len(names) < len(parameters.trainable) or not any("." in name for name in names.values()):
        return None
    first = next(iter(names), "")
    keys = [key for key in container if isinstance(key, str)]
    for outer in (key.removesuffix(first) for key in keys if first and key.endswith(first)):
        if all(outer + short in container for short in names):
            return {names.get(key.removeprefix(outer), key): container[key] for key in keys}
    return None
