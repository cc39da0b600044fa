"""Weights that a wrapper computes from others: masks of pruning, weight norm and spectral norm.

Either spelling of torch's: `weight_g` and `weight_v`, and `original0` and `original1` below
`parametrizations.weight`. Values are computed in float64 and rounded once. Sources: torch 2.14, `prune.py`,
`weight_norm.py`, `spectral_norm.py` and `parametrizations.py` in `nn/utils`. Imports numpy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..core.lazy import np
from ..core.tensors.cast import CastReport, in_float64
from ..core.tensors.ref import PLAIN_FLOATS, TensorRef
from ..core.tensors.rows import Change, blocks_of, by_rows, rows_of, with_norms
from ..errors import Refused

# How a wrapper is asked for, what it is, and the ends of the names of its parts, that of the weight first
FORMS = (
    ("mask", "a mask of pruning", ("_orig", "_mask")),
    ("norm", "weight norm", ("_v", "_g")),
    ("norm", "weight norm", ("original1", "original0")),
    ("norm", "spectral norm", ("_orig", "_u", "_v")),
    ("norm", "spectral norm", ("original", "0._u", "0._v")),
)
BY_PARTS = {frozenset(form[2]): form for form in FORMS}

OLD = re.compile(r"((?:.*\.)?[^.]+)(_orig|_mask|_u|_v|_g)")
NEW = re.compile(r"((?:.*\.)?)parametrizations\.([^.]+)\.(.+)")
MARK = re.compile(r"(?m)_(?:orig|g)$|parametrizations\.")
IS_SAME = 0.9  # the cosine of two vectors that are one but for a few steps of training


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A computed tensor.

    Attributes:
        kind: `mask` or `norm`.
        form: what it is in words; "" where nothing shows it.
        name: the tensor's.
        parts: names of what it is computed from, that of its own shape first.
    """

    kind: str
    form: str
    name: str
    parts: tuple[str, ...]

    def tensor(self, path: str, tensors: Mapping[str, TensorRef], report: CastReport) -> TensorRef:
        """Return the tensor, computed when it is read. Raises Refused where nothing says how."""
        if not self.form:
            what, how = "is of a parametrization that is not known", "parametrize.remove_parametrizations"
            if not NEW.fullmatch(self.parts[0]):
                what = f"may be of weight norm, or plain: '{self.parts[1][:80]}' has a shape that fits both"
                how = "remove_weight_norm"
            raise Refused(path, f"'{self.parts[0][:80]}' {what}", hint=f"in Python: torch.nn.utils.{how}")
        weight, *others = (tensors[part] for part in self.parts)
        if odd := {each.dtype.name for each in (weight, *others[self.kind == "mask" :])} - {*PLAIN_FLOATS}:
            raise Refused(path, f"'{self.parts[0][:80]}' is {odd.pop()}, of which no {self.form} is computed")
        if self.form == "spectral norm":
            axis = self._axis(path, weight, *others)

        def change() -> Change:
            if self.kind == "mask":
                mask = others[0]
                return lambda values, begin: values * rows_of(mask, begin, begin + len(values))
            if self.form == "weight norm":
                norms = in_float64(others[0]).reshape(others[0].shape or (1,) * len(weight.shape))
                return with_norms(weight, norms)
            size = _measured(weight, others[0], others[1], axis)[0]
            return lambda values, begin: values / size

        return by_rows(path, weight, change, weight.dtype, report, *(each.storage for each in others))

    def _axis(self, path: str, weight: TensorRef, u: TensorRef, v: TensorRef) -> int:
        """Return which axis of a weight u belongs to, which in a square one its values show."""
        axes = _axes(weight, u, v)
        fitting = [axis for axis in axes if axes[1:] and _measured(weight, u, v, axis)[1] >= IS_SAME]
        if len(axes) > 1 and len(fitting) != 1:
            what = f"'{self.parts[0][:80]}' is of {[*weight.shape]}, and nothing shows along which axis its"
            hint = "in Python: torch.nn.utils.remove_spectral_norm, or parametrize.remove_parametrizations"
            raise Refused(path, f"{what} spectral norm is", hint=hint)
        return (fitting or axes)[0]


def wrapped_in(tensors: Mapping[str, TensorRef]) -> Iterator[Wrapped]:
    """Yield the tensors of a state that are computed from others."""
    if MARK.search("\n".join(tensors)) is None:  # which is looked for in each file that is shown
        return
    groups = defaultdict[str, dict[str, str]](dict)
    for name in tensors:
        if match := NEW.fullmatch(name):
            groups[match[1] + match[2]][match[3]] = name
        elif match := OLD.fullmatch(name):
            groups[match[1]][match[2]] = name
    for name, parts in groups.items():
        kind, form, ends = BY_PARTS.get(frozenset(parts), ("norm", "", ()))
        held = [tensors[parts[end]] for end in ends]
        if form and _fits(form, *held):
            # Elsewhere as many norms as numbers, or a vector's, may be plain: RWKV's time_mix_g, time_mix_v.
            is_weight = ends != ("_v", "_g") or name.rpartition(".")[2].startswith("weight")
            is_clear = is_weight or (len(held[0].shape) > 1 and held[1].numel < held[0].numel)
            yield Wrapped(kind, form if is_clear else "", name, tuple(parts[end] for end in ends))
        elif unknown := tuple(part for end, part in parts.items() if not end.startswith("_")):
            yield Wrapped("norm", "", name, unknown)


def _fits(form: str, weight: TensorRef, first: TensorRef, *others: TensorRef) -> bool:
    """Return whether parts have the shapes that a wrapper gives them."""
    shape, sizes = weight.shape, first.shape
    if form == "spectral norm":
        return bool(_axes(weight, first, others[0]))
    if form == "weight norm":  # the norms are along one axis, or there is one
        is_alike = not sizes or (
            len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))
        )
        return is_alike and bool(shape) and sum(size != 1 for size in sizes) < 2
    return shape == sizes


def _axes(weight: TensorRef, u: TensorRef, v: TensorRef) -> list[int]:
    """Return the axes that have the size of u, where all others have that of v."""
    shape, (rows, columns) = weight.shape, (u.shape, v.shape)
    return [i for i, n in enumerate(shape) if rows == (n,) and columns == (prod(shape) // max(n, 1),)]


def _measured(weight: TensorRef, u: TensorRef, v: TensorRef, axis: int) -> tuple[float, float]:
    """Return u·W·v of a weight as a matrix whose rows are along an axis, and the cosine of u and W·v."""
    left, right = in_float64(u), in_float64(v)
    rest = [*weight.shape]
    rest.pop(axis)
    image = np.zeros(len(left))
    for begin, rows in blocks_of(weight):
        values = np.moveaxis(rows.reshape(-1, *weight.shape[1:]), axis, 0)
        if axis:
            here = right.reshape(rest)[begin : begin + len(rows)]
            image += values.reshape(len(left), -1) @ here.reshape(-1)
        else:
            image[begin : begin + len(rows)] = rows @ right
    size = float(left @ image)
    return size, size / max(float(np.linalg.norm(left) * np.linalg.norm(image)), 1e-300)
