"""Writes what the ranks of a run would: a file each, of DTensors placed on a mesh, with `torch.save`.

python make_ranks.py FOLDER BYTES TENSORS fsdp|tp [RANKS]

The ranks (8) are made in turn, in one process: a group that only pretends to communicate is enough for that.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = int(sys.argv[5]) if len(sys.argv) > 5 else 8
COLUMNS = 4096

folder, nbytes, tensors, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rows = max(nbytes // tensors // 4 // COLUMNS // WORLD, 1) * WORLD
for rank in range(WORLD):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    if kind == "fsdp":
        mesh, placements, shape = init_device_mesh("cpu", (WORLD,)), [Shard(0)], (rows // WORLD, COLUMNS)
    else:
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("fsdp", "tp"))
        placements, shape = [Shard(0), Shard(1)], (rows // 2, COLUMNS // (WORLD // 2))
    values = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    # Each piece has different values, so that swapped ones are noticed.
    state = {
        f"layers.{i}.weight": DTensor.from_local(values + i + rank / WORLD, mesh, placements, run_check=False)
        for i in range(tensors)
    }
    torch.save(state, f"{folder}/model_world_size_{WORLD}_rank_{rank}.pt")
    dist.destroy_process_group()
