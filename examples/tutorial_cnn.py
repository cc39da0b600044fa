"""The small network of PyTorch's CIFAR-10 tutorial, on one process and on four: the same training.

    DATA=folder:pictures         # pictures/train/<class>/* and pictures/test/<class>/*, of 32 x 32
    RUN="python train/main.py --model examples/tutorial_cnn.py:net --data $DATA --mean 0.5 --std 0.5
         --batch-size 16 --lr 0.001 --momentum 0.9 --weight-decay 0 --scheduler none --epochs 10"
    $RUN --out runs/one
    $RUN --out runs/four --spawn 4
    ckpttool diff runs/one/last.pt runs/four/last.pt        # the largest difference of parameters
    python train/plot.py runs/one runs/four -o curves.png   # both in one picture

The batch is the global one, so four ranks take four samples each, and the gradient is that of the mean over
all sixteen: only the order of sums differs. `net(double=True)` computes in float64, where what is left of the
difference shows that it is rounding. docs/fine-tuning.md has the figures.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Two convolutions of 6 and 16 channels, then layers of 120 and 84, for images of 32 × 32."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores (batch, num_classes) of images (batch, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.conv1(x.to(self.fc3.weight.dtype))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def net(num_classes: int = 10, double: bool = False) -> Net:
    """Return the network; the trainer says how many classes there are."""
    return Net(num_classes).double() if double else Net(num_classes)
