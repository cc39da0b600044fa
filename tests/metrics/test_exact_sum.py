"""Sums of float64 without rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.metrics.exact_sum import PIECE, ExactSum

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
EXTREMES = [
    0.0,
    -0.0,
    5e-324,
    -5e-324,
    2.2250738585072014e-308,
    1.7976931348623157e308,
    -1.7976931348623157e308,
]


def total_of(*parts: list[float]) -> ExactSum:
    whole = ExactSum()
    for part in parts:
        one = ExactSum()
        one.add(np.array(part, dtype=np.float64))
        whole.merge(one)
    return whole


@given(st.lists(FLOATS | st.sampled_from(EXTREMES), max_size=40))
def test_the_sum_is_exact(values):
    found = total_of(values)
    assert found.fraction == sum(map(Fraction, values), Fraction())


@given(st.lists(FLOATS | st.sampled_from(EXTREMES), max_size=40))
def test_the_sum_of_squares_is_exact(values):
    found = ExactSum()
    found.add_squares(np.array(values, dtype=np.float64))
    assert found.fraction == sum((Fraction(value) ** 2 for value in values), Fraction())


@given(st.lists(FLOATS, max_size=30), st.integers(0, 30), st.randoms())
def test_order_and_division_do_not_matter(values, cut, random):
    shuffled = [*values]
    random.shuffle(shuffled)
    assert total_of(shuffled[:cut], [], shuffled[cut:]).units == total_of(values).units


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40))
def test_the_value_is_rounded_once_as_fsum_does(values):
    assert total_of(values).value == math.fsum(values)


def test_a_sum_of_more_numbers_than_one_piece_is_exact():
    values = np.full(PIECE + 3, -0.1)
    values[0], values[-1] = 1e17, -1e17
    found = ExactSum()
    found.add(values)
    assert found.value == math.fsum(values)
    assert found.value != values.sum()


@given(st.lists(FLOATS | st.sampled_from(EXTREMES), max_size=20))
def test_a_packed_sum_is_unpacked_from_its_own_numbers_only(values):
    one = total_of(values)
    packed = iter([*one.pack(), 7])
    found = ExactSum.unpack(packed)
    assert (found.units, next(packed)) == (one.units, 7)
    assert all(-(2**63) <= number < 2**63 for number in one.pack())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([1.0, -math.inf], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([1.7976931348623157e308] * 2, math.inf),
        ([-1.7976931348623157e308] * 2, -math.inf),
    ],
)
def test_infinities_nan_and_overflow_behave_as_in_float64(values, expected):
    found = total_of(values[:1], values[1:])
    assert ExactSum.unpack(found.pack()).value == pytest.approx(expected, nan_ok=True)
    assert total_of([1.7976931348623157e308] * 2).over(2) == 1.7976931348623157e308


def test_a_mean_of_nothing_is_nan():
    assert math.isnan(ExactSum().over(0))
