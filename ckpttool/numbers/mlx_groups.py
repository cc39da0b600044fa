"""Tensors as MLX packs them: rows of codes as a stream of bits in words, with scales of groups of a row.

A row's bits lie from the lowest of its first word on. Affine groups have a bias too, and MLX computes in the
type of their scales: it rounds the product, and then the sum. config.json says the mode, the bits and the
size of a group, for all layers or for one. Source: MLX 0.32, `mx.dequantize` and the table of its modes;
mlx-lm's `quantize_model`, which writes the settings.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from ..core.tensors.ref import DTYPES
from ..errors import Unsupported
from .formula import Formula, Grid, Integers, Packing, elements, numbers, packed
from .integers import levels_of
from .micro import OF_MX, OF_NV, of_levels, scales
from .settings import MLX, Group, PackedParts, QuantizationSettings

AFFINE, BITS = "affine", (1, 2, 3, 4, 5, 6, 8)
USUAL = 64, 4  # numbers of an affine group, and bits

# Of each mode of floats: numbers that share a scale, bits of a code, and the type of the scales.
FP8, EXPONENT = DTYPES["float8_e4m3fn"], DTYPES["float8_e8m0fnu"]
MODES = {"mxfp4": (OF_MX, 4, EXPONENT), "mxfp8": (OF_MX, 8, EXPONENT), "nvfp4": (OF_NV, 4, FP8)}


def of_words(parts: PackedParts, stem: str) -> Group:
    """Return `weight`, `scales` and perhaps `biases` of a layer as a group.

    Raises Refused where they don't fit what config.json says, Unsupported for a mode that is not known.
    """
    said = _said(parts, stem)
    mode = said.text("mode") or AFFINE
    if mode not in (AFFINE, *MODES):
        known = ", ".join((AFFINE, *MODES))
        raise Unsupported(said.path, f"'{stem[:200]}' is of MLX's mode '{mode[:40]}', none of {known}")
    *usual, kind = MODES.get(mode, (*USUAL, FP8))
    size, bits = said.number("group_size") or usual[0], said.number("bits") or usual[1]
    is_known = size > 0 and bits in BITS if mode == AFFINE else [size, bits] == usual
    parts.require(is_known, parts.lead, f"is {mode} of {bits} bits in groups of {size}, says {said.path}")
    words, name = parts.of(parts.lead, "uint32"), f"{stem}.scales"
    parts.require(len(words.shape) > 1, parts.lead, f"is of shape {list(words.shape)}, and no matrix")
    *outer, count = words.shape
    groups, rest = divmod(count * 32, bits * size)
    what = f"has rows of {count} words, which no groups of {size} numbers of {bits} bits fill"
    parts.require(not rest, parts.lead, what)
    codes = packed(elements(words), Packing(bits, len(outer), bits // gcd(bits, 32)), groups * size)
    shape, block = (*outer, groups), (*(1 for _ in outer), size)
    given, biases = parts.of(name, "float32 float16 bfloat16 uint8", shape), f"{stem}.biases"
    if mode == AFFINE:
        kind = parts.of(name, "float32 float16 bfloat16").dtype
        scale = Grid(name, numbers(elements(given)), block)
        bias = Grid(biases, numbers(elements(parts.of(biases, kind.name, shape))), block)
        formula = Formula(codes, Integers(), (scale,), bias=bias, steps_in=kind)
        return parts.group(parts.lead, f"MLX {bits} bits, groups of {size}", kind, codes.shape, formula)
    parts.require(biases not in parts.tensors, biases, f"is there, and {mode} has none")
    given = replace(parts.of(name, "uint8"), dtype=kind)
    levels = levels_of(FP8) if bits == 8 else of_levels()
    formula = Formula(codes, levels, (Grid(name, scales(elements(given)), block),))
    return parts.group(parts.lead, f"MLX {mode}", parts.settings.dtype, codes.shape, formula)


def _said(parts: PackedParts, stem: str) -> QuantizationSettings:
    """Return what config.json says of a layer: its own settings, or those of all."""
    beside = parts.settings
    section = beside.model.get(MLX, beside.section)
    if not isinstance(section, dict) or not section.keys() & {"bits", "group_size", "mode"}:
        what = "its layout is MLX's, and no config.json says its bits and groups"
        raise parts.refused(f"{what}: put the model's own beside it")
    own = section.get(stem, True)
    if own is not True and not isinstance(own, dict):
        raise parts.refused(f"{beside.path} says that it is not packed")
    return QuantizationSettings(beside.path, section if own is True else own, beside.model)
