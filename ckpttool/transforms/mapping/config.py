"""Where the numbers of rules come from: a config beside the checkpoint, or settings inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.settings import json_object, settings_beside
from ...inert_pickle.values import Record, attributes_in

FILES = ("config.json", "params.json")  # of Hugging Face, and of Meta
ENTRIES = ("model_args", "config", "args", "hyper_parameters")  # of nanoGPT, others, Megatron, Lightning


def config_of(checkpoint: Checkpoint, path: str | None = None) -> Mapping[str, Any]:
    """Return what a config says: the one at `path`, beside the checkpoint, or inside it; {} without any.

    Raises Unreadable, or Damaged where the file is no JSON object.
    """
    if path is not None:
        return json_object(path)
    place, settings = settings_beside(checkpoint.path, *FILES)
    return settings if place else next(_inside(checkpoint.tree), {})


def _inside(tree: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that a file holds, as a dict or an object's attributes."""
    entries = tree if isinstance(tree, dict) else {}
    for value in map(entries.get, ENTRIES):
        settings = attributes_in(value.state) if isinstance(value, Record) else value
        if isinstance(settings, dict) and settings:
            yield settings
