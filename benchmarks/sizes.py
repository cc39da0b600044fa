"""Sizes in units of 1000, as people write them: `2GB`, `1.5 MB`."""

from __future__ import annotations

import re

UNITS = {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}


def parse_size(text: str) -> int:
    """Raises ValueError if the text is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)", text)
    if not match:
        raise ValueError(f"{text!r} is not a size: write for example 2GB or 500MB")
    return round(float(match[1]) * UNITS[match[2]])


def show_size(count: float) -> str:
    """Three digits and a unit: `24.1 MB`, `4 GB`."""
    unit = next((unit for unit in UNITS if count < 999.5 * UNITS[unit]), "TB")
    return f"{count / UNITS[unit]:.3g} {unit}"
