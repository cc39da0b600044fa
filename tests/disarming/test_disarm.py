"""A disarmed file holds tensors and plain values alone, whatever was crafted."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import functools
import inspect
import pathlib
import types
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.core.inert_pickle.known_names import PROPERTIES
from ckpttool.disarming.disarm import disarm
from ckpttool.errors import CkptToolError, Refused
from tests.support.comparing import disarmed
from tests.support.crafting import (
    call,
    dict_of,
    list_of,
    name,
    number,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)
from tests.support.every_format import INPUTS
from tests.support.trees import KINDS, TREES, Tagged, save_kind, save_tagged
from tests.support.user_classes import Colour, Config, Key

# ---- A disarmed file holds tensors and plain values alone: `torch.load(weights_only=True)` is the oracle


@dataclasses.dataclass(slots=True)
class Slotted:
    """A class whose attributes lie in slots."""

    a: int
    b: Any


class Attributes(dict[str, Any]):
    """A dict whose items are attributes too, as configurations often are."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Ordered(collections.OrderedDict[str, Any]):
    """A class of a user's, which pickle makes by a call without arguments."""


EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "east")


class Shadow:
    """An average kept in an object."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.shadow = tensors


def of(value: Any, folder: Path) -> Any:
    """Return what a value is after it was saved, disarmed and loaded."""
    return disarmed({"it": value}, folder)[0]["it"]


def same_tensors(a: Path, b: Path) -> None:
    """Compare the tensors of two files by name and value."""
    with ckpttool.open(a) as one, ckpttool.open(b) as other:
        found = {name: (t.dtype.name, t.shape) for name, t in other.tensors()}
        for key, each in one.tensors():
            assert found[key] == (each.dtype.name, each.shape)
    try:
        digest = ckpttool.digest(a)
    except CkptToolError:
        return
    assert ckpttool.digest(b) == digest


@pytest.mark.parametrize("case", TREES)
def test_torch_takes_every_tree_that_torch_saves(case: str, tmp_path: Path) -> None:
    disarmed(TREES[case], tmp_path)
    if "model" not in case and "list of parameters" not in case:
        same_tensors(tmp_path / "in.pt", tmp_path / "safe.pt")


@pytest.mark.parametrize("form", INPUTS)
def test_every_format_that_is_read_becomes_a_file_that_torch_takes(form: str, tmp_path: Path) -> None:
    INPUTS[form](tmp_path / "in")
    loaded, _ = disarmed(tmp_path / "in", tmp_path)
    assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(tmp_path / "in")
    with ckpttool.open(tmp_path / "safe.pt") as checkpoint:
        state = checkpoint.state()
        found = functools.reduce(lambda value, key: value[key], state.path, loaded)
        for key, value in state.load().items():
            assert torch.equal(found[key], value)


def test_a_published_file_is_taken(resnet20: Path) -> None:
    with ckpttool.open(resnet20) as checkpoint:
        new, _ = disarm(checkpoint)
        assert new.state().tensors.keys() == checkpoint.state().tensors.keys()
        assert new.names <= {n for n in new.names if n.module.startswith("torch")}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (argparse.Namespace(lr=0.1, out=pathlib.Path("runs/a")), {"lr": 0.1, "out": "runs/a"}),
        (Config(0.1, Config(0.2)), {"lr": 0.1, "inner": {"lr": 0.2, "inner": None}}),
        (Attributes(lr=0.1, names=["a"]), {"lr": 0.1, "names": ["a"]}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.deque([1, 2], maxlen=3), [1, 2]),
        (collections.OrderedDict(b=1, a=Config(1.0)), {"b": 1, "a": {"lr": 1.0, "inner": None}}),
        (frozenset([1, 2]), {1, 2}),
        (np.float64(0.5), 0.5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(2), 2.0),
        (np.int64(-7), -7),
        (np.uint8(7), 7),
        (np.bool_(False), False),
        (np.complex64(1 - 2j), 1 - 2j),
        (np.str_("é"), "é"),
        (np.bytes_(b"x"), b"x"),
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array([[b"a"], [b"bc"]]), [[b"a"], [b"bc"]]),
        (np.array([Config(1.0), None], dtype=object), [{"lr": 1.0, "inner": None}, None]),
        (np.array("word"), "word"),
        (np.dtype("float32"), "float32"),
        (torch.float16, torch.float16),
        (pathlib.PureWindowsPath("a\\b"), "a\\b"),
        (np.dtype(">f4"), ">f4"),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=5), str(uuid.UUID(int=5))),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3), "2026-01-02 03:00:00"),
        (datetime.timedelta(1, 2), "1 day, 0:00:02"),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), "2026-01-02 00:00:00+00:00"),
        (datetime.datetime(2026, 1, 2, tzinfo=EAST), "2026-01-02 00:00:00+05:30"),
        (datetime.time(1, 2, tzinfo=EAST), "01:02:00+05:30"),
        (types.SimpleNamespace(lr=0.1, inner=types.SimpleNamespace(a=1)), {"lr": 0.1, "inner": {"a": 1}}),
        (types.SimpleNamespace(), {}),
        (Ordered(b=1, a=2), {"b": 1, "a": 2}),
        (torch.optim.SGD, "torch.optim.sgd.SGD"),
        (
            functools.partial(max, 7, default=8),
            {"callable": "functools.partial", "args": ("__builtin__.max",)}
            | {"state": ("__builtin__.max", (7,), {"default": 8}, None)},
        ),
        (Colour.RED, {"callable": f"{Colour.__module__}.Colour", "args": (1,)}),
        (range(3), {"callable": "__builtin__.xrange", "args": (0, 3, 1)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_becomes_the_plain_value_that_it_stands_for(value: Any, plain: Any, tmp_path: Path) -> None:
    found = of(value, tmp_path)
    assert found == plain
    assert type(found) is type(plain) or type(value) is collections.OrderedDict


def test_attributes_in_slots_are_kept(tmp_path: Path) -> None:
    assert of(Slotted(1, [2]), tmp_path) in ({"a": 1, "b": [2]}, {"callable": f"{__name__}.Slotted"})


@pytest.mark.parametrize("dtype", ["?", "i1", "<i2", ">i4", "i8", "u1", "u2", "u4", ">u8", "f2", ">f4", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_becomes_a_tensor_of_its_kind(dtype: str, order: Any, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    found = of(array, tmp_path)
    assert (found.numpy() == array).all()
    assert found.numpy().dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 2)])
@pytest.mark.parametrize("dtype", ["c8", "c16", "f4"])
def test_arrays_of_any_shape_become_tensors(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    array = np.ones(shape, dtype)
    found = of(array, tmp_path)
    assert tuple(found.shape) == shape
    assert (found.numpy() == array).all()


def test_the_state_of_numpy_s_generator_can_be_set_from_what_it_became(tmp_path: Path) -> None:
    before = np.random.get_state()
    kind, keys, *rest = of(before, tmp_path)
    np.random.seed(1)
    np.random.set_state((kind, keys.numpy(), *rest))
    assert (np.random.get_state()[1] == before[1]).all()


def test_objects_are_converted_inside_all_containers_and_named(tmp_path: Path) -> None:
    value = {"list": [Config(1.0)], "tuple": (1, np.float64(2)), ("key", np.int64(3)): 4}
    value |= {np.int64(5): np.str_("six"), "set": {np.str_("a")}}
    value |= {"args": argparse.Namespace(deep={"path": pathlib.Path("x")})}
    loaded, report = disarmed(value, tmp_path)
    wanted = {"list": [{"lr": 1.0, "inner": None}], "tuple": (1, 2.0), ("key", 3): 4, 5: "six"}
    assert loaded == wanted | {"set": {"a"}, "args": {"deep": {"path": "x"}}}
    names = {change.name: (change.was, change.now) for change in report.changed}
    named = {"list.0": (f"{Config.__module__}.Config", "dict"), "tuple.1": ("numpy.float64", "float")}
    named |= {"args": ("argparse.Namespace", "dict"), "args.deep.path": ("pathlib.PosixPath", "text")}
    assert names == names | named and names["set.0"][1] == "str"


def test_one_object_in_two_places_is_one_value_and_cycles_stay(tmp_path: Path) -> None:
    config = Config(1.0)
    config.inner = [config]
    array = np.arange(3)
    loaded, report = disarmed({"a": config, "b": (config,), "x": array, "y": [array]}, tmp_path)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"]["inner"][0] is loaded["a"]
    assert loaded["x"] is loaded["y"][0]
    assert len(report.changed) == 2


def test_tensors_that_share_memory_still_do(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    value = {"args": [argparse.Namespace(w=weight)], "view": weight[2:], "again": weight}
    loaded, _ = disarmed(value, tmp_path)
    loaded["again"][2] = 99
    assert (loaded["args"][0]["w"][2], loaded["view"][0]) == (99, 99)


def test_a_pickled_model_becomes_its_state_dict_and_its_attributes_are_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.class_names = ["a", "b"]  # type: ignore[assignment]
    loaded, report = disarmed({"net": model, "epoch": 1}, tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded["net"][key], value)
    assert report.left_out == ("net.class_names",)
    assert ckpttool.digest(tmp_path / "in.pt") == ckpttool.digest(tmp_path / "safe.pt")


def test_a_whole_optimizer_keeps_its_state_by_parameter(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = of(optimizer, tmp_path)
    parameter = found["param_groups"][0]["params"][0]
    assert torch.equal(found["state"][parameter]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])


@pytest.mark.parametrize(
    "beside",
    [
        {"stats": {"mean": np.ones(3), "std": np.ones(3)}},
        {"average": Shadow({"a": torch.ones(3), "b": torch.ones(3)})},
        {"part": argparse.Namespace()},
        {"more": {"x": Shadow({"a": torch.ones(9), "b": torch.ones(9)})}},
        {"net": np.ones(3)},
        {"ema": types.SimpleNamespace(w=torch.rand(2, 2), v=torch.rand(2))},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_what_objects_become_is_no_state(beside: dict[str, Any], tmp_path: Path) -> None:
    value = {"weights_of_mine": {"w": torch.rand(2, 2), "v": torch.rand(2)}, **beside}
    disarmed(value, tmp_path)
    assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(tmp_path / "in.pt")


def test_an_array_inside_a_state_is_no_tensor_of_it_afterwards(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "scale": np.ones((1, 2))}
    loaded, _ = disarmed({"model": state, "args": argparse.Namespace(lr=0.1)}, tmp_path)
    assert (loaded["args"], loaded["model"]["scale"]) == ({"lr": 0.1}, [[1.0, 1.0]])
    assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(tmp_path / "in.pt")


def test_arrays_by_name_without_any_tensor_become_a_state(tmp_path: Path) -> None:
    loaded, _ = disarmed({"w": np.ones(2), "b": np.zeros(1)}, tmp_path)
    assert torch.equal(loaded["w"], torch.ones(2, dtype=torch.float64))


def test_a_tensor_of_a_subclass_becomes_a_tensor_and_is_named(tmp_path: Path) -> None:
    loaded, report = disarmed(save_tagged(tmp_path / "in.pt"), tmp_path)
    assert type(loaded["x"]) is torch.Tensor
    assert report.changed == (("x", "tests.support.trees.Tagged", "tensor"),)


def test_a_parameter_stays_one_and_keeps_its_attributes_in_their_plain_forms(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    subclass, plain = torch.ones(2).as_subclass(Tagged), torch.ones(2)
    for each in (parameter, subclass, plain):
        each.lr_scale, each.note, each.seed = 0.5, Config(7.0), 2**2100  # type: ignore[attr-defined]
    loaded, report = disarmed({"p": parameter, "s": subclass, "t": plain}, tmp_path)
    assert type(loaded["p"]) is torch.nn.Parameter
    assert not loaded["p"].requires_grad
    assert [type(loaded[name]) for name in "st"] == [torch.Tensor] * 2
    found = {"lr_scale": 0.5, "note": {"lr": 7.0, "inner": None}, "seed": hex(2**2100)}
    assert [vars(loaded[key]) for key in "pst"] == [found] * 3
    assert ("p.note", f"{Config.__module__}.Config", "dict") in report.changed
    assert report.left_out == ()
    assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(tmp_path / "in.pt")


def test_attributes_that_torch_s_own_tensors_compute_are_left_out_by_name(tmp_path: Path) -> None:
    odd = torch.nn.Parameter(torch.ones(2))
    vars(odd).update({"shape": "mine", "names": ["a"], "__slots__": 1, "note": 1})
    loaded, report = disarmed({"model": {"w": odd}, "epoch": 1}, tmp_path)
    assert vars(loaded["model"]["w"]) == {"note": 1}
    assert report.left_out == ("model.w.shape", "model.w.names", "model.w.__slots__")


def test_every_property_of_torch_s_tensors_is_known() -> None:
    of = torch.nn.Parameter
    found = {each for each in dir(of) if inspect.isdatadescriptor(inspect.getattr_static(of, each))}
    assert {each for each in found if not each.startswith("__")} <= PROPERTIES


def loads_weights_only(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_special_tensors_are_kept_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = save_kind(kind, tmp_path / "in.pt")
    if kind.startswith("nested") or not loads_weights_only(path):  # torch 2.14 takes nested ones
        with pytest.raises(Refused, match=r"'x' \(.*weights_only=True"):
            disarmed(path, tmp_path)
    else:
        loaded, report = disarmed(path, tmp_path)
        assert report.changed == ()
        assert type(loaded["x"]) is type(torch.load(path, weights_only=True)["x"])
        assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(path)


def test_a_file_disarmed_twice_is_the_same_file(tmp_path: Path) -> None:
    disarmed(TREES["a training checkpoint"], tmp_path)
    first = (tmp_path / "safe.pt").read_bytes()
    _, report = disarmed((tmp_path / "safe.pt").rename(tmp_path / "in.pt"), tmp_path)
    assert report.changed == ()
    assert (tmp_path / "safe.pt").read_bytes() == first


# ---- Crafted files, keys, and what holds itself: a disarmed file runs nothing, and loses nothing unnamed


SYSTEM = call(name("os", "system"), text("echo harm"))
EMPTY = call(name("collections", "OrderedDict"))
REBUILD = name("torch._utils", "_rebuild_tensor_v2")
PARTS = (storage(), number(0), tuple_of(number(4)), tuple_of(number(1)), b"\x89")

HOSTILE = {
    "a call": SYSTEM,
    "a name": name("os", "system"),
    "a call in a list": list_of(SYSTEM, list_of(SYSTEM)),
    "a call in a dict": dict_of({"model": dict_of({"w": tensor(storage()), "x": SYSTEM})}),
    "a call as a key": b"}(" + SYSTEM + number(1) + b"u",
    "a call in a key": b"}(" + tuple_of(text("a"), SYSTEM) + number(1) + b"u",
    "two calls as keys": b"}(" + SYSTEM + number(1) + SYSTEM + number(2) + b"u",
    "a name as a key": b"}(" + name("os", "system") + number(1) + b"u",
    "a call in a set": call(name("__builtin__", "set"), list_of(SYSTEM)),
    "a call in a frozenset as a key": (
        b"}(" + call(name("__builtin__", "frozenset"), list_of(SYSTEM)) + number(1) + b"u"
    ),
    "a call as the state of an object": name("argparse", "Namespace") + b")\x81" + SYSTEM + b"b",
    "a call as the state of an OrderedDict": EMPTY + SYSTEM + b"b",
    "a call as the callable": call(
        call(name("builtins", "getattr"), name("os", "x"), text("system")), text("x")
    ),
    "a call with a state": call(name("os", "system"), text("x")) + dict_of({"a": SYSTEM}) + b"b",
    "a call that gets items": SYSTEM + b"(" + text("k") + SYSTEM + b"u(" + SYSTEM + b"e",
    "a call that is dropped": SYSTEM + b"0" + number(1),
    "a call in a size": call(name("torch", "Size"), tuple_of(SYSTEM)),
    "a call in a device": call(name("torch", "device"), SYSTEM),
    "a device that is none": call(name("torch", "device"), text("harm")),
    "a call in a complex number": call(name("__builtin__", "complex"), SYSTEM, number(1)),
    "a call in a default dict": call(name("collections", "defaultdict"), SYSTEM),
    "a call in a counter": call(name("collections", "Counter"), dict_of({"a": SYSTEM})),
    "a call in NumPy's scalar": call(name("numpy.core.multiarray", "scalar"), SYSTEM, text("x")),
    "a call in NumPy's array": (
        call(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), tuple_of(), text("b"))
        + tuple_of(number(1), tuple_of(number(1)), SYSTEM, b"\x89", list_of(SYSTEM))
        + b"b"
    ),
    "hooks of a tensor": call(REBUILD, *PARTS, call(name("collections", "OrderedDict"), list_of(
        tuple_of(number(1), SYSTEM)))),
    "hooks of a parameter": call(
        name("torch._utils", "_rebuild_parameter"), tensor(storage()), b"\x88", list_of(SYSTEM)
    ),
    "a parameter's attributes": call(
        name("torch._utils", "_rebuild_parameter_with_state"),
        tensor(storage()), b"\x88", EMPTY, dict_of({"note": SYSTEM, "__class__": text("x")}),
    ),
    "a tensor's attributes": call(
        name("torch._tensor", "_rebuild_from_type_v2"), REBUILD, name("torch", "Tensor"),
        tuple_of(*PARTS, EMPTY), dict_of({"note": SYSTEM}),
    ),
    "a tensor's type": call(
        name("torch._tensor", "_rebuild_from_type_v2"), REBUILD, name("os", "system"),
        tuple_of(*PARTS, EMPTY), dict_of({}),
    ),
    "bytes that are a pickle": call(name("torch.storage", "_load_from_bytes"), text("x")),
    "a fraction that takes hours": call(name("fractions", "Fraction"), text("1e999999999")),
    "keys that take years to be hashed": (
        name("collections", "defaultdict") + b")\x81(" + text("a") + b"\x85" + b"2\x86" * 60 + b"Nu"
    ),
    "an element type with a long number": (
        call(name("numpy", "dtype"), text("f" + "9" * 5000))
        + tuple_of(number(3), text("<"), b"N", b"N", b"N", number(0), number(0), number(0)) + b"b"
    ),
    "lists that double sixty times": SYSTEM + b"2\x86" * 60,
    "a class with arguments by name": name("os", "system") + tuple_of() + dict_of({"a": SYSTEM}) + b"\x92",
    "an old instance": b"(" + text("x") + b"ios\nsystem\n",
    "a name in two lines": name("builtins", "eval") + tuple_of(text("1")) + b"R",
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_that_could_run_is_left_in_a_crafted_file(case: str, tmp_path: Path) -> None:
    protocol = b"\x80\x04" if case == "a class with arguments by name" else b"\x80\x02"
    path = torch_zip(tmp_path / "in.pt", protocol + HOSTILE[case] + b".", {"0": bytes(16)})
    disarmed(path, tmp_path)
    assert b"os\nsystem" not in (tmp_path / "safe.pt").read_bytes()


@pytest.mark.parametrize(
    "body",
    [b"\x82\x01", b"\x84\x01\x00\x00\x00", b"Pharm\n", text("harm") + b"Q", tuple_of(SYSTEM) + b"Q"],
    ids=["the registry", "a long code of the registry", "a persistent id", "another one", "a call"],
)  # fmt: skip
def test_what_lies_outside_the_file_is_refused(body: bytes, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", body)
    with pytest.raises(CkptToolError):
        disarmed(path, tmp_path)
    assert not (tmp_path / "safe.pt").exists()


def test_a_dtensor_is_kept_where_torch_knows_its_names(one_rank: None, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(6.0).reshape(3, 2)
    torch.save({"w": distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        new, report = disarm(checkpoint)
        ckpttool.save(new, tmp_path / "safe.pt")
    assert report.dtensors
    assert torch.equal(torch.load(tmp_path / "safe.pt", weights_only=True)["w"].full_tensor(), whole)
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        body = archive.read("in/data.pkl").replace(b"placement_types\nShard\n", b"placement_types\nHarms\n")
        torch_zip(tmp_path / "evil.pt", body, {"0": archive.read("in/data/0"), "1": bytes(4)})
    with ckpttool.open(tmp_path / "evil.pt") as checkpoint, pytest.raises(Refused, match="'w' "):
        disarm(checkpoint)


@pytest.mark.parametrize("levels", [250, 100_000])
def test_contents_nested_too_deeply_are_refused(levels: int, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "in.pt", b"]" * levels + b"a" * (levels - 1))
    with pytest.raises(Refused, match="nested too deeply"):
        disarmed(path, tmp_path)


# Keys, and what holds itself.


FORMS = pytest.mark.parametrize(
    "options",
    [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}],
    ids=["protocol 2", "protocol 4", "legacy"],
)


@pytest.mark.parametrize("is_last", [False, True])
def test_keys_that_become_equal_lose_no_entry(is_last: bool, tmp_path: Path) -> None:
    pairs: list[Any] = [(pathlib.PurePosixPath("a"), 1), ("a", 2), (decimal.Decimal(1), 3), ("1", 4)]
    given = dict(reversed(pairs) if is_last else pairs)
    found, _ = disarmed({"of": given, "all": {pathlib.PurePosixPath("a"), "a"}}, tmp_path)
    assert sorted(found["of"].values()) == [1, 2, 3, 4]
    assert (found["of"]["a"], found["of"]["1"], len(found["all"])) == (2, 4, 2)


def test_keys_that_are_objects_become_text_with_their_values(tmp_path: Path) -> None:
    value = {
        "of": {Key(1): "one", Key(2, "b"): "two", (Key(3), Colour.RED): "three"},
        "set": {Colour.RED, Key(4, (0.5, None, Key(5)))},
        "frozen": {frozenset([Key(6)]): 1},
    }
    loaded, report = disarmed({"it": value}, tmp_path)
    key, red = f"{Key.__module__}.Key", f"{Colour.__module__}.Colour(1)"
    assert loaded["it"] == {
        "of": {
            f"{key}(size=1, inner=None)": "one",
            f"{key}(size=2, inner='b')": "two",
            (f"{key}(size=3, inner=None)", red): "three",
        },
        "set": {red, f"{key}(size=4, inner=(0.5, None, {key}(size=5, inner=None)))"},
        "frozen": {(f"{key}(size=6, inner=None)",): 1},
    }
    assert {change.was for change in report.changed} == {key, f"{Colour.__module__}.Colour", "frozenset"}


@pytest.mark.parametrize(
    ("inner", "why"),
    [(torch.ones(2), "a tensor"), ("x" * 2000, "more than 1000 characters"), (2**70000, "more than 1000")],
    ids=["a tensor", "long text", "a long number"],
)
def test_a_key_that_text_can_t_hold_is_refused_by_name(inner: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=rf"'cfg\..*Key' is a key .* it holds {why}"):
        disarmed({"cfg": {Key(1, inner): 1}}, tmp_path)


def _itself(kind: str) -> Any:
    """Return a value that holds itself."""
    inside: Any = []
    held: Any = inside
    if kind.startswith("tuple"):
        held = (inside, *range(int(kind[5:])))
        inside.append(held)
    elif kind == "parameter":
        held = torch.nn.Parameter(torch.ones(2))
        held.all = inside
        inside.append(held)
    elif kind == "array":
        held = np.empty(1, object)
        held[0] = held
    else:
        inside.append(inside)
    return held


@FORMS
@pytest.mark.parametrize("kind", ["tuple0", "tuple1", "tuple5", "list"])
def test_a_tuple_that_holds_itself_becomes_a_list(kind: str, options: Any, tmp_path: Path) -> None:
    held = _itself(kind)
    loaded, report = disarmed({"model": {"w": torch.ones(2)}, "it": held}, tmp_path, **options)
    found = loaded["it"]
    assert type(found) is list
    assert (found[0][0] if kind != "list" else found[0]) is found
    assert len(found) == len(held)
    named = [("it", "tuple that holds itself", "list")] if kind != "list" else []
    assert [*report.changed] == named
    assert ckpttool.digest(tmp_path / "safe.pt") == ckpttool.digest(tmp_path / "in.pt")


@pytest.mark.parametrize("kind", ["array", "parameter"])
def test_what_else_holds_itself_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"'it' .* holds itself"):
        disarmed({"it": _itself(kind)}, tmp_path)


# Every value of the input is in the output, or in the report.


class Items(dict[str, Any]):
    """A dict of a user's."""


class Marks:
    """Makes values that are found again in any text: each number and each text is made once."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def number(self) -> int:
        self.made.append(str(7_000_001 + len(self.made)))
        return int(self.made[-1])

    def text(self) -> str:
        self.made.append(f"mark{7_000_001 + len(self.made)}")
        return self.made[-1]

    def tensor(self) -> torch.Tensor:
        return torch.tensor([float(self.number())])

    def tagged(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.note, tensor.scale = Config(self.number(), self.text()), self.number()  # type: ignore[attr-defined]
        return tensor


HOLDERS: dict[str, Callable[[Marks], Any]] = {
    "a Parameter": lambda m: m.tagged(torch.nn.Parameter(m.tensor())),
    "a tensor": lambda m: m.tagged(m.tensor()),
    "a subclass": lambda m: m.tagged(m.tensor().as_subclass(Tagged)),
    "a Parameter of a subclass": lambda m: m.tagged(torch.nn.Parameter(m.tensor().as_subclass(Tagged))),
    "a buffer": lambda m: m.tagged(torch.nn.Buffer(m.tensor())),
    "an object": lambda m: Config(m.number(), [m.text(), m.tensor()]),
    "a key": lambda m: {Key(m.number(), m.text()): m.text(), (Key(m.number()), m.text()): m.number()},
    "a set": lambda m: {Key(m.number(), (m.text(), frozenset([m.text()]))), m.text(), np.int64(m.number())},
    "a set of sets": lambda m: {frozenset([m.text(), Key(m.number())])},
    "keys of NumPy": lambda m: {np.str_(m.text()): np.int64(m.number()), np.float64(m.number()): 1},
    "keys of the library": lambda m: {decimal.Decimal(m.number()): 1, pathlib.PurePath(m.text()): m.text()},
    "an ordered dict with attributes": lambda m: _with(collections.OrderedDict(a=m.text()), note=m.text()),
    "a dict with attributes": lambda m: _with(Items(a=m.text()), note=Config(m.number(), m.text())),
    "a dict of a class": lambda m: Items(a=m.text(), b=Config(m.number())),
    "a defaultdict": lambda m: collections.defaultdict(functools.partial(int, m.text()), {m.text(): 1}),
    "a deque": lambda m: collections.deque([m.text()], maxlen=m.number()),
    "a counter": lambda m: collections.Counter({m.text(): m.number()}),
    "a partial": lambda m: functools.partial(print, m.text(), sep=m.text()),
    "an array": lambda m: np.array([m.number(), m.number()]),
    "an array of objects": lambda m: np.array([Config(m.number()), m.text()], dtype=object),
    "an array of text": lambda m: np.array([m.text(), m.text()]),
    "a date of NumPy": lambda m: [np.dtype([(m.text(), "f4")]), m.text()],
    "a UUID": lambda m: {uuid.UUID(int=5): m.text()},
    "a tuple in itself": lambda m: _in_itself(m.text(), m.number()),
    "an exception": lambda m: ValueError(m.text(), m.number()),
    "a long number": lambda m: [m.text(), 2**3000],
    "a model": lambda m: _with(torch.nn.Linear(1, 1), note=[m.text()], stats={"mean": m.number()}),
}  # fmt: skip
HOLDERS["all of them"] = lambda m: [hold(m) for name, hold in HOLDERS.items() if name != "all of them"]


def _with(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def _in_itself(*items: Any) -> Any:
    made: tuple[Any, ...] = ([], *items)
    made[0].append(made)
    return made


def _texts(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield every leaf of a value that torch has loaded, as text."""
    if isinstance(value, dict | list | tuple | set | torch.Tensor):
        if id(value) in seen:
            return
        seen[id(value)] = value
        inside: Any = [*value.items()] if isinstance(value, dict) else value
        if isinstance(value, torch.Tensor):
            inside = value.flatten().tolist()
        for each in [*inside, *getattr(value, "__dict__", {}).items()]:
            yield from _texts(each, seen)
    else:
        yield str(int(value)) if isinstance(value, float) else str(value)


@FORMS
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_value_is_in_the_output_or_named(holder: str, options: Any, tmp_path: Path) -> None:
    marks = Marks()
    value = {"model": {"w": marks.tensor(), "b": marks.tensor()}, "it": HOLDERS[holder](marks)}
    loaded, report = disarmed(value, tmp_path, **options)
    found = " ".join(_texts(loaded, {}))
    lost = [mark for mark in marks.made if mark not in found]
    unnamed = {"a defaultdict": 1, "a deque": 1, "a model": 2, "all of them": 4}
    assert len(lost) == unnamed.get(holder, 0) <= len(report.left_out)
    one, other = (ckpttool.digest(tmp_path / name, state="model") for name in ("in.pt", "safe.pt"))
    assert one == other
