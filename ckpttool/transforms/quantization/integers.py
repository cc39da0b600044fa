"""Weights of a few bits an element in words of 32 bits: GPTQ, AWQ, and compressed-tensors' `pack-quantized`.

Sources: AutoGPTQ's and GPTQModel's `pack` (words along the inputs, zeros along the outputs, stored less one
in format 1, `g_idx` the group of each input), AutoAWQ's `WQLinear_GEMM` (words along the outputs, in the
order 0 2 4 6 1 3 5 7), compressed-tensors' `pack_to_int32` (words along the inputs, codes less 2^(bits - 1);
older versions have whole codes in each word).
"""

from __future__ import annotations

from math import gcd

from ...errors import Unsupported
from ...lazy import np
from ...tensors.ref import TensorRef
from .fields import Field, Packing, Sizes, elements, numbers, packed
from .formula import Formula, Grid, Integers
from .groups import Group, PackedParts

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
        raise Unsupported(
            parts.path, f"is of GPTQ's format '{form[:40]}', and only gptq and gptq_v2 are read"
        )
    bits = parts.settings.number("bits") or 4
    parts.require(bits in (2, 3, 4, 8), parts.lead, f"is of {bits} bits, says {parts.settings.path}")
    turned = parts.strips.turned
    weight, scales = parts.of(parts.lead, "int32"), parts.of(f"{stem}.scales", "float16 bfloat16 float32")
    shapes = f"{list(weight.shape)} and {list(scales.shape)}"
    parts.require(
        len(weight.shape) == len(scales.shape) == 2, parts.lead, f"and its scales are of shapes {shapes}"
    )
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
        zeros = packed(
            elements(parts.of(f"{name}_zero_point", "int32", held)), Packing(bits, 0, words), shape[0]
        )
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
