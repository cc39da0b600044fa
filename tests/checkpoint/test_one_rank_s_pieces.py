"""A file of HuggingFaceStorageWriter with one rank's pieces of tensors is never taken for the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import Refused
from tests.support.running import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def piece(tmp_path: Path) -> Path:
    """Save what rank 1 of 2 writes of a tensor of 4 rows."""
    places = {"w": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": [2]}}
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 3), "b": torch.ones(2)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    "command",
    [
        *(("convert", out) for out in ("o.pt", "o.safetensors", "o/")),
        *(("convert", "o.pt", "--full"), ("convert", "o.safetensors", "--full")),
        *(("slim", "o.pt"), ("add-prefix", "o.safetensors"), ("convert", "o.pt", "--dtype", "bf16")),
        ("digest",),
    ],
    ids=" ".join,
)
def test_it_is_refused_by_name(
    command: tuple[str, ...], piece: Path, cli: Cli, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli(command[0], piece, *command[1:])
    assert ran.code == 3
    assert "holds one rank's pieces of tensors (DCP_SHARDING_INFO)" in ran.err
    assert "hint: the whole is only in the files of all ranks" in ran.err
    assert list(tmp_path.iterdir()) == [piece]


def test_it_can_be_inspected_and_verified(piece: Path, cli: Cli) -> None:
    page = cli("inspect", piece)
    assert page.code == 0
    assert "state       none: it holds one rank's pieces of tensors" in page.out
    assert cli("verify", piece).code == 0


def test_the_library_refuses_it_too(piece: Path) -> None:
    with pytest.raises(Refused, match="one rank's pieces"):
        ckpttool.open(piece).state()
