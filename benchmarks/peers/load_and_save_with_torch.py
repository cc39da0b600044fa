"""A checkpoint loaded and saved again, as a script that changes its names does.

python load_and_save_with_torch.py INPUT OUTPUT
"""

import sys

import torch

source, target = sys.argv[1:]
state = torch.load(source, map_location="cpu", weights_only=True)
torch.save({key.removeprefix("module."): tensor for key, tensor in state.items()}, target)
