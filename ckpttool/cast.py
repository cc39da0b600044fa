"""Element types changed as torch changes them, bit for bit, chunk by chunk and without torch. Imports numpy.

Rounding is to nearest, ties to even. Types narrower than float32 are reached through float32, also from
float64, because torch does so (c10/util/Half.h, BFloat16.h): a double is rounded twice. A finite value that
becomes infinite is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .elements import stream
from .errors import UsageFault
from .tensor import DTYPES, Computed, DType, Storage, TensorRef

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

FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
"""The types that are cast; integers, booleans and complex numbers stay as they are."""

BLOCK = 1 << 16
"""Elements converted at a time, so that the passes over them stay in the processor's cache."""


@dataclass(slots=True)
class CastReport:
    """What casting did, complete once the bytes were written. `overflows`: finite values now infinite."""

    tensors: int = 0
    overflows: int = 0


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
            self._storages[key] = self._storage(tensor)
            self._kept.append(tensor.storage)
        return replace(tensor, storage=self._storages[key], dtype=self.to)

    def _storage(self, tensor: TensorRef) -> Storage:
        old, size = tensor.storage, tensor.dtype.itemsize
        count = old.nbytes // size
        flat = TensorRef(old, tensor.dtype, (count,), (1,))
        convert = converter(tensor.dtype, self.to, self.report)

        def make(start: int, nbytes: int) -> Iterator[memoryview]:
            first, many = start // self.to.itemsize, nbytes // self.to.itemsize
            part = replace(flat, shape=(many,), offset=first)
            for chunk in stream("", part):
                yield memoryview(convert(chunk)).cast("B")  # type: ignore[arg-type]

        data = Computed(old.data.path, count * self.to.itemsize, make)
        return Storage(data, self.to.storage or "UntypedStorage", old.location)


def converter(source: DType, to: DType, report: CastReport) -> Callable[[memoryview], NDArray[Any]]:
    """A function from the bytes of elements of one type to an array of the other's."""
    import numpy as np

    read = _reader(source)
    write = _writer(to, report)

    def convert(raw: memoryview) -> NDArray[Any]:
        whole = np.frombuffer(raw, dtype=_carrier(source))
        out = np.empty(len(whole), dtype=_carrier(to))
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(whole), BLOCK):
                write(read(whole[start : start + BLOCK]), out[start : start + BLOCK])
        return out

    return convert


def _carrier(dtype: DType) -> Any:
    """The numpy type whose elements hold the bits: numpy has no bfloat16 and no 8-bit floats."""
    carriers = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
    return carriers.get(dtype.name, f"<f{dtype.itemsize}")


def _reader(source: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """From carrier to a numpy float that holds every value of the type."""
    import numpy as np

    if source.name == "bfloat16":
        return lambda block: (block.astype("<u4") << np.uint32(16)).view("<f4")
    if source.name.startswith("float8"):
        table = _table(5 if source.name.endswith("e5m2") else 4)
        return lambda block: table[block]
    return lambda block: block


def _table(exponent: int) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float (OCP 8-bit floating point, arXiv 2209.05433)."""
    import numpy as np

    bits = np.arange(256)
    mantissa, bias = 7 - exponent, 2 ** (exponent - 1) - 1
    sign = np.where(bits >> 7, -1.0, 1.0)
    power, fraction = (bits >> mantissa) & (2**exponent - 1), (bits & (2**mantissa - 1)) / 2**mantissa
    value = np.where(power > 0, (1 + fraction) * 2.0 ** (power - bias), fraction * 2.0 ** (1 - bias))
    if exponent == 5:  # e5m2 has infinities and NaNs as IEEE 754 does
        value = np.where(power == 31, np.where(fraction == 0, np.inf, np.nan), value)
    else:  # e4m3fn has one NaN and no infinity
        value = np.where((bits & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype("<f4")


def _writer(to: DType, report: CastReport) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    """From a numpy float into carriers of the wanted type, counting what overflows."""
    import numpy as np

    def plain(block: NDArray[Any], out: NDArray[Any]) -> None:
        narrow = to.itemsize < block.dtype.itemsize
        through = block.astype("<f4") if to.itemsize == 2 and block.dtype.itemsize == 8 else block
        out[:] = through
        if narrow and not np.isfinite(out).all():
            report.overflows += int(np.count_nonzero(np.isinf(out) & np.isfinite(block)))

    def bfloat16(block: NDArray[Any], out: NDArray[Any]) -> None:
        single = block if block.dtype == np.dtype("<f4") else block.astype("<f4")
        bits = single.view("<u4")
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        out[:] = rounded.view("<u2")[1::2]
        # The rounding carries a NaN over into another number; whatever is not finite now is looked at.
        if ((out & np.uint16(0x7F80)) == 0x7F80).any() or np.isnan(single).any():
            out[np.isnan(single)] = 0x7FC0
            report.overflows += int(np.count_nonzero(((out & 0x7FFF) == 0x7F80) & np.isfinite(block)))

    return bfloat16 if to.name == "bfloat16" else plain


def count_non_finite(name: str, raw: memoryview) -> int:
    """How many of the elements of a float type are NaN or infinite."""
    import numpy as np

    values = _reader(DTYPES[name])(np.frombuffer(raw, dtype=_carrier(DTYPES[name])))
    finite = np.isfinite(values)
    return 0 if finite.all() else int(finite.size - np.count_nonzero(finite))
