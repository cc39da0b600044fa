"""Element types changed as torch changes them, bit for bit, and the numbers that were lost. Imports numpy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal

from ...errors import UsageFault
from ..lazy import NDArray, np
from .ref import DTYPES, OF_ML_DTYPES, Computed, DType, Storage, Stretch, TensorRef, numpy_type
from .values import CHUNK, stream

# ---- The report of a cast: each lost element of a storage counts once

CELL = 1 << 20  # elements of a storage whose losses are marked together
FEW_LOSSES = CELL >> 5  # as many places take the memory of a bit for each element

Loss = Literal["infinite", "zero", "nan"]  # what a finite number, or one that is not 0, became


@dataclass(slots=True)
class CastReport:
    """What casting did, complete once the bytes were written."""

    tensors: int = 0
    _marks: dict[tuple[Loss, int, int], NDArray[Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def overflows(self) -> int:
        """Finite values that became infinite: each element of a storage once, in however many tensors."""
        return self.count("infinite")

    @property
    def underflows(self) -> int:
        """Values that became 0, likewise."""
        return self.count("zero")

    @property
    def nans(self) -> int:
        """Finite values that became NaN, likewise; a cast has none."""
        return self.count("nan")

    def count(self, loss: Loss) -> int:
        """Return how many elements were lost in this way."""
        return sum(_marked_in(marks) for (kind, *_), marks in self._marks.items() if kind == loss)

    def note(self, loss: Loss, storage: int, places: NDArray[np.int64]) -> None:
        """Record that elements of a storage were lost. Several threads may call this at once."""
        cells = places // CELL
        with self._lock:
            for cell in np.flatnonzero(np.bincount(cells)).tolist():
                key = loss, storage, cell
                here = (places[cells == cell] % CELL).astype(np.uint32)
                self._marks[key] = _marked(self._marks.get(key, here[:0]), here)

    def note_non_finite(
        self, storage: int, finite: NDArray[np.bool_], made: NDArray[Any], at: int = 0
    ) -> None:
        """Record which finite numbers became infinite or NaN; the first is element `at` of a storage."""
        if np.isfinite(made).all():
            return
        lost: dict[Loss, NDArray[np.bool_]] = {"infinite": np.isinf(made), "nan": np.isnan(made)}
        for loss, here in lost.items():
            if len(places := np.flatnonzero(finite & here)):
                self.note(loss, storage, places + at)


def _marked(marks: NDArray[Any], places: NDArray[np.uint32]) -> NDArray[Any]:
    """Return a cell's marks with more places: places as long as they are few, else a bit for each element."""
    if marks.dtype == np.uint32:
        places = np.union1d(marks, places)
        if len(places) < FEW_LOSSES:
            return places
        marks = np.zeros(CELL >> 3, np.uint8)
    np.bitwise_or.at(marks, places >> 3, (128 >> (places & 7)).astype(np.uint8))
    return marks


def _marked_in(marks: NDArray[Any]) -> int:
    return len(marks) if marks.dtype == np.uint32 else int(np.unpackbits(marks).sum())


@dataclass(slots=True)
class CastReports(CastReport):
    """Several reports as one: known once the output is written."""

    reports: list[CastReport] = field(default_factory=list)

    def count(self, loss: Loss) -> int:
        """Return how many elements were lost in this way, in all of them."""
        return sum(report.count(loss) for report in self.reports)


# ---- Casting, chunk by chunk and without torch
#
# Rounding is to nearest, ties to even. Types narrower than float32 are reached through float32, also from
# float64, because torch does so (c10/util/Half.h, BFloat16.h): a double is rounded twice. NaN stays NaN,
# though not every bit of it. Finite values that become infinite are counted, and so are those that become
# 0.


# What `--dtype` takes. The 8-bit types need a scale for each tensor, which no cast can choose.
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_SPOKEN = {"double": "float64", "float": "float32", "half": "float16"}
TARGETS = {name: DTYPES[name] for name in _SHORT.values()}
TARGETS |= {f"{DTYPES[name].safetensors}".lower(): DTYPES[name] for name in _SHORT.values()}
TARGETS |= {alias: DTYPES[name] for alias, name in (_SHORT | _SPOKEN).items()}

# The types that are cast; integers, booleans and complex numbers stay as they are.
FLOATS = {"float64", "float32", "float16", *OF_ML_DTYPES}

# The bits of the positive infinity: those of finite magnitudes are less.
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000, "float64": 0x7FF0 << 48}

FEW = 1 << 15  # elements that are rounded together, so that what is between stays in the processor's cache


def target(name: str) -> DType:
    """Return the type that `--dtype NAME` asks for. Raises UsageFault for a name that is not in TARGETS."""
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
        """Return the tensor in the wanted type: the same view of a storage whose bytes are computed."""
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

        def stretches() -> list[Stretch]:
            from_ = old.data.stretches() if isinstance(old.data, Computed) else []
            return [(nbytes // dtype.itemsize * self.to.itemsize, place) for nbytes, place in from_]

        nbytes = count * self.to.itemsize
        data = Computed(old.data.path, nbytes, make, view, is_divisible=True, stretches=stretches)
        return Storage(data, self.to.kind, old.location, byteorder=old.byteorder, origins=(old,))

    def _values(self, storage: int, tensor: TensorRef) -> Iterator[NDArray[Any]]:
        """Yield the converted elements, each array valid until the next; losses are noted on the way."""
        done = 0
        with self._conversion(tensor.dtype) as conversion:
            for raw in stream(tensor, buffer=conversion.buffer):
                values, lost = conversion.convert(raw)
                for loss, elements in lost.items():
                    self.report.note(loss, storage, _places(tensor, elements + done))
                done += len(values)
                yield values

    def without_loss(self, values: NDArray[Any]) -> NDArray[Any] | None:
        """Return float32 values in the wanted type; None where one becomes infinite or 0.

        For values that become elements of the result, in whatever number: nothing is counted.
        """
        raw, made = _bytes(values.reshape(-1)), np.empty(values.shape, carrier(self.to))
        with self._conversion(DTYPES["float32"]) as conversion:
            for start in range(0, len(raw), CHUNK):
                part, lost = conversion.convert(raw[start : start + CHUNK])
                if lost:
                    return None
                made.reshape(-1)[start // 4 :][: len(part)] = part
        return made

    @contextmanager
    def _conversion(self, source: DType) -> Iterator[Conversion]:
        """Yield a conversion that no other thread uses."""
        idle = self._idle[source]
        try:
            conversion = idle.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            conversion = Conversion(source, self.to)
        yield conversion
        idle.append(conversion)


def _places(tensor: TensorRef, elements: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers within the storage of elements that are numbered in row-major order."""
    if tensor.is_contiguous:
        return elements + tensor.offset
    indices = np.unravel_index(elements, tensor.shape)
    return sum((i * s for i, s in zip(indices, tensor.stride, strict=True)), start=np.int64(tensor.offset))


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


class Conversion:
    """From elements of one type to elements of another, in memory that is used again."""

    def __init__(self, source: DType, to: DType) -> None:
        self.buffer = memoryview(bytearray(CHUNK))
        self._to = to
        self._carrier, self._read = carrier(source), reader(source)
        self._out = np.empty(CHUNK // source.itemsize, carrier(to))
        self._few = np.zeros(16, "<u2")
        self._work = np.empty((3, FEW if to.name == "float16" else 0), "<u4")

    def convert(self, raw: memoryview) -> tuple[NDArray[Any], dict[Loss, NDArray[np.int64]]]:
        """Convert elements. Return them, and the places of those that became infinite or 0."""
        with np.errstate(all="ignore"):
            values = self._read(np.frombuffer(raw, dtype=self._carrier))
            out = self._out[: len(values)]
            through = values.astype("<f4") if out.itemsize == 2 and values.itemsize == 8 else values
            # isal's checksum leaves the upper halves of the vector registers in use, after which ml_dtypes'
            # code takes three times as long. A loop of numpy's ends in `vzeroupper`.
            self._few.max()
            if self._to.name == "float16" and through.itemsize == 4:
                for first in range(0, len(out), FEW):
                    part = slice(first, first + FEW)
                    _to_halves(through[part], out[part].view("<u2"), self._work)
            else:
                np.copyto(out.view(numpy_type(self._to)), through, casting="unsafe")
            return out, {loss: found for loss, found in self._lost(values, out) if len(found)}

    def _lost(self, values: NDArray[Any], out: NDArray[Any]) -> Iterator[tuple[Loss, NDArray[np.int64]]]:
        name, width = self._to.name, out.itemsize
        if width >= values.itemsize:  # it holds the range of narrower types
            return
        unsigned = out.view(f"<u{width}")
        largest = unsigned.dtype.type((1 << 8 * width - 1) - 1)  # all bits but the sign
        if not _all_finite(name, out):
            yield "infinite", np.flatnonzero((unsigned & largest >= INFINITY[name]) & np.isfinite(values))
        zeros = _zeros(unsigned)
        are_many = zeros > len(out) >> 8  # so that their places take longer to use than all elements
        if zeros and not (are_many and zeros == _zeros(values.view(f"<u{values.itemsize}"))):
            is_zero = unsigned & largest == 0
            if are_many:
                is_zero &= values != 0
            places = np.flatnonzero(is_zero)
            yield "zero", places[values[places] != 0]


def _to_halves(values: NDArray[Any], out: NDArray[Any], work: NDArray[Any]) -> None:
    """Round float32 to the bits of float16 as numpy does, which takes up to thirty times as long."""
    # The sum of a number and a power of two, of which it keeps only the digits that the half has, rounds it;
    # what is too large became infinite before. Source: Maratyszcza, FP16, `fp16_ieee_from_fp32_value`.
    bits, (sizes, powers, digits) = values.view("<u4"), work[:, : len(values)]
    np.bitwise_and(bits, 0x7FFF_FFFF, out=sizes)
    np.bitwise_and(sizes, 0x7F80_0000, out=powers)
    np.maximum(powers, 0x3880_0000, out=powers)  # those of subnormal halves have one exponent
    powers += 0x0780_0000
    sums = digits.view("<f4")
    np.multiply(sizes.view("<f4"), np.float32(2.0**112), out=sums)
    sums *= np.float32(2.0**-110)
    sums += powers.view("<f4")
    np.right_shift(digits, 13, out=powers)
    powers &= 0x7C00
    digits &= 0xFFF
    powers += digits
    np.copyto(out, powers, casting="unsafe")
    if len(sizes) and sizes.max() > 0x7F80_0000:
        out[sizes > 0x7F80_0000] = 0x7E00
    np.right_shift(bits, 16, out=powers)
    powers &= 0x8000
    np.bitwise_or(out, powers, out=out, casting="unsafe")


def _all_finite(name: str, values: NDArray[Any]) -> bool:
    """Return whether no bits of a type in INFINITY are those of an infinity or NaN."""
    if not len(values):
        return True
    infinity, width = INFINITY[name], values.itemsize
    unsigned, signed = values.view(f"<u{width}"), values.view(f"<i{width}")
    return bool(unsigned.max() < 1 << 8 * width - 1 | infinity and signed.max() < infinity)


def _zeros(bits: NDArray[Any]) -> int:
    """Return how many numbers are 0 or -0, of their bits as unsigned integers."""
    smallest = 1 << 8 * bits.itemsize - 1  # as a signed integer: the bits of -0
    count = len(bits) - np.count_nonzero(bits)
    has_negative = len(bits) and bits.view(f"<i{bits.itemsize}").min() == -smallest
    return int(count + (np.count_nonzero(bits == smallest) if has_negative else 0))


def carrier(dtype: DType) -> Any:
    """Return the numpy type whose elements hold the bits: unsigned where numpy has no such type."""
    return f"<u{dtype.itemsize}" if dtype.name in OF_ML_DTYPES else f"<f{dtype.itemsize}"


def reader(source: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return what makes numpy floats, which hold every value of the type, of an array of its `carrier`."""
    if source.name not in OF_ML_DTYPES:
        return lambda block: block
    kind = numpy_type(source)
    return lambda block: block.view(kind).astype("<f4")


def count_non_finite(name: str, raw: memoryview) -> int:
    """Return how many elements are NaN or infinite."""
    bits = np.frombuffer(raw, dtype=carrier(DTYPES[name]))
    if name in INFINITY and _all_finite(name, bits):
        return 0
    finite = np.isfinite(reader(DTYPES[name])(bits))
    return 0 if finite.all() else int(finite.size - np.count_nonzero(finite))


def in_float64(tensor: TensorRef) -> NDArray[Any]:
    """Return all values of a float tensor in float64, in its shape."""
    raw = b"".join(map(bytes, stream(tensor)))
    values: NDArray[Any] = reader(tensor.dtype)(np.frombuffer(raw, dtype=carrier(tensor.dtype)))
    return values.astype("<f8").reshape(tensor.shape)


def nearest(odd: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Round float64 to a type in one step; to bfloat16, which numpy lacks, through float32 rounded to odd."""
    if dtype.name != "bfloat16":
        return odd.astype(carrier(dtype))
    single = odd.astype("<f4")
    bits = single.view("<u4")
    ties = np.flatnonzero((bits & 0xFFFF) == 0x8000)
    if len(ties):  # perhaps only for float32: one step away from the middle, the bits say on which side it is
        size, exact = np.abs(single[ties].astype("<f8")), np.abs(odd[ties])
        bits[ties] += (size < exact).astype("<u4") - (size > exact).astype("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(single)
    return np.where(nan, 0x7FC0, rounded).astype("<u2") if nan.any() else rounded.astype("<u2")
