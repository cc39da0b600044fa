"""What a pickle names: sets and objects are read as values, and names that could run something come first."""

from __future__ import annotations

import argparse
import copy
import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.core.inert_pickle.known_names import names_in, names_that_run, unknown_names
from ckpttool.core.inert_pickle.reader import read_pickle
from ckpttool.core.inert_pickle.values import Global, OrderedDict_, Record
from ckpttool.diffing.compare import diff
from ckpttool.verifying.verify import verify
from tests.support.comparing import compared, opened
from tests.support.crafting import (
    call,
    dict_of,
    list_of,
    name,
    number,
    program,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)
from tests.support.running import Cli
from tests.support.trees import model, training_checkpoint
from tests.support.user_classes import NAMES_BY_ENUMS

# ---- Sets, bytes and objects: the same in every protocol, format and command; attributes read from a state


PROTOCOLS = [2, 3, 4, 5]
PLAIN_OBJECTS: dict[str, Any] = {
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
@pytest.mark.parametrize("value", [PLAIN_OBJECTS, tensors_inside()], ids=["plain", "tensors inside"])
def test_outputs_hold_the_same_values_and_torch_loads_them(value: Any, protocol: int, tmp_path: Path) -> None:
    source, outputs = there_and_back(value, tmp_path, protocol)
    for output in outputs:
        assert diff(ckpttool.open(source), ckpttool.open(output)).same
        assert verify(ckpttool.open(source), against=ckpttool.open(output)).ok
    for path in outputs[::2]:
        again = torch.load(path, weights_only=False)
        if value is PLAIN_OBJECTS:
            assert again == PLAIN_OBJECTS
            assert [type(each) for each in again.values()] == [type(each) for each in PLAIN_OBJECTS.values()]
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
        torch.save(PLAIN_OBJECTS, tmp_path / file, pickle_protocol=each)
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
    torch.save(PLAIN_OBJECTS, tmp_path / "in.pt", pickle_protocol=protocol)
    page = cli("inspect", tmp_path / "in.pt").out
    assert "builtin" not in page and "_codecs" not in page
    assert "set" in page and "frozenset" in page


@pytest.mark.parametrize("protocol", [2, 4])
def test_dcp_holds_plain_python_values(protocol: int, tmp_path: Path) -> None:
    value = {**PLAIN_OBJECTS, "inside": [{torch.ones(2)}]}
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


# ---- Names that could run something are shown first and whole, said when written, and refused by --no-code


WEIGHT = tensor(storage(1), (1,))
BYTES = {"0": bytes(4)}
NINE = [name(f"aaa{i}", "Thing") for i in range(8)] + [name("posix", "system")]


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A state next to eight unknown names that sort before `posix.system`."""
    tree = {"model": dict_of({"w": WEIGHT}), "x": list_of(*NINE)}
    return torch_zip(tmp_path / "in.pt", dict_of(tree), BYTES)


def test_what_runs_is_shown_first_and_never_shortened(hidden: Path, cli: Cli) -> None:
    shown = " ".join(cli("inspect", hidden).out.split())
    assert shown.index("posix.system") < shown.index("aaa0.Thing") < shown.index("aaa7.Thing")
    assert cli("inspect", hidden, "--json").json["unknown"][0] == "posix.system"


def test_every_command_says_what_it_writes_on(hidden: Path, cli: Cli, tmp_path: Path) -> None:
    for command in (["convert"], ["add-prefix"], ["rename-keys", "--map", "w=v"]):
        ran = cli(*command, hidden, tmp_path / "out.pt", "--force")
        assert ran.code == 0
        assert all(each in ran.err for each in ["posix.system", *(f"aaa{i}.Thing" for i in range(8))])
    ran = cli("convert", hidden, tmp_path / "out.safetensors")
    assert "posix.system" not in ran.err
    ran = cli("slim", hidden, tmp_path / "slim.pt", "--json")
    assert (ran.code, ran.json["mentions"]) == (0, [])


def test_verify_no_code_fails_for_names_that_run(hidden: Path, cli: Cli) -> None:
    assert cli("verify", hidden).code == 0
    ran = cli("verify", hidden, "--no-code", "--json")
    assert (ran.code, ran.json["ok"]) == (1, False)
    assert next((each["kind"], each["name"]) for each in ran.json["problems"]) == ("code", "posix.system")
    assert "posix.system" in cli("verify", hidden, "--no-code").err


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_verify_no_code_accepts_an_honest_file(zipped: bool, cli: Cli, tmp_path: Path) -> None:
    torch.save(training_checkpoint(), tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    assert cli("verify", tmp_path / "in.pt", "--no-code").code == 0


CALL = call(name("os", "system"), text("true"))
DROPPED = {
    "popped": CALL + b"0}",
    "stored in the memo": CALL + b"q\x000}",
    "overwritten": b"}" + text("a") + CALL + b"s" + text("a") + b"Ns",
    "popped with a mark": b"}(" + CALL + b"1",
    "a name alone": b"}" + name("os", "system") + b"0",
}


@pytest.mark.parametrize("how", DROPPED)
def test_a_call_whose_result_is_dropped_is_found(how: str, cli: Cli, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", DROPPED[how])
    assert cli("inspect", path, "--json").json["unknown"] == ["os.system"]
    assert cli("verify", path, "--no-code").code == 1


def test_a_call_in_another_pickle_of_a_legacy_file_is_found(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    sizes = {"short": 2, "int": 4, "long": 4}
    facts = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}, 2)
    raw = path.read_bytes()
    assert facts in raw
    path.write_bytes(raw.replace(facts, program(CALL)))
    assert cli("inspect", path, "--json").json["unknown"] == ["os.system"]


def test_names_in_shards_are_found(cli: Cli, tmp_path: Path) -> None:
    checkpoint = opened({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    ckpttool.save(checkpoint, tmp_path / "folder", to="torch-sharded", shard_size=8)
    (shard, *_) = sorted((tmp_path / "folder").glob("*.bin"))
    torch_zip(shard, CALL + b"0" + dict_of({"a": tensor(storage(2), (2,))}), {"0": bytes(8)})
    assert cli("verify", tmp_path / "folder", "--no-code").code == 1


def test_names_in_a_dcp_folder_are_found(cli: Cli, tmp_path: Path) -> None:
    ckpttool.save(opened({"a": torch.ones(2), "n": [1, "x"]}, tmp_path), tmp_path / "dcp", to="dcp")
    assert cli("inspect", tmp_path / "dcp", "--json").json["unknown"] == NAMES_BY_ENUMS
    assert cli("verify", tmp_path / "dcp", "--no-code").code == bool(NAMES_BY_ENUMS)
    metadata = tmp_path / "dcp" / ".metadata"
    raw = metadata.read_bytes()  # PROTO, FRAME and its length come first
    metadata.write_bytes(raw[:2] + CALL + b"0" + raw[11:])
    assert cli("inspect", tmp_path / "dcp", "--json").json["unknown"] == ["os.system"]


HARMLESS: list[Any] = [
    *(1j, range(3), {1, 2}, frozenset({1}), b"bytes", bytearray(b"x"), OrderedDict(a=1)),
    *(defaultdict(list, a=[1]), defaultdict(int), Counter("ab"), deque([1]), pathlib.PurePosixPath("x")),
    *(np.float64(0.5), np.arange(3), np.dtype("int8"), np.random.RandomState(0)),
    *(torch.Size([1]), torch.float16, torch.device("cpu"), torch.strided, torch.nn.Parameter(torch.ones(1))),
    *(torch.bfloat16, torch.ones(1).to_sparse(), torch.optim.SGD([torch.ones(1)], 0.1).state_dict(), model()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: type(value).__name__)
def test_harmless_names_are_not_called_unknown(value: Any, tmp_path: Path) -> None:
    with opened(value, tmp_path) as checkpoint:
        assert unknown_names(checkpoint.names) == []


PLAIN = [argparse.Namespace(a=1), datetime.datetime(2020, 1, 1)]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_of_the_standard_library_is_unknown_but_does_not_run(value: Any) -> None:
    names = read_pickle(pickle.dumps(value, 2)).names
    assert unknown_names(names) and names_that_run(names) == []


_ATTACKS = """
    os:system posix:system nt:system builtins:eval builtins:exec builtins:getattr builtins:__import__
    builtins:type __builtin__:execfile runpy:run_path subprocess:Popen torch.storage:_load_from_bytes
    torch:load torch:storage._load_from_bytes torch.serialization:os.system
    torch.nn.modules.module:torch.load torch.nn.modules.linear:Linear.forward torch.nn.modules:F.linear
    torch.optim.optimizer:torch._utils.sys.modules torch:FloatStorage.from_file numpy:load
    numpy.testing._private.utils:runstring numpy:ndarray.tofile collections:OrderedDict.__init__
    collections:namedtuple operator:attrgetter functools:partial antigravity:x pathlib:Path.write_text
    argparse:FileType argparse.Namespace:x torch.nn.modules.evil.sub:Linear
    torch.nn.modules.evilé:Linear torch_nn.modules.linear:Linear __main__:Net
"""
ATTACKS = [tuple(name.split(":")) for name in _ATTACKS.split()]


@pytest.mark.parametrize(("module", "attribute"), ATTACKS)
def test_a_name_that_could_run_is_never_called_harmless(module: str, attribute: str) -> None:
    assert names_that_run([Global(module, attribute)]) == [f"{module}.{attribute}"]


def test_names_by_which_pickles_run_code_come_first() -> None:
    """A package's own module may be called like one; what is reached through another module is one."""
    texts = "mine.commands:B z:Y os:system builtins:eval torch.serialization:os.remove"
    names = [Global(*text.split(":")) for text in texts.split()]
    first = ["builtins.eval", "os.system", "torch.serialization.os.remove"]
    assert names_that_run(names) == [*first, "mine.commands.B", "z.Y"]


def test_names_in_finds_names_wherever_they_are() -> None:
    body = b"}" + name("m", "key") + list_of(call(name("m", "C"), name("m", "arg"))) + b"s"
    tree = read_pickle(program(body)).value
    assert {str(each) for each in names_in(tree)} == {"m.key", "m.C", "m.arg"}
