"""Loading processes: the random numbers that they draw, and their end."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ckpttool.distributed.group import process_group
from ckpttool.errors import Damaged
from tests.ranks import trainings
from tests.ranks.programs import OWN_DATA
from train import main
from train.config.sections import TrainConfig
from train.data import batches as loading
from train.data import data_set
from train.model import builtin as models
from train.tasks import builtin as tasks
from train.trainer import preflight
from train.trainer.trainer import Trainer


class Noisy(TensorDataset):
    """Draws from the random state of whatever process loads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return torch.rand(10), self.tensors[1][index]


class Stuck(Dataset[Any]):
    """Has two samples that are there at once; the others take for ever."""

    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1000 * (index > 1))
        return torch.tensor(index)


class Noted(threading.Thread):
    """A thread that notes when it begins and when it is waited for."""

    order: list[str] = []  # noqa: RUF012

    def start(self) -> None:
        self.order.append("start")
        super().start()

    def join(self, timeout: float | None = None) -> None:
        self.order.append("join")
        super().join(timeout)


def test_loading_processes_that_are_stuck_are_ended_together(monkeypatch):
    monkeypatch.setattr(loading, "PATIENCE", 0.5)
    before = {*multiprocessing.active_children()}
    with loading.processes_ended():
        each = [[index] for index in range(99)]
        both = [iter(loading.load(Stuck(), each, trainings.place(0, 1), workers=2)) for _ in range(2)]
        assert [int(next(batches)) for batches in both] == [0, 0]
        ended = iter(loading.load(Stuck(), [[1]], trainings.place(0, 1), workers=1))
        assert [int(batch) for batch in ended] == [1]
        monkeypatch.setattr(threading, "Thread", Noted)
    assert Noted.order == sorted(Noted.order, reverse=True) and Noted.order.count("start") >= 2
    for process in {*multiprocessing.active_children()} - before:
        process.join(60)  # they have been killed
    assert {*multiprocessing.active_children()} <= before
    time.sleep(0.1)  # nor is their end raised here as a failure


def test_more_loading_processes_than_cores_are_started_without_a_warning():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with loading.processes_ended():
            numbers = TensorDataset(torch.arange(4))
            loaded = [*loading.load(numbers, [[0], [1], [2, 3]], trainings.place(0, 1), workers=2)]
    finally:
        os.sched_setaffinity(0, cores)
    assert [batch.tolist() for (batch,) in loaded] == [[0], [1], [2, 3]]


def drawn(rank: int = 0, seed: int = 0, *, start: int = 0, epochs: int = 1) -> list[torch.Tensor]:
    """Return the first samples of one rank of two in each of some epochs, loaded from step `start`."""
    data, seen, found = trainings.tensors((10,), 16), [], []
    data = dataclasses.replace(data, train=Noisy(*data.train.tensors))  # type: ignore[attr-defined]
    model = nn.Linear(10, 10)
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with process_group(trainings.place(0, 1), timeout=5):  # a plan of two ranks, and this one alone
        settings = {"batch_size": 8, "seed": seed, "workers": 1}
        trainer = trainings.trainer(rank, 2, data, model, **settings)
        trainer.progress.step = start
        for _ in range(epochs):
            seen.clear()
            trainings.finish_epoch(trainer)
            found.append(torch.cat(seen)[:4])
    return found


def test_workers_draw_different_numbers_for_each_epoch_rank_and_seed():
    alike = drawn(epochs=2)
    assert all(map(torch.equal, alike, drawn(epochs=2)))
    met = [*alike, *drawn(rank=1), *drawn(seed=1), *drawn(start=1)]
    assert len({tuple(numbers.flatten().tolist()) for numbers in met}) == 5


def test_random_samples_from_workers_are_the_same_after_a_resume_within_an_epoch(tmp_path):
    before = {*multiprocessing.active_children()}
    (tmp_path / "own.py").write_text(OWN_DATA)
    settings = ["--data", f"{tmp_path}/own.py:pair", "--batch-size", "4", "--workers", "2"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saving = ["--epochs", "2", "--save-every", "1steps", "--keep", "9"]
    assert main.main([*settings, *saving, "--out", str(whole)]) == 0
    going_on = ["--out", str(resumed), "--resume", str(whole / "step-000002.pt")]
    assert main.main([*settings, *saving, *going_on]) == 0
    one, other = (torch.load(out / "last.pt", weights_only=True)["model"] for out in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {*multiprocessing.active_children()} <= before  # those of an evaluation are kept for the next


# ---- --skip-damaged ------------------------------------------------------------------------------------

OWN = """
import torch
from torch.utils.data import TensorDataset
from ckpttool.errors import Damaged

class Files(TensorDataset):
    classes = ["a", "b"]

    def __getitem__(self, index):
        if index in (0, 1, 19):  # which are looked at before training
            raise Damaged(f"{index}.png", "is cut short")
        return super().__getitem__(index)

def files():
    return Files(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
"""


def trained(rank: int, size: int, spec: str) -> tuple[int, int]:
    """Check and train; return the samples that were used, and those that were left out."""
    config, model = TrainConfig.of(data=spec, batch_size=6, skip_damaged=True, epochs=1), models.simple_cnn(2)
    data, place = data_set.load(config.data), trainings.place(rank, size)
    task = tasks.build(config, data)
    preflight.check(config, data, model, place, task)
    trainer = Trainer(config, data, model, place, task)
    trainings.finish_epoch(trainer)
    return trainer.progress.samples, trainer.feed.skipped


def test_damaged_samples_are_left_out_also_where_they_are_looked_at_before_training(run_ranks, own):
    assert run_ranks(2, trained, f"{own}:files") == [(17, 3)] * 2
    with pytest.raises(Damaged, match=r"0\.png: is cut short"):
        data_set.load(TrainConfig.of(data=f"{own}:files").data)
