"""Weights of 4-bit codes with a table of 16 numbers: bitsandbytes' NF4 and FP4, nested statistics or not.

A tensor is cut into blocks of `blocksize` numbers in row-major order, whatever its rows; `absmax` has the
largest magnitude of each. Nested, these are 8-bit codes themselves, with a table and largest magnitudes of
their own, less their mean. Source: bitsandbytes' `QuantState.as_dict` and `dequantize_4bit`, 0.49.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ...checkpoint.special_tensors import shape_of
from ...lazy import NDArray, np
from ...tensors.dtypes import DTYPES, DType
from ...tensors.ref import TensorRef, extent
from .fields import HIGH_FIRST, Field, Packing, Sizes, elements, numbers, packed
from .formula import Formula, Grid, Table
from .groups import Group, PackedParts
from .settings import shown

STATE = ".quant_state.bitsandbytes__"  # nf4 or fp4 follows
MAX_STATE = 1 << 16  # bytes of settings of one tensor


def of_state(parts: PackedParts, name: str) -> Group:
    """Return a weight with its statistics as a group; the lead is the table of its settings."""
    kind = parts.lead.rpartition("__")[2].upper()
    weight, said = parts.need(name), _settings(parts, parts.lead)
    shape, dtype, size = _shape(parts, said), _dtype(parts, said), _count(parts, said, "blocksize")
    parts.lead = name
    count = extent(shape) if 0 not in shape else 0
    fits = weight.is_stretch and weight.nbytes == -(-count // 2)
    parts.require(fits, name, f"has {weight.nbytes} bytes for {count} numbers")
    codes = packed(elements(_in_bytes(weight)), Packing(4, 0, order=HIGH_FIRST), count)
    levels = _table(parts, f"{name}.quant_map", 16)
    if kind == "FP4":  # whose code has a negative zero that its table lacks
        levels[8:] = -abs(levels[8:])
    largest = Grid(f"{name}.absmax", _largest(parts, said, name, -(-count // size)), (size,))
    words = (f"bitsandbytes {kind}", f"blocks of {size}", "nested" if "nested_blocksize" in said else "")
    scheme = ", ".join(filter(None, words))
    return parts.group(name, scheme, dtype, shape, Formula(codes, Table(levels), (largest,)))


def _in_bytes(weight: TensorRef) -> TensorRef:
    """Return the bytes of a tensor, whatever the type of the words that hold them."""
    offset, shape = weight.offset * weight.dtype.itemsize, (weight.nbytes,)
    return replace(weight, dtype=DTYPES["uint8"], shape=shape, stride=(1,), offset=offset)


def _settings(parts: PackedParts, name: str) -> dict[str, Any]:
    tensor = parts.of(name, "uint8")
    parts.require(len(tensor.shape) == 1 and tensor.numel <= MAX_STATE, name, "is too long for settings")
    try:
        said = json.loads(elements(tensor).read((0,), tensor.shape).tobytes())
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise parts.refused(f"'{name[:200]}' is no JSON object")
    return said


def _shape(parts: PackedParts, said: dict[str, Any]) -> Sizes:
    shape = shape_of(said.get("shape"))
    if shape is None:
        raise parts.refused(f"its settings say the shape {shown(said.get('shape'))}")
    return shape


def _dtype(parts: PackedParts, said: dict[str, Any]) -> DType:
    name = said.get("dtype")
    if name not in ("bfloat16", "float16", "float32"):
        raise parts.refused(f"its settings say the type {shown(name)}")
    return DTYPES[name]


def _count(parts: PackedParts, said: dict[str, Any], name: str) -> int:
    value = said.get(name)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise parts.refused(f"its settings say {name} = {shown(value)}")
    return value


def _table(parts: PackedParts, name: str, length: int) -> NDArray[Any]:
    levels = numbers(elements(parts.of(name, "float", (length,)))).read((0,), (length,))
    parts.require(bool(np.isfinite(levels).all()), name, "holds a NaN or an infinity")
    return levels


def _largest(parts: PackedParts, said: dict[str, Any], name: str, blocks: int) -> Field:
    """Return the largest magnitude of each block."""
    absmax = f"{name}.absmax"
    if "nested_blocksize" not in said:
        return numbers(elements(parts.of(absmax, "float32", (blocks,))))
    size, offset = _count(parts, said, "nested_blocksize"), said.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not abs(offset) < 3e38:
        raise parts.refused(f"its settings say nested_offset = {shown(offset)}")
    codes: TensorRef = parts.of(absmax, "uint8", (blocks,))
    table = Table(_table(parts, f"{name}.nested_quant_map", 256))
    outer = parts.of(f"{name}.nested_absmax", "float32", (-(-blocks // size),))
    inner = Formula(
        elements(codes), table, (Grid(f"{name}.nested_absmax", numbers(elements(outer)), (size,)),)
    )
    return inner.field().each(lambda values: values + values.dtype.type(offset))
