"""Tensors that a file itself declares to be packed, as ComfyUI's do: by its header, or by a tensor each.

Names, types and shapes would tell another story, so what is declared is read as it is declared, or refused.
Sources: ComfyUI's QUANTIZATION.md, `comfy/quant_ops.py` and `convert_old_quants`; comfy-kitchen's `tensor/`
and `backends/eager/`; cuBLAS, "1D block scaling factors layout".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.module_tree import COMFY_TEXT
from ..core.checkpoint.special_tensors import shape_of
from ..core.checkpoint.state import State
from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, PLAIN_FLOATS, TensorRef
from ..errors import Damaged, Refused, Unsupported
from .formula import HIGH_FIRST, Field, Formula, Grid, Integers, Packing, Sizes, Table, elements, packed
from .integers import grid_over, in_tiles, levels_of, read_settings
from .micro import OF_MX, OF_NV, of_levels, unswizzled, with_whole
from .settings import Group, PackedParts, shown

MARK = ".comfy_quant"
MOST_PARTS = 6  # of a tensor's name that may stand before the layer's in the header

# Settings that are known, of which these do not change the numbers.
OF_LAYERS = {"full_precision_matrix_mult", "per_row", "num_experts", "linear_dtype"}
KNOWN = {
    "format",
    "params",
    "convrot",
    "convrot_groupsize",
    "orig_dtype",
    "orig_shape",
    "group_size",
    *OF_LAYERS,
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tensor that is declared to be packed.

    Attributes:
        name: of the tensor.
        said: its settings.
        mark: the name of the tensor that holds them; "" where the header does.
    """

    name: str
    said: Mapping[str, Any]
    mark: str = ""

    def group(self, parts: PackedParts) -> Group:
        """Return it as a group. Raises Refused where its parts don't fit, Unsupported for another format."""
        said = dict(self.said)
        if self.mark:
            here = read_settings(parts, self.mark)
            if said and any(said.get(name) != here.get(name) for name in KNOWN - OF_LAYERS):
                raise parts.refused(f"'{self.mark[:200]}' and the header say two things of it")
            said |= here
        if isinstance(said.get("params"), dict):
            said = said["params"] | said
        form = said.get("format")
        make, unit = FORMS.get(form, (None, 1)) if isinstance(form, str) else (None, 1)
        if make is None:
            what = f"'{self.name[:200]}' is packed as {shown(form)}, which is none of those read here"
            raise Unsupported(parts.path, f"{what}: {', '.join(FORMS)}")
        for odd in (name for name in said if name not in KNOWN):
            raise parts.refused(f"what declares it says {odd[:40]}, which is not known here")
        smoothing = f"{self.name.removesuffix('weight')}pre_quant_scale"
        parts.require(smoothing not in parts.tensors, smoothing, "changes its numbers, and is not read here")
        of_group = said.get("group_size")
        if unit > 1 and of_group not in (None, unit):
            raise parts.refused(f"it has groups of {unit}, and {shown(of_group)} is said")
        formula, words = make(parts, said)
        shape, codes = self._shape(parts, formula.codes, said, unit)
        formula = replace(formula, codes=replace(codes, shape=shape))
        return parts.group(self.name, f"ComfyUI {form}{words}", _dtype(parts, said), shape, formula)

    def _shape(
        self, parts: PackedParts, codes: Field, said: Mapping[str, Any], unit: int
    ) -> tuple[Sizes, Field]:
        """Return the shape of the tensor, which may have been padded to whole units, and its codes."""
        stored = codes.shape
        if (told := said.get("orig_shape")) is not None:
            shape = shape_of(told)
            if shape is None or stored not in (shape, tuple(-(-n // unit) * unit for n in shape)):
                raise parts.refused(f"it is of shape {list(stored)}, and {shown(told)} is said")
            return shape, codes
        if unit == 1 or stored[0] % unit:
            return stored, codes
        bias = parts.tensors.get(name := f"{self.name.removesuffix('weight')}bias")
        rows = stored[0] if bias is None or len(bias.shape) != 1 else bias.shape[0]
        fits = stored[0] - unit < rows <= stored[0]
        parts.require(fits, name, f"is of shape [{rows}], and the weight has {stored[0]} rows")
        return (rows, *stored[1:]), _watched(parts, codes, unit, rows=rows if bias is not None else None)


def _watched(parts: PackedParts, codes: Field, unit: int, rows: int | None) -> Field:
    """Return codes that are refused, once they are read, if they may end in padding of an unknown size."""
    count = min(codes.shape[0], 3 * unit)

    @cache
    def check() -> None:
        end = codes.read((codes.shape[0] - count, 0), (count, codes.shape[1])) != 0
        for is_open, is_used, what in (
            (rows is None, end.any(1), "rows"),
            (True, end.any(0), "columns"),
        ):
            if is_open and is_used.any() and not is_used[-1]:  # not all zeros, as a layer may be
                raise parts.refused(f"it ends in {what} of zeros, and nothing says if these are padding")

    def read(begin: Sizes, size: Sizes) -> NDArray[Any]:
        check()
        return codes.read(begin, size)

    return replace(codes, read=read)


def _dtype(parts: PackedParts, said: Mapping[str, Any]) -> Any:
    named = said.get("orig_dtype")
    if named is None:
        return parts.settings.dtype
    name = named.removeprefix("torch.") if isinstance(named, str) else ""
    if name not in PLAIN_FLOATS:
        raise parts.refused(f"what declares it says the type {shown(named)}")
    return DTYPES[name]


def declared(checkpoint: Checkpoint, state: State) -> dict[str, Declaration] | None:
    """Return the tensors of a state that are declared to be packed, by name; None where nothing declares any.

    Raises Damaged where the header's text is none of ComfyUI's, Unsupported for another version of it, and
    Refused where it is not clear which tensor it means.
    """
    tensors, text = state.tensors, checkpoint.metadata.get(COMFY_TEXT)
    marks = {f"{name.removesuffix(MARK[1:])}weight": name for name in tensors if f".{name}".endswith(MARK)}
    if any(COMFY_TEXT in each for each in checkpoint.unread):
        raise Unsupported(checkpoint.path, f"each of its files has a {COMFY_TEXT} of its own in its header")
    if text is None and not marks:
        return None
    layers = _layers(checkpoint.path, text) if text is not None else {}
    found = {name: Declaration(name, said) for name, said in _named(checkpoint.path, layers, tensors)}
    of_header = {name: each.said for name, each in found.items()}
    return found | {name: Declaration(name, of_header.get(name, {}), mark) for name, mark in marks.items()}


def _layers(path: str, text: str) -> dict[str, Mapping[str, Any]]:
    try:
        said = json.loads(text)
        layers, version = said["layers"], str(said.get("format_version", "1.0"))
        are_objects = isinstance(layers, dict) and all(isinstance(each, dict) for each in layers.values())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        are_objects = False
    if not are_objects:
        raise Damaged(path, f"the {COMFY_TEXT} of its header names no layers with their settings")
    if version.partition(".")[0] != "1":
        raise Unsupported(path, f"the {COMFY_TEXT} of its header is of version {version[:20]}, not of 1")
    return dict(layers)


def _named(
    path: str, layers: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorRef]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the weight of each layer that is there; the header may leave out how all names begin."""
    shorter = {name for name in layers if f"{name}.weight" not in tensors}
    ends: dict[str, list[str]] = {name: [] for name in shorter}
    for name in tensors if shorter else ():
        parts = name.removesuffix(".weight").split(".", MOST_PARTS)
        for end in (".".join(parts[start:]) for start in range(1, len(parts)) if name.endswith(".weight")):
            if end in ends:
                ends[end].append(name)
    for layer, said in layers.items():
        meant = ends[layer] if layer in shorter else [f"{layer}.weight"]
        if len(meant) > 1:
            which = " or ".join(f"'{name[:80]}'" for name in meant[:2])
            raise Refused(path, f"its header says how '{layer[:80]}' is packed, and may mean {which}")
        yield from ((name, said) for name in meant)


# ---- The formats: (parts, settings) -> what the numbers are made of, and how in words


Made = tuple[Formula, str]


def _fp8(name: str) -> Callable[[PackedParts, Mapping[str, Any]], Made]:
    def make(parts: PackedParts, said: Mapping[str, Any]) -> Made:
        weight = _as(parts, parts.lead, name)
        scale = parts.of(f"{parts.lead}_scale", "float bfloat")
        parts.require(scale.numel == 1, f"{parts.lead}_scale", "is more than one scale")
        grid, _ = grid_over(parts, f"{parts.lead}_scale", weight.shape)
        return Formula(elements(weight), levels_of(weight.dtype), (grid,)), ""

    return make


def _int8(parts: PackedParts, said: Mapping[str, Any]) -> Made:
    weight = parts.of(parts.lead, "int8")
    size = _rotation(parts, said, weight.shape) if said.get("convrot") else 0
    return _by_row(parts, elements(weight), Integers(), size)


def _int4(parts: PackedParts, said: Mapping[str, Any]) -> Made:
    weight = parts.of(parts.lead, "int8 uint8")
    parts.require(len(weight.shape) == 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    codes = packed(elements(weight), Packing(4, 1), weight.shape[1] * 2)
    levels = Table(np.array([*range(8), *range(-8, 0)], "<f4"))
    return _by_row(parts, codes, levels, _rotation(parts, said, codes.shape))


def _by_row(parts: PackedParts, codes: Field, levels: Integers | Table, size: int) -> Made:
    """Return codes with a scale for all or for each row, rotated in groups of a size, if that is not 0."""
    name = f"{parts.lead}_scale"
    parts.of(name, "float bfloat")
    parts.require(bool(codes.shape), parts.lead, "is a single number")
    grid, words = grid_over(parts, name, codes.shape)
    parts.require(grid.block[-1] >= codes.shape[-1], parts.lead, "has scales by groups of its rows")
    formula = Formula(codes, levels, (grid,))
    if not size:
        return formula, f", {words}"
    turned = Formula(_turned_back(formula.field(), size), _as_they_are, ())
    return turned, f", {words}, rotated in groups of {size}"


def _as_they_are(numbers: NDArray[Any], out: NDArray[Any]) -> None:
    out[...] = numbers


def _rotation(parts: PackedParts, said: Mapping[str, Any], shape: Sizes) -> int:
    """Return the size of the groups that are rotated: a power of 4 that divides a row."""
    size = said.get("convrot_groupsize", 256)
    if type(size) is not int or size not in (4**power for power in range(1, 8)):
        raise parts.refused(f"it is rotated in groups of {shown(size)}, which is no power of 4")
    what = f"has rows of {shape[-1]}, which groups of {size} don't divide"
    parts.require(not shape[-1] % size, parts.lead, what)
    return size


def _turned_back(numbers: Field, size: int) -> Field:
    """Return rows whose groups were rotated by a Hadamard matrix, its own inverse, as they were before."""
    # It is made of blocks: ones less twice the reversed identity, over 2, once for each power of 4.

    def read(begin: Sizes, box: Sizes) -> NDArray[Any]:
        first, end = begin[-1] // size * size, -(-(begin[-1] + box[-1]) // size) * size
        values = numbers.read((*begin[:-1], first), (*box[:-1], end - first)).astype("<f8")
        whole, step = values.shape, 1
        while step < size:
            values = values.reshape(-1, 4, step)
            values = (values.sum(1, keepdims=True) - 2 * values[:, ::-1]) / 2
            step *= 4
        skipped = begin[-1] - first
        return values.reshape(whole)[..., skipped : skipped + box[-1]].astype("<f4")

    return replace(numbers, read=read)


def _nvfp4(parts: PackedParts, said: Mapping[str, Any]) -> Made:
    weight = parts.of(parts.lead, "uint8")
    parts.require(len(weight.shape) == 2, parts.lead, f"is of shape {list(weight.shape)}, and no matrix")
    codes = packed(elements(weight), Packing(4, 1, order=HIGH_FIRST), weight.shape[1] * 2)
    name = f"{parts.lead}_scale"
    given = unswizzled(parts, name, _as(parts, name, "float8_e4m3fn"), codes.shape, OF_NV)
    grid = Grid(name, with_whole(parts, name, given), (1, OF_NV))
    return Formula(codes, of_levels(), (grid,)), ""


def _mxfp8(parts: PackedParts, said: Mapping[str, Any]) -> Made:
    weight, name = _as(parts, parts.lead, "float8_e4m3fn"), f"{parts.lead}_scale"
    return in_tiles(parts, weight, name, _as(parts, name, "float8_e8m0fnu")), ""


def _as(parts: PackedParts, name: str, kind: str) -> TensorRef:
    """Return a tensor in an 8-bit type, whose bits plain bytes may hold."""
    return replace(parts.of(name, f"{kind} uint8"), dtype=DTYPES[kind])


# What ComfyUI calls a format -> what makes the numbers, and the unit to which sizes are padded.
FORMS: dict[str, tuple[Callable[[PackedParts, Mapping[str, Any]], Made], int]] = {
    **{name: (_fp8(name), 1) for name in ("float8_e4m3fn", "float8_e5m2")},
    "nvfp4": (_nvfp4, OF_NV),
    "mxfp8": (_mxfp8, OF_MX),
    "int8_tensorwise": (_int8, 1),
    "convrot_w4a4": (_int4, 1),
}
