"""Blocks of few floats with a scale each: MXFP4 and MXFP8 (a power of two for 32), NVFP4 (fp8 for 16).

Sources: OCP's Microscaling Formats 1.0 (e2m1, e8m0), the `convert_moe_packed_tensors` of transformers' MXFP4
(gpt-oss: `_blocks`, `_scales`, experts transposed), compressed-tensors' `nvfp4-pack-quantized` (the global
scale divides), ModelOpt's NVFP4 (`weight_scale_2` multiplies; experts [E, in, out] keep that order, so that
two inputs share a byte), cuBLAS' "1D block scaling factors layout".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, TensorRef
from .formula import Field, Formula, Grid, Packing, Sizes, Table, elements, numbers, packed
from .settings import Group, PackedParts

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OF_MX, OF_NV = 32, 16  # numbers that share a scale
EXPONENTS = ("uint8", "float8_e8m0fnu")  # types of scales that are powers of two


def of_levels() -> Table:
    """Return the numbers of the codes of e2m1."""
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
    fits = len(blocks.shape) == 4 and blocks.shape[-1] == OF_MX // 2
    parts.require(fits, parts.lead, "isn't [E, rows, groups, 16]")
    turned, (experts, rows, groups, _) = parts.strips.turned, blocks.shape
    given = parts.of(f"{name}_scales", "uint8", (experts, rows, groups))
    whole = blocks.stride[-2] == OF_MX // 2 and blocks.stride[-1] == 1
    parts.require(whole, parts.lead, "is a view of another tensor")
    flat = replace(blocks, shape=(experts, rows, groups * OF_MX // 2), stride=(*blocks.stride[:2], 1))
    codes = packed(turned(flat), Packing(4, 1), groups * OF_MX)
    scale = Grid(f"{name}_scales", scales(turned(given)), (1, OF_MX, 1))
    formula = Formula(codes, of_levels(), (scale,))
    return parts.group(name, "MXFP4", DTYPES["bfloat16"], codes.shape, formula)


def fp4_rows(
    parts: PackedParts, name: str, scale: str, *, needs_whole: bool = True, is_swizzled: bool = False
) -> Group:
    """Return packed rows with their scales as a group: fp8 scales with a global one, or powers of two.

    Experts may be packed along their inputs, the axis before the last.
    """
    weight, given = parts.of(parts.lead, "uint8 int8 float4"), parts.of(scale, "uint8 float8")
    axes = len(weight.shape)
    parts.require(axes >= 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    has_whole = not {*_wholes(scale)}.isdisjoint(parts.tensors)
    if given.dtype.name == "uint8" and has_whole:
        given = replace(given, dtype=DTYPES["float8_e4m3fn"])
    size = OF_MX if given.dtype.name in EXPONENTS else OF_NV
    axis = axes - 1
    if axes > 2 and given.shape == _grouped(weight.shape, axes - 2, size):
        axis = axes - 2
    length = weight.shape[axis] * 2
    what = f"has rows of {length}, which groups of {size} don't divide"
    parts.require(length % size == 0, parts.lead, what)
    if is_swizzled:
        field = unswizzled(parts, scale, given, (*weight.shape[:-1], length), size)
    else:
        parts.of(scale, "uint8 float8", _grouped(weight.shape, axis, size))
        field = elements(given)
    is_whole = size == OF_NV and (needs_whole or has_whole)
    field = with_whole(parts, scale, field) if is_whole else scales(field)
    codes = packed(elements(replace(weight, dtype=DTYPES["uint8"])), Packing(4, axis), length)
    block = tuple(size if each == axis else 1 for each in range(axes))
    formula = Formula(codes, of_levels(), (Grid(scale, field, block),))
    kind = "MXFP4" if size == OF_MX else "NVFP4"
    return parts.group(name, kind, parts.settings.dtype, codes.shape, formula)


def _grouped(shape: Sizes, axis: int, size: int) -> Sizes:
    """Return the shape of the scales of groups along an axis of bytes of two numbers."""
    return (*shape[:axis], -(-shape[axis] * 2 // size), *shape[axis + 1 :])


def _wholes(scale: str) -> tuple[str, str]:
    """Return the names of the scale of a whole tensor beside those of groups: one divides, one multiplies."""
    return f"{scale.removesuffix('_scale')}_global_scale", f"{scale}_2"


def with_whole(parts: PackedParts, scale: str, given: Field) -> Field:
    """Return the scales of groups with that of the whole tensor, or of each expert.

    Raises Refused where there are others.
    """
    dividing, multiplying = _wholes(scale)
    divides = dividing in parts.tensors
    whole = parts.of(dividing if divides else multiplying, "float32")
    is_one, experts = whole.numel == 1, given.shape[:1] if len(given.shape) > 2 else ()
    fits = is_one or (whole.numel,) == whole.shape[:1] == experts
    parts.require(fits, parts.lead, "has more than one global scale")

    def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
        values = numbers(given).read(begin, size)
        by = numbers(elements(whole)).read((0,) * len(whole.shape), whole.shape).reshape(-1)
        by = by if is_one else by[begin[0] : begin[0] + size[0]]
        by = by.reshape(-1, *(1 for _ in size[1:]))
        with np.errstate(all="ignore"):
            products: NDArray[Any] = values / by if divides else values * by
        return products

    return replace(numbers(given), read=read, storages=(*given.storages, whole.storage))


def unswizzled(parts: PackedParts, name: str, given: TensorRef, shape: Sizes, size: int) -> Field:
    """Return the scales of groups of a matrix's rows, which lie in tiles of 128 × 4, as cuBLAS wants them."""
    parts.require(len(shape) == 2, parts.lead, f"is of shape {list(shape)}, and no matrix")
    what = f"has rows of {shape[1]}, which groups of {size} don't divide"
    parts.require(not shape[1] % size, parts.lead, what)
    rows, groups = shape[0], shape[1] // size
    high, wide = -(-rows // 128), -(-groups // 4)
    fits = given.numel == high * wide * 512 and given.is_contiguous
    parts.require(fits, name, f"has {given.numel} scales, and {high * wide * 512} fit it")
    # A tile is 32 times four rows of 4, of which the second is 32 rows below the first.
    tiles, steps = (high, 4, 32, wide, 4), (wide * 512, 4, 16, 512, 1)
    whole = elements(replace(given, shape=tiles, stride=steps))

    def read(begin: Sizes, box: Sizes) -> NDArray[Any]:
        (top, above), (left, before) = divmod(begin[0], 128), divmod(begin[1], 4)
        tall, broad = -(-(above + box[0]) // 128), -(-(before + box[1]) // 4)
        values = whole.read((top, 0, 0, left, 0), (tall, 4, 32, broad, 4)).reshape(tall * 128, broad * 4)
        return values[above : above + box[0], before : before + box[1]]

    return Field((rows, groups), read, whole.storages, given.dtype)
