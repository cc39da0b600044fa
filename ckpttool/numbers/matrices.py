"""A matrix as codes and scales of a scheme, all made when they are read; imports numpy.

Fp8 as vLLM and transformers load it: a scale is the largest magnitude over 448, in float32, of a tensor, a
row or a block of 128 × 128. Blocks of a row are those of compressed-tensors. For MXFP4 and MXFP8 a scale is
the power of two of the largest magnitude, the next from 1.75 of it on, over that of the largest code; for
NVFP4 that magnitude over 6 in fp8, times a scale of the tensor by which the largest is 448. Each element is
divided by its scale in float32 and rounded once. Sources: DeepSeek-V3's `weight_scale_inv`;
compressed-tensors 0.20, `calculate_qparams`, `generate_mx_scales`, `generate_gparam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, Computed, DType, TensorRef
from ..errors import Refused
from .formula import Field, Grid, Sizes, boxes_in, elements, numbers
from .integers import levels_of
from .lookup import round_to
from .micro import OF_MX, OF_NV, of_levels

FP8, FLOAT, BYTE = DTYPES["float8_e4m3fn"], DTYPES["float32"], DTYPES["uint8"]
FP4 = DTYPES["float4_e2m1fn_x2"]
LARGEST = 448.0  # of e4m3
LEAST = 2.0**-126  # of a scale: the reciprocal of a subnormal one is infinite
PIECE = 1 << 17  # elements worked on at a time


@dataclass(slots=True)
class Error:
    """How far a tensor's numbers are from their codes'; complete once the codes are written."""

    elements: int  # of the tensor
    largest: float = 0.0
    _noted: int = 0
    _squares: float = 0.0
    _of: float = 0.0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def is_known(self) -> bool:
        """Whether all of the tensor was seen here: another part may have written it, or an earlier run."""
        return self._noted >= self.elements

    @property
    def nmse(self) -> float:
        """The mean square of the error, over that of the numbers."""
        return self._squares / self._of if self._of else 0.0

    @property
    def relative(self) -> float:
        """The root of that."""
        return math.sqrt(self.nmse)

    def note(self, exact: NDArray[Any], off: NDArray[Any]) -> None:
        """Count numbers in, and how far off they are. Several threads may call this at once."""
        largest = float(np.abs(off).max(initial=0))
        squares, of = (float(np.square(each, dtype="<f8").sum()) for each in (off, exact))
        with self._lock:
            self.largest = max(self.largest, largest)
            self._noted += exact.size
            self._squares += squares
            self._of += of


Fill = Callable[[int, memoryview], None]


def _made(tensor: TensorRef, dtype: DType, shape: Sizes, fill: Fill) -> TensorRef:
    """Return a tensor that a function fills, in the place of another."""
    origin = tensor.storage
    data = Computed.filling(origin.data.path, math.prod(shape) * dtype.itemsize, fill)
    return TensorRef.of_bytes(data, dtype, shape, origin, location=origin.location)


def _require_finite(name: str, tensor: TensorRef, largest: NDArray[Any]) -> None:
    if not np.isfinite(largest).all():
        what = f"'{name[:200]}' holds a NaN, an infinity or more than float32 does: no scale helps"
        raise Refused(tensor.storage.data.path, what)


class GridMatrix:
    """A matrix in fp8 with a scale in float32 for all, for each row, or for each rectangle."""

    def __init__(self, name: str, tensor: TensorRef, block: tuple[int | None, int | None], end: str) -> None:
        self.tensor, self.name, self.error = tensor, name, Error(tensor.numel)
        self.block: Sizes = tuple(size or n for size, n in zip(block, tensor.shape, strict=True))
        self.shape: Sizes = tuple(-(-n // size) for n, size in zip(tensor.shape, self.block, strict=True))
        self._numbers, self._lock = numbers(elements(tensor)), Lock()
        scales = _made(tensor, FLOAT, (1,) if block == (None, None) else self.shape, self._fill_scales)
        self.parts = {"": _made(tensor, FP8, tensor.shape, self._fill), end: scales}

    def _fill_scales(self, start: int, out: memoryview) -> None:
        out[:] = memoryview(self._scales.tobytes())[start : start + len(out)]

    @property
    def _scales(self) -> Any:
        with self._lock:  # the first of several threads reads the matrix
            return self._found

    @cached_property
    def _found(self) -> NDArray[Any]:
        largest = np.zeros(self.shape, "<f4")
        for begin, size in boxes_in(self.tensor.shape, 0, self.tensor.numel, PIECE):
            values = np.abs(self._numbers.read(begin, size))
            first = [at // block for at, block in zip(begin, self.block, strict=True)]
            for axis in (1, 0):  # along rows first, which numpy does fifteen times as fast
                at, n, block = begin[axis], size[axis], self.block[axis]
                starts = np.maximum(np.arange(first[axis] * block, at + n, block) - at, 0)
                values = np.maximum.reduceat(values, starts, axis)
            place = largest[_box(first, values.shape)]
            np.maximum(place, values, out=place)
        _require_finite(self.name, self.tensor, largest)
        scales: NDArray[Any] = np.maximum(largest / np.float32(LARGEST), np.float32(LEAST))
        scales[largest == 0] = 1
        return scales

    def _fill(self, start: int, out: memoryview) -> None:
        scales = self._scales
        origins = (self.tensor.storage,)
        field = Field(self.shape, lambda begin, size: scales[_box(begin, size)], origins, FLOAT)
        grid = Grid(self.name, field, self.block)
        codes, levels = np.frombuffer(out, np.uint8), levels_of(FP8)
        for begin, size in boxes_in(self.tensor.shape, start, len(codes), PIECE):
            exact = self._numbers.read(begin, size)
            values = exact.copy()
            grid.apply(np.divide, values, begin)
            made, codes = codes[: exact.size].reshape(size), codes[exact.size :]
            round_to(FP8, values, made)
            levels(made, values)
            grid.apply(np.multiply, values, begin)
            self.error.note(exact, np.subtract(values, exact, out=values))


def _box(begin: Iterable[int], size: Sizes) -> tuple[slice, ...]:
    return tuple(slice(i, i + n) for i, n in zip(begin, size, strict=True))


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """A scheme with a scale for each block of a row.

    Attributes:
        size: of a block.
        code: the type of the codes.
        power: the exponent of the largest code's power of two; None where scales are fp8 with one of all.
        end: what follows a name for the codes.
    """

    size: int
    code: DType
    power: int | None
    end: str = ""


MXFP8 = BlockScheme(OF_MX, FP8, 8)
MXFP4 = BlockScheme(OF_MX, FP4, 2, "_packed")
NVFP4 = BlockScheme(OF_NV, FP4, None, "_packed")


class BlockMatrix:
    """A matrix in blocks of its rows, which must be whole. Those that share a scale of all are partners."""

    def __init__(self, name: str, tensor: TensorRef, scheme: BlockScheme) -> None:
        self.tensor, self.name, self.scheme, self.error = tensor, name, scheme, Error(tensor.numel)
        self.partners: Sequence[BlockMatrix] = (self,)
        self._numbers, self._lock = numbers(elements(tensor)), Lock()
        rows, columns = tensor.shape
        self._in_byte = scheme.code.numbers
        codes = (rows, columns // self._in_byte)
        kind, shape = FP8 if scheme.power is None else BYTE, (rows, columns // scheme.size)
        self.parts = {
            scheme.end: _made(tensor, FP8 if scheme.code is FP8 else BYTE, codes, self._fill),
            "_scale": _made(tensor, kind, shape, self._fill_scales),
        }
        if scheme.power is None:
            self.parts["_global_scale"] = _made(tensor, FLOAT, (1,), self._fill_whole)

    @property
    def largest(self) -> float:
        """The largest magnitude. Raises Refused where that is no number of float32."""
        with self._lock:  # the first of several threads reads the matrix
            return self._largest

    @cached_property
    def _largest(self) -> float:
        boxes = boxes_in(self.tensor.shape, 0, self.tensor.numel, PIECE)
        found = np.array([np.abs(self._numbers.read(*box)).max(initial=0) for box in boxes], "<f4")
        _require_finite(self.name, self.tensor, found)
        return float(found.max(initial=0))

    @cached_property
    def _whole(self) -> NDArray[Any]:
        """The scale of all partners, by which theirs of blocks are divided."""
        with np.errstate(all="ignore"):
            largest = np.float32(max(each.largest for each in self.partners))
            whole = np.float32(1) / largest * np.float32(6 * LARGEST)  # as torch divides a number
        return np.array([whole if np.isfinite(whole) else 1], "<f4")

    def _fill_whole(self, start: int, out: memoryview) -> None:
        out[:] = memoryview(self._whole.tobytes())[start : start + len(out)]

    def _read(self, first: int, count: int) -> NDArray[Any]:
        """Return blocks, each a row of an array."""
        size = self.scheme.size
        boxes = boxes_in(self.tensor.shape, first * size, count * size, PIECE)
        parts = [self._numbers.read(*box).reshape(-1) for box in boxes]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(-1, size)

    def _scales(self, blocks: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the codes of the scales of blocks, and the scales."""
        largest = np.abs(blocks).max(1)
        _require_finite(self.name, self.tensor, largest)
        if self.scheme.power is not None:
            digits, exponents = np.frexp(largest)  # digits of 1/2 and more
            exponents = exponents - 1 + (digits >= 0.875) - self.scheme.power
            exponents = np.clip(np.where(largest > 0, exponents, 0), -127, 127 - self.scheme.power)
            return (exponents + 127).astype("u1"), np.ldexp(np.float32(1), exponents).astype("<f4")
        codes = np.empty(len(blocks), "u1")
        round_to(FP8, np.minimum(largest / np.float32(6) * self._whole, np.float32(LARGEST)), codes)
        np.maximum(codes, 1, out=codes)  # a scale of 0 would lose what is smallest, and divide by 0
        scales = np.empty(len(blocks), "<f4")
        levels_of(FP8)(codes, scales)
        return codes, scales / self._whole

    def _fill_scales(self, start: int, out: memoryview) -> None:
        step = PIECE // self.scheme.size
        for done in range(0, len(out), step):
            blocks = self._read(start + done, min(step, len(out) - done))
            out[done : done + len(blocks)] = self._scales(blocks)[0].tobytes()

    def _fill(self, start: int, out: memoryview) -> None:
        width, step = self.scheme.size // self._in_byte, PIECE // self.scheme.size
        first, end = start // width, -(-(start + len(out)) // width)
        for at in range(first, end, step):
            exact = self._read(at, min(step, end - at))
            codes, values = self._packed(exact)
            low, high = max(start, at * width), min(start + len(out), at * width + len(codes))
            out[low - start : high - start] = codes[low - at * width : high - at * width].tobytes()
            asked = slice((low - at * width) * self._in_byte, (high - at * width) * self._in_byte)
            exact = exact.reshape(-1)[asked]
            self.error.note(exact, values.reshape(-1)[asked] - exact)

    def _packed(self, exact: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the codes of blocks, as bytes, and the numbers that they stand for."""
        scales = self._scales(exact)[1][:, None]
        values, codes = np.clip(exact / scales, -LARGEST, LARGEST), np.empty(exact.shape, "u1")
        round_to(self.scheme.code, values, codes)
        (levels_of(FP8) if self.scheme.code is FP8 else of_levels())(codes, values)
        values *= scales
        return (codes if self._in_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1), values


PackedMatrix = GridMatrix | BlockMatrix
