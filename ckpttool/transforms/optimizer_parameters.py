"""Which parameter each place of an optimizer belongs to, by a file's names and states or a live model."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dotted_names import dotted
from ..checkpoint.states import BUFFERS
from ..inert_pickle.values import PARAMETER, Record, tensor_of
from .optimizer_assignment import assignments
from .optimizer_slots import BadOptimizer, Shape, Slot, without_prefix

FLOATING = ("float", "bfloat", "complex")
"""How the names of element types begin that parameters may have."""


class ParameterSource:
    """A file, or a live model, as the source of parameters' names.

    Args:
        checkpoint: the file with the optimizer.
        live: name -> shape of a live model's parameters; None without one.
        state: dotted path of the model's state to ask; every state is asked when None.

    Raises:
        NoState: there is no state at `state`.
    """

    def __init__(self, checkpoint: Checkpoint, live: Mapping[str, Shape] | None, state: str | None) -> None:
        where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
        self.live = live
        self.states = [_parameters(checkpoint, path, live) for path in where]

    def named(self, groups: list[list[Slot]], *, needed: bool) -> list[list[Slot]]:
        """Return the same slots with the names of their parameters.

        Args:
            groups: the slots of each group.
            needed: look for names that the optimizer itself lacks; else its slots are returned as they are.

        Raises:
            BadOptimizer: the names are not certain, or the momentum does not have the shape of the named
                tensor.
        """
        if all(slot.name is not None for group in groups for slot in group):
            self._check(groups)
            return groups
        if not needed:
            return groups
        found: dict[tuple[str, ...], None] = {}
        for candidates in self.states or ([list(self.live.items())] if self.live else []):
            ways = assignments([[slot.shape for slot in group] for group in groups], candidates)
            found.update(dict.fromkeys(ways))
        if len(found) != 1:
            raise BadOptimizer(_unnamed(bool(found), bool(self.states or self.live)), hint=HINT)
        names = iter(next(iter(found)))
        return [[slot._replace(name=next(names)) for slot in group] for group in groups]

    def _check(self, groups: list[list[Slot]]) -> None:
        """Refuse names whose momentum has another shape than the tensor of that name in the same file."""
        for shapes in map(dict, self.states):
            listed = [slot for group in groups for slot in group]
            if all(slot.name in shapes for slot in listed):
                for slot in listed:
                    check_shape(slot, shapes[str(slot.name)], "the file")
                return


HINT = "--model SPEC gives the parameters if the file does not; --state WHERE says which state is meant"


def _unnamed(several: bool, asked: bool) -> str:
    if not asked:
        return "names no parameters, and the file has no model's state that would"
    if several:
        return "names no parameters, and more than one assignment of the state's tensors fits"
    return "names no parameters, and no assignment of the state's tensors fits"


def _parameters(
    checkpoint: Checkpoint, where: str, live: Mapping[str, Shape] | None
) -> list[tuple[str, Shape]]:
    """Return the tensors of a state that may be parameters, ties once, in the file's order."""
    found = checkpoint.state(where)
    known = {str(name) for name, value in found.container.items() if _is_parameter(value)}
    bare = dict(zip(found.tensors, without_prefix(found.tensors, live or {}), strict=True))
    seen: set[tuple[object, ...]] = set()
    listed = []
    for name, tensor in found.tensors.items():
        if known:
            fits = name in known
        elif live:
            fits = bare[name] in live
        else:
            fits = tensor.dtype.name.startswith(FLOATING) and not name.endswith(BUFFERS)
        if fits and tensor.view not in seen:
            seen.add(tensor.view)
            listed.append((name, tensor.shape))
    return listed


def _is_parameter(value: object) -> bool:
    """Return whether a value was saved as an `nn.Parameter`, as in a pickled model."""
    return isinstance(value, Record) and tensor_of(value) is not None and value.callable in PARAMETER


def check_shape(slot: Slot, shape: Shape, where: str) -> None:
    """Compare the shape of a slot's momentum with that of its parameter.

    Args:
        slot: the slot; one without momentum fits any shape.
        shape: the parameter's shape.
        where: the parameter's origin, for the message.

    Raises:
        BadOptimizer: the shapes differ.
    """
    if slot.shape not in (None, shape):
        raise BadOptimizer(
            f"keeps momentum of shape {list(slot.shape or ())} for '{slot.name}', "
            f"whose shape in {where} is {list(shape)}"
        )
