"""Weights of 8 bits an element with a scale beside them: fp8 and int8, by tensor, channel, group or block.

Sources: DeepSeek-V3's README_WEIGHTS.md (`weight_scale_inv`, 128 × 128, multiplied), vLLM's `fp8.py`,
FBGEMM's and ModelOpt's checkpoints (`weight_scale`), compressed-tensors' `float-quantized` and
`int-quantized`, Mistral's `qscale_weight`, bitsandbytes' LLM.int8() (`SCB`, the largest of each row).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from ...lazy import np
from ...tensors.dtypes import DType, numpy_type
from ...tensors.ref import TensorRef
from . import fp4
from .fields import Sizes, elements
from .formula import Formula, Grid, Integers, Table
from .groups import Group, PackedParts

USUAL_BLOCK = 128  # DeepSeek's, whose own files for inference have no settings that say so
BY_127 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def scale_of(tensors: Mapping[str, TensorRef], name: str) -> str | None:
    """Return the name of the scale of an 8-bit tensor; None where there is none by any known name."""
    stem = name.removesuffix(".weight")
    beside = [f"{stem}.{end}" for end in ("scale_weight", "qscale_weight", "scale")] if stem != name else []
    return next((each for each in (f"{name}_scale_inv", f"{name}_scale", *beside) if each in tensors), None)


def scaled(parts: PackedParts, scale: str) -> Group:
    """Return a weight of fp8 or int8 with its scale as a group. Raises Refused where they don't fit."""
    weight, given = parts.tensors[parts.lead], parts.of(scale, "float bfloat uint8")
    if weight.dtype.name == "uint8" or (weight.dtype.name == "int8" and given.dtype.name in fp4.EXPONENTS):
        return fp4.of_rows(parts, parts.lead, scale)
    grid, words = grid_over(parts, scale, weight.shape)
    zero = None
    if (name := f"{parts.lead}_zero_point") in parts.tensors:
        parts.of(name, "float bfloat int", given.shape)
        zero = grid_over(parts, name, weight.shape)[0]
    formula = Formula(elements(weight), levels_of(weight.dtype), (grid,), zero)
    dtype = given.dtype if given.dtype.name in ("bfloat16", "float16") else parts.settings.dtype
    return parts.group(parts.lead, f"{_called(weight.dtype)}, {words}", dtype, weight.shape, formula)


def levels_of(dtype: DType) -> Integers | Table:
    """Return the numbers of all codes of an 8-bit type."""
    if dtype.name == "int8":
        return Integers()
    return Table(np.arange(256, dtype=np.uint8).view(numpy_type(dtype)).astype("<f4"))


def _called(dtype: DType) -> str:
    return {"int8": "int8", "float8_e4m3fn": "fp8"}.get(dtype.name, dtype.name.replace("float8_", "fp8 "))


def grid_over(parts: PackedParts, name: str, shape: Sizes) -> tuple[Grid, str]:
    """Return the scales or zeros of a tensor, and in words what each of them is for.

    The size of a block is what the settings say. Raises Refused where the scales are too few or too many.
    """
    given = parts.need(name)
    tensor = _with_axes(given, shape)
    if tensor is None:
        raise parts.refused(f"'{name[:200]}' of shape {list(given.shape)} fits no shape {list(shape)[:8]}")
    cut = [axis for axis, (n, s) in enumerate(zip(shape, tensor.shape, strict=True)) if 1 < s != n]
    sizes = _blocks(parts, shape, tensor.shape, cut)
    block = tuple(
        sizes[axis] if axis in cut else (1 if s == n else max(n, 1))
        for axis, (n, s) in enumerate(zip(shape, tensor.shape, strict=True))
    )
    counts = tuple(-(-n // size) if n else s for n, size, s in zip(shape, block, tensor.shape, strict=True))
    if counts != tensor.shape:
        blocks = " × ".join(map(str, block))
        what = f"is of shape {list(given.shape)}, and blocks of {blocks} of {list(shape)} are {list(counts)}"
        raise parts.refused(f"'{name[:200]}' {what}")
    return Grid(name, fp4.scales(elements(tensor)), block), _in_words(parts, given.shape, shape, block, cut)


def _with_axes(tensor: TensorRef, shape: Sizes) -> TensorRef | None:
    """Return scales with as many axes as the tensor: those of its first axes, or one for all of it."""
    given, axes = tensor.shape, len(shape)
    if prod(given) == 1:
        return replace(tensor, shape=(1,) * axes, stride=(1,) * axes)
    missing = axes - len(given)
    if missing < 0 or (missing and given != shape[: len(given)]):
        return None
    return replace(tensor, shape=(*given, *(1,) * missing), stride=(*tensor.stride, *(1,) * missing))


def _blocks(parts: PackedParts, shape: Sizes, scales: Sizes, cut: list[int]) -> dict[int, int]:
    """Return the size of blocks along the last two axes, as far as these are cut."""
    last = len(shape) - 1
    if not set(cut) <= {last - 1, last}:
        raise parts.refused(f"there are {list(scales)} scales for {list(shape)}, cut along an outer axis")
    if cut == [last]:
        is_block = last > 0 and scales[last - 1] == 1 != shape[last - 1]  # not groups of each row
        return {last: _group_size(parts, shape[last], scales[last], is_block)}
    return dict(zip((last - 1, last), _block_sizes(parts), strict=True)) if cut else {}


def _group_size(parts: PackedParts, size: int, groups: int, is_block: bool) -> int:
    """Return the size of groups that the settings say, or into which a row divides."""
    named = [each.number("group_size") or 0 for each in parts.settings.groups()]
    for said in (*named, *(pair[1] for pair in _pairs(parts))):
        if said > 0 and -(-size // said) == groups:
            return said
    if -(-size // USUAL_BLOCK) == groups and size != groups * USUAL_BLOCK:
        if is_block or size % groups:
            return USUAL_BLOCK
        what = f"are of {size // groups} elements or of {USUAL_BLOCK}"
        raise parts.refused(f"nothing says whether the {groups} groups of its rows {what}")
    if size % groups:
        raise parts.refused(f"{groups} groups don't divide a row of {size}")
    return size // groups


def _block_sizes(parts: PackedParts) -> Sizes:
    return next(_pairs(parts), (USUAL_BLOCK, USUAL_BLOCK))


def _pairs(parts: PackedParts) -> Iterator[Sizes]:
    """Yield the block sizes that the settings name."""
    settings = parts.settings
    pairs = settings.pair("weight_block_size"), *(w.pair("block_structure") for w in settings.groups())
    yield from filter(None, pairs)


def _in_words(parts: PackedParts, given: Sizes, shape: Sizes, block: Sizes, cut: list[int]) -> str:
    if cut == [len(shape) - 1]:
        return f"groups of {block[-1]}"
    pair = next(_pairs(parts), block[-2:])
    # One block may hold all of a small tensor.
    if cut or (len(given) == len(shape) > 1 and pair != block[-2:]):
        return f"blocks of {pair[0]} × {pair[1]}"
    return "per tensor" if block == shape else "per channel"


def by_largest(parts: PackedParts, name: str) -> Group:
    """Return an int8 weight of bitsandbytes with the largest magnitude of each row as a group."""
    weight = parts.tensors[parts.lead]
    parts.require(len(weight.shape) == 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    parts.of(name, "float", weight.shape[:1])
    if form := parts.find(f"{parts.lead}_format"):
        code = (
            bytes(elements(form).read((0,) * len(form.shape), form.shape).tobytes())
            if form.numel == 1
            else b"?"
        )
        parts.require(not code.strip(b"\0"), parts.lead, "is tiled for another kind of GPU, not in rows")
    grid = grid_over(parts, name, weight.shape)[0]
    formula = Formula(elements(weight), Integers(), (grid, BY_127))
    return parts.group(parts.lead, "bitsandbytes int8", parts.settings.dtype, weight.shape, formula)
