"""Numbers packed in few bits with scales, as far as every transform has to know of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...rooms import find
from ..words import counted
from .checkpoint import Checkpoint
from .state import State


def require_unpacked(
    checkpoint: Checkpoint,
    state: State,
    why: str = "its codes can't be laid out without their scales",
    dtype: str = "bfloat16",
    names: Collection[str] | None = None,
) -> None:
    """Raise Refused where a tensor of a state is packed: its codes and scales are numbers only together.

    Args:
        names: those that are asked about, codes or scales; None for all of the state.
    """
    if numbers := find("numbers.recognise"):  # many modules, which are imported only where it is asked
        numbers.require_unpacked(checkpoint, state, why, dtype, names)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way in which tensors are packed, in words, and how many tensors and layers are packed so."""

    scheme: str
    tensors: int
    layers: int  # numbered modules; 0 where none is

    def __str__(self) -> str:
        layers = f", {counted(self.layers, 'layer')}" if self.layers else ""
        return f"{self.scheme}{layers} ({counted(self.tensors, 'tensor')})"
