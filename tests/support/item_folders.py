"""Folders as torch_checkpointing writes them, made without it: cut here by torch's rules of placements."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

REPLICATE: dict[str, Any] = {"type": "Replicate"}


def shard(dim: int) -> dict[str, Any]:
    """Return the metadata of `Shard(dim)`."""
    return {"type": "Shard", "dim": dim}


def strided(dim: int, factor: int) -> dict[str, Any]:
    """Return the metadata of `_StridedShard(dim, split_factor=factor)`."""
    return {"type": "StridedShard", "dim": dim, "split_factor": factor}


class Placed(NamedTuple):
    """A whole tensor, and how a mesh of all ranks cuts it."""

    whole: torch.Tensor
    mesh: tuple[int, ...]
    placements: Sequence[Mapping[str, Any]]

    def local(self, rank: int) -> torch.Tensor:
        """Return the share of a rank: one mesh axis after another cuts, as `torch.chunk` does."""
        at = [*itertools.product(*map(range, self.mesh))][rank]
        share = self.whole
        for placement, size, index in zip(self.placements, self.mesh, at, strict=True):
            if placement["type"] == "Replicate":
                continue
            dim, factor = placement["dim"], placement.get("split_factor", 1)
            parts = [chunks(part, size, dim)[index] for part in torch.chunk(share, factor, dim)]
            share = torch.cat(parts, dim)
        return share.clone()

    def described(self) -> dict[str, Any]:
        """Return the entry of `metadata.pkl`."""
        ranks = tuple(range(len([*itertools.product(*map(range, self.mesh))])))
        mesh = {"device_type": "cpu", "mesh_shape": self.mesh, "mesh_data": ranks, "mesh_dim_names": None}
        data = {
            "global_shape": list(self.whole.shape),
            "dtype": str(self.whole.dtype),
            "stride": list(self.whole.stride()),
            "mesh_spec": mesh,
            "placements": list(self.placements),
        }
        return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Return as many chunks as asked for; the last ones may be empty."""
    parts = [*torch.chunk(tensor, count, dim)]
    return parts + [tensor.narrow(dim, 0, 0)] * (count - len(parts))


def write(
    folder: Path, items: Mapping[str, Mapping[str, Placed]], world: int, *, as_safetensors: bool = True
) -> dict[str, Any]:
    """Write the files of all ranks and `metadata.pkl`; return what that holds."""
    folder.mkdir()
    metadata: dict[str, Any] = {}
    for item, tensors in items.items():
        layouts: dict[int, Any] = dict.fromkeys(range(world))
        for rank in range(world):
            local = {name: placed.local(rank) for name, placed in tensors.items()}
            if not as_safetensors:
                torch.save(local, folder / f"{item}_{rank}.pt")
                continue
            name, kind = f"{item}_{rank}.safetensors", {"type": "SafetensorsSerialization"}
            layouts[rank] = {"file_path": name, "serialization_format": kind}
            save_file(local, folder / name)
        paths = {json.dumps([name], separators=(",", ":")): [t.described()] for name, t in tensors.items()}
        metadata[item] = {"nested_path_to_metadata": paths, "rank_to_layout_info": layouts}
    said = {"metadata": metadata, "world_size": world, "version": "2.0"}
    tell(folder, said)
    return said


def tell(folder: Path, said: object) -> None:
    """Write `metadata.pkl`."""
    (folder / "metadata.pkl").write_bytes(pickle.dumps(said))
