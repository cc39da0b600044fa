"""What users write today: load the checkpoint, cut the keys, save.

python strip_prefix_with_torch.py INPUT OUTPUT [mmap]
"""

import sys

import torch
from safetensors.torch import save_file

source, target, *options = sys.argv[1:]
state = torch.load(source, map_location="cpu", mmap="mmap" in options, weights_only=True)
save_file({key.removeprefix("module."): tensor for key, tensor in state.items()}, target)
