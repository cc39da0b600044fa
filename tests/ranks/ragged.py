"""Texts of several lengths, whose data set makes the batches, and a model for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SAMPLES = 13


class Ragged(Dataset[Any]):
    """Texts of 1 to 13 numbers, each with a class; `collate` pads them."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return torch.randn((index * 5) % 13 + 1, 4, generator=draw, dtype=torch.float64), index % 3

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        texts, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(text) for text in texts])
        return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class OfTexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.scores = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(texts.shape[1]) < lengths.unsqueeze(1)
        return self.scores((self.each(texts).tanh() * inside.unsqueeze(2)).sum(dim=1) / lengths.unsqueeze(1))


class Masked(Ragged):
    """Hides numbers at random, drawn for the batch."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        texts, lengths, labels = Ragged.collate(samples)
        return texts * (torch.rand(texts.shape) > 0.3), lengths, labels
