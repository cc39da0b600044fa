"""What tests of files do all the time: save by torch, open, convert, load again, and be refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, FileError, UsageFault
from ckpttool.formats import Saved
from ckpttool.metrics import predictions
from ckpttool.transforms.disarm import Disarmed, disarm


def prefixed(state: Any, prefix: str) -> Any:
    return OrderedDict((prefix + key, value) for key, value in state.items())


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def opened(value: Any, folder: Path) -> ckpttool.Checkpoint:
    """Save a value with torch as `in.pt`, and open that."""
    return ckpttool.open(saved(value, folder / "in.pt"))


def convert(value: object, out: Path, **given: Any) -> Saved:
    """Save a value with torch as `in.pt` beside an output, and write that."""
    return ckpttool.save(opened(value, out.parent), out, **given)


def saved_predictions(folder: Path, ranks: int, samples: int) -> None:
    """Write what each rank of an evaluation predicted, as `rank0.safetensors` and so on."""
    for rank in range(ranks):
        index = np.arange(rank, samples, ranks)
        rows = predictions.Predictions(index, index % 2, index % 2, index / 4)
        about = predictions.Evaluation(ranks, samples)
        predictions.write(folder / f"rank{rank}.safetensors", rows, about, rank)


def loaded(checkpoint: ckpttool.Checkpoint, folder: Path) -> Any:
    """Return what torch reads from the checkpoint written as a `.pt` file."""
    ckpttool.save(checkpoint, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt", weights_only=False)


def disarmed(given: Any, folder: Path, **options: Any) -> tuple[Any, Disarmed]:
    """Disarm a file, or a value that torch saves with these options as `in.pt`.

    Return what torch loads from `safe.pt` without trusting it, and what was changed.
    """
    path = given if isinstance(given, Path) else folder / "in.pt"
    if path is not given:
        torch.save(given, path, **options)
    with ckpttool.open(path) as checkpoint:
        new, report = disarm(checkpoint)
        ckpttool.save(new, folder / "safe.pt", force=True)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(folder / "safe.pt") == []
    return torch.load(folder / "safe.pt", weights_only=True), report


def refused(
    path: Path | list[Path],
    said: str = "",
    error: type[CkptToolError] | tuple[type[CkptToolError], ...] = Damaged,
    opened: Callable[..., Any] = ckpttool.open,
    **given: Any,
) -> Any:
    """Open what must be refused, in words that match; return the error."""
    with pytest.raises(error, match=said or None) as refusal:
        opened(path, **given)
    fault = refusal.value.with_traceback(None)  # whose frames would keep files open
    del refusal
    assert isinstance(fault, FileError | UsageFault) and len(str(fault)) < 1000
    return fault
