"""Keys of dicts and sets that would take long to hash or to compare are refused."""

from __future__ import annotations

import json
import pickle
import struct
import time

import pytest

from ckpttool.checkpoint.full_json import BadJson, decode
from ckpttool.inert_pickle.machine import BASE_PARTS, MAX_EQUAL_HASHES, BadKey, KeyGuard
from ckpttool.inert_pickle.reader import PickleFault, read_pickle
from ckpttool.inert_pickle.values import OrderedDict_, Set_
from tests.support.crafting import program

MANY = 40_000


def test_one_large_tuple_in_very_many_keys_takes_bounded_time() -> None:
    large = b"(" + b"K\1" * 990 + b"tq\0"
    keys = b"".join(b"J" + struct.pack("<i", i) + b"h\0\x86N" for i in range(MANY))
    start = time.process_time()
    with pytest.raises(PickleFault, match="one of too many large tuples as a key"):
        read_pickle(program(large + b"0}(" + keys + b"u"))
    assert time.process_time() - start < 8  # it took half a minute


def test_one_large_tuple_in_very_many_json_keys_takes_bounded_time() -> None:
    pairs = [[["tuple", i, ["ref", 0]], None] for i in range(MANY)]
    tree = ["list", ["def", 0, ["tuple", *[1] * 990]], ["dict", *pairs]]
    start = time.process_time()
    with pytest.raises(BadJson):
        decode({}, json.dumps({"version": 1, "protocol": 2, "tree": tree}))
    assert time.process_time() - start < 8


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_honest_tuples_are_accepted_as_keys(protocol: int) -> None:
    value = {(i, "layer", (i, 2, 3)): i for i in range(MANY)}
    value.update({(-i, *range(30)): i for i in range(1, MANY)})  # type: ignore[misc]
    assert sum(map(len, value)) > BASE_PARTS
    assert read_pickle(pickle.dumps(value, protocol)).value == value


def test_the_limit_is_for_all_keys_together_and_grows_with_the_file() -> None:
    key = (1,) * 1000
    guard = KeyGuard(10_000)
    for _ in range((BASE_PARTS + 20_000) // 1000):
        guard.check(key, [])
    with pytest.raises(BadKey, match="too many large tuples"):
        guard.check(key, [])


def test_colliding_keys_are_counted_by_owner() -> None:
    colliding = [(2**61 - 1) * i << 8 for i in range(1, MAX_EQUAL_HASHES + 2)]
    guard, owner = KeyGuard(0), object()
    for number in colliding[:-1]:
        guard.check(number, owner)
    guard.check(colliding[-1], object())
    with pytest.raises(BadKey, match="crafted to collide"):
        guard.check(colliding[-1], owner)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ([], "a list"),
        (OrderedDict_(), "a dict"),
        (Set_(), "a set"),
        (({1},), "a set"),
        (bytearray(), "a bytearray"),
    ],
)
def test_an_unhashable_key_is_named(key: object, what: str) -> None:
    with pytest.raises(BadKey, match=f"^{what}$"):
        KeyGuard(0).check(key, [])
