"""Batch samplers for training loops of one's own: every index once, and the gradients of one process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data as of_torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from ckpttool.distributed import ExactBatchSampler, Plan, distribute, global_mean_loss
from ckpttool.errors import RanksDiffer, UsageFault


class Own(of_torch.Sampler[int]):
    """Draws from a generator of one of three kinds, or from that of Python."""

    def __init__(self, generator: Any = random) -> None:
        self.generator = generator

    def __iter__(self) -> Any:
        for _ in range(20):
            if isinstance(self.generator, np.random.Generator):
                yield int(self.generator.integers(1000))
            else:
                yield self.generator.randrange(1000)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(22)),
    "random": lambda: RandomSampler(range(22)),
    "random with a generator": lambda: RandomSampler(range(22), generator=torch.Generator()),
    "weighted": lambda: of_torch.WeightedRandomSampler(range(1, 23), 30),
    "subset": lambda: of_torch.SubsetRandomSampler([3, 5, 8, 13, 21]),
    "Python's generator": lambda: Own(random),
    "a generator of Python's": lambda: Own(random.Random(7)),
    "a generator of numpy's": lambda: Own(np.random.default_rng(7)),
    "a list": lambda: [4, 4, 2, 9],
}


def by_rank(make: Any, world_size: int, epoch: int = 0) -> list[list[list[int]]]:
    """The batches of each rank."""
    made = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
    for batches in made:
        batches.set_epoch(epoch)
    return [list(batches) for batches in made]


def steps(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The samples of all ranks in each step, sorted."""
    return [sorted(index for share in step for index in share) for step in zip(*ranks, strict=True)]


# ---- the plan as a sampler -----------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(0, 2))
def test_the_exact_sampler_takes_what_the_plan_says(samples, world_size, times, drop_last, epoch):
    plan = Plan(samples, times * world_size, seed=3, drop_last=drop_last)

    given = {"seed": 3, "drop_last": drop_last, "uneven": True, "world_size": world_size}
    for rank in range(world_size):
        batches = ExactBatchSampler(samples, times * world_size, rank=rank, **given)
        batches.set_epoch(epoch)
        planned = [step.micro_batches for step in plan.of_rank(epoch, rank, world_size)]
        assert [(batch,) for batch in batches] == [part for part in planned if part]
        sizes = range(plan.steps_of(world_size))
        assert batches.global_sizes == [plan.global_size(step, world_size) for step in sizes]
        assert len(batches) == len(list(batches))


def test_a_data_set_stands_for_its_length_and_a_loader_takes_the_batches():
    data = TensorDataset(torch.arange(10))
    batches = ExactBatchSampler(data, 4)
    loaded = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=batches, num_workers=1)]
    assert loaded == list(batches)
    assert len(DataLoader(data, batch_sampler=batches)) == 3


def test_an_epoch_can_start_at_any_step():
    batches = ExactBatchSampler(22, 4)
    batches.set_epoch(2)
    whole = list(batches)
    batches.set_epoch(2, start=4)
    assert (list(batches), len(batches), batches.global_sizes) == (whole[4:], 2, [4, 2])


def test_unequal_ranks_get_batches_of_their_sizes():
    ranks = by_rank(lambda **place: ExactBatchSampler(24, 12, rank_batch=[2, 10], **place), 2)
    assert [[len(batch) for batch in batches] for batches in ranks] == [[2, 2], [10, 10]]


def test_a_batch_that_leaves_a_rank_with_nothing_is_refused_unless_it_is_asked_for():
    with pytest.raises(UsageFault, match="a batch of 2 leaves 2 of 4 ranks without a sample") as refused:
        ExactBatchSampler(10, 4, rank=3, world_size=4)
    assert "uneven=True" in refused.value.hint
    ranks = by_rank(lambda **place: ExactBatchSampler(10, 4, uneven=True, **place), 4)
    assert [len(batches) for batches in ranks] == [3, 3, 2, 2]


def test_a_rank_without_a_process_group_is_not_taken_for_the_only_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageFault, match="would take every sample, as there is no process group"):
        ExactBatchSampler(10, 4)
    assert len(ExactBatchSampler(10, 4, rank=0, world_size=2)) == 3


@pytest.mark.parametrize(("place", "said"), [
    ({"rank": 0}, "only one of them"), ({"world_size": 2}, "only one of them"),
    ({"rank": 2, "world_size": 2}, "is none of 2 ranks"),
])  # fmt: skip
def test_a_place_that_does_not_exist_is_refused(place, said):
    with pytest.raises(UsageFault, match=said):
        ExactBatchSampler(10, 4, **place)


# ---- other samplers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_sampler_draws_is_dealt_exactly_once_on_any_number_of_ranks(kind, world_size):
    def make(**place: int) -> Any:
        return distribute(SAMPLERS[kind](), 5, uneven=True, seed=1, **place)

    ranks = by_rank(make, world_size, epoch=3)
    (alone,) = by_rank(make, 1, epoch=3)
    together = sorted(index for batches in ranks for batch in batches for index in batch)
    assert together == sorted(index for batch in alone for index in batch)
    assert len(together) == len(list(SAMPLERS[kind]()))
    whole = len(together) // 5  # no rank is left out of whole batches
    assert steps([batches[:whole] for batches in ranks]) == [sorted(batch) for batch in alone[:whole]]


def test_a_weighted_sampler_keeps_its_repeats_and_its_weights():
    sampler = of_torch.WeightedRandomSampler([0.0, 1.0, 3.0], 4000)
    ranks = by_rank(lambda **place: distribute(sampler, 400, **place), 4)
    drawn = [index for batches in ranks for batch in batches for index in batch]
    assert len(drawn) == 4000
    assert drawn.count(0) == 0
    assert abs(drawn.count(2) - 3000) < 150


def test_epochs_differ_and_the_same_epoch_does_not():
    batches = distribute(RandomSampler(range(50), generator=torch.Generator()), 10)
    found = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        found.append(list(batches))
    assert found[0] == found[2] != found[1]


def test_drawing_leaves_all_random_states_as_they_were():
    own = random.Random(1)
    before = random.getstate(), torch.get_rng_state().tolist(), own.getstate()
    list(distribute(Own(own), 4))
    assert (random.getstate(), torch.get_rng_state().tolist(), own.getstate()) == before


def test_the_batches_of_a_batch_sampler_are_split_over_the_ranks():
    given = BatchSampler(SequentialSampler(range(12)), 4, False)
    ranks = by_rank(lambda **place: distribute(given, **place), 2)
    assert ranks == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    shared = by_rank(lambda **place: distribute(given, rank_share=[1, 3], **place), 2)
    assert [[len(batch) for batch in batches] for batches in shared] == [[1, 1, 1], [3, 3, 3]]


def test_batches_of_changing_size_have_their_global_sizes():
    batches = distribute([[1, 2, 3], (4, 5), [], [6, 7, 8, 9]], rank=0, world_size=2)
    assert (list(batches), batches.global_sizes) == ([[1, 3], [4], [6, 8]], [3, 2, 4])


def test_a_rank_may_end_its_epoch_early_but_not_leave_out_a_step_within_it():
    def dealt(batches: list[list[int]]) -> list[list[list[int]]]:
        return by_rank(lambda **place: distribute(batches, uneven=True, **place), 2)

    assert dealt([[1, 2], [3, 4], [5]]) == [[[1], [3], [5]], [[2], [4]]]
    assert dealt([[1, 2], [3], [5]]) == [[[1], [3], [5]], [[2]]]
    with pytest.raises(UsageFault, match="a batch of 1 leaves 1 of 2 ranks without a sample"):
        dealt([[0], [1, 2], [3, 4]])


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last_leaves_out_a_short_batch(drop_last):
    batches = distribute(SequentialSampler(range(10)), 4, drop_last=drop_last)
    assert batches.global_sizes == [4, 4] if drop_last else [4, 4, 2]


def test_the_epoch_is_passed_on_to_a_sampler_that_takes_it():
    class Curriculum(of_torch.Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter(range(self.epoch * 10, self.epoch * 10 + 4))

    batches = distribute(Curriculum(), 4)
    batches.set_epoch(3)
    assert list(batches) == [[30, 31, 32, 33]]


hidden = random.Random(0)

REFUSED = {
    "yields batches, not indices": lambda: distribute([[1, 2], [3]], 4),
    "yields indices, not batches": lambda: distribute(RandomSampler(range(9))),
    "DistributedSampler is already distributed": lambda: distribute(
        BatchSampler(of_torch.DistributedSampler(range(9), 2, 0), 3, False)
    ),
    "ExactBatchSampler is already distributed": lambda: distribute(ExactBatchSampler(9, 3)),
    "draws other samples each time from one seed": lambda: distribute(
        type("Hidden", (), {"__iter__": lambda self: iter([hidden.random()])})(), 1
    ),
    "batch_size 1: leaves rank 1 without samples": lambda: distribute([1, 2], 1, rank=0, world_size=2),
    "rank_share 1: 1 number for 2 ranks": lambda: distribute([[1]], rank_share=[1], rank=0, world_size=2),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_sampler_that_can_not_be_distributed_is_refused(said):
    with pytest.raises(UsageFault, match=said):
        REFUSED[said]()


# ---- on process groups ---------------------------------------------------------------------------------


def batches_for(kind: str) -> Any:
    if kind == "exact":
        return ExactBatchSampler(28, 8)
    if kind == "unequal":
        ranks = torch.distributed.get_world_size()
        return ExactBatchSampler(28, 20, rank_share=range(1, ranks + 1))
    if kind == "batches":
        return distribute(BatchSampler(RandomSampler(range(28)), 8, False))
    return distribute(SAMPLERS[kind](), 8)


def samples_of_training() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand(28, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (28,), generator=generator))


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3, dtype=torch.float64)


def train_with(rank: int, world_size: int, kind: str) -> Any:
    """Two epochs in the loop that the documentation shows; the steps' samples, and the weights."""
    torch.manual_seed(rank)  # other random numbers on each rank must not matter
    data, batches = samples_of_training(), batches_for(kind)
    ddp = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    taken = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        taken += list(batches)
        loader = DataLoader(data, batch_sampler=batches)
        for (inputs, target), size in zip(loader, batches.global_sizes, strict=True):
            global_mean_loss(F.cross_entropy(ddp(inputs), target, reduction="sum"), size).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return taken, [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["exact", "unequal", "weighted", "random", "batches"])
def test_training_with_a_distributed_sampler_is_that_of_one_process(run_ranks, kind, size):
    ranks = run_ranks(size, train_with, kind)
    (inputs, target), model = samples_of_training().tensors, linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in steps([taken for taken, _ in ranks]):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), target[batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for _, weights in ranks:
        for ours, expected in zip(weights, model.parameters(), strict=True):
            assert (ours - expected).abs().max() < 1e-12


def make_of_other_data(rank: int, world_size: int) -> None:
    with pytest.raises(RanksDiffer, match="plan"):
        ExactBatchSampler(100 + 2 * rank, 10)
    with pytest.raises(RanksDiffer, match="samples"):
        distribute([rank, 1, 2, 3], 4)


def test_ranks_with_other_data_are_told_when_the_sampler_is_made(run_ranks):
    run_ranks(2, make_of_other_data)
