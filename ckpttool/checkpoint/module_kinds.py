"""The kinds of a model's BatchNorm layers (1d, 2d, 3d), as text in a safetensors header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS_TEXT = "batchnorm.kinds"  # its name in the header


def kinds_in(metadata: Mapping[str, str]) -> dict[Any, object]:
    """Return layer -> kind, as a conversion has recorded them; whatever else is there counts for nothing."""
    try:
        kinds = json.loads(metadata.get(KINDS_TEXT, "{}"))
    except (ValueError, RecursionError):
        return {}
    return kinds if isinstance(kinds, dict) else {}


def kinds_text(kinds: Mapping[str, object]) -> str:
    """Return the text of kinds by layer."""
    return json.dumps(dict(kinds), sort_keys=True)
