"""Which parameter each place of an optimizer belongs to, by a file's names and states or a live model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.states import BUFFERS
from ...inert_pickle.values import PARAMETER, Record, tensor_of
from .assignment import by_shapes, in_order
from .slots import BadOptimizer, Shape, Slot, without_prefix

FLOATING = ("float", "bfloat", "complex")
"""How the names of element types begin that parameters may have."""


Order = Literal["state", "model"]
"""Whose order an optimizer lists its parameters in: that of the file's state, or of the live model."""


class ParameterSource:
    """A file, or a live model, as the source of parameters' names.

    Args:
        checkpoint: the file with the optimizer.
        live: name -> shape of a live model's parameters; None without one.
        state: dotted path of the model's state to ask; every state is asked when None.
        order: the user's word that an optimizer without names lists its parameters in this order. When None,
            a live model is that word, unless the file's state has them in another order that fits as well.

    Raises:
        NoState: there is no state at `state`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        live: Mapping[str, Shape] | None,
        state: str | None,
        order: Order | None = None,
    ) -> None:
        where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
        self.live = live
        self.order = order
        self.states = [_parameters(checkpoint, path, live) for path in where]

    def named(self, groups: list[list[Slot]], *, needed: bool) -> tuple[list[list[Slot]], bool]:
        """Return the same slots with the names of their parameters, and whether an order was taken for them.

        Args:
            groups: the slots of each group.
            needed: look for names that the optimizer itself lacks; else its slots are returned as they are.

        Raises:
            BadOptimizer: the names are not certain, or the momentum does not have the shape of the named
                tensor.
        """
        if all(slot.name is not None for group in groups for slot in group):
            self._check(groups)
            return groups, False
        if not needed:
            return groups, False
        shapes = [[slot.shape for slot in group] for group in groups]
        found, ordered = self._by_shapes(shapes), False
        if len(found) > 1 and (self.order or self.live):
            found, ordered = self._in_order(shapes), True
        if len(found) != 1:
            raise self._unnamed(several=bool(found), ordered=ordered)
        names = iter(found[0])
        return [[slot._replace(name=next(names)) for slot in group] for group in groups], ordered

    def _by_shapes(self, groups: list[list[Shape | None]]) -> list[tuple[str, ...]]:
        flat = [shape for group in groups for shape in group]
        lists = self.states or ([list(self.live.items())] if self.live else [])
        return [*dict.fromkeys(way for candidates in lists for way in by_shapes(flat, candidates))]

    def _in_order(self, groups: list[list[Shape | None]]) -> list[tuple[str, ...]]:
        """Return the ways that fit the order that was asked for, under the names that the file has."""
        live = [list(self.live.items())] if self.live else []
        lists = {"state": self.states, "model": live, None: [*self.states, *live]}[self.order]
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for way in (way for candidates in lists for way in in_order(groups, candidates)):
            found.setdefault(tuple(without_prefix(way, self.live or {})), way)
        return [*found.values()]

    def _unnamed(self, *, several: bool, ordered: bool) -> BadOptimizer:
        what, hint = "names no parameters, and", None
        if not self.states and not self.live:
            return BadOptimizer(f"{what} the file has no model's state that would", hint=MODEL)
        if ordered and several and self.order is None and self.states:
            why = "the file's state and the model list them in orders that both fit, or in no single one"
            return BadOptimizer(f"{what} {why}", hint=ORDER)
        if ordered:
            which = "more than one assignment" if several else "no assignment"
            return BadOptimizer(f"{what} {which} in that order fits the shapes of the momentum")
        hint = f"{MODEL}; {ORDER}" if several else "--state WHERE says which state is meant"
        which = "more than one assignment" if several else "no assignment"
        return BadOptimizer(f"{what} {which} of the state's tensors fits", hint=hint)

    def _check(self, groups: list[list[Slot]]) -> None:
        """Refuse names whose momentum has another shape than the tensor of that name in the same file."""
        for shapes in map(dict, self.states):
            listed = [slot for group in groups for slot in group]
            if all(slot.name in shapes for slot in listed):
                for slot in listed:
                    check_shape(slot, shapes[str(slot.name)], "the file")
                return


MODEL = "--model SPEC takes them in the order of that model's parameters"
ORDER = "--order state takes them in the order of the file's state, --order model in that of --model"


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
