"""A small network with BatchNorm and a head, whose statistics are not those of a new model."""

from __future__ import annotations

import torch
from torch import nn


class SmallNet(nn.Module):
    """A convolution, a normalisation and a head.

    Args:
        classes: outputs of the head.
        width: channels of the convolution.
    """

    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.conv(x)).mean((2, 3)))
        return found


def used(seed: int = 1) -> SmallNet:
    """Return a network that has seen two samples."""
    torch.manual_seed(seed)
    made = SmallNet()
    made(torch.rand(2, 3, 5, 5))
    return made
