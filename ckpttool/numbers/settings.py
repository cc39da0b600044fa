"""What the files beside a checkpoint say of its quantisation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.checkpoint.settings import SECTIONS, settings_beside
from ..core.tensors.cast import Caster
from ..core.tensors.ref import DTYPES, DType, TensorRef
from ..errors import Damaged, Refused
from .formula import Formula, Sizes
from .lookup import Strips, rounded

# Files of the libraries' own with what else stands in config.json, and the method that they are of.
OWN = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}

MLX = "quantization"  # of config.json: MLX's own section


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """The section `quantization_config` of a model's settings.

    Attributes:
        path: the file that holds it; "" where there is none.
        section: what it says; empty where there is none.
        model: all settings of the model.
    """

    path: str = ""
    section: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The name of the method, in small letters; "" where none is named."""
        return self.text("quant_method").lower()

    @property
    def dtype(self) -> DType:
        """The float type that the model computes in; bfloat16 where nothing says so."""
        for settings in (self.model, self.model.get("text_config")):
            if isinstance(settings, Mapping):
                named = settings.get("torch_dtype") or settings.get("dtype")
                if named in ("bfloat16", "float16", "float32"):
                    return DTYPES[named]
                if named is not None and not isinstance(named, str):
                    path = self.path or "config.json"
                    raise Damaged(path, f"says torch_dtype = {shown(named)}, which is no name")
        return DTYPES["bfloat16"]

    def number(self, *names: str) -> int | None:
        """Return the first of these settings that is there; raises Damaged where it is no whole number."""
        for name in names:
            value = self.section.get(name)
            if value is not None:
                if type(value) is not int or value == 0 or not -1 <= value < 1 << 31:
                    raise Damaged(self.path, f"says {name} = {shown(value)}, which is no size")
                return value
        return None

    def text(self, name: str) -> str:
        """Return a setting, "" where there is none; raises Damaged where it is no text."""
        value = self.section.get(name)
        if value is not None and not isinstance(value, str):
            raise Damaged(self.path, f"says {name} = {shown(value)}, which is no name")
        return value or ""

    def pair(self, name: str) -> tuple[int, int] | None:
        """Return two sizes, None where there are none; raises Damaged where they are no sizes."""
        match self.section.get(name):
            case None:
                return None
            case [int(rows), int(columns)] if all(0 < n < 1 << 31 and n is not True for n in (rows, columns)):
                return rows, columns
            case value:
                raise Damaged(self.path, f"says {name} = {shown(value)}, which is no pair of sizes")

    def groups(self) -> Iterator[QuantizationSettings]:
        """Yield how each group of layers is quantised, of compressed-tensors: `config_groups.*.weights`.

        Raises Damaged where one is no object.
        """
        for name, group in self._object(self.section, "config_groups").items():
            weights = self._object(self._object({name: group}, name), "weights")
            if weights:
                yield QuantizationSettings(self.path, weights, self.model)

    def algorithms(self) -> Iterator[str]:
        """Yield the algorithms that ModelOpt names, for all layers or each. Raises Damaged for no names."""
        said = self._object(self.section, "quantization") or self.section
        layers = self._object(said, "quantized_layers")
        for each in (said, *(self._object(layers, name) for name in layers)):
            yield QuantizationSettings(self.path, each).text("quant_algo").upper()

    def _object(self, of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = of.get(name)
        if value is not None and not isinstance(value, dict):
            raise Damaged(self.path, f"says {name[:40]} = {shown(value)}, which is no object")
        return value or {}


def shown(value: object) -> str:
    """Return a value that JSON said, in short."""
    try:
        return f"{value!r:.40}"
    except RecursionError:
        return f"a nested {type(value).__name__}"


def packing_beside(path: str) -> QuantizationSettings:
    """Return the settings in the folder of a checkpoint. Raises Damaged where a file of them is no JSON."""
    place, model = settings_beside(path, "config.json")
    for name in SECTIONS:
        for settings in (model, model.get("text_config")):
            section = settings.get(name) if isinstance(settings, dict) else None
            if section is not None and not isinstance(section, dict):
                raise Damaged(place, f"says {name} = {shown(section)}, which is no object")
            if section:
                return QuantizationSettings(place, section, model)
    own, said = settings_beside(path, *OWN)
    if own:
        return QuantizationSettings(own, {"quant_method": OWN[os.path.basename(own)]} | said, model)
    if isinstance(section := model.get(MLX), dict):
        return QuantizationSettings(place, section, model)
    return QuantizationSettings(model=model)


# ---- Groups: tensors that are one packed tensor together


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are one packed one together.

    Attributes:
        name: of the plain tensor.
        scheme: how it is packed, in words: `fp8, blocks of 128 × 128`.
        dtype: the type that the scheme's library returns.
        shape: of the plain tensor.
        formula: what its numbers are made of.
        parts: the names of the tensors, first the one in whose place the plain tensor goes.
    """

    name: str
    scheme: str
    dtype: DType
    shape: Sizes
    formula: Formula
    parts: tuple[str, ...]

    def tensor(self, caster: Caster) -> TensorRef:
        """Return the plain tensor in the caster's type, whose values are computed when they are read."""
        return rounded(self.formula, caster, self.shape)


@dataclass(slots=True)
class PackedParts:
    """The tensors around a packed one, and which of them a scheme used."""

    path: str
    tensors: Mapping[str, TensorRef]
    lead: str  # the name of the packed one
    settings: QuantizationSettings
    strips: Strips = field(default_factory=Strips)
    used: dict[str, None] = field(default_factory=dict)

    def find(self, name: str) -> TensorRef | None:
        """Return a tensor, which counts as used; None where there is none."""
        tensor = self.tensors.get(name)
        if tensor is not None:
            self.used[name] = None
        return tensor

    def need(self, name: str) -> TensorRef:
        """Return a tensor, which counts as used. Raises Refused where it is missing."""
        tensor = self.find(name)
        if tensor is None:
            raise self.refused(f"there is no '{name[:200]}'")
        return tensor

    def of(self, name: str, kinds: str, shape: Sizes | None = None) -> TensorRef:
        """Return a tensor of a type whose name begins so, and of a shape. Raises Refused where it isn't."""
        tensor = self.need(name)
        self.require(tensor.dtype.name.startswith(tuple(kinds.split())), name, f"is of {tensor.dtype.name}")
        if shape is not None and tensor.shape != shape:
            raise self.refused(f"'{name[:200]}' is of shape {list(tensor.shape)}, and {list(shape)} fits it")
        return tensor

    def require(self, holds: bool, name: str, what: str) -> None:
        """Raise Refused with what is wrong with a tensor unless something holds."""
        if not holds:
            raise self.refused(f"'{name[:200]}' {what}")

    def refused(self, why: str) -> Refused:
        """Return the error for this group."""
        return Refused(self.path, f"'{self.lead[:200]}' can't be dequantised: {why}")

    def group(self, name: str, scheme: str, dtype: DType, shape: Sizes, formula: Formula) -> Group:
        """Return the group of the tensors used so far."""
        names = dict.fromkeys((self.lead, *self.used))
        return Group(name, scheme, dtype, shape, formula, tuple(names))
