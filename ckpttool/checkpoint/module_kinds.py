"""The kinds of a model's BatchNorm layers (1d, 2d, 3d), as text in a safetensors header."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

KINDS_TEXT = "batchnorm.kinds"  # its name in the header


def kinds_in(metadata: Mapping[str, str]) -> dict[Any, object]:
    """Return layer -> kind, as a conversion has recorded them; whatever else is there counts for nothing."""
    try:
        kinds = json.loads(metadata.get(KINDS_TEXT, "{}"))
    except (ValueError, RecursionError):
        return {}
    return kinds if isinstance(kinds, dict) else {}


def with_kinds(metadata: Mapping[str, str], kinds: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of a header with these kinds recorded, or with no record for none."""
    new = {name: value for name, value in metadata.items() if name != KINDS_TEXT}
    return {**new, KINDS_TEXT: json.dumps(dict(kinds), sort_keys=True)} if kinds else new


def moved_kinds(
    metadata: Mapping[str, str], keys: Iterable[str], kept: Iterable[str], module: Callable[[str], str] = str
) -> Mapping[str, str]:
    """Return the texts of a header with layers under their new paths in the record of kinds.

    A layer that had keys and keeps none is left out; others without keys stay.
    """
    if not (kinds := kinds_in(metadata)):
        return metadata
    before, after = ({key.rpartition(".")[0] for key in names} for names in (keys, kept))
    gone = before - after
    return with_kinds(metadata, {module(path): kind for path, kind in kinds.items() if path not in gone})
