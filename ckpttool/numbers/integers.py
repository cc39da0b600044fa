"""The schemes of packed weights: GPTQ, AWQ, compressed-tensors, fp8, int8 and bitsandbytes.

Sources: AutoGPTQ's and GPTQModel's `pack` (words along the inputs, zeros along the outputs, stored less one
in format 1, `g_idx` the group of each input), AutoAWQ's `WQLinear_GEMM` (words along the outputs, in the
order 0 2 4 6 1 3 5 7), compressed-tensors' `pack_to_int32` (words along the inputs, codes less 2^(bits - 1);
older versions have whole codes in each word).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd, prod
from typing import Any

from ..core.checkpoint.special_tensors import shape_of
from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, DType, TensorRef, extent, numpy_type
from ..errors import Unsupported
from .formula import Field, Formula, Grid, Integers, Packing, Sizes, Table, elements, numbers, packed
from .micro import EXPONENTS, OF_MX, fp4_rows, scales, unswizzled
from .settings import Group, PackedParts, shown

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OF_GPTQ = ("gptq", "gptqmodel", "auto-round", "intel/auto-round")
MANY_GROUPS = 1 << 16  # of which all are read for each piece, where `g_idx` permutes them


def of_modules(parts: PackedParts, stem: str) -> Group:
    """Return `qweight`, `qzeros`, `scales` and `g_idx` of a layer as a group."""
    settings = parts.settings
    if settings.method in OF_GPTQ:
        return _gptq(parts, stem)
    if settings.method == "awq":
        return _awq(parts, stem)
    said = f"{settings.path} says '{settings.method[:40]}'" if settings.section else "no config.json says so"
    raise parts.refused(f"its layout is that of GPTQ or of AWQ, and {said}: put the model's own beside it")


def _gptq(parts: PackedParts, stem: str) -> Group:
    form = parts.settings.text("checkpoint_format") or _packing(parts) or "gptq"
    if form not in ("gptq", "gptq_v2"):
        what = f"is of GPTQ's format '{form[:40]}', and only gptq and gptq_v2 are read"
        raise Unsupported(parts.path, what)
    bits = parts.settings.number("bits") or 4
    parts.require(bits in (2, 3, 4, 8), parts.lead, f"is of {bits} bits, says {parts.settings.path}")
    turned = parts.strips.turned
    weight, scales = parts.of(parts.lead, "int32"), parts.of(f"{stem}.scales", "float16 bfloat16 float32")
    shapes = f"{list(weight.shape)} and {list(scales.shape)}"
    are_matrices = len(weight.shape) == len(scales.shape) == 2
    parts.require(are_matrices, parts.lead, f"and its scales are of shapes {shapes}")
    inputs, (groups, outputs) = weight.shape[0] * 32 // bits, scales.shape
    fits = weight.shape[1] == outputs and weight.shape[0] * 32 % bits == 0 and outputs * bits % 32 == 0
    parts.require(fits, parts.lead, f"and its scales are of shapes {shapes}, which don't fit {bits} bits")
    zeros = parts.of(f"{stem}.qzeros", "int32", (groups, outputs * bits // 32))
    words = bits // gcd(bits, 32) if bits == 3 else 1
    zero = packed(turned(zeros), Packing(bits, 0, words), outputs)
    if form == "gptq":
        zero = zero.each(lambda codes: codes + 1 & (1 << bits) - 1)
    size = parts.settings.number("group_size") or -1
    block = (1, size if size > 0 else max(inputs, 1))
    index = _index(parts, f"{stem}.g_idx", inputs, groups, block[1])
    if index is None and -(-inputs // block[1]) != groups:
        raise parts.refused(f"it has {groups} groups, and {inputs} inputs in groups of {block[1]} don't")
    scale_grid = Grid(f"{stem}.scales", numbers(turned(scales)), block, index)
    zero_grid = Grid(f"{stem}.qzeros", zero, block, index)
    codes = packed(turned(weight), Packing(bits, 1, words), inputs)
    formula = Formula(codes, Integers(), (scale_grid,), zero_grid)
    order = ", in no order (g_idx)" if index else ""
    scheme = f"GPTQ, {bits} bits, groups of {block[1] if size > 0 else 'a row'}{order}"
    return parts.group(f"{stem}.weight", scheme, scales.dtype, codes.shape, formula)


def _packing(parts: PackedParts) -> str:
    """Return the format that auto-round names: `auto_round:auto_gptq` is GPTQ's first."""
    named = parts.settings.text("packing_format")
    return "gptq" if named in ("auto_round:auto_gptq", "auto_round:gptq") else named


def _index(parts: PackedParts, name: str, inputs: int, groups: int, size: int) -> Field | None:
    """Return the group of each input; None where they are in order, as without an index."""
    if name not in parts.tensors:
        return None
    tensor = parts.of(name, "int", (inputs,))
    field, in_order = elements(tensor), True
    for begin in range(0, inputs, 1 << 18):
        places = field.read((begin,), (min(1 << 18, inputs - begin),))
        if places.min() < 0 or places.max() >= groups:
            wrong = places.min() if places.min() < 0 else places.max()
            raise parts.refused(f"'{name[:200]}' names group {wrong}, and there are {groups}")
        in_order = in_order and np.array_equal(places, np.arange(begin, begin + len(places)) // size)
    if not in_order:
        parts.require(groups <= MANY_GROUPS, name, f"is in no order, with {groups} groups")
    return None if in_order else field


def _awq(parts: PackedParts, stem: str) -> Group:
    settings = parts.settings
    form, bits = (settings.text("version") or "gemm").lower(), settings.number("bits", "w_bit") or 4
    if form != "gemm" or bits != 4:
        what = f"is of AWQ's version '{form[:40]}' with {bits} bits, and only gemm with 4 is read"
        raise Unsupported(parts.path, what)
    turned = parts.strips.turned
    weight, scales = parts.of(parts.lead, "int32"), parts.of(f"{stem}.scales", "float16 bfloat16 float32")
    parts.require(len(weight.shape) == len(scales.shape) == 2, parts.lead, "and its scales are no matrices")
    inputs, (groups, outputs) = weight.shape[0], scales.shape
    parts.of(parts.lead, "int32", (inputs, -(-outputs // 8)))
    zeros = parts.of(f"{stem}.qzeros", "int32", (groups, weight.shape[1]))
    parts.require(outputs % 8 == 0, parts.lead, f"has {outputs} outputs, which no words of 8 hold")
    size = settings.number("group_size", "q_group_size") or -1
    block = (1, size if size > 0 else max(inputs, 1))
    if inputs != groups * block[1]:
        raise parts.refused(f"it has {groups} groups of {block[1]}, and {inputs} inputs")

    def unpacked(words: TensorRef) -> Field:
        return packed(turned(words), Packing(4, 0, order=AWQ_ORDER), outputs)

    scale, zero = numbers(turned(scales)), Grid(f"{stem}.qzeros", unpacked(zeros), block)
    formula = Formula(unpacked(weight), Integers(), (Grid(f"{stem}.scales", scale, block),), zero)
    scheme = f"AWQ, 4 bits, groups of {block[1]}"
    return parts.group(f"{stem}.weight", scheme, scales.dtype, (outputs, inputs), formula)


def of_rows(parts: PackedParts, name: str) -> Group:
    """Return `weight_packed`, `weight_scale`, `weight_shape` and so on of compressed-tensors as a group."""
    weight = parts.of(parts.lead, "int32")
    parts.require(len(weight.shape) == 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    told = parts.of(f"{name}_shape", "int", (2,))
    shape: Sizes = tuple(elements(told).read((0,), (2,)).tolist())
    bits, is_whole = _bits(parts, shape)
    scales = parts.of(f"{name}_scale", "float bfloat")
    parts.require(len(scales.shape) == 2, f"{name}_scale", f"is of shape {list(scales.shape)}, and no matrix")
    groups = scales.shape[1]
    parts.of(f"{name}_scale", "float bfloat", (shape[0], groups))
    block = (1, max(shape[1], 1) if groups == 1 else _size(parts, shape[1], groups))
    index = _index(parts, f"{name}_g_idx", shape[1], groups, block[1])
    scale = Grid(f"{name}_scale", numbers(elements(scales)), block, index)
    zero, words = None, 1 if is_whole else bits // gcd(bits, 32)
    if f"{name}_zero_point" in parts.tensors:
        held = (_words(bits, is_whole, shape[0]), groups)
        points = elements(parts.of(f"{name}_zero_point", "int32", held))
        zeros = packed(points, Packing(bits, 0, words), shape[0])
        zero = Grid(f"{name}_zero_point", zeros, block, index)
    codes = packed(elements(weight), Packing(bits, 1, words), shape[1])
    formula = Formula(codes, Integers(0 if zero else 1 << bits - 1), (scale,), zero)
    by = "per channel" if groups == 1 else f"groups of {block[1]}"
    by += ", in no order (g_idx)" if index else ""
    return parts.group(name, f"compressed-tensors int{bits}, {by}", scales.dtype, shape, formula)


def _words(bits: int, is_whole: bool, count: int) -> int:
    """Return how many words hold some codes: whole ones in each, or one after another."""
    return -(-count // (32 // bits)) if is_whole else -(-count * bits // 32)


def _bits(parts: PackedParts, shape: Sizes) -> tuple[int, bool]:
    """Return the bits of a code and whether words hold whole codes: the one way that fits the shapes."""
    rows, words = parts.tensors[parts.lead].shape
    named = {group.number("num_bits") or 0 for group in parts.settings.groups()} or {4, 8}
    known = [bits for bits in named if 1 <= bits <= 8]
    ways = [(bits, is_whole) for bits in known for is_whole in (True, False) if 32 % bits or is_whole]
    fitting = [way for way in ways if _words(*way, max(shape[1], 0)) == words]
    if shape[0] != rows or shape[1] < 0 or len(fitting) != 1:
        said = f"{[rows, words]} words for {list(shape)} numbers of {sorted(map(str, named))} bits"
        raise parts.refused(f"there are {said}, in {len(fitting)} ways")
    return fitting[0]


def _size(parts: PackedParts, inputs: int, groups: int) -> int:
    """Return the size of groups: the one that the settings name, or into which the inputs divide."""
    for group in parts.settings.groups():
        size = group.number("group_size") or 0
        if size > 0 and -(-inputs // size) == groups:
            return size
    if not groups or inputs % groups:
        raise parts.refused(f"{groups} groups don't divide {inputs} inputs")
    return inputs // groups


# ---- fp8 and int8 with scales, by tensor, channel, group or block
#
# Sources: DeepSeek-V3's README_WEIGHTS.md (`weight_scale_inv`, 128 × 128, multiplied), vLLM's `fp8.py`,
# FBGEMM's and ModelOpt's checkpoints (`weight_scale`), compressed-tensors' `float-quantized` and `int-
# quantized`, Mistral's `qscale_weight`, bitsandbytes' LLM.int8() (`SCB`, the largest of each row).


USUAL_BLOCK = 128  # DeepSeek's, whose own files for inference have no settings that say so
BY_127 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def scale_of(tensors: Mapping[str, TensorRef], name: str) -> str | None:
    """Return the name of the scale of an 8-bit tensor; None where there is none by any known name."""
    stem = name.removesuffix(".weight")
    beside = [f"{stem}.{end}" for end in ("scale_weight", "qscale_weight", "scale")] if stem != name else []
    ends = ("_scale_inv", "_scale", "_weight_scale")  # the last of experts in one tensor
    return next((each for each in (*(f"{name}{end}" for end in ends), *beside) if each in tensors), None)


def scaled(parts: PackedParts, scale: str) -> Group:
    """Return a weight of fp8 or int8 with its scale as a group. Raises Refused where they don't fit."""
    weight, given = parts.tensors[parts.lead], parts.of(scale, "float bfloat uint8")
    if weight.dtype.name in ("uint8", "float4_e2m1fn_x2") or (
        weight.dtype.name == "int8" and given.dtype.name in EXPONENTS
    ):
        return fp4_rows(parts, parts.lead, scale)
    grid, words = grid_over(parts, scale, weight.shape)
    zero = None
    if (name := f"{parts.lead}_zero_point") in parts.tensors:
        parts.of(name, "float bfloat int", given.shape)
        zero = grid_over(parts, name, weight.shape)[0]
    formula = Formula(elements(weight), levels_of(weight.dtype), (grid,), zero)
    dtype = given.dtype if given.dtype.name in ("bfloat16", "float16") else parts.settings.dtype
    kind = weight.dtype.name.replace("float8_e4m3fn", "fp8").replace("float8_", "fp8 ")
    return parts.group(parts.lead, f"{kind}, {words}", dtype, weight.shape, formula)


def in_tiles(parts: PackedParts, weight: TensorRef, name: str, given: TensorRef) -> Formula:
    """Return what a matrix of MXFP8 is made of, whose scales lie in tiles."""
    field = scales(unswizzled(parts, name, given, weight.shape, OF_MX))
    return Formula(elements(weight), levels_of(weight.dtype), (Grid(name, field, (1, OF_MX)),))


def levels_of(dtype: DType) -> Integers | Table:
    """Return the numbers of all codes of an 8-bit type."""
    if dtype.name == "int8":
        return Integers()
    return Table(np.arange(256, dtype=np.uint8).view(numpy_type(dtype)).astype("<f4"))


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
        1 if axis not in sizes and s == n else min(sizes.get(axis, n), max(n, 1))
        for axis, (n, s) in enumerate(zip(shape, tensor.shape, strict=True))
    )
    counts = tuple(-(-n // size) if n else s for n, size, s in zip(shape, block, tensor.shape, strict=True))
    if counts != tensor.shape:
        blocks = " × ".join(map(str, block))
        what = f"is of shape {list(given.shape)}, and blocks of {blocks} of {list(shape)} are {list(counts)}"
        raise parts.refused(f"'{name[:200]}' {what}")
    return Grid(name, scales(elements(tensor)), block), _in_words(parts, given.shape, shape, block, cut)


def _with_axes(tensor: TensorRef, shape: Sizes) -> TensorRef | None:
    """Return scales with as many axes as the tensor: those of its first axes, or one for all of it."""
    axes = len(shape)
    if len(tensor.shape) == 2 * axes and {*tensor.shape[1::2]} == {
        1
    }:  # ModelOpt's blocks: [rows, 1, columns, 1]
        tensor = replace(tensor, shape=tensor.shape[::2], stride=tensor.stride[::2])
    given = tensor.shape
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
    is_block = last > 0 and scales[last - 1] == 1 != shape[last - 1]  # not groups of each row
    sizes = next(_pairs(parts), (USUAL_BLOCK, USUAL_BLOCK))
    if cut == [last] and not (is_block and shape[last - 1] > sizes[0]):
        return {last: _group_size(parts, shape[last], scales[last], is_block)}
    return dict(zip((last - 1, last), sizes, strict=True)) if cut else {}


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
        read = elements(form).read
        code = read((0,) * len(form.shape), form.shape).tobytes() if form.numel == 1 else b"?"
        parts.require(not code.strip(b"\0"), parts.lead, "is tiled for another kind of GPU, not in rows")
    grid = grid_over(parts, name, weight.shape)[0]
    formula = Formula(elements(weight), Integers(), (grid, BY_127))
    return parts.group(parts.lead, "bitsandbytes int8", parts.settings.dtype, weight.shape, formula)


# ---- 4-bit codes with a table of 16 numbers: bitsandbytes' NF4 and FP4, plain or nested
#
# A tensor is cut into blocks of `blocksize` numbers in row-major order, whatever its rows; `absmax` has
# the largest magnitude of each. Nested, these are 8-bit codes themselves, with a table and largest
# magnitudes of their own, less their mean. Source: bitsandbytes' `QuantState.as_dict` and
# `dequantize_4bit`, 0.49.


STATE = ".quant_state.bitsandbytes__"  # nf4 or fp4 follows
MAX_STATE = 1 << 16  # bytes of settings of one tensor


def of_state(parts: PackedParts, name: str) -> Group:
    """Return a weight with its statistics as a group; the lead is the table of its settings."""
    kind = parts.lead.rpartition("__")[2].upper()
    weight, said = parts.need(name), read_settings(parts, parts.lead)
    shape, dtype, size = _shape(parts, said), _dtype(parts, said), _count(parts, said, "blocksize")
    parts.lead = name
    count = extent(shape) if 0 not in shape else 0
    fits = weight.is_stretch and weight.nbytes == -(-count // 2)
    parts.require(fits, name, f"has {weight.nbytes} bytes for {count} numbers")
    codes = packed(elements(_in_bytes(weight)), Packing(4, 0, order=(1, 0)), count)
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


def read_settings(parts: PackedParts, name: str) -> dict[str, Any]:
    """Return the settings that a tensor holds as text. Raises Refused where it is no JSON object."""
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
    grid = Grid(f"{name}.nested_absmax", numbers(elements(outer)), (size,))
    inner = Formula(elements(codes), table, (grid,))
    return inner.field().each(lambda values: values + values.dtype.type(offset))
