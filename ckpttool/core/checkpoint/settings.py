"""The settings of a model in files beside its checkpoint: a `config.json`, and its like."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ...errors import CkptToolError, Damaged
from ..remote.places import exists, is_folder, open_source_at
from ..system import join

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
