"""Fixtures for tests of the trainer: a user's own code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import contracts
from train import console
from train.data.batches import processes_ended


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the programs print as JSON is compared with its schema."""
    monkeypatch.setattr(console, "say", contracts.requiring(console.say))


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Processes that load data ignore SIGTERM: one that is left would hold up the end of the tests."""
    with processes_ended():
        yield


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The path of a user's file, `own.py`, with the code OWN of the test's module."""
    (tmp_path / "own.py").write_text(request.module.OWN)
    return f"{tmp_path}/own.py"
