"""States, files that torch saves, opened by ckpttool, and what torch loads from its output."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import ckpttool
from ckpttool.checkpoint.checkpoint import Checkpoint


def prefixed(state: Any, prefix: str) -> Any:
    return OrderedDict((prefix + key, value) for key, value in state.items())


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def opened(value: Any, folder: Path) -> Checkpoint:
    return ckpttool.open(saved(value, folder / "in.pt"))


def loaded(checkpoint: Checkpoint, folder: Path) -> Any:
    """Return what torch reads from the checkpoint written as a `.pt` file."""
    ckpttool.save(checkpoint, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt", weights_only=False)
