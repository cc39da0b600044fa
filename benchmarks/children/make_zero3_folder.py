"""Writes a folder as ranks of DeepSpeed ZeRO-3 leave it, without DeepSpeed: fp32 weights, no momenta.

python make_zero3_folder.py FOLDER BYTES TENSORS RANKS
"""

import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
nbytes, tensors, ranks = map(int, sys.argv[2:])
rows = nbytes // tensors // 4 // 1001
shapes = {f"layers.{i}.weight": torch.Size([rows + i % 3, 1001]) for i in range(tensors)}  # most with padding

tag = folder / "global_step1"
tag.mkdir(parents=True)
(folder / "latest").write_text(tag.name)
for rank in range(ranks):
    shares = [-(-shape.numel() // ranks) for shape in shapes.values()]
    flat = torch.empty(sum(shares))
    at = 0
    for number, share in enumerate(shares):  # each with other values, so that swapped pieces are noticed
        torch.arange(share, out=flat[at : at + share]).add_(1000 * number + rank)
        at += share
    name = f"zero_pp_rank_{rank}_mp_rank_00"
    states = {
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "fp32_flat_groups": [flat],
    }
    torch.save({"optimizer_state_dict": states}, tag / f"{name}_optim_states.pt")
    model = {
        "module": {key: torch.empty(0) for key in shapes},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": ranks,
        "ds_version": "0.19.8",
    }
    torch.save(model, tag / f"{name}_model_states.pt")
