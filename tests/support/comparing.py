"""Two trees that torch loads are the same: values, types, order, shared memory; or what `diff` finds."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.comparison import Comparison


def compared(folder: Path, a: Any, b: Any, **given: Any) -> Comparison:
    """Save both trees in a folder and return what `diff` finds; `given` are its keyword arguments."""
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    with ckpttool.open(folder / "a.pt") as mine, ckpttool.open(folder / "b.pt") as theirs:
        return diff(mine, theirs, **given)


def values(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values in row-major order, conjugation and negation applied."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.dtype == torch.bool:  # a copy would make any byte but 0 a 1
        flat = flat.view(torch.uint8)
    return torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat).view(torch.uint8).numpy().tobytes()


def assert_same(a: Any, b: Any) -> None:
    """Raise AssertionError, naming the place, unless two trees are the same."""
    _Pair().compare(a, b, "")


class _Pair:
    """Two trees side by side, in which the same places must share objects and storages."""

    def __init__(self) -> None:
        self.partners: dict[tuple[str, int], int] = {}
        self.kept: list[Any] = []

    def compare(self, a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b), f"{where}: {type(a)} became {type(b)}"
        if isinstance(a, torch.Tensor):
            self.tensors(a, b, where)
        elif isinstance(a, weakref.ref):
            self.compare(a(), b(), where)
        elif isinstance(a, np.ndarray | np.generic):
            assert a.dtype == b.dtype and np.array_equal(a, b), where
        elif isinstance(a, float):
            assert repr(a) == repr(b), f"{where}: {a!r} became {b!r}"  # tells -0.0, takes NaN for NaN
        elif isinstance(a, type | FunctionType | BuiltinFunctionType):
            assert a is b, where
        elif isinstance(a, frozenset):  # equal ones are one object or two, as Python likes
            assert a == b, where
        elif isinstance(a, dict | list | tuple | set) or hasattr(a, "__dict__"):
            if not self.met("object", id(a), id(b), where):
                self.kept += [a, b]
                self.containers(a, b, where)
        else:
            assert a == b, f"{where}: {a!r} became {b!r}"

    def met(self, kind: str, a: int, b: int, where: str) -> bool:
        """Return whether the pair was seen before; raise AssertionError if one had another partner."""
        known = self.partners.get((kind, a))
        assert known in (None, b), f"{where}: the {kind} was shared, and is no longer"
        other = self.partners.get((kind + " back", b))
        assert other in (None, a), f"{where}: the {kind} is shared, and was not"
        self.partners[kind, a], self.partners[kind + " back", b] = b, a
        return known is not None

    def containers(self, a: Any, b: Any, where: str) -> None:
        if isinstance(a, dict):
            assert list(map(str, a)) == list(map(str, b)), f"{where}: keys or their order"
            for (key, x), (other, y) in zip(a.items(), b.items(), strict=True):
                self.compare(key, other, f"{where}.{key} (key)")
                self.compare(x, y, f"{where}.{key}")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), where
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(x, y, f"{where}.{index}")
        elif isinstance(a, set):
            assert a == b, where
        if hasattr(a, "__dict__"):
            self.compare(dict(a.__dict__), dict(b.__dict__), f"{where}.__dict__")

    def tensors(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        assert (a.dtype, a.shape, a.layout, a.device) == (b.dtype, b.shape, b.layout, b.device), where
        assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
        if a.layout is not torch.strided:
            self.compare(a._indices(), b._indices(), where)
            self.compare(a._values(), b._values(), where)
            assert a.is_coalesced() == b.is_coalesced(), where
            return
        assert a.stride() == b.stride(), f"{where}: stride"
        if a.is_meta:
            return
        self.met("tensor", id(a), id(b), where)
        self.kept += [a, b]
        if a.is_quantized:
            assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), where
            a, b = a.int_repr(), b.int_repr()
        else:
            assert a.storage_offset() == b.storage_offset(), f"{where}: offset"
            assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg()), where
            if a.untyped_storage().nbytes():
                self.met("storage", a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr(), where)
        assert values(a) == values(b), f"{where}: values"
