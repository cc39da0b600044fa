"""What the files beside a checkpoint say of its quantisation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import Damaged, Unreadable
from ...remote.places import exists, is_folder
from ...tensors.dtypes import DTYPES, DType
from ..lora.adapter import json_object

# Files of the libraries' own with what else stands in config.json, and the method that they are of.
OWN = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
SECTIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Settings:
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
        return str(self.section.get("quant_method") or "").lower()

    @property
    def dtype(self) -> DType:
        """The float type that the model computes in; bfloat16 where nothing says so."""
        for settings in (self.model, self.model.get("text_config")):
            if isinstance(settings, Mapping):
                named = settings.get("torch_dtype") or settings.get("dtype")
                if named in ("bfloat16", "float16", "float32"):
                    return DTYPES[named]
        return DTYPES["bfloat16"]

    def number(self, *names: str) -> int | None:
        """Return the first of these settings that is there; raises Damaged where it is no whole number."""
        for name in names:
            value = self.section.get(name)
            if value is not None:
                if type(value) is not int or not -1 <= value < 1 << 31:
                    raise Damaged(self.path, f"says {name} = {value!r:.40}, which is no size")
                return value
        return None

    def groups(self) -> Iterator[Mapping[str, Any]]:
        """Yield how each group of layers is quantised, of compressed-tensors: `config_groups.*.weights`."""
        groups = self.section.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                yield weights


def settings_beside(path: str) -> Settings:
    """Return the settings in the folder of a checkpoint. Raises Damaged where a file of them is no JSON."""
    if path == "-":
        return Settings()
    folder = path if is_folder(path) else os.path.dirname(path)
    place = os.path.join(folder, "config.json")
    try:
        model = json_object(place)
    except Unreadable:
        model = {}
    for name in SECTIONS:
        for settings in (model, model.get("text_config")):
            if isinstance(settings, dict) and isinstance(settings.get(name), dict):
                return Settings(place, settings[name], model)
    for name, method in OWN.items():
        if exists(place := os.path.join(folder, name)):
            return Settings(place, {"quant_method": method} | json_object(place), model)
    return Settings("", {}, model)
