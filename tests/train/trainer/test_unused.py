"""What no rank uses in a step: left as it is with `--find-unused`, as in one process; else an error."""

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


class OfOneKind(Experts):
    """Uses one layer alone in a pass whose samples are all of its kind, and else all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and bool((x[:, 0] == x[0, 0]).all()):
            return super().forward(x)
        return self.all(x) + sum(expert(x) * 0 for expert in self.experts) + super().forward(x) * 0


def pass_by_pass(rank: int, size: int, settings: dict[str, Any]) -> Any:
    """Take a step of two passes: in the second each rank has samples of a kind of its own."""
    inputs = torch.rand(8 * size, 4, dtype=torch.float64)
    for number in range(size):
        (step,) = Plan(len(inputs), len(inputs), accumulate=2).of_rank(0, number, size)
        first, second = map(list, step.micro_batches)
        inputs[first, 0], inputs[second, 0] = torch.arange(4.0, dtype=torch.float64), float(number)
    samples = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    data = Data("kinds", samples, None, tuple("0123456789"), (4,), "kinds")
    settings = {"batch_size": len(inputs), "accumulate": 2, **settings}
    trainer = trainings.trainer(rank, size, data, trainings.seeded(OfOneKind), **settings)
    return trainings.error_of(lambda: trainings.finish_epoch(trainer))


@pytest.mark.parametrize("settings", [{}, {"shard": True}], ids=["DDP", "--shard"])
def test_a_parameter_that_only_an_earlier_pass_uses_is_named(run_ranks, settings):
    """Each has a gradient, which was averaged with that of another one, or not at all."""
    for kind, said in run_ranks(2, pass_by_pass, settings):
        assert kind == "CheckFailed"
        assert "did not affect the output in step 1" in said
    assert run_ranks(2, pass_by_pass, {"find_unused": True}) == [None, None]
