"""Unequal ranks: the training is that of one process, whatever each rank's share; and shares by speed."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.tasks import builtin as tasks
from train.trainer import preflight, shares
from train.trainer.shares import Speed, propose

SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 10)).double()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).double()


def data_of(samples: int) -> Any:
    return trainings.tensors((10,), samples, dtype=torch.float64)


# ---- exactness -----------------------------------------------------------------------------------------


def train_in_shares(rank: int, world_size: int, make: Any, settings: dict[str, Any]) -> list[torch.Tensor]:
    model = trainings.seeded(make)
    trainer = trainings.trainer(rank, world_size, data_of(53), model, **SGD, epochs=2, **settings)
    for _ in range(2):
        trainings.finish_epoch(trainer)
    return [tensor.detach() for tensor in trainer.ddp.module.state_dict().values()]


def train_alone(make: Any, batch_size: int, clip_norm: float | None) -> list[torch.Tensor]:
    """The same training by plain PyTorch in one process: the mean over each global batch."""
    model = trainings.alone(make, data_of(53), batch_size, 2, clip_norm, **SGD)
    return [tensor.detach() for tensor in model.state_dict().values()]


@pytest.mark.covered(lambda make, size, share, extra: (size, "rank_batch" in share) != (4, True))
@pytest.mark.parametrize(("make", "extra"), [
    (plain, {}), (plain, {"accumulate": 3}), (plain, {"clip_norm": 0.3}),
    (plain, {"accumulate": 4, "clip_norm": 0.3}), (normalised, {}), (normalised, {"clip_norm": 0.3}),
], ids=["plain", "accumulate", "clip", "both", "sync", "sync and clip"])  # fmt: skip
@pytest.mark.parametrize(("size", "share"), [
    (2, {"rank_share": (1, 3), "batch_size": 16}),
    (2, {"rank_batch": (2, 10), "batch_size": 12}),  # the last batch of 5 is 1 and 4
    (4, {"rank_share": (1, 2, 3, 10), "batch_size": 16}),
    (4, {"rank_batch": (9, 1, 1, 1), "batch_size": 12}),
])  # fmt: skip
def test_training_in_unequal_shares_is_that_of_one_process(run_ranks, make, size, share, extra):
    settings = {**share, **extra, "batchnorm": "sync" if make is normalised else "plain"}
    expected = train_alone(make, share["batch_size"], extra.get("clip_norm"))
    for ours in run_ranks(size, train_in_shares, make, settings):
        assert trainings.farthest(ours, expected) < 1e-12


def test_ranks_with_other_numbers_of_passes_agree_under_sync_batchnorm(run_ranks):
    settings = {"rank_batch": (2, 10), "batch_size": 12, "accumulate": 4, "drop_last": True}
    one, other = run_ranks(2, train_in_shares, normalised, {**settings, "batchnorm": "sync"})
    assert all(map(torch.equal, one, other))


def train_as_torch_deals(rank: int, world_size: int) -> Any:
    settings = {**SGD, "batch_size": 8, "sampler": "torch", "epochs": 1}
    trainer = trainings.trainer(rank, world_size, data_of(21), trainings.seeded(plain), **settings)
    score = trainings.finish_epoch(trainer)
    return score.samples, [parameter.detach() for parameter in trainer.ddp.parameters()]


def test_with_torchs_sampler_the_repeats_count_as_samples(run_ranks):
    plan = Plan(21, 8, sampler="torch")
    model, (inputs, labels) = trainings.seeded(plain), data_of(21).train.tensors
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for batch in plan.batches(0, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    for samples, ours in run_ranks(4, train_as_torch_deals):
        assert samples == 24
        assert trainings.farthest(ours, model.parameters()) < 1e-12


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "said", "hint"), [
    ({"rank_share": (1, 7), "batch_size": 8},
     "--rank-share 1,7: a batch of 8 gives a rank a single sample", "other numbers as --rank-share"),
    ({"rank_batch": (1, 3), "batch_size": 4},
     "--rank-batch 1,3: a batch of 4 gives a rank a single sample", "other numbers as --rank-batch"),
    ({"rank_share": (1, 3), "batch_size": 8},
     "--rank-share 1,3: the last batch of 4 gives a rank a single sample", "--drop-last"),
])  # fmt: skip
def test_a_share_of_one_sample_is_refused_for_batchnorm(settings, said, hint):
    config, data = TrainConfig.of(**settings), data_of(44)
    with pytest.raises(UsageFault) as refused:
        preflight.check(
            config,
            data,
            normalised(),
            trainings.place(0, 2),
            tasks.build(config, data),
        )
    assert said in str(refused.value)
    assert hint in refused.value.hint


# ---- shares by speed -----------------------------------------------------------------------------------


def test_shares_follow_the_speeds():
    assert propose([Speed(0, 1), Speed(0, 2)], Plan(300, 30)) == [20, 10]
    assert propose([Speed(0, 1)] * 4, Plan(300, 30)) == [8, 8, 7, 7]


def test_a_pause_that_each_step_takes_is_not_taken_for_slow_samples():
    assert propose([Speed(0, 1), Speed(10, 1)], Plan(300, 30)) == [20, 10]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9)), min_size=1, max_size=6), st.integers(1, 9))
def test_no_other_shares_would_be_done_sooner_than_those_proposed(speeds, times):
    ranks = [Speed(*speed) for speed in speeds]
    sizes = propose(ranks, Plan(10_000, 16 * len(ranks) * times, drop_last=True))
    assert sum(sizes) == 16 * len(ranks) * times
    done = [rank.pause + size * rank.per_sample for rank, size in zip(ranks, sizes, strict=True)]
    slowest = done.index(max(done))
    if sizes[slowest] > 2:  # fewer would leave BatchNorm a single sample
        for number, rank in enumerate(ranks):
            assert number == slowest or done[number] + rank.per_sample >= done[slowest] - 1e-9


def test_no_share_leaves_a_rank_a_single_sample_in_the_last_batch():
    plan = Plan(samples=36, batch_size=32)  # the last batch has 4
    assert Plan(36, 32, rank_share=tuple(propose([Speed(0, 1), Speed(0, 50)], plan))).splits(2)[-1] == [2, 2]


class Slow(nn.Module):
    """A model that takes twice as long on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(10, 10), nn.BatchNorm1d(10)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0006 * len(x) * (1 + self.rank))
        return torch.dropout(self.norm(self.layer(x)), 0.3, self.training)


def train_by_speed(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    settings = {"out": folder, "batch_size": 36, "rank_share": "auto", "epochs": 2, **runs.OFTEN, **settings}
    model = trainings.seeded(lambda: Slow(rank))
    return runs.outcome(rank, world_size, trainings.tensors((10,), 144), model, settings)


def test_a_rank_of_half_the_speed_gets_half_the_samples_and_a_resume_follows(run_ranks, tmp_path):
    whole = run_ranks(2, train_by_speed, str(tmp_path / "a"), {}, timeout=60)[0]
    share = runs.read(tmp_path / "a" / "last.pt")["plan"]["rank_share"]
    assert 20 <= share[0] * 36 / sum(share) <= 28, share
    given = ",".join(map(str, share))
    assert f"shares  --rank-share {given}, by measured speed" in whole
    resumed = {"resume": str(tmp_path / "a" / "step-000003.pt")}
    again = run_ranks(2, train_by_speed, str(tmp_path / "b"), resumed, timeout=60)[0]
    assert f"shares  --rank-share {given}, as measured when the run began" in again
    ends = (runs.contents(tmp_path / folder / "last.pt", "model", "optimizer") for folder in "ab")
    assert next(ends) == next(ends)


def measure(rank: int, world_size: int) -> Any:
    """Return the measured speed, and what a training goes on from, before and after."""
    data, model = trainings.tensors((10,), 64), trainings.seeded(lambda: Slow(rank))
    trainer = trainings.trainer(rank, world_size, data, model, rank_share="auto")
    traces = []
    for _ in range(2):
        traces.append({**copy.deepcopy(model.state_dict()), "drawn": torch.get_rng_state()})
        speed = shares.measure(trainer)
    assert all(parameter.grad is None for parameter in model.parameters())
    return speed, *traces


def test_measuring_leaves_no_trace(run_ranks):
    for speed, before, after in run_ranks(2, measure):
        assert speed.per_sample > 0
        assert all(torch.equal(before[name], after[name]) for name in before)


def train_with_shares(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> None:
    settings = {"out": folder, "batch_size": 16, "epochs": 1, **runs.OFTEN, **settings}
    said = runs.outcome(rank, world_size, data_of(64), trainings.seeded(plain), settings)
    assert "Error" not in said and "Fault" not in said, said


def test_a_run_continues_with_other_shares_on_other_ranks(run_ranks, tmp_path):
    run_ranks(1, train_with_shares, str(tmp_path / "one"), {})
    run_ranks(2, train_with_shares, str(tmp_path / "two"), {"rank_share": (1, 3), "stop_at": 2})
    resumed = {"rank_share": (1, 1, 1, 5), "resume": str(tmp_path / "two" / "step-000002.pt")}
    run_ranks(4, train_with_shares, str(tmp_path / "four"), resumed)
    assert (
        runs.largest_difference(*(runs.read(tmp_path / one / "last.pt") for one in ("one", "four"))) < 1e-12
    )


def shares_of_one_sample(rank: int, world_size: int) -> Any:
    data = trainings.tensors((10,), 1)
    trainer = trainings.trainer(rank, world_size, data, nn.Linear(10, 10), rank_share="auto", batch_size=2)
    return shares.settle(trainer)


def test_nothing_is_measured_where_a_rank_has_no_sample(run_ranks):
    said = ["equal shares: a batch leaves a rank without a sample, so there is nothing to measure"]
    assert run_ranks(2, shares_of_one_sample) == [said, said]
