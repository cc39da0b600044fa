"""Regression: a line through 20 samples of 10 features, by the mean squared error.

    python train/main.py --task regression --data examples/regression.py:data \
        --model examples/regression.py:model --batch-size 20 --lr 0.1 --epochs 100

One process takes the 20 samples of a step at once; `torchrun --nproc-per-node 4` gives each rank 5 of them.
The gradient is that of the mean over all 20 either way, so the weights are the same, up to rounding in the
last bits of float64.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return 20 training and 7 test samples of (10 features, 1 number), on a line with some noise."""
    features = torch.randn(27, 10, dtype=torch.float64)
    weights = torch.arange(-5, 5, dtype=torch.float64)
    numbers = features @ weights.unsqueeze(1) + 3 + 0.1 * torch.randn(27, 1)
    return TensorDataset(features[:20], numbers[:20]), TensorDataset(features[20:], numbers[20:])


def model() -> nn.Module:
    return nn.Linear(10, 1, dtype=torch.float64)
