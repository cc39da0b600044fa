"""Weights of 4-bit floats (e2m1), two in a byte: MXFP4 with a power of two for 32, NVFP4 with fp8 for 16.

Sources: OCP's Microscaling Formats 1.0 (e2m1, e8m0), the `convert_moe_packed_tensors` of transformers' MXFP4
(gpt-oss: `_blocks`, `_scales`, experts transposed), compressed-tensors' `nvfp4-pack-quantized` (the global
scale divides) and ModelOpt's NVFP4 (`weight_scale_2` multiplies).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...lazy import NDArray, np
from ...tensors.dtypes import DTYPES
from ...tensors.ref import TensorRef
from .fields import Field, Packing, elements, numbers, packed
from .formula import Formula, Grid, Table
from .groups import Group, PackedParts

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OF_MX, OF_NV = 32, 16  # numbers that share a scale
EXPONENTS = ("uint8", "float8_e8m0fnu")  # types of scales that are powers of two


def _levels() -> Table:
    return Table(np.array([*MAGNITUDES, *(-each for each in MAGNITUDES)], "<f4"))


def scales(given: Field) -> Field:
    """Return scales: numbers, or the powers of two whose exponents they are, infinite for the code of NaN."""
    if given.dtype.name not in EXPONENTS:
        return numbers(given)

    def power(exponents: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            powers: NDArray[Any] = np.ldexp(np.float32(1), exponents.astype("i4") - 127)
        return powers

    return given.each(power)


def of_experts(parts: PackedParts, name: str) -> Group:
    """Return blocks of [experts, rows, groups, 16] bytes with their scales as a group."""
    blocks = parts.of(parts.lead, "uint8")
    parts.require(
        len(blocks.shape) == 4 and blocks.shape[-1] == OF_MX // 2, parts.lead, "isn't [E, rows, groups, 16]"
    )
    turned, (experts, rows, groups, _) = parts.strips.turned, blocks.shape
    given = parts.of(f"{name}_scales", "uint8", (experts, rows, groups))
    whole = blocks.stride[-2] == OF_MX // 2 and blocks.stride[-1] == 1
    parts.require(whole, parts.lead, "is a view of another tensor")
    flat = replace(blocks, shape=(experts, rows, groups * OF_MX // 2), stride=(*blocks.stride[:2], 1))
    codes = packed(turned(flat), Packing(4, 1), groups * OF_MX)
    scale = Grid(f"{name}_scales", scales(turned(given)), (1, OF_MX, 1))
    formula = Formula(codes, _levels(), (scale,))
    return parts.group(name, "MXFP4", DTYPES["bfloat16"], codes.shape, formula)


def of_rows(parts: PackedParts, name: str, scale: str, *, needs_whole: bool = True) -> Group:
    """Return packed rows with their scales as a group: fp8 scales with a global one, or powers of two."""
    weight, given = parts.of(parts.lead, "uint8 int8"), parts.need(scale)
    parts.require(len(weight.shape) == 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    rows, columns = weight.shape[0], weight.shape[1] * 2
    size = OF_MX if given.dtype.name in EXPONENTS else OF_NV
    parts.of(scale, "uint8 float8", (rows, -(-columns // size)))
    parts.require(
        columns % size == 0, parts.lead, f"has rows of {columns}, which groups of {size} don't divide"
    )
    has_whole = size == OF_NV and (needs_whole or f"{name}_scale_2" in parts.tensors)
    field = _with_whole(parts, name, given) if has_whole else scales(elements(given))
    codes = packed(elements(weight), Packing(4, 1), columns)
    formula = Formula(codes, _levels(), (Grid(scale, field, (1, size)),))
    return parts.group(
        name, "MXFP4" if size == OF_MX else "NVFP4", parts.settings.dtype, codes.shape, formula
    )


def _with_whole(parts: PackedParts, name: str, given: TensorRef) -> Field:
    """Return the scales of groups of 16 with that of the whole tensor."""
    divides = f"{name}_global_scale" in parts.tensors
    whole = parts.of(f"{name}_global_scale" if divides else f"{name}_scale_2", "float32")
    parts.require(whole.numel == 1, parts.lead, "has more than one global scale")

    def both(values: NDArray[Any]) -> NDArray[Any]:
        by = numbers(elements(whole)).read((0,) * len(whole.shape), whole.shape).reshape(())
        with np.errstate(all="ignore"):
            products: NDArray[Any] = values / by if divides else values * by
        return products

    return replace(numbers(elements(given)).each(both), storages=(given.storage, whole.storage))
