"""What the tests of parts share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.core.files import copying


@pytest.fixture(scope="package")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return a checkpoint that takes a moment, and the bytes of its conversion by one process."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"module.{number}": torch.randn(1_500_000) for number in range(8)}
    torch.save(state, folder / "in.pt")
    ckpttool.convert(folder / "in.pt", folder / "out.pt", dtype="bf16")
    return folder / "in.pt", (folder / "out.pt").read_bytes()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files of some kilobytes consist of many blocks."""
    monkeypatch.setattr(copying, "BUFFER", 1 << 12)
    monkeypatch.setattr(copying, "SMALL", 1 << 10)
    monkeypatch.setattr(copying, "TINY", 1 << 8)
