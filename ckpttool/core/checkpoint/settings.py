"""What the files beside a checkpoint say, and whether its numbers are packed."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CkptToolError, Damaged, MissingRoom, Refused
from ...rooms import find
from ..remote.places import exists, is_folder, open_source_at
from ..system import join
from ..words import counted
from .checkpoint import Checkpoint
from .module_tree import COMFY_TEXT
from .state import State

MAX_BYTES = 16 << 20
SECTIONS = ("quantization_config", "compression_config")  # of config.json: how numbers are packed


def settings_beside(path: str, *names: str) -> tuple[str, dict[str, Any]]:
    """Return the first of these files that lies beside a checkpoint or in its folder, and what it says.

    Without any, and for standard input, "" and {}. Raises what `json_object` does.
    """
    folder = path if is_folder(path) else os.path.dirname(path)
    for name in names if path != "-" else ():
        if exists(place := join(folder, name)):
            return place, json_object(place)
    return "", {}


def json_object(path: str) -> dict[str, Any]:
    """Return what a file of settings says. Raises Unreadable, and Damaged if it is no JSON object."""
    source = open_source_at(path)  # a regular file: a pipe would wait, and a device never end
    text = source.read(0, min(source.size, MAX_BYTES + 1))
    if len(text) > MAX_BYTES:
        raise Damaged(path, f"is longer than {MAX_BYTES >> 20} MiB, and holds settings alone")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged(path, "is not JSON") from None
    if not isinstance(settings, dict):
        raise Damaged(path, "is not a JSON object")
    return settings


def config_of(base: str) -> Mapping[str, Any]:
    """Return the settings of the model in a file or folder, {} if there are none to read."""
    try:
        return settings_beside(base, "config.json")[1]
    except CkptToolError:
        return {}


# ---- Numbers packed in few bits with scales, as far as every transform has to know them


def require_unpacked(
    checkpoint: Checkpoint,
    state: State,
    why: str = "its codes can't be laid out without their scales",
    dtype: str = "bfloat16",
    names: Collection[str] | None = None,
) -> None:
    """Raise Refused where a tensor of a state is packed: its codes and scales are numbers only together.

    Args:
        names: those that are asked about, codes or scales; None for all of the state.
    """
    numbers = find("numbers.recognise")  # many modules, which are imported only where it is asked
    name = (numbers.first_packed if numbers else _first_like_packed)(checkpoint, state, names)
    if name is not None:
        plain = f"convert {shlex.quote(checkpoint.path)} plain.safetensors --dequantize --dtype {dtype}"
        hint = f"make it plain: ckpttool {plain}" if numbers else MissingRoom("numbers").hint
        raise Refused(checkpoint.path, f"'{name[:200]}' is packed, and {why}", hint=hint)


# What codes are held in, and what stands beside them: as much as the core knows where the room is not there.
HOLDING = ("int32", "uint32", "uint8", "int8", "float8", "float4")
BESIDE = re.compile(
    r"(?i)(.+[._])?(q?scales?(_inv|_weight|_2)?|qzeros|scb|comfy_quant|weight\.absmax|weight\.quant_.+)"
)


def _first_like_packed(checkpoint: Checkpoint, state: State, names: Collection[str] | None) -> str | None:
    tensors, is_declared = state.tensors, COMFY_TEXT in checkpoint.metadata
    holding = {_module(name) for name, each in tensors.items() if each.dtype.name.startswith(HOLDING)}
    scaled = holding if is_declared else {_module(name) for name in tensors if BESIDE.fullmatch(name)}
    those = tensors if names is None else names
    return next((name for name in those if _module(name) in holding & scaled), None)


def _module(name: str) -> str:
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way in which tensors are packed, in words, and how many tensors and layers are packed so."""

    scheme: str
    tensors: int
    layers: int  # numbered modules; 0 where none is

    def __str__(self) -> str:
        layers = f", {counted(self.layers, 'layer')}" if self.layers else ""
        return f"{self.scheme}{layers} ({counted(self.tensors, 'tensor')})"
