"""Save two trees with torch and compare the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckpttool
from ckpttool.analysis.compare import Comparison, diff


def compared(folder: Path, a: Any, b: Any, **given: Any) -> Comparison:
    """Save both trees in a folder and return what `diff` finds; `given` are its keyword arguments."""
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    with ckpttool.open(folder / "a.pt") as mine, ckpttool.open(folder / "b.pt") as theirs:
        return diff(mine, theirs, **given)
