"""Fixtures for tests of formats: a working directory, and the recorded folders of DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import deepspeed_runs
from tests.support.recording import unpack


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the recorded folders of DeepSpeed, which tests only read."""
    return unpack(deepspeed_runs.RECORDED, tmp_path_factory.mktemp("deepspeed"))
