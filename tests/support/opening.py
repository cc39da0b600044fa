"""What tests of formats do all the time: open what torch saved, convert it, and be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, FileError
from ckpttool.formats import Saved


def opened(tree: object, folder: Path) -> ckpttool.Checkpoint:
    """Save a tree with torch as `in.pt`, and open that."""
    torch.save(tree, folder / "in.pt")
    return ckpttool.open(folder / "in.pt")


def convert(tree: object, out: Path, **given: Any) -> Saved:
    """Save a tree with torch as `in.pt` beside an output, and write that."""
    return ckpttool.save(opened(tree, out.parent), out, **given)


def refused(
    path: Path, said: str = "", error: type[CkptToolError] | tuple[type[CkptToolError], ...] = Damaged
) -> FileError:
    """Open a file that must be refused, in words that match; return the error."""
    with pytest.raises(error, match=said or None) as refusal:
        ckpttool.open(path)
    fault = refusal.value.with_traceback(None)  # whose frames would keep files open
    del refusal
    assert isinstance(fault, FileError)
    return fault
