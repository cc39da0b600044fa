"""Element types changed as torch changes them, bit for bit, chunk by chunk and without torch. Imports numpy.

Rounding is to nearest, ties to even. Types narrower than float32 are reached through float32, also from
float64, because torch does so (c10/util/Half.h, BFloat16.h): a double is rounded twice. NaN stays NaN, though
not every bit of it. A finite value that becomes infinite is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .ahead import in_order
from .dtypes import DTYPES, DType
from .elements import stream, true_bytes
from .errors import UsageFault
from .tensor import Computed, Storage, TensorRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TARGETS = {
    **{name: DTYPES[name] for name in ("float64", "float32", "float16", "bfloat16")},
    "fp64": DTYPES["float64"],
    "double": DTYPES["float64"],
    "fp32": DTYPES["float32"],
    "float": DTYPES["float32"],
    "fp16": DTYPES["float16"],
    "half": DTYPES["float16"],
    "bf16": DTYPES["bfloat16"],
}
"""What `--dtype` takes. The 8-bit types need a scale for each tensor, which no cast can choose."""

FLOATS = {
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
"""The types that are cast; integers, booleans and complex numbers stay as they are."""

PIECE = 2 << 20
"""Bytes of the source cast as one job."""

BLOCK = 1 << 16
"""Elements converted at a time, so that the passes over them stay in the processor's cache."""

# The least magnitudes that are rounded to infinity: half a step above the largest number of the type.
MAX_FLOAT = float.fromhex("0x1.ffffffp127")
MAX_HALF = 65520.0
MAX_BFLOAT16 = float.fromhex("0x1.ffp127")

WORKERS = 1
"""Threads beside the one that writes: each step of a cast is so short that more of them wait for each other's
turn with Python's lock."""


@dataclass(slots=True)
class CastReport:
    """What casting did, complete once the bytes were written.

    Attributes:
        tensors: how many were cast.
        counts: finite values that became infinite, by storage and the stretch of it that was cast.
    """

    tensors: int = 0
    counts: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def overflows(self) -> int:
        """Finite values that became infinite. A stretch that was cast again, to be compared, counts once."""
        total = reached = 0
        before = -1
        for (storage, _, end), count in sorted(self.counts.items(), key=_outer_first):
            reached = 0 if storage != before else reached
            if end > reached:
                total += count
            before, reached = storage, max(reached, end)
        return total


def _outer_first(item: tuple[tuple[int, int, int], int]) -> tuple[int, int, int]:
    (storage, begin, end), _ = item
    return storage, begin, -end


def target(name: str) -> DType:
    """The type that `--dtype NAME` asks for. Raises UsageFault."""
    if name not in TARGETS:
        raise UsageFault(
            f"--dtype {name}: not a type that can be cast to", hint=f"one of {', '.join(TARGETS)}"
        )
    return TARGETS[name]


class Caster:
    """Casts the tensors of one checkpoint; tensors that share a storage share the cast one."""

    def __init__(self, to: DType) -> None:
        self.to = to
        self.report = CastReport()
        self._storages: dict[tuple[int, str], Storage] = {}
        self._kept: list[Storage] = []  # so that no id above is used again

    def cast(self, tensor: TensorRef) -> TensorRef:
        """The tensor in the wanted type: the same view of a storage whose bytes are computed."""
        if tensor.dtype.name not in FLOATS or tensor.dtype is self.to:
            return tensor
        self.report.tensors += 1
        key = id(tensor.storage), tensor.dtype.name
        if key not in self._storages:
            self._storages[key] = self._storage(tensor.storage, tensor.dtype)
            self._kept.append(tensor.storage)
        return replace(tensor, storage=self._storages[key], dtype=self.to)

    def _storage(self, old: Storage, dtype: DType) -> Storage:
        count, number = old.nbytes // dtype.itemsize, len(self._kept)
        convert = converter(dtype, self.to)

        def make(start: int, nbytes: int) -> Iterator[memoryview]:
            first, many = start // self.to.itemsize, nbytes // self.to.itemsize
            flat = TensorRef(old, dtype, (many,), (1,), first)
            jobs = in_order(_jobs(convert, flat), WORKERS)
            for values in self._counted(number, flat, jobs):
                # The order of bytes stays that of the file, in which all storages must agree.
                yield _bytes(values.byteswap() if old.byteorder == "big" else values)

        def view(cast: TensorRef) -> Iterator[memoryview]:
            tensor = replace(cast, storage=old, dtype=dtype)
            for values in self._counted(number, tensor, map(convert, stream("", tensor))):
                yield _bytes(values)

        data = Computed(old.data.path, count * self.to.itemsize, make, view)
        kind = self.to.storage or "UntypedStorage"
        return Storage(data, kind, old.location, byteorder=old.byteorder)

    def _counted(
        self, storage: int, tensor: TensorRef, pieces: Iterator[Converted]
    ) -> Iterator[NDArray[Any]]:
        overflows = 0
        for piece in pieces:
            overflows += piece.overflows
            yield piece.values
        if overflows:
            begin, end = tensor.span
            self.report.counts[storage, begin, end] = overflows


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


def _jobs(convert: Convert, flat: TensorRef) -> Iterator[Callable[[], Converted]]:
    """The conversion of a row of elements, cut into jobs."""
    most = PIECE // flat.dtype.itemsize
    for first in range(0, flat.numel, most):
        part = replace(flat, shape=(min(most, flat.numel - first),), offset=flat.offset + first)
        yield lambda part=part: convert(true_bytes(part))  # type: ignore[misc]


class Converted(NamedTuple):
    """Elements in another type: an array that carries their bits, and how many overflowed."""

    values: NDArray[Any]
    overflows: int


Convert = Callable[[memoryview], Converted]


def converter(source: DType, to: DType) -> Convert:
    """A function from the bytes of elements of one type, little-endian, to those of the other."""
    import numpy as np

    read = reader(source)
    write = _to_bfloat16 if to.name == "bfloat16" else _to_ieee

    def convert(raw: memoryview) -> Converted:
        whole = np.frombuffer(raw, dtype=carrier(source))
        out = np.empty(len(whole), dtype=carrier(to))
        overflows = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(whole), BLOCK):
                block = read(whole[start : start + BLOCK])
                overflows += write(block, out[start : start + BLOCK])
        return Converted(out, overflows)

    return convert


def carrier(dtype: DType) -> Any:
    """The numpy type whose elements hold the bits: numpy has no bfloat16 and no 8-bit floats."""
    return "<u2" if dtype.name == "bfloat16" else "u1" if dtype.itemsize == 1 else f"<f{dtype.itemsize}"


def reader(source: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """From carrier to a numpy float that holds every value of the type."""
    import numpy as np

    if source.name == "bfloat16":
        return lambda block: (block.astype("<u4") << np.uint32(16)).view("<f4")
    if source.itemsize == 1:
        table = _table(source.name)
        return lambda block: table[block]
    return lambda block: block


def _table(name: str) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float.

    Sources: OCP 8-bit floating point (arXiv 2209.05433), for `fnuz` arXiv 2206.02915, for `e8m0` OCP
    microscaling formats.
    """
    import numpy as np

    bits = np.arange(256)
    if name == "float8_e8m0fnu":  # an exponent alone
        return np.where(bits == 255, np.nan, 2.0 ** (bits - 127)).astype("<f4")
    exponent, one_zero = 5 if "e5m2" in name else 4, name.endswith("uz")
    mantissa, bias = 7 - exponent, 2 ** (exponent - 1) - (0 if one_zero else 1)
    sign = np.where(bits >> 7, -1.0, 1.0)
    power, fraction = (bits >> mantissa) & (2**exponent - 1), (bits & (2**mantissa - 1)) / 2**mantissa
    value = np.where(power > 0, (1 + fraction) * 2.0 ** (power - bias), fraction * 2.0 ** (1 - bias))
    if one_zero:  # NaN where the negative zero would be, and no infinity
        value = np.where(bits == 0x80, np.nan, value)
    elif exponent == 5:  # infinities and NaNs as IEEE 754 has them
        value = np.where(power == 31, np.where(fraction == 0, np.inf, np.nan), value)
    else:  # one NaN of each sign and no infinity
        value = np.where((bits & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype("<f4")


def _to_ieee(block: NDArray[Any], out: NDArray[Any]) -> int:
    """Numpy floats into a narrower or wider IEEE type; returns how many overflowed."""
    import numpy as np

    through = block.astype("<f4") if out.itemsize == 2 and block.itemsize == 8 else block
    out[:] = through
    if out.itemsize >= block.itemsize or _all_below(through, MAX_HALF if out.itemsize == 2 else MAX_FLOAT):
        return 0
    return int(np.count_nonzero(np.isinf(out) & np.isfinite(block)))


def _to_bfloat16(block: NDArray[Any], out: NDArray[Any]) -> int:
    """Numpy floats into the upper halves of float32; returns how many overflowed."""
    import numpy as np

    single = block if block.itemsize == 4 else block.astype("<f4")
    bits = single.view("<u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    out[:] = rounded
    if _all_below(single, MAX_BFLOAT16):
        return 0
    out[np.isnan(single)] = 0x7FC0  # the rounding carries some NaNs over into other numbers
    return int(np.count_nonzero(((out & 0x7FFF) == 0x7F80) & np.isfinite(block)))


def _all_below(block: NDArray[Any], limit: float) -> bool:
    """Whether all magnitudes are below a limit; NaN is not. Two passes that make no array."""
    return bool(-limit < block.min() and block.max() < limit)


def count_non_finite(name: str, raw: memoryview) -> int:
    """How many of the elements of a float type are NaN or infinite."""
    import numpy as np

    values = reader(DTYPES[name])(np.frombuffer(raw, dtype=carrier(DTYPES[name])))
    finite = np.isfinite(values)
    return 0 if finite.all() else int(finite.size - np.count_nonzero(finite))
