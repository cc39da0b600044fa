"""Writes a model and what it became: a fine-tune in bf16 or fp32, or a step that changes one value in 100.

python make_step.py FOLDER tuned-bf16|tuned-fp32|step BYTES
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

folder, kind, nbytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dtype = torch.float32 if kind == "tuned-fp32" else torch.bfloat16
rows, columns = 2048, 2048
base, new = {}, {}
for i in range(max(1, nbytes // (rows * columns * dtype.itemsize))):
    weight = torch.randn(rows, columns) * 0.02
    change = torch.randn(rows, columns) * 1e-4  # what a fine-tune with a small learning rate moves a weight
    name = f"model.layers.{i}.weight"
    base[name] = weight.to(dtype)
    if kind == "step":
        new[name] = torch.where(torch.rand(rows, columns) < 0.01, base[name] * 1.02, base[name])
    else:
        new[name] = (weight + change).to(dtype)
folder.mkdir(exist_ok=True)
save_file(base, folder / "base.safetensors")
save_file(new, folder / "new.safetensors")
