"""The log of a training, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log that are about whole epochs, and not about steps."""
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [entry for entry in entries if "epoch" in entry]
