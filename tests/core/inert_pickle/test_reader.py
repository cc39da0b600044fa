"""The pickle reader and the writer, compared with Python's own; of hostile pickles nothing is run."""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import json
import pathlib
import pickle
import pickletools
import struct
import time
import tracemalloc
import uuid
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from ckpttool.core.checkpoint.full import BadJson, decode
from ckpttool.core.inert_pickle import machine
from ckpttool.core.inert_pickle import values as inert
from ckpttool.core.inert_pickle.machine import BASE_PARTS, MAX_EQUAL_HASHES, BadKey, KeyGuard
from ckpttool.core.inert_pickle.reader import PickleFault, read_pickle
from ckpttool.core.inert_pickle.values import Global, OrderedDict_, Record, Set_, TooDeep, rebuild, walk
from ckpttool.core.inert_pickle.writer import write_pickle
from tests.support.comparing import assert_same
from tests.support.crafting import call, list_of, name, number, program, text, tuple_of
from tests.support.running import within

# ---- The pickle reader and the writer, compared with Python's own -------------------------------------


PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def no_tensor(*_: Any) -> Any:
    raise AssertionError("no tensors and storages here")


def written(value: object, protocol: int = 2) -> bytes:
    return write_pickle(value, protocol=protocol, persistent_id=no_tensor, reduce_tensor=no_tensor)


def through(value: Any, protocol: int) -> Any:
    """Pickle with Python, read and write again with ckpttool, unpickle with Python."""
    read = read_pickle(pickle.dumps(value, protocol))
    return pickle.loads(written(read.value, read.protocol))


# Reading.

PLAIN = [
    *(None, True, False, 0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**63)),
    *(2**64, 2**2040 - 1, -(2**2039), 10**4000, 0.0, -0.0, 1.5, 1e308, 5e-324, float("inf"), float("nan")),
    *("", "a", "é\n\t\\'\"", "\ud800", "\U0001f511", "x" * 300, "\0", b"", b"\x00\xff", b"b" * 300),
    *((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1, [2, [3]]], {}, {"a": 1, 2: "b", (1, "c"): None}),
    *(list(range(2500)), dict.fromkeys(range(2500), "v"), {1: {2: {3: [4]}}}),
    *(bytearray(b"\xff"), bytearray()),
]
SETS = [{1, "a", (2, 3)}, frozenset({4, frozenset({5})}), set(), frozenset()]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PLAIN, ids=lambda v: repr(v)[:30].encode("ascii", "replace").decode())
def test_plain_values_of_every_protocol_stand_for_themselves(value: object, protocol: int) -> None:
    assert_same(value, read_pickle(pickle.dumps(value, protocol)).value)
    if protocol >= 2:
        assert_same(value, pickle.loads(written(value, protocol)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_of_every_protocol_are_plain_values(protocol: int) -> None:
    assert read_pickle(pickle.dumps(SETS, protocol)).value == SETS


@pytest.mark.parametrize("kind", ["set", "frozenset"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_set_keeps_the_order_of_the_file(protocol: int, kind: str) -> None:
    """Objects have no order of their own, and tensors in a set are named by their position."""
    value = {"set": set, "frozenset": frozenset}[kind](Plain(i) for i in range(50))
    read = read_pickle(pickle.dumps(value, protocol))
    assert [each.state["value"] for each in read.value] == [each.value for each in value]
    again = read_pickle(written(read.value, read.protocol)).value
    assert [each.state for each in again] == [each.state for each in read.value]


CALLS_OF_NO_PICKLER = {
    "a set of text": call(name("builtins", "set"), text("abc")),
    "a set of two lists": call(name("builtins", "set"), b"]", b"]"),
    "bytes by another codec": call(name("_codecs", "encode"), text("abc"), text("rot13")),
    "bytes beyond latin-1": call(name("_codecs", "encode"), text("\u20ac"), text("latin1")),
    "a byte array of a number": call(name("builtins", "bytearray"), number(10**12)),
    "bytes of a number": call(name("builtins", "bytes"), number(10**12)),
}


@pytest.mark.parametrize("what", CALLS_OF_NO_PICKLER)
def test_calls_that_no_pickler_writes_stay_records(what: str) -> None:
    assert isinstance(read_pickle(program(CALLS_OF_NO_PICKLER[what])).value, Record)


def test_many_equal_bytes_are_written_and_read_back() -> None:
    """Protocol 2 writes bytes as calls on text, and equal text only once."""
    equal = [bytes(bytearray(b"\xff" * 1000)) for _ in range(300)]
    assert read_pickle(written(read_pickle(pickle.dumps(equal, 4)).value, 2)).value == equal


def test_the_reader_stops_at_the_end_of_one_pickle_and_says_where() -> None:
    first, second = pickle.dumps([1], 2), pickle.dumps({"b": 2}, 4)
    read = read_pickle(b"xx" + first + second + b"rest", 2)
    assert (read.value, read.end, read.protocol) == ([1], 2 + len(first), 2)
    after = read_pickle(b"xx" + first + second + b"rest", read.end)
    assert (after.value, after.protocol) == ({"b": 2}, 4)


class Colour(enum.Enum):
    RED = 1


class Plain:
    def __init__(self, value: object = 3) -> None:
        self.value = value


class Remade(Plain):
    def __reduce__(self) -> Any:
        return Remade, (self.value,)


class Slotted:
    __slots__ = ("a", "b")


class ListLike(list):  # type: ignore[type-arg]
    pass


class DictLike(dict):  # type: ignore[type-arg]
    pass


class SetLike(set):  # type: ignore[type-arg]
    pass


class WithKeywords(int):
    def __new__(cls, *, size: int = 0) -> Any:
        made = super().__new__(cls, size)
        made.size = size  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> Any:
        return (), {"size": int(self)}


Point = collections.namedtuple("Point", "x y")


class Outer:
    class Inner:
        pass


def objects() -> dict[str, Any]:
    shared = ["shared"]
    slotted = Slotted()
    slotted.a, slotted.b = 1, shared
    listlike, dictlike = ListLike([1, 2]), DictLike(k=1)
    listlike.note = "kept"  # type: ignore[attr-defined]
    dictlike.note = shared  # type: ignore[attr-defined]
    ordered = OrderedDict(b=1, a=2)
    ordered._metadata = OrderedDict(x={"version": 1})  # type: ignore[attr-defined]
    return {
        "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("/tmp/x"), shared=shared),
        "object": Plain(shared),
        "slots": slotted,
        "list subclass": listlike,
        "dict subclass": dictlike,
        "set subclass": SetLike({1, 2}),
        "named tuple": Point(1, 2),
        "keyword arguments": WithKeywords(size=5),
        "ordered": ordered,
        "default dict": collections.defaultdict(list, a=shared),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=3),
        "partial": functools.partial(int, "7", base=8),
        "function": copyreg.pickle,
        "type": Plain,
        "builtin": len,
        "enum": Colour.RED,
        "set": {1, "a"},
        "frozenset": frozenset({1, 2}),
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"\x01"),
        "complex": 1 + 2j,
        "range": range(3),
        "slice": slice(1, None, 2),
        "error": ValueError("x"),
        "decimal": decimal.Decimal("1.10"),
        "fraction": fractions.Fraction(1, 3),
        "uuid": uuid.UUID(int=5),
        "date": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
        "numpy scalar": np.float64(1.5),
        "numpy array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numpy object array": np.array([None, "a"], dtype=object),
        "numpy dtype": np.dtype("float32"),
        "shared": [shared, shared],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("what", objects())
def test_python_reads_back_every_object_unchanged(what: str, protocol: int) -> None:
    value = objects()[what]
    again = through(value, protocol)
    if isinstance(value, ValueError | functools.partial | slice):
        assert repr(again) == repr(value)
    elif isinstance(value, Slotted):
        assert (again.a, again.b) == (value.a, value.b)
    else:
        assert_same(value, again)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_in_one_tree_keep_what_they_share(protocol: int) -> None:
    odd = ("slots", "partial", "error", "slice")
    value = {key: item for key, item in objects().items() if key not in odd}
    assert_same(value, through(value, protocol))


@pytest.mark.parametrize("protocol", [4, 5])
def test_dotted_names_are_written_under_the_protocol_they_were_read_from(protocol: int) -> None:
    assert through(Outer.Inner, protocol) is Outer.Inner


leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
leaves |= st.text(st.characters(), max_size=5) | st.binary(max_size=5)
hashable = st.one_of(leaves, st.tuples(leaves, leaves))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.sets(hashable, max_size=3),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=20,
)


@given(trees, st.sampled_from([2, 3, 4, 5]))
def test_python_reads_back_any_tree_unchanged(value: Any, protocol: int) -> None:
    assert_same(value, through(value, protocol))


@given(trees)
def test_a_copy_of_a_tree_is_the_same_tree(value: Any) -> None:
    read = read_pickle(pickle.dumps(value, 4)).value
    assert_same(value, pickle.loads(written(copied(read), 4)))


# Cycles.


def cycles() -> dict[str, Any]:
    inside: list[Any] = []
    inside.append(inside)
    in_dict: dict[str, Any] = {}
    in_dict["self"] = in_dict
    through_tuple: list[Any] = []
    through_tuple.append((through_tuple,))
    entered_by_tuple = ([],)  # type: ignore[var-annotated]
    entered_by_tuple[0].append(entered_by_tuple)
    owner = Plain()
    owner.value = [owner]
    by_arguments = Remade([])
    by_arguments.value.append(by_arguments)
    tuples = {"by tuple": through_tuple, "tuple": entered_by_tuple}
    objects = {"arguments": [by_arguments, ["a"], ["b"]], "object": owner}
    return {"list": inside, "dict": in_dict, **tuples, **objects}


def copied(tree: Any) -> Any:
    return rebuild(tree, lambda item: item)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("what", cycles())
def test_cycles_survive_reading_writing_and_a_copy(what: str, protocol: int) -> None:
    raw = pickle.dumps(cycles()[what], protocol)
    meant = pickle.loads(raw)  # Python itself splits some objects in two
    assert_same(meant, pickle.loads(written(read_pickle(raw).value, protocol)))
    assert_same(meant, pickle.loads(written(copied(read_pickle(raw).value), protocol)))


@pytest.mark.parametrize("change", [lambda tree: tree, copied], ids=["read", "copied"])
@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_cycle_through_a_set_survives(protocol: int, kind: Any, change: Any) -> None:
    owner = Plain()
    owner.value = kind([owner])
    for start in (owner, owner.value, [owner.value, owner, "text", ["list"]]):
        tree = change(read_pickle(pickle.dumps(start, protocol)).value)
        again = pickle.loads(written(tree, protocol))
        if isinstance(again, list):
            assert again[2:] == ["text", ["list"]]
            assert again[1].value is again[0]
            again = again[0]
        again = again if isinstance(again, kind) else again.value
        (inside,) = again
        assert inside.value is again


def doubled(times: int) -> bytes:
    """The opcodes of nested lists, each of which holds the one before twice."""
    return b"]" + b"".join(b"q%b0](h%bh%be" % ((bytes([i]),) * 3) for i in range(times))


def test_a_list_doubled_60_times_is_walked_and_copied_in_no_time() -> None:
    tree = read_pickle(program(doubled(60))).value
    assert sum(isinstance(value, list) for value in walk(tree)) < 200
    assert written(copied(tree)) == written(tree)


def nested(levels: int) -> bytes:
    return b"]" * levels + b"a" * (levels - 1)


def test_nesting_of_100_000_levels_is_read_and_walked() -> None:
    tree = read_pickle(program(nested(100_000))).value
    assert sum(1 for _ in walk(tree)) == 100_000


@pytest.mark.parametrize("act", [written, copied])
def test_nesting_beyond_the_limit_is_too_deep_to_write_or_copy(act: Any) -> None:
    act(read_pickle(program(nested(inert.MAX_DEPTH))).value)
    with pytest.raises(TooDeep):
        act(read_pickle(program(nested(100_000))).value)


def test_every_kind_of_container_can_be_nested_up_to_the_limit() -> None:
    value: Any = 1
    for level in range(inert.MAX_DEPTH // 4):
        value = [{"k": (OrderedDict(x=value) if level % 2 else Plain(value),)}]
    read = read_pickle(pickle.dumps(value, 2)).value
    copy = copied(read) if _depth(read) <= inert.MAX_DEPTH else read
    assert _depth(copy) == _depth(read)


def _depth(root: object) -> int:
    deepest, stack = 0, [(root, 1)]
    while stack:
        value, level = stack.pop()
        deepest = max(deepest, level)
        stack.extend((child, level + 1) for child in inert.children(value))
    return deepest


# Writing.


def test_a_shared_value_is_written_once() -> None:
    shared = ["x" * 1000]
    assert len(written([shared, shared])) < 1100


def test_a_value_that_no_pickle_can_hold_raises_value_error() -> None:
    for odd in (Global("a\nb", "c"), Global("a", "b\nc"), Global("a", "\ud800"), 1j, object()):
        with pytest.raises(ValueError):
            written([odd])


def test_dicts_and_lists_longer_than_a_batch_keep_their_order() -> None:
    value = {"list": list(range(3001)), "dict": {str(i): i for i in range(3001)}}
    assert_same(value, pickle.loads(written(value)))


def test_a_pickle_of_torch_protocol_has_no_newer_opcodes() -> None:
    written_2 = written(read_pickle(pickle.dumps(list(objects().values())[:-1], 2)).value, 2)
    assert max(op.proto for op, _, _ in pickletools.genops(written_2)) == 2


def test_each_container_is_walked_and_changed_once_and_the_original_is_left_unchanged() -> None:
    shared: list[int] = [1]
    tree = read_pickle(pickle.dumps({"a": shared, "b": (shared,), "c": {3}}, 4)).value
    assert sum(value == [1] for value in walk(tree)) == 1
    copy: Any = rebuild(tree, lambda value: [2] if value == [1] else value)
    assert copy == {"a": [2], "b": ([2],), "c": {3}}
    assert copy["a"] is copy["b"][0]
    assert rebuild(tree, lambda value: {"x": 1} if isinstance(value, dict) else value) == {"x": 1}
    assert tree == {"a": [1], "b": ([1],), "c": {3}}


# ---- Hostile pickles: nothing in them is run, each fault is said, and no key takes long to hash or compare


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
