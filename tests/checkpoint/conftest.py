"""Fixtures for tests of what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint.checkpoint import Checkpoint
from tests.support import saved


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Any], Checkpoint]:
    """Return a function that saves a value with torch and opens the file."""
    return lambda value: saved.opened(value, tmp_path)
