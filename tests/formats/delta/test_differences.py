"""The XOR of a block as bytes, and back: whatever is left out, and whatever stands there instead."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.delta.differences import (
    UNSIGNED,
    BadDifference,
    few_places,
    largest,
    packable,
    unpack,
)
from ckpttool.formats.delta.header import BLOCK


def packed(changes: np.ndarray) -> bytes:
    return bytes(packable(changes, few_places(changes)))


def assert_kept(changes: np.ndarray) -> bytes:
    """Pack changes, and make them again of a block of other values; return what they were packed as."""
    raw = packed(changes)
    before = np.random.default_rng(1).integers(0, 255, changes.nbytes, np.uint8).view(changes.dtype)
    after = before.copy()
    unpack(raw, after)
    assert (after == before ^ changes).all()
    assert len(raw) <= largest(changes.nbytes, changes.itemsize)
    return raw


def changes_of(width: int, count: int, share: float, seed: int = 0, planes: int = 8) -> np.ndarray:
    """Return changes of a share of the elements, in their lowest bytes alone."""
    random = np.random.default_rng(seed)
    values = random.integers(1, 256 ** min(width, planes) - 1, count, np.uint64, endpoint=True)
    return np.where(random.random(count) < share, values, 0).astype(UNSIGNED[width])


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("share", [0.00003, 0.01, 0.33, 0.34, 1.0])
@pytest.mark.parametrize("planes", [1, 8])
def test_changes_of_a_whole_block(width: int, share: float, planes: int) -> None:
    changes = changes_of(width, BLOCK // width, share, planes=planes)
    changes[-1] = 1
    assert_kept(changes)


@given(
    st.sampled_from([*UNSIGNED]), st.integers(1, 3000), st.floats(0, 1), st.integers(0, 9), st.integers(1, 8)
)
def test_changes_of_any_part(width: int, count: int, share: float, seed: int, planes: int) -> None:
    changes = changes_of(width, count, share, seed, planes)
    changes[seed % count] = 1  # a block that is the base's is not packed
    assert_kept(changes)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
@pytest.mark.parametrize("before", [0, 700])
def test_a_gap_of_any_length(gap: int, before: int) -> None:
    changes = np.zeros(before + gap + 3000, "<u2")
    changes[[before, before + gap + 1]] = 7
    raw = assert_kept(changes)
    (size,) = struct.unpack_from("<I", raw)
    assert raw[4 : 4 + size] == bytes(
        [255] * (before // 255) + [before % 255] + [255] * (gap // 255) + [gap % 255]
    )


def test_what_is_kept_of_few_changes_in_one_byte_is_a_gap_and_a_byte_of_each() -> None:
    changes = np.zeros(90, "<u4")
    changes[[5, 70]] = 0x300, 0x400
    zeros, nothing = struct.pack("<IB", 1, 255), struct.pack("<I", 0)
    assert packed(changes) == struct.pack("<IBB", 2, 5, 64) + zeros + nothing + b"\3\4" + zeros + zeros


@pytest.mark.parametrize("width", UNSIGNED)
def test_a_call_does_not_change_what_another_width_gave(width: int) -> None:
    """The memory of a thread is used again."""
    for other in UNSIGNED:
        assert_kept(changes_of(other, 100, 1.0))
        assert_kept(changes_of(width, 70, 0.1))


GOOD = packed(np.arange(9).astype("<u2") % 2)  # of nine elements, four are 1

HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "less than a size": lambda: GOOD[:3],
    "less than its gaps": lambda: struct.pack("<I", 99) + b"\1",
    "more gaps than memory": lambda: struct.pack("<I", 0xFFFFFFFF) + GOOD[4:],
    "less than its items": lambda: GOOD[:-1],
    "more than a block": lambda: GOOD + b"\0",
    "a place outside": lambda: struct.pack("<IB", 1, 9) + GOOD[8:],
    "a place far outside": lambda: struct.pack("<I", 2) + b"\xff\0" + GOOD[8:],
    "a place outside of what changed": lambda: struct.pack("<IBIBB", 1, 0, 1, 1, 5) + bytes(4),
    "no plane after the first": lambda: struct.pack("<I", 0) + struct.pack("<I", 0) + bytes(9),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bytes_that_are_no_difference_are_refused(kind: str) -> None:
    with pytest.raises(BadDifference):
        unpack(HOSTILE[kind](), np.zeros(9, "<u2"))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_whatever_byte_is_another_it_is_refused_or_some_difference(place: int, byte: int) -> None:
    raw = bytearray(GOOD)
    raw[place] = byte
    values = np.zeros(9, "<u2")
    try:
        unpack(bytes(raw), values)
    except BadDifference:
        return
    unpack(bytes(raw), values)
    assert not values.any()
