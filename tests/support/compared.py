"""Two trees saved by torch and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import ckpttool
from ckpttool.analysis.compare import Comparison, compare


def compared(folder: Path, a: Any, b: Any, **given: Any) -> Comparison:
    """Two trees as torch saves them."""
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    with ckpttool.open(folder / "a.pt") as mine, ckpttool.open(folder / "b.pt") as theirs:
        return compare(mine, theirs, **given)
