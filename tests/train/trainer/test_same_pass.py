"""What no state dict has may differ between ranks: before training, that is seen in one sample's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.distributed import randomness
from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.tasks import builtin as tasks


class Scaled(nn.Module):
    """A network with an attribute of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.net, self.scale = runs.restless(), scale

    def forward(self, x: Any) -> Any:
        return self.net(x) * self.scale


def compared(rank: int, size: int, scales: list[float], shard: bool) -> str:
    randomness.seed_all(rank)
    model = trainings.seeded(lambda: Scaled(scales[rank]))
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.trainer(rank, size, data, model, shard=shard).differing


@pytest.mark.parametrize("shard", [False, True])
def test_a_model_that_is_another_function_on_a_rank_is_named(run_ranks, shard):
    assert run_ranks(2, compared, [1.0, 1.0], shard) == ["", ""]
    first, second = run_ranks(2, compared, [1.0, 2.0], shard)
    assert first == second and first.startswith(
        "by --model simple-cnn and --task classification a sample has"
    )
    assert " on rank 1, with the same weights" in first


def made(rank: int, size: int) -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10, dtype=[torch.float32, torch.float64][rank]))
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.error_of(lambda: trainings.trainer(rank, size, data, model))


def test_models_of_other_types_are_named_before_they_are_sent(run_ranks):
    for kind, said in run_ranks(2, made):
        assert (kind, said) == (
            "RanksDiffer",
            "rank 1 has a different 1.weight than rank 0, before training (1 more differ)",
        )


OWN = """
import random

class Task:
    def __init__(self):
        self.scale = random.random()

    def loss(self, outputs, batch):
        return outputs.sum() * self.scale, len(outputs)

def make():
    return Task()
"""


@pytest.mark.parametrize("name", ["Task", "make"])
def test_a_task_draws_the_same_numbers_on_every_rank_and_after_a_resume(own, name):
    config, scales = TrainConfig.of(task=f"{own}:{name}"), []
    for seed in (1, 2):
        randomness.seed_all(seed)
        scales.append(tasks.users(config.data.task).scale)
    assert scales[0] == scales[1]
