"""The histogram of one pass: the same for any blocks, in bounded memory, and numpy's but for its edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool.analysis.histogram import FINE, Histogram

finite = st.floats(allow_nan=False, allow_infinity=False)


def made(*blocks: list[float]) -> Histogram:
    histogram = Histogram()
    for block in blocks:
        histogram.add(np.array(block, dtype="f8"))
    return histogram


@example([[0.0, -2.297302443698339e-286], [1.7766264184340615e308, -1.773115299034121e308]])
@given(st.lists(st.lists(finite, min_size=1, max_size=8), min_size=1, max_size=6))
def test_blocks_and_their_order_make_no_difference_and_every_value_counts(blocks: list[list[float]]) -> None:
    whole = [value for block in blocks for value in block]
    one, apart, back = made(whole), made(*blocks), made(*reversed(blocks))
    assert one.bins(16) == apart.bins(16) == back.bins(16)
    assert sum(one.bins(16)) == len(whole)
    if min(whole) < max(whole):
        assert len(one.bins(16)) == 16
        assert one._counts is not None and len(one._counts) <= FINE


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e30])
def test_it_is_numpys_but_for_values_near_the_edges(spread: float) -> None:
    values = np.random.default_rng(0).normal(spread, spread, 50_000)
    found = np.array(made(values.tolist()).bins(16))
    expected = np.histogram(values, 16)[0]
    near = np.histogram(values, 16 * FINE // 4)[0].reshape(16, -1)
    assert (abs(found - expected) <= near[:, :8].sum(1) + near[:, -8:].sum(1) + 200).all()
    assert abs(found - expected).sum() < 0.03 * len(values)


def test_of_equal_values_there_is_one_bin_and_of_none_there_is_none() -> None:
    assert made([2.5] * 3, [2.5]).bins(16) == (4,)
    assert Histogram().bins(16) == ()


def test_the_least_and_the_most_are_in_the_outer_bins_whatever_the_range() -> None:
    for least, most in (
        (0.0, 1.0),
        (-1.7e308, 1.7e308),
        (1.0, 1 + 2**-52),
        (-(2.0**63), 2.0**63),
        (1e9, 1e9 + 1e-6),
    ):
        bins = made([least], [most, most]).bins(16)
        assert (bins[0], bins[-1]) == (1, 2)
