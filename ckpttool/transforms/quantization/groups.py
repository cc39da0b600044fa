"""A group of tensors that are one packed one: how schemes look for its parts, and what they make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import Refused
from ...tensors.cast import Caster
from ...tensors.dtypes import DType
from ...tensors.ref import TensorRef
from .fields import Sizes
from .formula import Formula
from .lookup import rounded
from .settings import QuantizationSettings
from .strips import Strips


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are one packed one together.

    Attributes:
        name: of the plain tensor.
        scheme: how it is packed, in words: `fp8, blocks of 128 × 128`.
        dtype: the type that the scheme's library returns.
        shape: of the plain tensor.
        formula: what its numbers are made of.
        parts: the names of the tensors, first the one in whose place the plain tensor goes.
    """

    name: str
    scheme: str
    dtype: DType
    shape: Sizes
    formula: Formula
    parts: tuple[str, ...]

    def tensor(self, caster: Caster) -> TensorRef:
        """Return the plain tensor in the caster's type, whose values are computed when they are read."""
        return rounded(self.formula, caster, self.shape)


@dataclass(slots=True)
class PackedParts:
    """The tensors around a packed one, and which of them a scheme used."""

    path: str
    tensors: Mapping[str, TensorRef]
    lead: str  # the name of the packed one
    settings: QuantizationSettings
    strips: Strips = field(default_factory=Strips)
    used: dict[str, None] = field(default_factory=dict)

    def find(self, name: str) -> TensorRef | None:
        """Return a tensor, which counts as used; None where there is none."""
        tensor = self.tensors.get(name)
        if tensor is not None:
            self.used[name] = None
        return tensor

    def need(self, name: str) -> TensorRef:
        """Return a tensor, which counts as used. Raises Refused where it is missing."""
        tensor = self.find(name)
        if tensor is None:
            raise self.refused(f"there is no '{name[:200]}'")
        return tensor

    def of(self, name: str, kinds: str, shape: Sizes | None = None) -> TensorRef:
        """Return a tensor of a type whose name begins so, and of a shape. Raises Refused where it isn't."""
        tensor = self.need(name)
        self.require(tensor.dtype.name.startswith(tuple(kinds.split())), name, f"is of {tensor.dtype.name}")
        if shape is not None and tensor.shape != shape:
            raise self.refused(f"'{name[:200]}' is of shape {list(tensor.shape)}, and {list(shape)} fits it")
        return tensor

    def require(self, holds: bool, name: str, what: str) -> None:
        """Raise Refused with what is wrong with a tensor unless something holds."""
        if not holds:
            raise self.refused(f"'{name[:200]}' {what}")

    def refused(self, why: str) -> Refused:
        """Return the error for this group."""
        return Refused(self.path, f"'{self.lead[:200]}' can't be dequantised: {why}")

    def group(self, name: str, scheme: str, dtype: DType, shape: Sizes, formula: Formula) -> Group:
        """Return the group of the tensors used so far."""
        names = dict.fromkeys((self.lead, *self.used))
        return Group(name, scheme, dtype, shape, formula, tuple(names))
