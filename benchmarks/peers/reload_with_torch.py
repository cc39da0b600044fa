"""What careful users write today: a model without memory, a mapped file, tensors assigned, one forward pass.

python reload_with_torch.py INPUT BYTES
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "children"))
from layers import layers

source, nbytes = sys.argv[1], int(sys.argv[2])
with torch.device("meta"):
    model = layers(nbytes)
state = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
model.load_state_dict({key.removeprefix("module."): t for key, t in state.items()}, strict=True, assign=True)
with torch.inference_mode():
    print(model.eval()(torch.zeros(1)))
