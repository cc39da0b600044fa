"""A small folder of shards, for tests of replacing folders."""

from __future__ import annotations

from pathlib import Path

import ckpttool


def shards_of(value: float, folder: Path) -> None:
    """A sharded checkpoint whose three tensors all hold one value."""
    import torch

    torch.save({name: torch.full((100,), float(value)) for name in "abc"}, folder / "in.pt")
    ckpttool.save(
        ckpttool.open(folder / "in.pt"),
        folder / "out",
        to="safetensors-sharded",
        shard_size=400,
        force=True,
    )
