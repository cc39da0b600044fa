"""Hostile pickles: nothing in them is run, each fault is said, and no key takes long to hash or compare."""

from __future__ import annotations

import argparse
import json
import pickle
import pickletools
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from ckpttool.checkpoint.full_json import BadJson, decode
from ckpttool.inert_pickle import machine
from ckpttool.inert_pickle.machine import BASE_PARTS, MAX_EQUAL_HASHES, BadKey, KeyGuard
from ckpttool.inert_pickle.reader import PickleFault, read_pickle
from ckpttool.inert_pickle.values import Global, OrderedDict_, Record, Set_, TooDeep, walk
from ckpttool.inert_pickle.writer import write_pickle
from tests.support.crafting import call, list_of, name, number, program, text, tuple_of
from tests.support.running import within


def not_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("this is not to be called")


# Nothing is run.


TOUCH, SYSTEM = text("touch CANARY"), name("os", "system")
RUNNING = {
    "REDUCE": call(SYSTEM, TOUCH),
    "REDUCE builtins": call(name("builtins", "eval"), text("open('CANARY','w')")),
    "INST": b"(" + TOUCH + b"ios\nsystem\n",
    "OBJ": b"(" + SYSTEM + TOUCH + b"o",
    "NEWOBJ": SYSTEM + tuple_of(TOUCH) + b"\x81",
    "NEWOBJ_EX": SYSTEM + tuple_of(TOUCH) + b"}" + b"\x92",
    "STACK_GLOBAL": text("os") + text("system") + b"\x93" + tuple_of(TOUCH) + b"R",
    "BUILD": call(SYSTEM, text("true")) + TOUCH + b"b",
    "APPEND": call(SYSTEM, text("true")) + TOUCH + b"a",
    "SETITEM": call(SYSTEM, text("true")) + TOUCH + b"Ns",
    "a call of a call": call(call(name("builtins", "getattr"), text("x")), TOUCH),
}


@pytest.mark.parametrize("what", RUNNING)
def test_opcodes_that_run_code_make_inert_records(what: str, tmp_path: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(read_pickle(program(RUNNING[what], protocol=4)).value, Record)
    assert not list(tmp_path.iterdir())


def test_no_module_is_imported(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.__import__", not_called)
    assert read_pickle(program(name("no_such_module", "Thing"))).value == Global("no_such_module", "Thing")


# Faults.

FAULTS = {
    "nothing": b"",
    "no STOP": b"\x80\x02N",
    "STOP on an empty stack": b"\x80\x02.",
    "STOP inside a group": b"\x80\x02N(N.",
    "an unknown opcode": b"\x80\x02\xf0.",
    "a protocol of the future": b"\x80\x06N.",
    "text shorter than said": b"\x80\x02X\x05\x00\x00\x00abc.",
    "text of 2^64 bytes": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
    "bytes of 4 GiB": b"\x80\x03B\xff\xff\xff\xffabc.",
    "a byte array of 2^63 bytes": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7fabc.",
    "a number of 2^31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "text that is no UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "a line without end": b"\x80\x02I12",
    "a number of letters": b"Iabc\n.",
    "a number of 5,000 digits": b"I" + b"9" * 5000 + b"\n.",
    "a number in base 8 or 10": b"I010\n.",
    "a memo by a negative number": b"Np0\ng-1\n.",
    "a float of letters": b"Fabc\n.",
    "an open quotation": b"S'abc\n.",
    "no quotation": b"Sabc\n.",
    "a malformed escape": b"S'\\x'\n.",
    "malformed unicode": b"V\\u12\n.",
    "a memo never stored": b"\x80\x02h\x05.",
    "a memo by a word": b"gabc\n.",
    "storing from an empty stack": b"\x80\x02q\x00N.",
    "a tuple of too few": b"\x80\x02N\x87.",
    "a group never opened": b"\x80\x02Nt.",
    "a key without a value": b"\x80\x02}(NNNu.",
    "a list as a key": b"\x80\x02}]Ns.",
    "a dict as a key": b"\x80\x02}}Ns.",
    "a list inside a key": b"\x80\x02}]\x85Ns.",
    "a set of lists": b"\x80\x04\x8f(]\x90.",
    "a frozenset of dicts": b"\x80\x04(}\x91.",
    "appending to a dict": b"\x80\x02}Na.",
    "appending to text": b"\x80\x02U\x01aNa.",
    "items for a list": b"\x80\x02]NNs.",
    "adding to a list": b"\x80\x04](N\x90.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "a call of text": b"\x80\x02U\x01a)R.",
    "arguments in a list": b"\x80\x02cos\nsystem\n]R.",
    "a new object of text": b"\x80\x02U\x01a)\x81.",
    "keyword arguments in a list": b"\x80\x04cos\nsystem\n)]\x92.",
    "a state for a list": b"\x80\x02]Nb.",
    "a state for a number": b"\x80\x02K\x01Nb.",
    "a name of numbers": b"\x80\x04K\x01K\x02\x93.",
    "a name of 2,000 characters": b"\x80\x02c" + b"a" * 2000 + b"\nb\n.",
    "a name without an end": b"\x80\x02cos\nsystem.",
    "something outside the file": b"\x80\x02U\x01aQ.",
    "something outside, by a line": b"Pabc\n.",
    "the extension registry": b"\x80\x02\x82\x01.",
    "a buffer outside": b"\x80\x05\x97.",
    "an object of nothing": b"(o.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_pickle_raises_pickle_fault(fault: str) -> None:
    with pytest.raises(PickleFault, match=r"^its pickle "):
        read_pickle(FAULTS[fault])


def test_a_pickle_cut_at_any_byte_raises_pickle_fault() -> None:
    whole = pickle.dumps({"a": [1, 2.5, "text", b"b", (None, True)], "b": argparse.Namespace(value=3)}, 4)
    for end in range(len(whole)):
        with pytest.raises(PickleFault):
            read_pickle(whole[:end])


@given(st.binary(max_size=40))
def test_noise_is_a_value_or_a_fault(noise: bytes) -> None:
    try:
        read_pickle(b"\x80\x04" + noise + b".")
    except PickleFault as fault:
        assert len(str(fault)) < 300


@given(st.lists(st.sampled_from([op.code for op in pickletools.opcodes]), max_size=30), st.binary(max_size=4))
def test_opcodes_at_random_are_a_value_or_a_fault(codes: list[str], operand: bytes) -> None:
    body = b"".join(code.encode("latin-1") + operand for code in codes)
    with_values = b"N)]}X\x01\x00\x00\x00acos\nsystem\n" + body
    try:
        read = read_pickle(b"\x80\x04" + with_values + b".").value
        write_pickle(read, protocol=2, persistent_id=not_called, reduce_tensor=not_called)
    except (PickleFault, TooDeep, ValueError):
        return


def test_a_memo_index_of_2_to_the_31_takes_no_memory() -> None:
    tracemalloc.start()
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\x7f0j\xff\xff\xff\x7f.").value is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def tuple_in_tuple(times: int) -> bytes:
    """The opcodes of nested tuples, each of which holds the one before twice."""
    steps = (b"0h%bh%b\x86q%b" % (bytes([i]), bytes([i]), bytes([i + 1])) for i in range(times))
    return b")q\x00" + b"".join(steps)


def test_a_tuple_that_repeats_itself_is_read_as_a_value() -> None:
    assert len(list(walk(read_pickle(program(tuple_in_tuple(60))).value))) < 200


MANY = 10_000
GIANT, ORDERED = tuple_in_tuple(60), name("collections", "OrderedDict")
LARGE = b"(" + b"K\1" * 990 + b"tq\0"
DEEP = b"N" + b"\x85" * 990
COLLIDING = [number((2**61 - 1) * (i + 1) << 8) for i in range(30_000)]  # all have the hash 0
PAIRS = list_of(*(b"M%bN\x86" % i.to_bytes(2, "little") for i in range(30_000)))
BYTES = b"B" + (30_000).to_bytes(4, "little") + b"x" * 30_000


def batched(items: list[bytes], opcode: bytes) -> bytes:
    """Groups of 900 items, each with the opcode that takes a group."""
    return b"".join(b"(" + b"".join(items[i : i + 900]) + opcode for i in range(0, len(items), 900))


def over_and_over(module: str, function: str, contents: bytes = list_of(*[b"N"] * 30_000)) -> bytes:
    """A call that copies a large argument, 30,000 times: a file of 300 kB could ask for 10^9 entries."""
    made = contents + b"q\x000" + name(module, function) + b"q\x01h\x00\x85q\x02"
    return b"(" + made + b"0h\x01h\x02R" * 30_000 + b"l"


COSTLY = {
    "a tuple doubled 60 times as a key": (b"}" + GIANT + b"Ns", "giant tuple"),
    "a tuple doubled 60 times in a set": (b"\x8f(" + GIANT + b"\x90", "giant tuple"),
    "a tuple doubled 60 times in a frozenset": (b"(" + GIANT + b"\x91", "giant tuple"),
    "a tuple doubled 60 times as a key of pairs": (call(ORDERED, b"](" + GIANT + b"N\x86e"), "giant tuple"),
    "colliding keys": (b"}" + batched([key + b"N" for key in COLLIDING], b"u"), "crafted to collide"),
    "colliding tuples": (b"}" + batched([key + b"\x85N" for key in COLLIDING], b"u"), "crafted to collide"),
    "a colliding set": (b"\x8f" + batched(COLLIDING, b"\x90"), "crafted to collide"),
    "a colliding frozenset": (b"(" + b"".join(COLLIDING) + b"\x91", "crafted to collide"),
    "deep keys that are equal": (b"}(" + DEEP + b"N" + DEEP + b"Nu", "deeply nested tuple as a key"),
    "one large tuple in very many keys": (  # it took very long
        LARGE + b"0}(" + b"".join(b"J" + struct.pack("<i", i) + b"h\0\x86N" for i in range(MANY)) + b"u",
        "one of too many large tuples as a key",
    ),
    "one list made an ordered dict": (over_and_over("collections", "OrderedDict", PAIRS), "over and over"),
    "one list made a set": (over_and_over("builtins", "set"), "over and over"),
    "one list made a frozenset": (over_and_over("builtins", "frozenset"), "over and over"),
    "bytes made a bytearray": (over_and_over("builtins", "bytearray", BYTES), "over and over"),
}


@pytest.mark.parametrize("what", COSTLY)
def test_what_would_take_long_to_hash_compare_or_copy_is_refused_at_once(what: str) -> None:
    body, words = COSTLY[what]
    with within(5, time.process_time), pytest.raises(PickleFault, match=words):
        read_pickle(program(body, 4))


def test_one_large_tuple_in_very_many_json_keys_takes_bounded_time() -> None:
    pairs = [[["tuple", i, ["ref", 0]], None] for i in range(MANY)]
    tree = ["list", ["def", 0, ["tuple", *[1] * 990]], ["dict", *pairs]]
    with within(5, time.process_time), pytest.raises(BadJson):
        decode({}, json.dumps({"version": 1, "protocol": 2, "tree": tree}))


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_honest_tuples_are_accepted_as_keys(protocol: int, monkeypatch: MonkeyPatch) -> None:
    """As many parts as bytes are allowed, beside the parts that any file may have."""
    monkeypatch.setattr(machine, "BASE_PARTS", 100)
    value = {(i, "layer", (i, 2, 3)): i for i in range(999)}
    value.update({(-i, *range(30)): i for i in range(1, 999)})  # type: ignore[misc]
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
    for key in colliding[:-1]:
        guard.check(key, owner)
    guard.check(colliding[-1], object())
    with pytest.raises(BadKey, match="crafted to collide"):
        guard.check(colliding[-1], owner)


UNHASHABLE = [([], "a list"), (OrderedDict_(), "a dict"), (Set_(), "a set"), (({1},), "a set")]
UNHASHABLE += [(bytearray(), "a bytearray")]


@pytest.mark.parametrize(("key", "what"), UNHASHABLE)
def test_an_unhashable_key_is_named(key: object, what: str) -> None:
    with pytest.raises(BadKey, match=f"^{what}$"):
        KeyGuard(0).check(key, [])
