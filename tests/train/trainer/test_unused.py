"""`--find-unused`: what no rank uses in a step is left as it is, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ckpttool.distributed.plan import Plan
from tests.ranks import trainings
from train.data.data_set import Data

SAMPLES, EPOCHS = 22, 2
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5}


class Experts(nn.Module):
    """Layers that are used for the samples of their kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(4, 10, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(4, 10, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.all(x)
        for kind, expert in enumerate(self.experts):
            its = x[:, 0] == kind
            out = out + its[:, None] * expert(x) if its.any() else out
        return out


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(SAMPLES, 4, generator=generator, dtype=torch.float64)
    inputs[:, 0] = torch.randint(4, (SAMPLES,), generator=generator)
    return inputs, torch.randint(10, (SAMPLES,), generator=generator)


def alone(batch_size: int) -> list[torch.Tensor]:
    """Return the parameters after plain training in one process."""
    model, (inputs, labels) = trainings.seeded(Experts), samples()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for epoch in range(EPOCHS):
        for batch in torch.tensor(Plan(SAMPLES, batch_size).order(epoch)).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def on_ranks(rank: int, size: int, settings: dict[str, Any]) -> list[torch.Tensor]:
    data = Data("kinds", TensorDataset(*samples()), None, tuple("0123456789"), (4,), "kinds")
    usual = {"find_unused": True, "optimizer": "adamw", "momentum": 0.0, **ADAMW}
    trainer = trainings.trainer(rank, size, data, trainings.seeded(Experts), **usual, **settings)
    for _ in range(EPOCHS):
        trainings.finish_epoch(trainer)
    return [parameter.detach() for parameter in trainer.ddp.module.parameters()]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, {"batch_size": 5, "accumulate": 2}),
        (2, {"batch_size": 1}),  # one rank has no samples
        (2, {"batch_size": 5, "accumulate": 2}),
        (4, {"batch_size": 3, "zero": True}),
    ],
)
def test_neither_momentum_nor_decay_changes_what_no_rank_uses(run_ranks, size, settings):
    expected = alone(settings["batch_size"])
    for found in run_ranks(size, on_ranks, settings):
        assert trainings.farthest(found, expected) < 1e-12
