"""`sampler="torch"` takes, index for index, what torch's own classes take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpttool.distributed.plan import Plan


def of_torch(plan: Plan, epoch: int, world_size: int) -> list[list[list[int]]]:
    """The batches of each rank by torch's own classes."""
    data = TensorDataset(torch.arange(plan.samples))
    loaded = []
    for rank in range(world_size):
        sampler = DistributedSampler(data, world_size, rank, True, plan.seed, plan.drop_last)
        if plan.set_epoch:
            sampler.set_epoch(epoch)
        each = plan.batch_size // world_size
        loader = DataLoader(data, each, sampler=sampler, drop_last=plan.drop_last)
        loaded.append([batch.tolist() for (batch,) in loader])
    return loaded


def of_plan(plan: Plan, epoch: int, world_size: int, start: int = 0) -> list[list[list[int]]]:
    return [
        [[i for m in step.micro_batches for i in m] for step in plan.of_rank(epoch, rank, world_size, start)]
        for rank in range(world_size)
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, int]:
    world_size = draw(st.integers(1, 9))
    plan = Plan(
        samples=draw(st.integers(0, 60)),
        batch_size=draw(st.integers(1, 8)) * world_size,
        seed=draw(st.integers(0, 2**63 - 10)),
        drop_last=draw(st.booleans()),
        sampler="torch",
        set_epoch=draw(st.booleans()),
    )
    return plan, world_size


def torch_plan(samples: int, batch_size: int, *, drop_last: bool = False) -> Plan:
    return Plan(samples, batch_size, sampler="torch", drop_last=drop_last)


@given(cases(), st.integers(0, 3), st.integers(0, 9))
@example((torch_plan(6, 8, drop_last=True), 2), 0, 0)
@example((torch_plan(5, 4), 2), 0, 1)
@example((torch_plan(10, 4), 4), 1, 0)
@example((torch_plan(3, 8), 8), 0, 0)
@example((torch_plan(3, 8, drop_last=True), 8), 0, 0)
@example((torch_plan(1, 2), 2), 0, 0)
def test_each_rank_takes_the_samples_that_torchs_classes_give_it_from_any_step_on(case, epoch, start):
    plan, world_size = case
    start = min(start, plan.steps_of(world_size))
    expected = [steps[start:] for steps in of_torch(plan, epoch, world_size)]
    assert of_plan(plan, epoch, world_size, start) == expected


@given(cases())
def test_the_announced_sizes_are_those_of_torchs_batches(case):
    plan, world_size = case
    by_rank = of_torch(plan, 0, world_size)
    assert {len(steps) for steps in by_rank} == {plan.steps_of(world_size)}
    for step in range(plan.steps_of(world_size)):
        assert plan.global_size(step, world_size) == sum(len(steps[step]) for steps in by_rank)
    assert plan.share_sizes(world_size) == {len(batch) for steps in by_rank for batch in steps}


@pytest.mark.parametrize(("samples", "batch_size", "world_size", "drop_last", "seen"), [
    (6, 8, 2, True, []),  # 3 for each rank, and the loader drops a batch of 3 out of 4
    (5, 4, 2, False, [1, 1, 1, 1, 2]),
    (10, 4, 4, False, [1] * 8 + [2] * 2),
    (10, 4, 4, True, [1] * 8),
    (3, 8, 8, False, [2, 3, 3]),
    (3, 8, 8, True, []),
])  # fmt: skip
def test_the_cases_that_everybody_meets(samples, batch_size, world_size, drop_last, seen):
    plan = torch_plan(samples, batch_size, drop_last=drop_last)
    counted = plan.seen(0, world_size).tolist()
    assert sorted(times for times in counted if times) == seen
    drawn = [index for steps in of_torch(plan, 0, world_size) for batch in steps for index in batch]
    assert counted == [drawn.count(index) for index in range(samples)]


@given(cases())
def test_without_a_sampler_every_rank_takes_every_sample(case):
    given, world_size = case
    plan = Plan(given.samples, given.batch_size, given.seed, sampler="none")
    each = given.batch_size // world_size
    for steps in of_plan(plan, 0, world_size):
        assert sorted(index for batch in steps for index in batch) == list(range(plan.samples))
        loader = DataLoader(TensorDataset(torch.arange(plan.samples)), each, shuffle=plan.samples > 0)
        assert [len(batch) for batch in steps] == [len(batch) for (batch,) in loader]


def test_the_random_numbers_of_the_training_are_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch_plan(10, 4).order(0, 2)
    assert torch.equal(torch.get_rng_state(), before)
