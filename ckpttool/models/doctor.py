"""Diagnose why a file does not load into a live model. Imports torch when called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..formats.reading import File, opened
from .diagnosis import Diagnosis, diagnose
from .diagnosis.fit import Blueprint
from .diagnosis.resize import resized
from .loading_rules import accepts

if TYPE_CHECKING:
    import torch


def doctor(
    file: File, model: torch.nn.Module, *, state: str | None = None, spec: str | None = None
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model, and which commands fix it.

    Args:
        file: a path, or an open checkpoint; only names, shapes and types of its tensors are read.
        model: the model that it should load into; it is not changed, and may be on the meta device.
        state: dotted path of the model's state in the file; the one that fits best when None.
        spec: the SPEC that built the model, for the commands; its factory may be run again to find the sizes
            in which the model fits. When None, the commands say `SPEC`.

    Returns:
        The problems, the command that fixes each, and the line of Python that loads the result.

    Raises:
        NoState: `state` is given, and the file has no state there.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.
    """
    with opened(file) as checkpoint:
        return diagnose(
            checkpoint,
            Blueprint.of(model),
            spec or "SPEC",
            state=state,
            accepts=partial(accepts, model),
            rebuild=partial(resized, spec) if spec else None,
        )
