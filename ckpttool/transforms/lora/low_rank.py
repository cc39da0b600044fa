"""The best product of two thin matrices for a difference of two weights. Imports numpy.

A small matrix is decomposed whole. A larger one is passed over row by row, so that it need not fit into
memory: DᵀDQ of an orthonormal Q takes one pass, and repeating it turns Q towards the largest singular
vectors (subspace iteration: Halko, Martinsson and Tropp, SIAM Review 53, 2011). It ends when a pass hardly
adds to what the product captures of ‖D‖², which can only grow towards what an SVD captures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ...lazy import NDArray, np
from ...tensors.ref import TensorRef
from ..mean import in_float64

WHOLE = 1 << 20  # elements up to which a matrix is decomposed whole
HELD = 1 << 23  # elements up to which the difference stays in memory between passes
ROWS = 1 << 20  # elements of a block of rows
MORE = 16  # singular vectors that are iterated besides those that are wanted, which thus converge sooner
PASSES = 100
SLOW = 1e-6  # the part of the error's square by which a pass must reduce it to be worth another
LEAST = 1e-24  # the part of ‖D‖² that is rounding


@dataclass(slots=True)
class Difference:
    """What is between two weights, as a matrix of as many rows as the weights have."""

    base: TensorRef
    tuned: TensorRef
    _blocks: list[NDArray[Any]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows = self.base.shape[0]
        return rows, math.prod(self.base.shape[1:])

    def rows(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield blocks of rows in float64, each with its place."""
        count, columns = self.shape
        step = max(1, ROWS // columns)
        places = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
        if self._blocks:
            yield from zip(places, self._blocks, strict=True)
            return
        blocks = []
        for place in places:
            block = subtracted(*(_rows(tensor, place) for tensor in (self.base, self.tuned)))
            if count * columns <= HELD:
                blocks.append(block)
            yield place, block
        self._blocks = blocks


def _rows(tensor: TensorRef, place: slice) -> NDArray[Any]:
    shape = (place.stop - place.start, *tensor.shape[1:])
    part = replace(tensor, shape=shape, offset=tensor.offset + place.start * tensor.stride[0])
    return in_float64(part).reshape(shape[0], -1)


def subtracted(base: NDArray[Any], tuned: NDArray[Any]) -> NDArray[Any]:
    """Return tuned - base; 0 where both are the same infinity or NaN."""
    with np.errstate(all="ignore"):
        same = (tuned == base) | (np.isnan(tuned) & np.isnan(base))
        return np.where(same, 0.0, tuned - base)


@dataclass(frozen=True, slots=True)
class Factors:
    """Two matrices in float32 whose product is nearest to a difference, and how near.

    Attributes:
        left: rows x rank.
        right: rank x columns.
        error: ‖D - left·right‖ / ‖D‖, in the Frobenius norm; NaN where float32 can't hold the factors.
        max_abs: the largest element of D - left·right.
    """

    left: NDArray[Any]
    right: NDArray[Any]
    error: float
    max_abs: float


def factors(difference: Difference, rank: int) -> Factors:
    """Return the factors of a rank, at most the smaller side; the singular values are shared evenly."""
    rows, columns = difference.shape
    if rows * columns <= WHOLE or 2 * (rank + MORE) >= min(rows, columns):
        whole = np.concatenate([block for _, block in difference.rows()])
        left, sizes, right = np.linalg.svd(whole, full_matrices=False)
    else:
        left, sizes, right = _largest(difference, rank)
    roots = np.sqrt(sizes[:rank])
    with np.errstate(over="ignore"):
        left = (left[:, :rank] * roots).astype("<f4")
        right = (roots[:, None] * right[:rank]).astype("<f4")
    return Factors(left, right, *_error(difference, left, right))


def _largest(difference: Difference, rank: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return singular vectors and values, of which the first `rank` are the largest."""
    rows, columns = difference.shape
    random = np.random.Generator(np.random.Philox(key=0))  # the same factors each time
    basis, _ = np.linalg.qr(random.standard_normal((columns, rank + MORE)))
    total = captured = 0.0
    for number in range(PASSES):
        image = np.zeros_like(basis)
        for _, block in difference.rows():
            image += block.T @ (block @ basis)
            total += float(np.vdot(block, block)) if not number else 0.0
        before, captured = captured, float(np.linalg.eigvalsh(basis.T @ image)[-rank:].sum())
        if captured - before <= max(SLOW * (total - captured), LEAST * total):
            break
        basis, _ = np.linalg.qr(image)
    projected = np.empty((rows, basis.shape[1]))
    for place, block in difference.rows():
        projected[place] = block @ basis
    left, sizes, right = np.linalg.svd(projected, full_matrices=False)
    return left, sizes, right @ basis.T


def _error(difference: Difference, left: NDArray[Any], right: NDArray[Any]) -> tuple[float, float]:
    """Return how far the product is from the difference: as a part of its norm, and in the worst element."""
    a, b = left.astype("<f8"), right.astype("<f8")
    missed = total = worst = 0.0
    with np.errstate(all="ignore"):
        for place, block in difference.rows():
            rest = block - a[place] @ b
            missed += float(np.vdot(rest, rest))
            total += float(np.vdot(block, block))
            worst = max(worst, float(np.abs(rest).max()))
    return math.sqrt(missed / total), worst
