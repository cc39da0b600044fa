"""Fixtures for tests of formats: a working directory, and the recorded folders of DeepSpeed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.support import deepspeed_runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the recorded folders of DeepSpeed, which tests only read."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(deepspeed_runs.RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder
