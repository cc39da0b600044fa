"""A model that takes twice as long for each sample on the last rank, and data for it; for train/main.py."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

PER_SAMPLE = 0.002
"""Seconds on the other ranks. A pause and not work, so that the ratio of the ranks does not depend on what
else the machine does."""


class Slowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        self.pause = PER_SAMPLE * (1 + last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause * len(inputs))
        scores: torch.Tensor = self.layer(inputs)
        return scores


def model(num_classes: int) -> nn.Module:
    return Slowed()


def data() -> tuple[TensorDataset, TensorDataset]:
    inputs, labels = torch.rand(1280, 10), torch.arange(1280) % 10
    return TensorDataset(inputs, labels), TensorDataset(inputs[:10], labels[:10])
