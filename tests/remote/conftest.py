"""Servers on the loopback that hold a folder of checkpoints, and a cache of each test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.range_server import RangeServer


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of this test, empty at its start."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CKPTTOOL_CACHE", str(folder))
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of the folder `there`, by https's rules without its certificate."""
    os.makedirs(tmp_path / "there", exist_ok=True)
    with RangeServer(tmp_path / "there") as running:
        yield running
