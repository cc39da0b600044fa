"""Pairs of public architectures with their libraries: right or refused, and right by values; never wrong."""

from __future__ import annotations

import pytest

from tests.transforms.conforming.architectures import Pair, pairs
from tests.transforms.conforming.pairs import KEPT, results

QUICK = [pair for pair in pairs() if f"{pair.left} <-> {pair.right}".startswith(KEPT)]


@pytest.mark.parametrize("pair", QUICK, ids=lambda pair: f"{pair.left} to {pair.right}")
def test_a_pair_is_right_or_refused_both_ways(pair: Pair) -> None:
    try:
        made = pair.make()
    except ImportError as missing:
        pytest.skip(f"needs {missing.name}")
    found = results(made)
    assert {each.word for each in found[:2]} <= {"right", "refused"}
    assert [each.word for each in found[2:]] == ["right"] * len(found[2:])


def test_the_recorded_pairs_are_those_that_are_quick() -> None:
    assert len(QUICK) >= len(KEPT)
