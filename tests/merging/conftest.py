"""A fixture for tests of formats: the recorded folders of DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import deepspeed_runs
from tests.support.recording import unpack


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the recorded folders of DeepSpeed, which tests only read."""
    return unpack(deepspeed_runs.RECORDED, tmp_path_factory.mktemp("deepspeed"))
