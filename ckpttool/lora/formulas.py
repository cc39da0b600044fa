"""What each kind of adapter makes of a weight. Imports numpy.

W is a weight as a matrix of rows, s the scale. LoRA: W + s·B·A, and with a third factor (LoCon) A is its
product with that; DoRA gives the rows of the sum norms of their own. LoHa: W + s·(w1_a·w1_b)∘(w2_a·w2_b).
LoKr: W + s·w1⊗w2, each whole or a product. OFT: W·Rᵀ, R of blocks along the diagonal, each the Cayley
transform of a skew-symmetric matrix or the first terms of a series. Differences are added, and rows of
trained tokens take the place of others. Sources: PEFT 0.21, `layer.py` in `tuners/lora`, `loha`, `lokr`,
`oft` and `trainable_tokens`; LyCORIS 4.1, `functional/general.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, TypeAlias

from ..core.lazy import NDArray, np
from ..core.tensors.cast import CastReport, in_float64
from ..core.tensors.ref import DType, TensorRef
from ..core.tensors.rows import Change, by_rows, rows_of, with_norms

Parts = Mapping[str, TensorRef]
Rows: TypeAlias = (
    "Callable[[int, int], NDArray[Any]]"  # number of the first row, and of that behind the last -> rows
)

# The products that a layer of each kind has: both factors, the core between, or the matrix itself instead.
PRODUCTS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "lora_embedding": (("lora_embedding_B", "lora_embedding_A", "", ""),),
    "lora_diff": (),
    "lora": (("lora_B", "lora_A", "lora_mid", ""),),
    "hada": tuple((f"hada_w{n}_a", f"hada_w{n}_b", f"hada_t{n}", "") for n in (1, 2)),
    "lokr": tuple((f"lokr_w{n}_a", f"lokr_w{n}_b", f"lokr_t{n}", f"lokr_w{n}") for n in (1, 2)),
}


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix that a layer has as two factors, as two around a core of a kernel's sizes, or whole."""

    left: TensorRef
    right: TensorRef | None = None
    core: TensorRef | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns."""
        columns = prod((self.right or self.left).shape[1:])
        if self.core is None:
            return self.left.shape[0], columns
        return self.left.shape[1], columns * prod(self.core.shape[2:])

    @property
    def ranks(self) -> set[int]:
        """The sizes that are the rank, of which there must be one; none of a whole matrix, 0 of no matrix."""
        left, core = self.left.shape, self.core.shape if self.core else None
        if self.right is None:
            return set() if left else {0}
        if len(left) < 2 or not self.right.shape or (core is not None and (len(left) > 2 or len(core) < 2)):
            return {0}
        return {
            self.right.shape[0],
            *(core[:2] if core is not None else ()),
            left[0] if core else prod(left[1:]),
        }

    def factors(self) -> list[NDArray[Any]]:
        """Return the matrices in float64 whose product it is: two, the core in the second, or one."""
        left = in_float64(self.left)
        if self.right is None:
            return [left.reshape(len(left), -1)]
        right = in_float64(self.right).reshape(max(self.ranks), -1)
        if self.core is None:
            return [left.reshape(-1, len(right)), right]
        core = np.einsum("ij...,jr->ir...", in_float64(self.core), right)
        return [left.T, core.reshape(len(core), -1)]


# Parts of a layer that are not of its weight, or of no product.
BESIDE = ("lora_B.bias", "lora_diff_b", "lora_magnitude_vector")


def of_weight(parts: Parts) -> Parts:
    """Return the parts that an update of the weight is made of."""
    return {name: part for name, part in parts.items() if name not in BESIDE}


def kind_of(parts: Parts) -> str:
    """Return the kind of a layer, as its parts are named; "" for a mixture."""
    kinds = {next((kind for kind in PRODUCTS if part.startswith(kind)), part) for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


def products_of(parts: Parts) -> list[Product] | None:
    """Return the products that a layer has parts of; None where a factor is missing."""
    found = []
    for left, right, core, whole in PRODUCTS.get(kind_of(parts), ()):
        if whole in parts:
            found.append(Product(parts[whole]))
        elif left in parts and right in parts:
            found.append(Product(parts[left], parts[right], parts.get(core)))
        else:
            return None
    return found


@dataclass(frozen=True, slots=True)
class Update:
    """What is done to a weight.

    Attributes:
        sizes: rows and columns that it must have, as a matrix.
        parts: what that is made of.
        change: asked once, when the weight is read, for what makes new rows of old ones.
        turned: the columns have DoRA's norms, and not the rows.
        magnitude: those norms, one for each.
    """

    sizes: tuple[int, int]
    parts: tuple[TensorRef, ...]
    change: Callable[[], Change]
    turned: bool = False
    magnitude: TensorRef | None = None

    def applied(self, path: str, weight: TensorRef, to: DType, report: CastReport) -> TensorRef:
        """Return a weight that was changed; nothing is read yet."""

        def change() -> Change:
            if self.magnitude is None:
                return self.change()
            shape = [1] * len(weight.shape)
            shape[self.turned] = -1
            return with_norms(weight, in_float64(self.magnitude).reshape(shape), self.change())

        return by_rows(path, weight, change, to, report, *(part.storage for part in self.parts))


def sum_of(parts: Parts, scale: float, *, turned: bool = False) -> Update:
    """Return the update that adds products: one, element by element, or LoKr's of each with all."""
    products = products_of(parts) or []
    sizes = [each.sizes for each in products]
    rows, columns = sizes[0]
    make = elementwise
    if kind_of(parts) == "lokr":
        make, (rows, columns) = kronecker, map(prod, zip(*sizes, strict=True))

    def change() -> Change:
        delta = make([each.factors() for each in products], turned=turned)
        return lambda values, begin: values + scale * delta(begin, begin + len(values))

    return Update((columns, rows) if turned else (rows, columns), (*parts.values(),), change, turned)


def elementwise(factors: list[list[NDArray[Any]]], *, turned: bool) -> Rows:
    """Return the rows of the product of all matrices, element by element."""
    pairs = [(right.T.copy(), left.T.copy()) if turned else (left, right) for left, right in factors]
    first, *others = pairs

    def rows(begin: int, end: int) -> NDArray[Any]:
        made: NDArray[Any] = first[0][begin:end] @ first[1]
        for left, right in others:
            made *= left[begin:end] @ right
        return made

    return rows


def kronecker(factors: list[list[NDArray[Any]]], *, turned: bool) -> Rows:
    """Return the rows of the Kronecker product of two matrices."""
    one, other = (each[0] @ each[1] if each[1:] else each[0] for each in factors)

    def rows(begin: int, end: int) -> NDArray[Any]:
        outer, inner = np.divmod(np.arange(begin, end), len(other))
        made: NDArray[Any] = one[outer][:, :, None] * other[inner][:, None, :]
        return made.reshape(end - begin, -1)

    return rows


def difference(tensor: TensorRef, scale: float = 1.0) -> Update:
    """Return the update that adds a tensor."""

    def change() -> Change:
        return lambda values, begin: values + scale * rows_of(tensor, begin, begin + len(values))

    return Update(((*tensor.shape, 1)[0], prod(tensor.shape[1:])), (tensor,), change)


def block_size(elements: int) -> int:
    """Return of which size a skew-symmetric matrix of so many numbers is; 0 for none."""
    size = (1 + isqrt(1 + 8 * elements)) // 2
    return size if size * (size - 1) == 2 * elements else 0


def rotation(blocks: TensorRef, rows: int, terms: int) -> Update:
    """Return OFT's update: rows turned block by block, by so many terms of the series; 0 for all."""
    count, size = blocks.shape[0], block_size(blocks.shape[1])

    def change() -> Change:
        skew = np.zeros((count, size, size))
        row, column = np.triu_indices(size, 1)
        skew[:, row, column] = in_float64(blocks)
        skew -= skew.transpose(0, 2, 1)
        one = np.eye(size)
        turned = cayley_series(skew, terms) if terms else np.linalg.solve(one + skew, one - skew)
        back = turned.transpose(0, 2, 1)
        return lambda values, begin: np.einsum("nki,kij->nkj", values.reshape(-1, count, size), back)

    return Update((rows, count * size), (blocks,), change)


def cayley_series(skew: NDArray[Any], terms: int) -> NDArray[Any]:
    """Return the first terms of (1 + Q)/(1 - Q), as PEFT sums them: of a power at least 3, the last once."""
    powers = list(matrix_powers(skew, max(terms, 4) if terms > 2 else terms))
    weights = [1.0] + [2.0] * (len(powers) - 1)
    weights[-1] = 1.0 if terms > 2 else weights[-1]
    total: NDArray[Any] = np.einsum("p,p...->...", weights, powers)
    return total


def matrix_powers(matrix: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    """Yield the powers of a matrix from the 0th on."""
    power = np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape)
    for _ in range(max(count, 1)):
        yield power
        power = power @ matrix


def tokens(new: TensorRef, indices: list[int], rows: int) -> Update:
    """Return the update that replaces rows."""

    def change() -> Change:
        held, places = in_float64(new), np.array(indices)

        def replaced(values: NDArray[Any], begin: int) -> NDArray[Any]:
            here = (places >= begin) & (places < begin + len(values))
            values[places[here] - begin] = held[here]
            return values

        return replaced

    return Update((rows, new.shape[1]), (new,), change)
