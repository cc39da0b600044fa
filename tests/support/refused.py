"""Paths that can't be opened: one line for what is raised and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.errors import CkptToolError, Damaged


def refused(
    path: Path | list[Path],
    words: str | None = None,
    kind: type[CkptToolError] = Damaged,
    opened: Callable[..., Any] = ckpttool.open,
    **given: Any,
) -> Any:
    """Open a path, which raises an error of this kind whose message matches; return the error."""
    with pytest.raises(kind, match=words) as caught:
        opened(path, **given)
    return caught.value
