"""The places of parameters in ZeRO's vectors: cut as DeepSpeed cuts them, put together again."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.deepspeed.zero import Layout, given_order, parameters_cut, vectors_cut

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
groups = st.lists(st.lists(shapes, max_size=6), min_size=1, max_size=3)
ranks = st.integers(1, 13)


def named(listed: list[list[Shape]]) -> list[dict[str, Shape]]:
    return [{f"{group}.{i}": shape for i, shape in enumerate(each)} for group, each in enumerate(listed)]


def put_together(layout: Layout, parts: dict[int, list[list[int]]]) -> dict[str, list[int]]:
    """Return the elements of each parameter, taken from the ranks' parts."""
    found: dict[str, list[int]] = {}
    for slot in layout.slots:
        runs = sorted(slot.runs, key=lambda run: run.begin)
        taken = [parts[run.rank][slot.group][run.start : run.start + run.count] for run in runs]
        found[slot.name] = [*itertools.chain(*taken)]
        ends = itertools.accumulate(map(len, taken))
        assert [run.begin for run in runs] == [0, *ends][: len(runs)]
    return found


def numbered(listed: list[dict[str, Shape]]) -> dict[str, list[int]]:
    """Return other numbers for the elements of each parameter."""
    numbers = itertools.count(1)
    return {
        name: [next(numbers) for _ in range(math.prod(shape))]
        for each in listed
        for name, shape in each.items()
    }


@given(groups, ranks, st.integers(0, 2))
def test_a_vector_is_put_together(listed: list[list[Shape]], world_size: int, fill: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    fills = [[fill] * len(each) for each in listed]
    layout = vectors_cut(named_groups, fills if fill else [], world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        vector = [*itertools.chain(*(wanted[name] + [0] * fill for name in group))]
        size = math.ceil(len(vector) / (2 * world_size)) * 2
        for rank in range(world_size):
            parts[rank].append(vector[rank * size : (rank + 1) * size])
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == [len(each) for each in kept]


@given(groups, ranks)
def test_parameters_that_are_cut_each_are_put_together(listed: list[list[Shape]], world_size: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    layout = parameters_cut(named_groups, world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        for rank in range(world_size):
            parts[rank].append([])
            for name in group:
                share = math.ceil(len(wanted[name]) / world_size)
                padded = wanted[name] + [0] * (share * world_size - len(wanted[name]))
                parts[rank][-1] += padded[rank * share : (rank + 1) * share]
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == layout.most[rank] == [len(each) for each in kept]


@given(st.integers(0, 20), ranks)
def test_dealt_out_parameters_are_put_in_order(count: int, world_size: int) -> None:
    order = [f"{i}" for i in range(count)]
    dealt = [name for first in range(world_size) for name in order[first::world_size]]
    assert given_order(dealt, world_size) == order
