"""Writes what our trainer would: tensors on block boundaries, in a `.pt` and in a run with an optimizer.

python make_aligned.py OUTPUT FOLDER BYTES
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.serialization import config

path, folder, nbytes, tensors = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), 128
config.save.storage_alignment = 4096
# As in most models, sizes are whole blocks of 4 KB.
values = torch.arange(nbytes // tensors // 4096 * 1024, dtype=torch.float32)
torch.save({f"module.layers.{i}.weight": values + i for i in range(tensors)}, path)

# A run's checkpoints: the older as large as the other file, two thirds of it Adam's, and a small newer one.
for name, count in (("step-1", len(values) // 3072 * 1024), ("step-2", 9)):
    model = {f"layers.{i}.weight": values[:count] + i for i in range(tensors)}
    moments = {i: {"exp_avg": values[:count] - i, "exp_avg_sq": values[:count] + i} for i in range(tensors)}
    groups = [{"params": list(range(tensors))}]
    state = {"model": model, "optimizer": {"state": moments, "param_groups": groups}}
    torch.save(state, folder / f"{name}.pt")
    os.utime(folder / f"{name}.pt", (count == 9,) * 2)
os.sync()
