"""What trainers' own mergers do: load the file of every rank, copy each piece to its place, save.

python merge_with_torch.py FOLDER OUTPUT
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed.tensor
from safetensors.torch import save_file
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


def merged(states):
    """The whole tensors, of the states of all ranks."""
    whole = {}
    for state in states:
        for name, value in state.items():
            if name not in whole:
                whole[name] = torch.empty(value.shape, dtype=value.dtype)
            mesh = value.device_mesh
            sizes = [math.prod(axis.shape) for axis in mesh._layout.axes]
            at = list(mesh._coordinate_on_dim)
            size, begin = _compute_local_shape_and_global_offset(value.shape, sizes, at, value.placements)
            place = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            whole[name][place] = value._local_tensor
    return whole


if __name__ == "__main__":
    folder, target = sys.argv[1:]
    paths = sorted(Path(folder).glob("*.pt"))
    save_file(merged(torch.load(path, map_location="cpu", weights_only=False) for path in paths), target)
