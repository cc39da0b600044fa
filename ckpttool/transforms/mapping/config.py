"""Where the numbers of rules come from: a config beside the checkpoint, or settings inside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...inert_pickle.values import Record, attributes_in
from ...remote.places import exists, is_folder
from ..lora.adapter import json_object

FILES = ("config.json", "params.json")  # of Hugging Face, and of Meta
ENTRIES = (
    "model_args",
    "config",
    "args",
    "hyper_parameters",
)  # of a .pt: nanoGPT, others, Megatron, Lightning


def config_of(checkpoint: Checkpoint, path: str | None = None) -> Mapping[str, Any]:
    """Return what a config says: the one at `path`, beside the checkpoint, or inside it; {} without any.

    Raises Unreadable, or Damaged where the file is no JSON object.
    """
    if path is not None:
        return json_object(path)
    folder = checkpoint.path if is_folder(checkpoint.path) else os.path.dirname(checkpoint.path)
    for name in FILES:
        if checkpoint.path != "-" and exists(beside := os.path.join(folder, name)):
            return json_object(beside)
    return next(_inside(checkpoint.tree), {})


def _inside(tree: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that a file holds, as a dict or an object's attributes."""
    entries = tree if isinstance(tree, dict) else {}
    for value in map(entries.get, ENTRIES):
        settings = attributes_in(value.state) if isinstance(value, Record) else value
        if isinstance(settings, dict) and settings:
            yield settings
