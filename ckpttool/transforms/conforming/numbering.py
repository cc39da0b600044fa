"""Whether an optimizer that numbers parameters counts them as the reference does.

A number means the same parameter on both sides where the parameters of each group stand in one order. Buffers
have no numbers, so they may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.optimizer_view import OptimizerView, is_numbered
from ...errors import Refused
from ...inert_pickle.values import walk
from ..optimizer.parameters import Names, Parameters, in_order, parameters_of
from .modules import Places
from .search import BUFFERS


def require_order(checkpoint: Checkpoint, state: str | None, theirs: Places) -> None:
    """Raise Refused where an optimizer numbers parameters in another order than the reference has them."""
    optimizers = [value for value in walk(checkpoint.tree) if is_numbered(value)]
    if not optimizers:
        return
    floats = [(name, shape) for name, shape in parameters_of(checkpoint, state) if name in theirs]
    number = {name: i for i, name in enumerate(theirs)}
    place = {name: number.get(theirs[name].first, number[name]) for name, _ in floats}  # a tie's is its first
    if _is_rising(place.values()):
        return
    for optimizer in optimizers:
        groups = _named(optimizer, floats)
        if not groups or not all(_is_rising(place[name] for name in group) for group in groups):
            raise _refused(checkpoint.path, len(floats), is_known=bool(groups))


def _named(optimizer: Any, floats: Parameters) -> list[Names]:
    """Return the names of each group's parameters; [] where the shapes of momentum allow several."""
    try:
        shapes = [[kept.shape for kept in group] for group in OptimizerView(optimizer).parameters()]
    except BadOptimizer:
        return []
    for tensors in (floats, [(name, shape) for name, shape in floats if not BUFFERS.search(name)]):
        ways = in_order(shapes, tensors)
        if len(ways) == 1:
            names = iter(ways[0])
            return [tuple(next(names) for _ in group) for group in shapes]
    return []


def _is_rising(numbers: Iterable[int]) -> bool:
    listed = [*numbers]
    return listed == sorted(listed)


def _refused(path: str, floats: int, *, is_known: bool) -> Refused:
    what = "its optimizer numbers the parameters in another order than the reference has them"
    if not is_known:
        what += f", or only buffers stand in another: nothing says which of {floats} tensors are some"
    hint = "key it by names first: ckpttool optimizer IN NAMED --to names; or write the state alone: slim"
    return Refused(path, what, hint=hint)
