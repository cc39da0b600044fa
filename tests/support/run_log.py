"""The log of a training, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's log that are about whole epochs, and not about steps."""
    return [entry for entry in entries_of(folder) if "epoch" in entry]


def timeless(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries without what differs from one run to the next: their times."""
    return [{name: value for name, value in entry.items() if "second" not in name} for entry in entries]
