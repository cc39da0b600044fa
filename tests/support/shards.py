"""Write a small folder of shards, for tests that replace folders."""

from __future__ import annotations

from pathlib import Path

import ckpttool


def shards_of(value: float, folder: Path) -> None:
    """Write `folder/out`, three shards of one tensor each, all of whose values are `value`."""
    import torch

    torch.save({name: torch.full((100,), float(value)) for name in "abc"}, folder / "in.pt")
    ckpttool.save(
        ckpttool.open(folder / "in.pt"),
        folder / "out",
        to="safetensors-sharded",
        shard_size=400,
        force=True,
    )
