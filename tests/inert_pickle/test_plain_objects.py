"""Sets, bytes and objects: the same in every protocol, format and command; attributes read from a state."""

from __future__ import annotations

import argparse
import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.verify import verify
from ckpttool.inert_pickle.reader import read_pickle
from ckpttool.inert_pickle.values import Global, OrderedDict_, Record
from tests.support.comparing import compared
from tests.support.crafting import call, list_of, name, number, program, text, tuple_of
from tests.support.running import Cli
from tests.support.saved import opened

PROTOCOLS = [2, 3, 4, 5]
PLAIN: dict[str, Any] = {
    "w": torch.ones(1),
    "set": {1, "a", (2, b"x")},
    "frozenset": frozenset("xyz"),
    "bytes": [b"\xff\0", b"", {b"key": 1}],
    "bytearray": [bytearray(b"\xfe"), bytearray()],
}


class Keywords:
    def __new__(cls, **given: Any) -> Keywords:
        made = object.__new__(cls)
        made.__dict__.update(given)
        return made

    def __getnewargs_ex__(self) -> Any:
        return (), {"t": torch.ones(2)}


def tensors_inside() -> dict[str, Any]:
    return {
        "w": torch.zeros(1),
        "s": {torch.full((n,), float(n)) for n in range(1, 20)},
        "f": frozenset(torch.full((n,), -float(n)) for n in range(1, 20)),
        "k": Keywords(),
    }


def there_and_back(value: Any, folder: Path, protocol: int) -> tuple[Path, list[Path]]:
    """Save a file, and convert it to `.pt`, to safetensors with everything, and that to `.pt` again."""
    source = folder / "in.pt"
    torch.save(value, source, pickle_protocol=protocol)
    outputs = [folder / "out.pt", folder / "flat.safetensors", folder / "back.pt"]
    for start, end in zip([source, source, outputs[1]], outputs, strict=True):
        ckpttool.save(ckpttool.open(start), end, full=end.suffix != ".pt", verify=True)
    return source, outputs


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [PLAIN, tensors_inside()], ids=["plain", "tensors inside"])
def test_outputs_hold_the_same_values_and_torch_loads_them(value: Any, protocol: int, tmp_path: Path) -> None:
    source, outputs = there_and_back(value, tmp_path, protocol)
    for output in outputs:
        assert diff(ckpttool.open(source), ckpttool.open(output)).same
        assert verify(ckpttool.open(source), against=ckpttool.open(output)).ok
    for path in outputs[::2]:
        again = torch.load(path, weights_only=False)
        if value is PLAIN:
            assert again == PLAIN
            assert [type(each) for each in again.values()] == [type(each) for each in PLAIN.values()]
        elif protocol >= 4:
            assert sorted(len(tensor) for tensor in again["s"]) == list(range(1, 20))
            assert sorted(tensor[0].item() for tensor in again["f"]) == list(range(-19, 0))
            assert again["k"].t.tolist() == [1, 1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_and_byte_arrays_load_as_weights_only(protocol: int, tmp_path: Path) -> None:
    """torch's weights_only reader takes sets and byte arrays as calls alone, not as opcodes."""
    value = {"w": 1, "s": {1, 2, "a"}, "b": bytearray() if protocol > 2 else bytearray(b"ab")}
    _, (out, _, back) = there_and_back(value, tmp_path, protocol)
    assert torch.load(out, weights_only=True) == torch.load(back, weights_only=True) == value


@pytest.mark.parametrize("protocol", [2, 3, 5])
def test_files_of_two_protocols_compare_as_the_same(protocol: int, tmp_path: Path) -> None:
    for file, each in (("a.pt", 4), ("b.pt", protocol)):
        torch.save(PLAIN, tmp_path / file, pickle_protocol=each)
    assert diff(ckpttool.open(tmp_path / "a.pt"), ckpttool.open(tmp_path / "b.pt")).same


def test_sets_compare_equal_in_any_order(tmp_path: Path) -> None:
    numbers = [2**20 * i for i in range(9)]  # these collide, so that a set keeps their order of adding
    a, b = dict.fromkeys(numbers), dict.fromkeys(reversed(numbers))
    one, other = {"w": torch.ones(1), "s": set(a)}, {"w": torch.ones(1), "s": set(b)}
    assert list(one["s"]) != list(other["s"])  # type: ignore[call-overload]
    assert compared(tmp_path, one, other).same


@pytest.mark.parametrize(
    ("a", "b", "changes", "more"),
    [
        ({1, 2}, {1, 3}, [("s.1", "2", "3")], ()),
        ({1}, {True}, [("s.0", "1", "True")], ()),
        ({0.0}, {-0.0}, [("s.0", "0.0", "-0.0")], ()),
        ({1, 2}, {1, 2, 3}, [], ("s.2",)),
    ],
)
def test_diff_names_elements_that_differ(a: Any, b: Any, changes: Any, more: Any, tmp_path: Path) -> None:
    found = compared(tmp_path, {"w": torch.ones(1), "s": a}, {"w": torch.ones(1), "s": b})
    assert [(each.name, each.a, each.b) for each in found.changed] == changes
    assert (found.only_a, found.only_b) == ((), more)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inspect_shows_plain_type_names(protocol: int, cli: Cli, tmp_path: Path) -> None:
    torch.save(PLAIN, tmp_path / "in.pt", pickle_protocol=protocol)
    page = cli("inspect", tmp_path / "in.pt").out
    assert "builtin" not in page and "_codecs" not in page
    assert "set" in page and "frozenset" in page


@pytest.mark.parametrize("protocol", [2, 4])
def test_dcp_holds_plain_python_values(protocol: int, tmp_path: Path) -> None:
    value = {**PLAIN, "inside": [{torch.ones(2)}]}
    torch.save(value, tmp_path / "in.pt", pickle_protocol=protocol)
    ckpttool.save(ckpttool.open(tmp_path / "in.pt"), tmp_path / "dcp", to="dcp")
    assert diff(ckpttool.open(tmp_path / "in.pt"), ckpttool.open(tmp_path / "dcp")).same
    assert not any(b"inert_pickle" in file.read_bytes() for file in (tmp_path / "dcp").iterdir())


# Attributes of objects.


class Slotted:
    """An object with slots, whose state is a pair."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 18


def test_attributes_of_a_namespace_are_read_by_name(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=0.1, model="resnet18", inner=SimpleNamespace(steps=[1, 2]))
    tree = opened({"w": torch.ones(1), "args": args, "slotted": Slotted()}, tmp_path).tree
    assert isinstance(tree, dict)
    assert (tree["args"].lr, tree["args"].model, tree["args"].inner.steps) == (0.1, "resnet18", [1, 2])
    assert tree["slotted"].depth == 18
    assert not hasattr(tree["args"], "epochs")
    said = r"'argparse.Namespace' has no attribute 'epochs' in its pickled state"
    with pytest.raises(AttributeError, match=said):
        tree["args"].epochs  # noqa: B018


def test_names_of_the_record_s_own_are_never_taken_from_the_file() -> None:
    state = {"args": 1, "items": 2, "state": 3, "type_name": 4, "__class__": 5, "__len__": 6, "lr": 7}
    record = Record("newobj", Global("m", "C"), (), state=state, has_state=True)
    assert (record.args, record.items, record.state, record.type_name) == ((), (), state, "m.C")
    assert (record.__class__, record.lr) == (Record, 7)
    assert not hasattr(record, "__len__")
    assert record.state["items"] == 2


@pytest.mark.parametrize("state", [None, 1, [("lr", 1)], "lr", ({},), (None, {"x": 1})])
def test_a_state_without_the_name_has_no_attribute(state: object) -> None:
    with pytest.raises(AttributeError):
        Record("newobj", Global("m", "C"), (), state=state, has_state=True).lr  # noqa: B018


def test_records_are_copied_as_before() -> None:
    record = Record("newobj", Global("m", "C"), (), state={"x": [1]}, has_state=True)
    assert copy.deepcopy(record).x == [1]
    with pytest.raises(AttributeError):
        Record.__new__(Record).x  # noqa: B018


def test_a_record_has_the_name_of_its_class() -> None:
    read = read_pickle(pickle.dumps(argparse.Namespace(), 2)).value
    assert read.type_name == "argparse.Namespace"
    old_style = call(name("copy_reg", "_reconstructor"), name("m", "C"), name("__builtin__", "object"), b"N")
    assert read_pickle(program(old_style)).value.type_name == "m.C"


def test_an_ordered_dict_of_python_2_is_made_of_its_pairs() -> None:
    pairs = list_of(list_of(text("b"), number(1)), tuple_of(text("a"), number(2)))
    read = read_pickle(program(call(name("collections", "OrderedDict"), pairs))).value
    assert isinstance(read, OrderedDict_)
    assert list(read.items()) == [("b", 1), ("a", 2)]


def test_a_string_of_python_2_is_text_where_it_is_utf_8_and_bytes_elsewhere() -> None:
    body = b"(U\x03abcU\x02\xff\xfeT\x02\x00\x00\x00\xc3\xa9S'q\\x41'\nl"
    assert read_pickle(program(body)).value == ["abc", b"\xff\xfe", "é", "qA"]
