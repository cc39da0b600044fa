"""The plan of an epoch: every sample once, in the same global batches on any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from train.plan import Plan, deal, evaluation_batches

plans = st.builds(
    Plan,
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
    accumulate=st.integers(1, 5),
)
world_sizes = st.integers(1, 9)


def taken(plan: Plan, epoch: int, world_size: int, start: int = 0) -> list[list[list[int]]]:
    """The samples of each step, by rank."""
    by_rank = [list(plan.of_rank(epoch, rank, world_size, start)) for rank in range(world_size)]
    steps = range(len(by_rank[0]))
    return [[[i for m in by_rank[r][s].micro_batches for i in m] for r in range(world_size)] for s in steps]


@given(plans, world_sizes, st.integers(0, 3))
@example(Plan(5, 2), 4, 0)
def test_every_sample_is_taken_exactly_once_an_epoch(plan, world_size, epoch):
    all_taken = [i for step in taken(plan, epoch, world_size) for share in step for i in share]
    assert len(all_taken) == len(set(all_taken))
    left_out = plan.samples % plan.batch_size if plan.drop_last else 0
    assert len(all_taken) == plan.samples - left_out
    assert set(all_taken) <= set(range(plan.samples))


@given(plans, world_sizes, st.integers(0, 3))
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(plan, world_size, epoch):
    def batches(size: int) -> list[list[int]]:
        return [sorted(i for share in step for i in share) for step in taken(plan, epoch, size)]

    assert batches(world_size) == batches(1)


@given(plans, world_sizes)
@example(Plan(samples=9, batch_size=4), 4)
def test_shares_differ_by_at_most_one_and_rank_0_never_has_fewer(plan, world_size):
    for step in taken(plan, 0, world_size):
        sizes = [len(share) for share in step]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[0] == max(sizes)


@given(plans, world_sizes)
def test_all_ranks_take_the_same_number_of_steps_and_know_each_global_size(plan, world_size):
    by_rank = [list(plan.of_rank(0, rank, world_size)) for rank in range(world_size)]
    assert {len(steps) for steps in by_rank} == {plan.steps}
    for steps in zip(*by_rank, strict=True):
        in_all = sum(len(micro) for step in steps for micro in step.micro_batches)
        assert {step.global_size for step in steps} == {in_all}
        assert in_all == plan.global_size(steps[0].index)


@given(plans, world_sizes, st.data())
def test_an_epoch_can_start_at_any_step(plan, world_size, data):
    start = data.draw(st.integers(0, plan.steps))
    assert taken(plan, 1, world_size, start) == taken(plan, 1, world_size)[start:]


@given(plans, world_sizes)
def test_micro_batches_are_at_most_accumulate_and_never_empty(plan, world_size):
    for rank in range(world_size):
        for step in plan.of_rank(0, rank, world_size):
            assert len(step.micro_batches) <= plan.accumulate
            assert all(step.micro_batches)


@given(plans, world_sizes)
def test_the_announced_sizes_are_those_that_occur(plan, world_size):
    shares, micros = set(), set()
    for rank in range(world_size):
        for step in plan.of_rank(0, rank, world_size):
            shares.add(sum(map(len, step.micro_batches)))
            micros.update(map(len, step.micro_batches))
    assert plan.share_sizes(world_size) == shares
    assert plan.micro_batch_sizes(world_size) - {0} == micros


def test_a_rank_may_have_no_sample_in_a_short_last_batch():
    assert taken(Plan(samples=5, batch_size=4, seed=1), 0, 4)[1][1:] == [[], [], []]


def test_epochs_and_seeds_differ_in_order():
    plan = Plan(samples=50, batch_size=10)
    orders = {tuple(plan.order(0)), tuple(plan.order(1)), tuple(Plan(50, 10, seed=1).order(0))}
    assert len(orders) == 3


def test_the_order_of_an_epoch_never_changes_so_that_old_runs_can_continue():
    assert Plan(samples=10, batch_size=4, seed=7).order(3) == [8, 6, 3, 4, 7, 1, 9, 0, 2, 5]


@pytest.mark.parametrize(("samples", "batch_size", "drop_last", "steps"), [
    (10, 4, False, 3), (10, 4, True, 2), (8, 4, False, 2), (3, 4, False, 1), (3, 4, True, 0),
])  # fmt: skip
def test_steps_of_an_epoch(samples, batch_size, drop_last, steps):
    assert Plan(samples, batch_size, drop_last=drop_last).steps == steps


@given(st.lists(st.integers()), st.integers(1, 9))
def test_deal_keeps_every_item(items, parts):
    assert sorted(item for part in deal(items, parts) for item in part) == sorted(items)


@given(st.integers(0, 200), st.integers(1, 40), world_sizes)
def test_evaluation_takes_each_sample_once_in_the_same_batch_on_any_number_of_ranks(
    samples, batch_size, world_size
):
    by_rank = [evaluation_batches(samples, batch_size, rank, world_size) for rank in range(world_size)]
    together = {number: list(batch) for batches in by_rank for number, batch in batches.items()}
    alone = evaluation_batches(samples, batch_size, 0, 1)
    assert together == {number: list(batch) for number, batch in alone.items()}
    assert sum(map(len, by_rank)) == len(together)
    assert [i for number in sorted(together) for i in together[number]] == list(range(samples))
