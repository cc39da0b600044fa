"""Writes a checkpoint like that of a DDP run: `torch.save` of a flat state under `module.`

python make_checkpoint.py OUTPUT BYTES TENSORS
"""

import sys

import torch

path, nbytes, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
values = torch.arange(nbytes // tensors // 4, dtype=torch.float32)
# Each tensor has different values, so that swapped tensors are noticed.
torch.save({f"module.layers.{i}.weight": values + i for i in range(tensors)}, path)
