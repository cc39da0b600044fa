"""Each rank has other classes, as when data can't be moved: the training data of `running_statistics`.

`digits_by_class.py:shards` for `--data`, `digits_by_class.py:network` for `--model`. With STATISTICS=FOLDER
in the environment, the network also keeps the running statistics of this rank's samples alone, as plain
BatchNorm would, and saves them as FOLDER/statistics<rank>.pt after each training step.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from train.config.sections import DataConfig
from train.data.data_set import load
from train.data.samples import Samples

CLASSES = 10


class Shard(Dataset[tuple[Tensor, int]]):
    """A rank's own samples, under as many indices as all ranks have samples: each has several indices."""

    classes = tuple(map(str, range(CLASSES)))
    fingerprint = "each rank has its own classes"  # ranks whose samples differ are refused without it

    def __init__(self, own: Subset[tuple[Tensor, int]], size: int) -> None:
        self.own, self.size = own, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.own[index * len(self.own) // self.size]


def shards() -> tuple[Shard, Samples]:
    """The digits of this rank's classes (on four ranks 0–2, 3–4, 5–7 and 8–9), and the whole test set."""
    digits = load(DataConfig(name="digits"))
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    labels = [int(label) for _, label in digits.train]
    own = [index for index, label in enumerate(labels) if label * ranks // CLASSES == rank]
    return Shard(Subset(digits.train, own), len(labels)), digits.test


def network(num_classes: int = CLASSES) -> nn.Sequential:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
    if "STATISTICS" in os.environ:
        for layer in model:
            if isinstance(layer, nn.BatchNorm1d):
                layer.alone = [copy.deepcopy(layer)]  # in a list: not a part of the model, but copied with it
                layer.register_forward_hook(_update_alone)
        model.register_forward_hook(_save_alone)
    return model


def _update_alone(layer: Any, given: tuple[Tensor], output: Tensor) -> None:
    if layer.training:
        layer.alone[0](given[0].detach())


def _save_alone(model: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
    if model.training:
        kept = {path: layer.alone[0] for path, layer in model.named_modules() if hasattr(layer, "alone")}
        buffers = {f"{path}.{name}": b for path, layer in kept.items() for name, b in layer.named_buffers()}
        torch.save(buffers, f"{os.environ['STATISTICS']}/statistics{os.environ['RANK']}.pt")
