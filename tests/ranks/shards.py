"""Trainings on shards sorted by class: each rank meets digits of its own, as where data can't be moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ckpttool import ranks as ckpttool_ranks
from ranks import trainings
from train import data
from train.config import TrainConfig
from train.plan import Plan, Step


class SortedShards(Plan):
    """A plan that deals by class instead of at random; `owners[i]` is the rank that has sample i."""

    owners: list[int]

    def of_rank(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Step]:
        own = [index for index in self.order(epoch) if self.owners[index] == rank]
        for index in range(start, self.steps):
            begin, end = (len(own) * at // self.steps for at in (index, index + 1))
            yield Step(index, self.global_size(index), (own[begin:end],))


def train_on_shards(rank: int, world_size: int, batchnorm: str, shares: list[list[int]], epochs: int) -> Any:
    """Trains on the digits, rank r on the classes `shares[r]`; returns the accuracy on
    the whole test set after each epoch, and a digest of the weights."""
    torch.set_num_threads(1)
    config = TrainConfig(data="digits", batchnorm=batchnorm, batch_size=64, epochs=epochs)
    digits = data.load(config, seed=0)
    labels = [int(label) for _, label in digits.train]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    trainer = trainings.trainer(
        rank, world_size, digits, model, batchnorm=batchnorm, batch_size=64, epochs=epochs, lr=0.05
    )
    plan = trainer.plan
    trainer.plan = SortedShards(plan.samples, plan.batch_size, plan.seed)
    owner = {label: number for number, share in enumerate(shares) for label in share}
    object.__setattr__(trainer.plan, "owners", [owner[label] for label in labels])
    scores = []
    for _ in range(epochs):
        trainings.finish_epoch(trainer)
        scores.append(trainer.evaluate().accuracy)
    return scores, ckpttool_ranks.digest_all(dict(trainer.ddp.module.named_parameters()))
