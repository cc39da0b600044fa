"""A folder of shards that tells which save wrote it: made without torch, so that new processes start fast."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ckpttool
from tests.support.crafting import safetensors_file


def shards_of(value: float, folder: Path) -> None:
    """Write `folder/out`, three shards of one tensor each, all of whose values are `value`."""
    entry = {"dtype": "F32", "shape": [100]}
    places = zip("abc", (0, 400, 800), strict=True)
    header = {name: {**entry, "data_offsets": [at, at + 400]} for name, at in places}
    made = safetensors_file(folder / "in.safetensors", header, struct.pack("<300f", *[value] * 300))
    given: dict[str, Any] = {"to": "safetensors-sharded", "shard_size": 400, "force": True}
    ckpttool.save(ckpttool.open(made), folder / "out", **given)


def values_in(folder: Path) -> set[float]:
    """Return the values in the shards of a folder: one, if all are of the same save."""
    with ckpttool.open(folder) as checkpoint:
        return {
            value
            for tensor in checkpoint.state().tensors.values()
            for value in struct.unpack("<100f", tensor.storage.data.read())  # type: ignore[union-attr]
        }
