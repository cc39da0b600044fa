"""A whole checkpoint in a safetensors file and back: nothing is lost, and nothing in the file is trusted."""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import json
import math
import random
import re
import struct
import tempfile
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.checkpoint import full
from ckpttool.core.inert_pickle.values import MAX_DEPTH, Global, Record, TooDeep
from ckpttool.errors import CkptToolError, Damaged, Refused
from tests.support.comparing import assert_same, values
from tests.support.crafting import call, dict_of, name, number, storage, tensor, torch_zip, tuple_of
from tests.support.running import ROOT, Cli


def there(source: Path) -> Path:
    """Return the checkpoint saved whole as a safetensors file."""
    flat = source.parent / "flat.safetensors"
    ckpttool.save(ckpttool.open(source), flat, full=True, force=True)
    return flat


def and_back(source: Path) -> Any:
    """Return what torch loads of the checkpoint after the round trip."""
    again = source.parent / "again.pt"
    ckpttool.save(ckpttool.open(there(source)), again, force=True)
    return torch.load(again, weights_only=False)


def saved(value: Any, folder: Path) -> Path:
    torch.save(value, folder / "in.pt")
    return folder / "in.pt"


def assert_survives(value: Any, folder: Path) -> None:
    source = saved(value, folder)
    assert_same(torch.load(source, weights_only=False), and_back(source))


def text_of(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[full.ENTRY])["tree"]


# Round trips.


def cyclic() -> dict[str, Any]:
    node: dict[str, Any] = {"name": "a"}
    node["self"] = node
    node["list"] = [node, [node]]
    return node


def tuple_inside_itself() -> tuple[Any, ...]:
    inside: list[Any] = []
    whole = (1, inside, 2, 3, 4)
    inside.append(whole)
    return whole


def two_tuples_inside_each_other() -> list[Any]:
    first: list[Any] = []
    a = (first, "a")
    b = (a, first, "b")
    first += [a, b]
    return [b, a, first]


def shared() -> dict[str, Any]:
    inner, pair, empty = [1, 2], (1, [2]), ()
    tuples = {"d": pair, "e": [pair, pair], "f": empty, "g": (empty, frozenset())}
    return {"a": inner, "b": {"c": inner}, **tuples}


def with_attributes() -> argparse.Namespace:
    options = argparse.Namespace(lr=0.1, names=["a"], when=datetime.timedelta(1))
    options.again = options
    return options


def training(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    for _ in range(3):
        optimizer.zero_grad()
        model[:2](torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    states = {"optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")}
    return {
        "model": torch.nn.DataParallel(model).state_dict(),
        **{name: each.state_dict() for name, each in states.items()},
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "config": argparse.Namespace(lr=0.1, betas=(0.9, 0.999)),
        "epoch": 3,
        "best": float("inf"),
    }


base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
numbered = torch.arange(6)
phases = torch.complex(base, -base)
fine = phases.to(torch.complex128)
one = torch.ones(3)
array = bytearray(b"abc")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    halves = torch.ones(2, dtype=torch.complex32)
    quantised = torch.quantize_per_tensor(torch.linspace(-1, 1, 6), 0.1, 3, torch.qint8)

TREES: dict[str, Any] = {
    **{f"training with {kind}": training(kind) for kind in ("AdamW", "SGD", "Adagrad", "RMSprop")},
    "scalars": [None, True, False, 0, -1, 2**53 - 1, 2**53, -(2**53), 2**70, -(10**5000), 1.5, 1e308, 5e-324],
    "floats that JSON lacks": [float("inf"), float("-inf"), float("nan"), -0.0, 1e-7, 1e16],
    "texts": ["", "é", "\U0001f511", '\0\n"\\', "\ud800", "a\udfffb", "x" * 1000, "tensor"],
    "bytes": [b"", b"\0\xff", bytearray(), bytearray(b"ab"), [b"a", b"a"]],
    "a bytearray twice": [array, array],
    "a tensor alone": base,
    "a number alone": 7,
    "a text alone": "seven",
    "nothing": None,
    "lists that look like tags": [["tensor", "w"], ["ref", 0], ["nonsense"], [], [["list"]]],
    "dicts that look like others": [{"tree": 1}, {"": {"": {}}}, {"list": [1]}],
    "keys of all kinds": {1: "a", (1, "b"): 2, None: 3, False: 4, 1.5: 5, frozenset({1}): 7, "s": 8},
    "keys that are no Unicode": {"a\udcff": 1, "b": torch.ones(1), "c\udcff": torch.ones(1)},
    "keys that make one name": {"a.b": base, "a": {"b": base + 1}, "a.b~2": base + 2},
    "names of the format's own": {"__metadata__": base, "": torch.ones(1), "ckpttool.full": numbered},
    "sets": [{1, 2}, frozenset({"a", (1, 2)}), set(), frozenset()],
    "types of numbers as keys": {1: torch.ones(1), "1": torch.zeros(1)},
    "shared": shared(),
    "cyclic": cyclic(),
    "a tuple inside itself": tuple_inside_itself(),
    "two tuples inside each other": two_tuples_inside_each_other(),
    "an object": with_attributes(),
    "an object twice": [with_attributes()] * 2,
    "other objects": [
        *(datetime.datetime(2020, 1, 2), Path("/a"), collections.Counter("abca")),
        *(collections.defaultdict(list, {"a": [1]}), collections.deque([1, 2], 5)),
        *(complex(1, -0.0), range(3), slice(1, None), np.float64(1.5), np.arange(4).reshape(2, 2)),
        *(torch.Size([1, 2]), torch.device("cpu"), torch.float8_e4m3fn, torch.nn.Linear, math.floor),
    ],
    "an ordered dict with keys of all kinds": OrderedDict({1: 2, "a": base}),
    "ties": {"a": base, "b": base, "c": base.view(4, 6), "d": [base]},
    "views": {"row": base[1], "turned": base.t(), "corner": base[1:3, 2:], "whole": base, "at": base[2, 2]},
    "views without the whole": {"row": numbered[1:3], "other": numbered[2:], "empty": numbered[6:]},
    "expanded": {"e": torch.ones(1, 3).expand(5, 3)},
    "empty": {"e": torch.empty(0), "f": torch.empty(0, 3), "g": torch.empty(3, 0).t(), "h": base[:0, 3:]},
    "strides that do not matter": torch.ones(5, 1).t().view(1, 5).as_strided((1, 5), (3, 1)),
    "requires_grad": {"p": torch.ones(2, requires_grad=True), "q": torch.nn.Parameter(one), "r": one},
    "a parameter twice": [torch.nn.Parameter(one)] * 2,
    "complex": {"c": phases, "d": fine, "e": halves, "part": fine[1:2, ::2]},
    "lazy": {"c": phases.conj(), "d": fine.conj(), "whole": phases, "part": fine.mH[1:, ::2]},
    "lazy negative": {"n": phases.conj().imag, "d": fine.conj().imag},
    "quantised": quantised,
    "sparse": torch.eye(3).to_sparse(),
    "a meta tensor": torch.ones(3, device="meta"),
    "no model at all": {"epoch": 1},
    "eight bits": {str(d): torch.ones(3).to(d) for d in (torch.float8_e5m2, torch.float8_e4m3fnuz)},
    "small types": {str(d): torch.ones(3, dtype=d) for d in (torch.bool, torch.uint16, torch.uint64)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", TREES)
def test_a_tree_survives(what: str, tmp_path: Path) -> None:
    assert_survives(TREES[what], tmp_path)
    load_file(tmp_path / "flat.safetensors")  # readable to others


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_unusual_kinds_survive(tmp_path: Path) -> None:
    channels = torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8)
    rows = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    back = and_back(saved([channels, rows, nested, one.untyped_storage()], tmp_path))
    assert torch.equal(back[0].int_repr(), channels.int_repr())
    assert torch.equal(back[0].q_per_channel_scales(), channels.q_per_channel_scales())
    assert torch.equal(back[1].to_dense(), rows.to_dense()) and back[1].layout == torch.sparse_csr
    assert [each.tolist() for each in back[2].unbind()] == [[1, 1], [0, 0, 0]]
    assert back[3].tolist() == torch.load(tmp_path / "in.pt", weights_only=False)[3].tolist()


def test_training_continues_after_the_round_trip(tmp_path: Path) -> None:
    back = and_back(saved(training("AdamW"), tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    torch.nn.DataParallel(model).load_state_dict(back["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(back["optimizer"])
    torch.set_rng_state(back["rng"]["torch"])
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_a_legacy_checkpoint_survives(tmp_path: Path) -> None:
    torch.save(training("AdamW"), tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    assert_same(torch.load(tmp_path / "in.pt", weights_only=False), and_back(tmp_path / "in.pt"))


def test_a_public_checkpoint_survives(resnet20: Path, tmp_path: Path) -> None:
    """Its tensors were saved from a GPU, and the device is kept too."""
    (tmp_path / "in.th").write_bytes(resnet20.read_bytes())
    ckpttool.save(ckpttool.open(there(tmp_path / "in.th")), tmp_path / "again.pt")
    again = tmp_path / "again.pt"
    assert_same(*(torch.load(path, map_location="cpu", weights_only=False) for path in (resnet20, again)))
    assert {storage.location for _, storage in ckpttool.open(again).storages()} == {"cuda:0"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_pickle_protocol_is_kept(protocol: int, tmp_path: Path) -> None:
    torch.save({"w": base, "b": b"bytes"}, tmp_path / "in.pt", pickle_protocol=protocol)
    back = ckpttool.open(there(tmp_path / "in.pt"))
    assert back.protocol == protocol
    assert and_back(tmp_path / "in.pt")["b"] == b"bytes"


def test_metadata_of_the_header_stays_beside_the_text(tmp_path: Path) -> None:
    save_file({"w": base}, tmp_path / "in.safetensors", metadata={"format": "pt", "who": "me"})
    flat = there(tmp_path / "in.safetensors")
    assert ckpttool.open(flat).metadata == {"format": "pt", "who": "me"}
    with safe_open(flat, "pt") as file:
        assert set(file.metadata()) == {"format", "who", full.ENTRY}


def test_big_endian_checkpoints_come_back_little_endian_with_the_same_values(tmp_path: Path) -> None:
    rebuild = name("torch._utils", "_rebuild_tensor_v3")
    hooks = call(name("collections", "OrderedDict"))
    rest = (tuple_of(number(1)), b"\x89", hooks, name("torch", "uint16"))

    def shorts(count: int, key: str) -> bytes:
        return storage(2 * count, kind="UntypedStorage", key=key, module="torch.storage")

    tensors = {
        "w": tensor(storage()),
        "every second": tensor(storage(key="2"), (2,), (2,), 1),
        "short": call(rebuild, shorts(6, "1"), number(0), tuple_of(number(6)), *rest),
        "part": call(rebuild, shorts(2, "3"), number(1), tuple_of(number(1)), *rest),
    }
    raw, short = np.array([1, 2, 3, 4], ">f4").tobytes(), np.arange(6, dtype=">u2").tobytes()
    storages = {"0": raw, "1": short, "2": raw, "3": short[:4]}
    back = and_back(torch_zip(tmp_path / "in.pt", dict_of(tensors), storages, byteorder="big"))
    wanted = {"w": [1, 2, 3, 4], "every second": [2, 4], "short": [*range(6)], "part": [1]}
    assert {key: value.tolist() for key, value in back.items()} == wanted


# Any tree.


REALS = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
DTYPES = (*REALS, torch.complex64, torch.complex128)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
SCALARS |= st.text(st.characters(), max_size=5) | st.binary(max_size=4)
SCALARS |= st.sampled_from([torch.float32, collections.OrderedDict, complex(1, 2), torch.Size([2])])
KEYS = st.text(st.characters(), max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.text("ab"))


class Builder:
    """Draw a tree in which any value may appear in several places, inside itself too."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.made: list[Any] = []
        self.bases = [torch.arange(16).to(dtype) for dtype in DTYPES]
        self.left = 25

    def value(self, depth: int = 0) -> Any:
        self.left -= 1
        kinds = ["scalar", "tensor"]
        if depth < 4 and self.left > 0:
            kinds += ["list", "dict", "tuple", "ordered", "object", "set"]
        if self.made:
            kinds.append("again")
        return getattr(self, self.draw(st.sampled_from(kinds)))(depth)

    def several(self, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self.draw(st.integers(0, 3)))]

    def remembered(self, value: Any) -> Any:
        self.made.append(value)
        return value

    def again(self, depth: int) -> Any:
        return self.draw(st.sampled_from(self.made))

    def scalar(self, depth: int) -> Any:
        return self.draw(SCALARS)

    def list(self, depth: int) -> Any:
        made = self.remembered([])
        made.extend(self.several(depth))
        return made

    def tuple(self, depth: int) -> Any:
        return self.remembered(tuple(self.several(depth)))

    def dict(self, depth: int) -> Any:
        return self.filled(self.remembered({}), depth)

    def ordered(self, depth: int) -> Any:
        made = self.filled(self.remembered(OrderedDict()), depth)
        if self.draw(st.booleans()):
            made._metadata = self.value(depth + 1)
        return made

    def filled(self, made: Any, depth: int) -> Any:
        keys = self.draw(st.lists(KEYS, max_size=3, unique_by=str))
        made.update((key, self.value(depth + 1)) for key in keys)
        return made

    def object(self, depth: int) -> Any:
        made = self.remembered(argparse.Namespace())
        for key in self.draw(st.lists(st.sampled_from("abc"), unique=True)):
            setattr(made, key, self.value(depth + 1))
        return made

    def set(self, depth: int) -> Any:
        made = self.draw(st.frozensets(st.one_of(st.integers(), st.text(max_size=3)), max_size=3))
        return self.remembered(self.draw(st.sampled_from([set, frozenset]))(made))

    def tensor(self, depth: int) -> Any:
        of = self.draw(st.sampled_from(self.bases))
        shape = self.draw(st.lists(st.integers(0, 3), max_size=2))
        stride = [self.draw(st.integers(0, 3)) for _ in shape]
        made = of if self.draw(st.booleans()) else of.as_strided(shape, stride, self.draw(st.integers(0, 3)))
        if of.is_complex() and self.draw(st.booleans()):
            made = made.conj()
        if of.is_floating_point() and self.draw(st.booleans()):
            made = torch.nn.Parameter(made, self.draw(st.booleans()))
        return self.remembered(made)


@settings(max_examples=settings().max_examples * 2)
@given(st.data())
def test_any_tree_survives(data: st.DataObject) -> None:
    tree = Builder(data.draw).value()
    with tempfile.TemporaryDirectory() as folder:
        assert_survives(tree, Path(folder))
        flat = load_file(Path(folder) / "flat.safetensors")
        mine = dict(ckpttool.open(Path(folder) / "flat.safetensors").tensors())
        assert len(flat) <= len(mine)


# The form of the file.


def test_tensors_and_parameters_have_their_dotted_paths_and_values(tmp_path: Path) -> None:
    value = training("AdamW")
    flat = load_file(there(saved(value, tmp_path)))
    assert values(flat["model.module.0.weight"]) == values(value["model"]["module.0.weight"])
    assert values(flat["optimizer.state.0.exp_avg"]) == values(value["optimizer"]["state"][0]["exp_avg"])
    assert values(flat["rng.torch"]) == values(value["rng"]["torch"])
    assert set(load_file(there(saved({"m": {"w": torch.nn.Parameter(one)}}, tmp_path)))) == {"m.w"}


def test_a_value_that_appears_once_is_plain_json(tmp_path: Path) -> None:
    value = {"epoch": 3, "best": 0.5, "names": ["a"], "nothing": None, "args": {"lr": 1e-3}}
    assert text_of(there(saved(value, tmp_path))) == {**value, "names": ["list", "a"]}


def test_only_values_that_are_referred_to_have_a_number_and_no_empty_tuple() -> None:
    def tree(value: object) -> Any:
        return json.loads(full.encode(value).text)["tree"]

    empty = [(), (), frozenset(), frozenset()]
    assert tree(empty) == ["list", ["tuple"], ["tuple"], ["frozenset"], ["frozenset"]]
    pair = ([1], {"a": 2})
    _, (_, number, node), reference = tree([pair, pair])
    assert (node, reference) == (["tuple", ["list", 1], {"a": 2}], ["ref", number])


@pytest.mark.parametrize("empty", [set(), []], ids=["set", "list"])
def test_an_empty_container_in_two_places_is_one(empty: Any, tmp_path: Path) -> None:
    torch.save([empty, empty], tmp_path / "in.pt", pickle_protocol=4)
    again = and_back(tmp_path / "in.pt")
    assert again == [empty, empty]
    assert again[0] is again[1]


def test_each_storage_is_written_once(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    flat = there(saved({str(i): big[i:] for i in range(20)}, tmp_path))
    assert flat.stat().st_size < 410_000


PAGE = (ROOT / "docs" / "full-format.md").read_text()


def test_the_page_names_the_tags_the_options_and_the_fields_of_the_code() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith('| `["')]
    assert {tag for row in rows for tag in re.findall(r'`\["(\w+)"', row)} == set(full.DECODERS)
    whole = Record("newobj", Global("a", "b"), (), {"k": 1}, "state", True, [1], [(1, 2)])
    (tag, fields) = json.loads(full.encode(whole).text)["tree"]
    assert tag == "record"
    for field in (*fields, "view", "requires_grad", "conj", "neg", "storage"):
        assert f"`{field}`" in PAGE
    assert f"`{full.ENTRY}`" in PAGE and f'"version": {full.VERSION}' in PAGE


def test_the_example_of_the_page_is_what_the_code_writes(tmp_path: Path) -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    model = {"w": (weight := torch.ones(2, 3)), "tied": weight.view(2, 3)}
    value = {"model": model, "epoch": 3, "betas": (0.9, 0.999), "best": math.inf}
    with safe_open(there(saved(value, tmp_path)), "pt") as file:
        assert json.loads(file.metadata()[full.ENTRY]) == json.loads(blocks[-1])
        assert list(file.keys()) == ["model.w"]


ITEM_TAGS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
PLAIN_TAGS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "str": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
}


class FromThePage:
    """Rebuild a checkpoint from a file of `--full` by docs/full-format.md alone.

    Nothing of this library takes part; what the text names is imported and called, as no one should who does
    not trust the file.
    """

    def __init__(self, path: Path) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        self.defined: dict[int, Any] = {}
        with safe_open(path, "pt") as file:
            document = json.loads(file.metadata()["ckpttool.full"])
        assert document["version"] == 1
        self.tree = self.value(document["tree"])

    def value(self, node: Any, number: int | None = None) -> Any:
        if isinstance(node, dict):
            return self.fill(self.known({}, number), node)
        if not isinstance(node, list):
            return node
        tag, *rest = node
        if tag in PLAIN_TAGS:
            made = PLAIN_TAGS[tag](*rest)
        elif tag in ITEM_TAGS:
            made = ITEM_TAGS[tag](map(self.value, rest))
        else:
            made = getattr(self, f"read_{tag}")(number, *rest)
        return self.known(made, number)

    def known(self, value: Any, number: int | None) -> Any:
        if number is not None:
            self.defined[number] = value
        return value

    def fill(self, made: Any, node: Any) -> Any:
        pairs = node.items() if isinstance(node, dict) else [(self.value(k), v) for k, v in node[1:]]
        for key, item in pairs:
            made[key] = self.value(item)
        return made

    def read_dict(self, number: int | None, *pairs: Any) -> Any:
        return self.fill(self.known({}, number), ["dict", *pairs])

    def read_ordered(self, number: int | None, items: Any, *attributes: Any) -> Any:
        made = self.fill(self.known(OrderedDict(), number), items)
        for node in attributes:
            made.__dict__.update(self.value(node))
        return made

    def read_list(self, number: int | None, *items: Any) -> Any:
        made = self.known([], number)
        made.extend(map(self.value, items))
        return made

    def read_def(self, _: int | None, number: int, node: Any) -> Any:
        return self.value(node, number)

    def read_ref(self, _: int | None, number: int) -> Any:
        return self.defined[number]

    def read_after(self, _: int | None, first: Any, then: Any) -> Any:
        self.value(first)
        return self.value(then)

    def read_global(self, _: int | None, module: Any, name: Any) -> Any:
        module, name = self.value(module), self.value(name)
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return getattr(import_module(module), name)

    def read_record(self, number: int | None, fields: dict[str, Any]) -> Any:
        callable, args = self.value(fields["callable"]), self.value(fields["args"])
        if fields["how"] == "reduce":
            made = callable(*args)
        else:
            made = callable.__new__(callable, *args, **self.value(fields.get("kwargs", {})))
        self.known(made, number)
        for node in fields.get("elements", ()):
            made.append(self.value(node))
        for key, item in fields.get("items", ()):
            made[self.value(key)] = self.value(item)
        if "state" in fields:
            state = self.value(fields["state"])
            made.__setstate__(state) if hasattr(made, "__setstate__") else made.__dict__.update(state)
        return made

    def read_tensor(self, _: int | None, name: str, options: Any = None) -> torch.Tensor:
        made, options = self.tensors[name], options or {}
        made = made.view_as(made)  # another tensor that looks at the same storage
        if "view" in options:
            dtype, offset, size, stride = options["view"]
            made = torch.empty(0, dtype=getattr(torch, dtype))
            made.set_(self.tensors[name].untyped_storage(), offset, size, stride)
        made = torch._conj(made) if options.get("conj") else made
        made = torch._neg_view(made) if options.get("neg") else made
        return made.requires_grad_(options.get("requires_grad", False))


BY_PYTHON = {"quantised", "sparse", "a meta tensor"}  # their parts are for torch's own functions alone


@pytest.mark.parametrize("what", sorted(TREES.keys() - BY_PYTHON))
def test_the_page_suffices_to_read_the_file(what: str, tmp_path: Path) -> None:
    source = saved(TREES[what], tmp_path)
    assert_same(torch.load(source, weights_only=False), FromThePage(there(source)).tree)


# Values that can't be held, and files that lie.


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


def test_honest_depth_survives(tmp_path: Path) -> None:
    tree: Any = {"w": base}
    for i in range(30):
        tree = argparse.Namespace(inner={"a": (tree, i)})
    assert_survives(tree, tmp_path)


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH])
def test_nesting_deeper_than_can_be_written_is_refused(depth: int) -> None:
    tree = nested(depth)
    with pytest.raises(TooDeep) if depth == MAX_DEPTH else nullcontext():
        assert full.decode({}, full.encode(tree).text)[0] == tree


def test_nesting_deeper_than_python_can_follow_is_refused(tmp_path: Path) -> None:
    tree: object = 1
    for _ in range(60):
        tree = Record("reduce", Global("m", "C"), ((tree,),), state={"s": [tree]}, has_state=True)
    try:
        text = full.encode(tree).text
    except TooDeep:
        return
    assert full.encode(full.decode({}, text)[0]).text == text


def test_a_value_that_cannot_be_held_is_named_with_the_way_out(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(saved({"w": base, "a": {"b": [1]}}, tmp_path))
    checkpoint.tree["a"]["b"].append(memoryview(b""))
    with pytest.raises(Refused, match=r"JSON can't hold 'a\.b\.1', a memoryview") as refusal:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors", full=True)
    assert "--drop a.b" in str(refusal.value.hint)
    assert not (tmp_path / "out.safetensors").exists()


def document(tree: Any, **changes: Any) -> str:
    return json.dumps({"version": 1, "protocol": 2, "tree": tree, **changes})


def recorded(of: Any = ("global", "a", "b"), args: Any = ("tuple",), how: str = "reduce", **more: Any) -> str:
    return document(["record", {"how": how, "callable": of, "args": args, **more}])


def crafted(text: str, folder: Path) -> Path:
    save_file({"w": base, "n": numbered, "odd": torch.ones(3, dtype=torch.uint8)},
              folder / "lie.safetensors", metadata={full.ENTRY: text})  # fmt: skip
    return folder / "lie.safetensors"


PARAMETER = ["global", "torch._utils", "_rebuild_parameter"]

LIES: dict[str, str] = {
    "no JSON": "{", "nothing": "", "a list": "[]", "a number": "1",
    "no tree": json.dumps({"version": 1, "protocol": 2}), "a version to come": document({}, version=2),
    "a version of text": document({}, version="1"), "a version of lists": document({}, version=[[[1]]]),
    "a protocol to come": document({}, protocol=6), "a protocol that is true": document({}, protocol=True),
    "a protocol that is a fraction": document({}, protocol=2.0),
    "a protocol of text": document({}, protocol="2"),
    "deeply nested": '{"version":1,"protocol":2,"tree":' + '["list",' * 100_000 + "1" + "]" * 100_001 + "}",
    "a number of 10,000 digits": '{"version":1,"protocol":2,"tree":1' + "0" * 10_000 + "}",
    "no tag": document([]), "an unknown tag": document(["eval", "1"]),
    "a tag that is a list": document([["list"]]), "a tag that is a number": document([1, 2]),
    "a tag that is null": document([None]), "an unknown tag inside": document({"a": ["list", 1, ["x"]]}),
    "a tensor that is not there": document(["tensor", "v"]),
    "a tensor without a name": document(["tensor"]),
    "a tensor named by a list": document(["tensor", ["w"]]),
    "a tensor named by a number": document(["tensor", 1]),
    "a tensor with options of text": document(["tensor", "w", "view"]),
    "a tensor with three more": document(["tensor", "w", {}, {}, {}]),
    "a view past the end": document(["tensor", "w", {"view": ["float32", 0, [25], [1]]}]),
    "a view of large strides": document(["tensor", "w", {"view": ["float32", 0, [2], [24]]}]),
    "a view that overflows": document(["tensor", "w", {"view": ["float32", 0, [2**62, 4], [0, 0]]}]),
    "a view before the beginning": document(["tensor", "w", {"view": ["float32", -1, [1], [1]]}]),
    "a view of negative size": document(["tensor", "w", {"view": ["float32", 0, [-1], [1]]}]),
    "a view of negative stride": document(["tensor", "w", {"view": ["float32", 3, [2], [-1]]}]),
    "a view of fractions": document(["tensor", "w", {"view": ["float32", 0, [1.0], [1]]}]),
    "a view of truth": document(["tensor", "w", {"view": ["float32", True, [1], [1]]}]),
    "a view of text": document(["tensor", "w", {"view": ["float32", 0, "1", "1"]}]),
    "a view of one number": document(["tensor", "w", {"view": ["float32", 0, 1, 1]}]),
    "a view without strides": document(["tensor", "w", {"view": ["float32", 0, [1]]}]),
    "a view with strides of other length": document(["tensor", "w", {"view": ["float32", 0, [1, 1], [1]]}]),
    "a view of an unknown type": document(["tensor", "w", {"view": ["float7", 0, [1], [1]]}]),
    "a view of a type in a list": document(["tensor", "w", {"view": [["float32"], 0, [1], [1]]}]),
    "a conjugate of floats": document(["tensor", "w", {"conj": True}]),
    "a negative of integers": document(["tensor", "n", {"neg": True}]),
    "a storage of an unknown class": document(["tensor", "w", {"storage": ["os.system", "cpu"]}]),
    "a storage of a class in a list": document(["storage", "w", ["FloatStorage"], "cpu"]),
    "a storage of no whole elements": document(["storage", "odd", "FloatStorage", "cpu"]),
    "a storage somewhere odd": document(["storage", "w", "FloatStorage", 1]),
    "a storage that is not there": document(["storage", "v", "FloatStorage", "cpu"]),
    "a ref to nothing": document(["ref", 0]),
    "a ref before its def": document(["list", ["ref", 0], ["def", 0, ["list"]]]),
    "a ref to itself": document(["def", 0, ["ref", 0]]),
    "a ref to a tuple that is not whole": document(["def", 0, ["tuple", ["ref", 0]]]),
    "a ref by a list": document(["ref", [0]]), "a def by a list": document(["def", [0], ["list"]]),
    "a def of nothing": document(["def", 0]), "a def of an empty list": document(["def", 0, []]),
    "after nothing": document(["after", 1]), "a dict of single things": document(["dict", 1]),
    "a dict of threes": document(["dict", [1, 2, 3]]),
    "a dict with a list for a key": document(["dict", [["list"], 1]]),
    "a dict with a list inside a key": document(["dict", [["tuple", ["list"]], 1]]),
    "a dict with a dict for a key": document(["dict", [{}, 1]]),
    "a set of lists": document(["set", ["list"]]),
    "a set of bytearrays": document(["frozenset", ["bytearray", ""]]),
    "an ordered dict of a list": document(["ordered", ["list", 1]]),
    "an ordered dict of nothing": document(["ordered"]), "a record of nothing": document(["record"]),
    "a record of a list": document(["record", ["list"]]),
    "a record without a callable": document(["record", {"how": "reduce", "args": ["tuple"]}]),
    "a record made by magic": recorded(how="eval"), "a record called by a list": recorded(["list"]),
    "a record called by text": recorded("a", how="newobj"),
    "a record called with a list": recorded(args=["list"]),
    "a record with keywords in a list": recorded(how="newobj", kwargs=["list"]),
    "a record of odd items": recorded(items=[1]), "a record of odd elements": recorded(elements=1),
    "a Parameter around text": recorded(PARAMETER, ["tuple", "x", True, {}]),
    "a Parameter with a state": recorded(PARAMETER, ["tuple", ["tensor", "w"], True, {}], state={}),
    "a tensor made by a call": recorded(
        ["global", "torch._utils", "_rebuild_tensor"], ["tuple", ["storage", "w"], 0, *[["tuple", 1]] * 2]
    ),
    "a tensor of a class, of two parts": recorded(
        ["global", "torch._tensor", "_rebuild_from_type_v2"],
        ["tuple", ["tensor", "w"], ["global", "torch", "Tensor"]],
    ),
    "a quantised tensor by no scheme": recorded(
        ["global", "torch._utils", "_rebuild_qtensor"],
        ["tuple", ["storage", "odd", "QInt8Storage"], 0, *[["tuple", 1]] * 3, False, {}],
    ),
    "a call with keywords": recorded(kwargs={"a": 1}),
    "an object with a number for a keyword": recorded(how="newobj", kwargs=["dict", [1, 1]]),
    "gradients of integers": document(["tensor", "n", {"requires_grad": True}]),
    "an ordered dict with attributes in a list": document(["ordered", {}, ["list", 1]]),
    "an ordered dict with a number for an attribute": document(["ordered", {}, ["dict", [1, 2]]]),
    "a storage on no device": document(["storage", "w", "FloatStorage", "module.a"]),
    "a tensor on no device": document(["tensor", "w", {"storage": ["FloatStorage", ""]}]),
    "a name with a line break": document(["global", "a\nb", "c"]),
    "a name with half a character": document(["global", "a", ["str", "7aCA"]]),
    "an empty name": document(["global", "", "c"]), "a global of numbers": document(["global", 1, 2]),
    "a global of one name": document(["global", "os"]), "an integer that is none": document(["int", "ten"]),
    "an integer of a number": document(["int", 10]), "a float that is short": document(["float", "7ff0"]),
    "a float that is none": document(["float", "infinity"]),
    "text that is no base64": document(["str", "ä"]), "text that is no UTF-8": document(["str", "/w=="]),
    "bytes of a number": document(["bytes", 5]), "bytes of a list": document(["bytearray", ["list", 1]]),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_text_that_breaks_a_rule_is_damaged(lie: str, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=f"its entry '{full.ENTRY}' ") as damage:
        ckpttool.open(crafted(LIES[lie], tmp_path))
    assert len(damage.value.reason) < 200
    assert "\n" not in damage.value.reason


def test_a_damaged_text_is_exit_3_and_one_line(cli: Cli, tmp_path: Path) -> None:
    path = crafted(document(["eval", "1"]), tmp_path)
    ran = cli("convert", path, tmp_path / "out.pt")
    assert (ran.code, ran.out, ran.err.count("\nhint: ")) == (3, "", 1)
    assert "unknown tag 'eval'" in ran.err
    assert not (tmp_path / "out.pt").exists()


VIEW = ["tensor", "w", {"view": ["float32", 1, [2], [3]]}]
OBJECT = {"how": "newobj", "callable": ["global", "a", "B"], "args": ["tuple", 1], "state": {"x": 1}}
SEED = document(
    {
        "m": ["ordered", {"w": ["tensor", "w"], "v": VIEW}, {"k": 1}],
        "shared": ["def", 0, ["list", ["ref", 0], ["def", 1, ["tuple", 1, 2]], ["ref", 1]]],
        "o": ["record", OBJECT],
        "d": ["dict", [1, ["int", "0x1f"]], [["tuple", 1], ["float", "7ff0000000000000"]]],
        "s": ["set", 1, "a"],
        "b": ["bytes", "aGk="],
        "t": ["storage", "n", "LongStorage", "cpu"],
    }
)
TOKENS = re.findall(r'"[^"]*"|[\[\]{},:]|[^\[\]{},:" ]+', SEED)
NEW = st.lists(st.sampled_from(TOKENS), max_size=3)
EDITS = st.tuples(st.integers(0, len(TOKENS)), st.integers(0, 3), NEW)


@settings(max_examples=settings().max_examples * 5)
@given(st.lists(EDITS, min_size=1, max_size=3))
def test_any_changed_text_is_read_or_refused(changes: list[tuple[int, int, list[str]]]) -> None:
    tokens = list(TOKENS)
    for at, gone, new in changes:
        tokens[at : at + gone] = new
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint = ckpttool.open(crafted(" ".join(tokens), Path(folder)))
        except Damaged:
            return
        try:
            ckpttool.save(checkpoint, Path(folder) / "again.safetensors", full=True)
            ckpttool.save(checkpoint, Path(folder) / "out.pt")
        except CkptToolError:
            return
        again = ckpttool.open(Path(folder) / "again.safetensors")
        assert full.encode(again.tree).text == full.encode(checkpoint.tree).text


def test_the_unchanged_text_is_read(tmp_path: Path) -> None:
    """This shows that the lies fail for their own reasons, and where the changes begin."""
    tree: Any = ckpttool.open(crafted(" ".join(TOKENS), tmp_path)).tree
    assert tree.keys() == json.loads(SEED)["tree"].keys()
    assert tree["m"]["v"].shape == (2,)
