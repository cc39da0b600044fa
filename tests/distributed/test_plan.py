"""The plan of an epoch: every sample once, in the same global batches on any number of ranks."""

from __future__ import annotations

import dataclasses
import random
import re
import time
import tracemalloc

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpttool.distributed import plan as shuffle
from ckpttool.distributed.plan import (
    CHUNK,
    ENDLESS,
    MANY,
    InOrder,
    Permuted,
    Plan,
    check,
    deal,
    dealt_sizes,
    evaluation_batches,
)
from ckpttool.errors import UsageFault

settings = st.builds(
    Plan,
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
    accumulate=st.integers(1, 5),
    set_epoch=st.booleans(),
)
world_sizes = st.integers(1, 9)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan and a number of ranks, with equal or unequal shares."""
    plan, world_size = draw(settings), draw(world_sizes)
    share = st.none() | st.lists(st.integers(1, 12), min_size=world_size, max_size=world_size).map(tuple)
    return dataclasses.replace(plan, rank_share=draw(share)), world_size


def taken(plan: Plan, epoch: int, world_size: int, start: int = 0) -> list[list[list[int]]]:
    """The samples of each step, by rank."""
    by_rank = [list(plan.of_rank(epoch, rank, world_size, start)) for rank in range(world_size)]
    steps = range(len(by_rank[0]))
    return [[[i for m in by_rank[r][s].micro_batches for i in m] for r in range(world_size)] for s in steps]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for share in step for index in share]


@given(plans(), st.integers(0, 3))
@example((Plan(5, 2), 4), 0)
def test_every_sample_is_taken_exactly_once_an_epoch(case, epoch):
    plan, world_size = case
    found = flat(taken(plan, epoch, world_size))
    assert len(found) == len(set(found))
    left_out = plan.samples % plan.batch_size if plan.drop_last else 0
    assert len(found) == plan.samples - left_out
    assert set(found) <= set(range(plan.samples))


@given(plans(), st.integers(0, 3))
def test_the_global_batches_depend_neither_on_the_number_of_ranks_nor_on_their_shares(case, epoch):
    plan, world_size = case
    alone = dataclasses.replace(plan, rank_share=None)

    def batches(plan: Plan, size: int) -> list[list[int]]:
        return [sorted(i for share in step for i in share) for step in taken(plan, epoch, size)]

    assert batches(plan, world_size) == batches(alone, 1)


@given(settings, world_sizes)
@example(Plan(samples=9, batch_size=4), 4)
def test_equal_shares_differ_by_at_most_one_and_rank_0_never_has_fewer(plan, world_size):
    for step in taken(plan, 0, world_size):
        sizes = [len(share) for share in step]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[0] == max(sizes)


@given(plans())
def test_all_ranks_take_the_same_steps_and_know_the_size_and_the_passes_of_each(case):
    plan, world_size = case
    by_rank = [list(plan.of_rank(0, rank, world_size)) for rank in range(world_size)]
    assert {len(steps) for steps in by_rank} == {plan.steps_of(world_size)}
    for steps in zip(*by_rank, strict=True):
        micros = [micro for step in steps for micro in step.micro_batches]
        assert all(micros), "a micro-batch is never empty"
        assert {step.global_size for step in steps} == {sum(map(len, micros))}
        assert plan.global_size(steps[0].index, world_size) == sum(map(len, micros))
        passes = max(len(step.micro_batches) for step in steps)
        assert {step.passes for step in steps} == {passes} and passes <= plan.accumulate


@given(plans(), st.data())
def test_an_epoch_can_start_at_any_step(case, data):
    plan, world_size = case
    start = data.draw(st.integers(0, plan.steps_of(world_size)))
    assert taken(plan, 1, world_size, start) == taken(plan, 1, world_size)[start:]


@given(plans())
def test_the_announced_sizes_are_those_that_occur(case):
    plan, world_size = case
    by_rank = [list(plan.of_rank(0, rank, world_size)) for rank in range(world_size)]
    shares, micros, passes = set(), set(), set()
    for steps in zip(*by_rank, strict=True):
        shares.update(sum(map(len, step.micro_batches)) for step in steps)
        micros.update(len(micro) for step in steps for micro in step.micro_batches)
        for number in range(plan.accumulate):
            passes.add(sum(len(micro) for step in steps for micro in step.micro_batches[number : number + 1]))
    assert plan.share_sizes(world_size) == shares
    assert plan.micro_batch_sizes(world_size) == micros
    assert plan.pass_sizes(world_size) == passes - {0}


@given(st.integers(0, 300), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_shares_follow_the_weights_as_closely_as_whole_samples_allow(size, weights):
    sizes = dealt_sizes(size, weights)
    assert sum(sizes) == size
    # Divided by Sainte-Laguë's rule: no transfer of one item brings two parts closer to their weights.
    for one, weight in zip(sizes, weights, strict=True):
        for other, its_weight in zip(sizes, weights, strict=True):
            assert (2 * one - 1) * its_weight <= (2 * other + 1) * weight


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_a_multiple_of_the_weights_is_dealt_exactly_by_the_weights(weights, times):
    assert dealt_sizes(sum(weights) * times, weights) == [weight * times for weight in weights]


@given(st.integers(0, 200), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_with_one_more_sample_no_share_shrinks(size, weights):
    both = zip(dealt_sizes(size, weights), dealt_sizes(size + 1, weights), strict=True)
    assert all(one <= other for one, other in both)


def test_a_rank_batch_gives_each_rank_its_number_and_the_last_batch_in_proportion():
    plan = Plan(samples=18, batch_size=12, rank_batch=(2, 10))
    assert [[len(share) for share in step] for step in taken(plan, 0, 2)] == [[2, 10], [1, 5]]


def test_a_rank_may_have_no_sample_in_a_short_last_batch():
    assert taken(Plan(samples=5, batch_size=4, seed=1), 0, 4)[1][1:] == [[], [], []]


def test_epochs_and_seeds_differ_in_order():
    plan = Plan(samples=50, batch_size=10)
    orders = {tuple(plan.order(0)), tuple(plan.order(1)), tuple(Plan(50, 10, seed=1).order(0))}
    assert len(orders) == 3


def test_the_order_of_an_epoch_never_changes_so_that_old_runs_can_continue():
    assert Plan(samples=10, batch_size=4, seed=7).order(3).tolist() == [8, 6, 3, 4, 7, 1, 9, 0, 2, 5]


@pytest.mark.covered(lambda count: count == 200_000)
@pytest.mark.parametrize("count", [0, 1, 2, 1_999, 2_000, 2_047, 2_048, 2_049, 4_096, 65_537, 200_000])
def test_the_order_is_that_of_pythons_shuffle(count: int) -> None:
    for epoch in range(3):
        order = list(range(count))
        random.Random(f"5:{epoch}").shuffle(order)
        assert Plan(count, 8, seed=5).order(epoch).tolist() == order


@given(st.integers(0, 700), st.integers(0, 10**9))
def test_it_is_so_of_a_few_samples_too_that_are_shuffled_as_many_are(count: int, seed: int) -> None:
    order = list(range(count))
    random.Random(f"{seed}:0").shuffle(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "FEW", 0)
        assert shuffle.shuffled(count, f"{seed}:0").tolist() == order


def test_an_epoch_of_very_many_samples_takes_4_bytes_for_each() -> None:
    plan = Plan(1_000_000, 256)
    Plan(shuffle.FEW, 8).order(0)  # what it imports is not counted
    tracemalloc.start()
    try:
        steps = plan.of_rank(0, 3, 4)
        assert sum(len(steps[number].micro_batches[0]) for number in range(100)) == 6_400
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 4 * plan.samples  # the order, and this rank's share
    assert left < 1.1 * plan.samples  # the share alone


def test_the_order_of_very_many_samples_takes_a_fraction_of_the_time_of_pythons_shuffle() -> None:
    order, began = list(range(200_000)), time.thread_time()
    random.Random("0:0").shuffle(order)
    one_tenth, began = time.thread_time() - began, time.thread_time()
    Plan(2_000_000, 256).of_rank(0, 3, 4)
    assert time.thread_time() - began < 5 * one_tenth  # it is below one


@pytest.mark.parametrize(("samples", "batch_size", "drop_last", "steps"), [
    (10, 4, False, 3), (10, 4, True, 2), (8, 4, False, 2), (3, 4, False, 1), (3, 4, True, 0),
])  # fmt: skip
def test_steps_of_an_epoch(samples, batch_size, drop_last, steps):
    assert Plan(samples, batch_size, drop_last=drop_last).steps_of(4) == steps


@given(st.lists(st.integers()), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_dealing_keeps_every_item(items, weights):
    assert sorted(item for part in deal(items, weights) for item in part) == sorted(items)


def test_without_set_epoch_all_epochs_have_the_order_of_the_first():
    plan = Plan(samples=50, batch_size=10, set_epoch=False)
    orders = plan.order(3), plan.order(0), Plan(samples=50, batch_size=10).order(0)
    assert len({tuple(order) for order in orders}) == 1


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "given", "choices", "ranks"), [
    ("batch_size 3: leaves rank 3 without samples in every step, on 4 ranks", (9, 3), {}, 4),
    ("batch_size 0: must be 1 or more", (9, 0), {}, 1),
    ("accumulate 0: must be 1 or more", (9, 3), {"accumulate": 0}, 1),
    ("sampler random: is none of exact, torch, none", (9, 3), {"sampler": "random"}, 1),
    ("rank_share 1,3: 2 numbers for 4 ranks", (9, 8), {"rank_share": (1, 3)}, 4),
    ("rank_share 1,3: 2 numbers for 1 rank", (9, 8), {"rank_share": (1, 3)}, 1),
    ("rank_batch 8: 1 number for 2 ranks", (9, 8), {"rank_batch": (8,)}, 2),
    ("rank_share 1,0: gives rank 1 nothing", (9, 8), {"rank_share": (1, 0)}, 2),
    ("rank_batch -2,10: gives rank 0 nothing", (9, 8), {"rank_batch": (-2, 10)}, 2),
    ("rank_batch 2,10: its sum is 12, and batch_size is 64", (99, 64), {"rank_batch": (2, 10)}, 2),
    ("rank_batch and rank_share: both say how a batch is dealt", (9, 8), {"rank_batch": (4, 4),
     "rank_share": (1, 1)}, 2),
    ("rank_share 1,100: leaves rank 0 without samples in every step, with batch_size 16", (99, 16),
     {"rank_share": (1, 100)}, 2),
    ("batch_size 10: does not divide by 4 ranks, and sampler torch gives each the same number", (99, 10),
     {"sampler": "torch"}, 4),
    ("rank_share 1,3: sampler torch gives each rank the same number of samples", (99, 8),
     {"sampler": "torch", "rank_share": (1, 3)}, 2),
])  # fmt: skip
def test_a_plan_that_can_not_be_dealt_is_refused_by_name(said, given, choices, ranks):
    with pytest.raises(UsageFault) as refused:
        check(Plan(*given, **choices), ranks)
    assert refused.value.message == said


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6).map(tuple), st.integers(1, 40))
def test_the_batch_that_is_advised_leaves_no_rank_without_samples(weights, batch_size):
    plan = Plan(1000, batch_size, rank_share=weights)
    try:
        check(plan, len(weights))
    except UsageFault as refused:
        advised = int(re.findall(r"batch_size (\d+) or more", refused.hint)[0])
        assert advised > batch_size
        check(dataclasses.replace(plan, batch_size=advised), len(weights))


# ---- evaluation ----------------------------------------------------------------------------------------


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


# ---- orders that are computed where they are used: each number once, and no memory ---------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 1000, CHUNK, 3 * CHUNK + 5])
def test_each_number_comes_once_however_it_is_sliced(count):
    whole = Permuted(count, "0:0")[:]
    assert sorted(whole.tolist()) == list(range(count))
    order = Permuted(count, "0:0")
    parts = [order[at : at + 777] for at in range(0, count, 777)]
    assert numpy.concatenate([*parts, whole[:0]]).tolist() == whole.tolist()


def test_a_sample_is_drawn_for_each_place_about_equally_often():
    count, tenths, seeds = 10**9, 10, 2000
    drawn = [Permuted(count, f"{seed}").at(numpy.array([7, 8])) for seed in range(seeds)]
    for of_place in zip(*drawn, strict=True):
        numbers = numpy.bincount([tenths * int(value) // count for value in of_place], minlength=tenths)
        # The chi-squared of 9 degrees of freedom is above 34 in 1 of 10^4; the seeds are always the same.
        assert ((numbers - seeds / tenths) ** 2 / (seeds / tenths)).sum() < 34
    first, second = (numpy.array(of_place, dtype=float) for of_place in zip(*drawn, strict=True))
    assert abs(numpy.corrcoef(first, second)[0, 1]) < 0.1


def test_neighbours_of_a_large_order_have_nothing_to_do_with_each_other():
    drawn = Permuted(10**9, "1:0")[: 10**5].astype(float)
    assert abs(numpy.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert abs(drawn.mean() / 10**9 - 0.5) < 0.01


@pytest.mark.parametrize("plan", [Plan(10**9, 64), Plan(ENDLESS, 64, in_order=True)], ids=["10^9", "endless"])
def test_a_plan_of_very_many_samples_takes_no_memory(plan):
    tracemalloc.start()
    ranks = [iter(plan.of_rank(3, rank, 3, start=1000)) for rank in range(3)]
    for step in range(1000, 1005):
        taken = [index for rank in ranks for index in next(rank).micro_batches[0]]
        whole = plan.order(3)[step * 64 : (step + 1) * 64]
        assert sorted(taken) == sorted(whole.tolist())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5e6


def test_only_very_many_are_ordered_where_they_are_used():
    assert not isinstance(Plan(1000, 64).order(0), InOrder)
    assert isinstance(Plan(MANY, 64).order(0), Permuted)


# ---- sampler='torch' takes, index for index, what torch's own classes take -----------------------------


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
