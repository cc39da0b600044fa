"""Orders that are computed where they are used: each number once, and no memory."""

from __future__ import annotations

import tracemalloc

import numpy
import pytest

from ckpttool.distributed.lazy_order import CHUNK, InOrder, Permuted
from ckpttool.distributed.plan import ENDLESS, MANY, Plan


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
