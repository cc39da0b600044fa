"""Write a small folder of shards, for tests that replace folders."""

from __future__ import annotations

import struct
from pathlib import Path

import ckpttool
from tests.support.crafting import safetensors_file


def shards_of(value: float, folder: Path) -> None:
    """Write `folder/out`, three shards of one tensor each, all of whose values are `value`."""
    header = {
        name: {"dtype": "F32", "shape": [100], "data_offsets": [400 * at, 400 * at + 400]}
        for at, name in enumerate("abc")
    }
    values = struct.pack("<300f", *[value] * 300)
    ckpttool.save(
        ckpttool.open(safetensors_file(folder / "in.safetensors", header, values)),
        folder / "out",
        to="safetensors-sharded",
        shard_size=400,
        force=True,
    )
