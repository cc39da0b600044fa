"""Cases in which several ranks save parts of one checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn


def whole() -> dict[str, torch.Tensor]:
    """Tensors of which no size divides evenly by two or four."""
    return {
        "rows": torch.arange(35.0).reshape(7, 5),
        "columns": torch.arange(35, dtype=torch.int64).reshape(5, 7),
        "both": torch.arange(45.0).reshape(5, 9).to(torch.bfloat16),
        "middle": torch.arange(3 * 5 * 4.0).reshape(3, 5, 4),
        "short": torch.arange(2.0),
        "alike": torch.arange(3.0),
    }


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    """Saves `whole()` by `torch.distributed.checkpoint`, cut in various ways."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    line = init_device_mesh("cpu", (world_size,))
    plane = init_device_mesh("cpu", (world_size // 2, 2))
    tensors = whole()
    state = {
        "model": {
            "rows": distribute_tensor(tensors["rows"], line, [Shard(0)]),
            "columns": distribute_tensor(tensors["columns"], line, [Shard(1)]),
            "both": distribute_tensor(tensors["both"], plane, [Shard(0), Shard(1)]),
            "middle": distribute_tensor(tensors["middle"], plane, [Replicate(), Shard(1)]),
            "short": distribute_tensor(tensors["short"], line, [Shard(0)]),
            "alike": tensors["alike"],
        },
        "epoch": 3,
    }
    dcp.save(state, checkpoint_id=folder)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def save_fsdp(rank: int, world_size: int, folder: str) -> None:
    """Trains a step under FSDP2 and saves model and optimizer; rank 0 also keeps the whole beside it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"model": weights, "optimizer": moments}, Path(folder).with_suffix(".pt"))


def save_pieces(rank: int, world_size: int, folder: str) -> None:
    """Save each rank's own file with torch.save: FSDP2's DTensors, placed DTensors, and ShardedTensors."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), f"{folder}/fsdp2-{rank}.pt")
    rows = torch.arange(24.0).reshape(6, 4)
    placed = {
        "cut": distribute_tensor(rows, mesh, [Shard(1)]),
        "copied": distribute_tensor(rows, mesh, [Replicate()]),
        "plain": torch.ones(2),
    }
    torch.save(placed, f"{folder}/placed-{rank}.pt")
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(world_size)])
    torch.save({"w": sharded_tensor.ones(spec, 6, 4), "b": rows}, f"{folder}/sharded-{rank}.pt")
