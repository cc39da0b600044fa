"""Element types changed as torch changes them, bit for bit, chunk by chunk and without torch. Imports numpy.

Rounding is to nearest, ties to even. Types narrower than float32 are reached through float32, also from
float64, because torch does so (c10/util/Half.h, BFloat16.h): a double is rounded twice. NaN stays NaN, though
not every bit of it. A finite value that becomes infinite is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import UsageFault
from .dtypes import DTYPES, DType
from .ref import Computed, Storage, TensorRef
from .values import CHUNK, stream

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

BLOCK = 1 << 16
"""Elements converted at a time, so that the passes over them stay in the processor's cache."""

BUFFER = 1 << 18
"""Bytes read at a time where they are contiguous: still in the cache when they are converted."""

# The least magnitudes that are rounded to infinity: half a step above the largest number of the type.
MAX_FLOAT = float.fromhex("0x1.ffffffp127")
MAX_HALF = 65520.0

CELL = 1 << 20
"""Elements of a storage whose overflows are marked together, a bit for each."""


@dataclass(slots=True)
class CastReport:
    """What casting did, complete once the bytes were written.

    Attributes:
        tensors: how many were cast.
        notes: pieces in which values overflowed; a piece that is cast again, to be compared, counts again.
    """

    tensors: int = 0
    notes: int = 0
    _marks: dict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def overflows(self) -> int:
        """Finite values that became infinite: each element of a storage once, in however many tensors."""
        import numpy as np

        return sum(int(np.unpackbits(bits).sum()) for bits in self._marks.values())

    def note(self, storage: int, places: NDArray[np.int64]) -> None:
        """That the elements at these places of a storage overflowed. Several threads may cast at once."""
        import numpy as np

        cells = places // CELL
        with self._lock:
            self.notes += 1
            for cell in np.flatnonzero(np.bincount(cells)).tolist():
                bits = self._marks.get((storage, cell))
                marks = np.zeros(CELL, np.uint8) if bits is None else np.unpackbits(bits)
                marks[places[cells == cell] % CELL] = 1
                self._marks[storage, cell] = np.packbits(marks)


def target(name: str) -> DType:
    """The type that `--dtype NAME` asks for. Raises UsageFault."""
    if name not in TARGETS:
        raise UsageFault(f"--dtype {name}: not a dtype to cast to", hint=f"one of {', '.join(TARGETS)}")
    return TARGETS[name]


class Caster:
    """Casts the tensors of one checkpoint; tensors that share a storage share the cast one."""

    def __init__(self, to: DType) -> None:
        self.to = to
        self.report = CastReport()
        self._storages: dict[tuple[int, str], Storage] = {}
        self._kept: list[Storage] = []  # so that no id above is used again
        self._idle: dict[DType, list[Conversion]] = defaultdict(list)

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

        def make(start: int, nbytes: int) -> Iterator[memoryview]:
            first, many = start // self.to.itemsize, nbytes // self.to.itemsize
            for values in self._values(number, TensorRef(old, dtype, (many,), (1,), first)):
                # The order of bytes stays that of the file, in which all storages must agree.
                yield _bytes(values.byteswap() if old.byteorder == "big" else values)

        def view(cast: TensorRef) -> Iterator[memoryview]:
            return map(_bytes, self._values(number, replace(cast, storage=old, dtype=dtype)))

        nbytes = count * self.to.itemsize
        data = Computed(old.data.path, nbytes, make, view, lambda: self.report.notes)
        kind = self.to.storage or "UntypedStorage"
        return Storage(data, kind, old.location, byteorder=old.byteorder, origins=(old,))

    def _values(self, storage: int, tensor: TensorRef) -> Iterator[NDArray[Any]]:
        """The converted elements, each array valid until the next; overflows are noted on the way."""
        idle, done = self._idle[tensor.dtype], 0
        try:
            conversion = idle.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            conversion = Conversion(tensor.dtype, self.to)
        for raw in stream(tensor, buffer=conversion.buffer):
            values, overflows = conversion.convert(raw)
            if len(overflows):
                self.report.note(storage, _places(tensor, overflows + done))
            done += len(values)
            yield values
        idle.append(conversion)


def _places(tensor: TensorRef, elements: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in its storage these elements of a tensor are, which are counted in row-major order."""
    import numpy as np

    if tensor.is_contiguous:
        return elements + tensor.offset
    indices = np.unravel_index(elements, tensor.shape)
    return sum((i * s for i, s in zip(indices, tensor.stride, strict=True)), start=np.int64(tensor.offset))


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


class Conversion:
    """From elements of one type to elements of another, in memory that is used again.

    Attributes:
        buffer: where elements may be read to.
    """

    def __init__(self, source: DType, to: DType) -> None:
        import numpy as np

        self.source = carrier(source)
        self.buffer = memoryview(bytearray(BUFFER))
        self._read = reader(source)
        most = CHUNK // source.itemsize
        self._out = np.empty(most, carrier(to))
        self._write = ToBfloat16(min(most, BLOCK)) if to.name == "bfloat16" else _to_ieee
        self._none = np.empty(0, np.int64)

    def convert(self, raw: memoryview) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The elements as an array that carries the other type's bits, and which of them overflowed.

        Args:
            raw: little-endian, CHUNK bytes at most. The array is valid until the next call.
        """
        import numpy as np

        whole = np.frombuffer(raw, dtype=self.source)
        out = self._out[: len(whole)]
        overflows = [self._none]
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(whole), BLOCK):
                block = self._read(whole[start : start + BLOCK])
                found = self._write(block, out[start : start + BLOCK])
                if found is not None:
                    overflows.append(found + start)
        return out, np.concatenate(overflows)


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


def _to_ieee(block: NDArray[Any], out: NDArray[Any]) -> NDArray[np.int64] | None:
    """Numpy floats into a narrower or wider IEEE type; returns which overflowed, None where none can have."""
    import numpy as np

    through = block.astype("<f4") if out.itemsize == 2 and block.itemsize == 8 else block
    out[:] = through
    if out.itemsize >= block.itemsize or _all_below(through, MAX_HALF if out.itemsize == 2 else MAX_FLOAT):
        return None
    return np.flatnonzero(np.isinf(out) & np.isfinite(block))


class ToBfloat16:
    """The same into bfloat16, which is the upper half of a float32: rounding may add 1 to that half.

    It is added where the lower half is above a half step, or is a half step and the upper half is odd: where
    the lower half, with the lowest bit of the upper one or-ed into it, is above a half step. So most passes
    are over 16 bits.
    """

    def __init__(self, most: int) -> None:
        """Makes room for blocks of so many elements."""
        import numpy as np

        self._low, self._sticky = np.empty(most, "<u2"), np.empty(most, "<u2")
        self._up = np.empty(most, bool)

    def __call__(self, block: NDArray[Any], out: NDArray[Any]) -> NDArray[np.int64] | None:
        import numpy as np

        single = block if block.itemsize == 4 else block.astype("<f4")
        bits, n = single.view("<u4"), len(single)
        low, sticky, up = self._low[:n], self._sticky[:n], self._up[:n]
        np.right_shift(bits, np.uint32(16), out=out, casting="unsafe")
        np.copyto(low, bits, casting="unsafe")
        stays_finite = out.max() < 0xFF7F and out.view("<i2").max() < 0x7F7F  # negative, positive
        np.bitwise_and(out, np.uint16(1), sticky)
        sticky |= low
        np.greater(sticky, np.uint16(0x8000), up)
        out += up
        if stays_finite:
            return None
        out[np.isnan(single)] = 0x7FC0  # the rounding carries some NaNs over into other numbers
        return np.flatnonzero(((out & 0x7FFF) == 0x7F80) & np.isfinite(block))


def _all_below(block: NDArray[Any], limit: float) -> bool:
    """Whether all magnitudes are below a limit; NaN is not. Two passes that make no array."""
    return bool(-limit < block.min() and block.max() < limit)


def count_non_finite(name: str, raw: memoryview) -> int:
    """How many of the elements of a float type are NaN or infinite."""
    import numpy as np

    values = reader(DTYPES[name])(np.frombuffer(raw, dtype=carrier(DTYPES[name])))
    finite = np.isfinite(values)
    return 0 if finite.all() else int(finite.size - np.count_nonzero(finite))
