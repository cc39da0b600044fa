"""Fixtures for tests of the trainer: a user's own code, and quick collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import contracts
from train import console


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """The collection at the end of each training need not visit torch and thousands of tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the programs print as JSON is compared with its schema."""
    monkeypatch.setattr(console, "say", contracts.requiring(console.say))


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The path of a user's file, `own.py`, with the code OWN of the test's module."""
    (tmp_path / "own.py").write_text(request.module.OWN)
    return f"{tmp_path}/own.py"
