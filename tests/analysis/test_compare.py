"""Differences between two checkpoints: names, types, shapes, and everything beside the model's state."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.comparison import Change
from ckpttool.analysis.verify import verify
from tests.support import every_format as table
from tests.support.comparing import compared, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


# Names, shapes, types.


def test_names_in_only_one_file_are_listed(folder: Path) -> None:
    one = torch.ones(2)
    found = compared(folder, {"a": one, "b": one}, {"b": one, "c": one})
    assert (found.only_a, found.only_b, found.changed, found.same) == (("a",), ("c",), (), False)


def test_a_different_shape_or_dtype_is_its_own_kind_of_difference(folder: Path) -> None:
    a = {"v": torch.ones(2, 3), "w": torch.ones(4), "x": torch.ones(2)}
    b = {"v": torch.ones(3, 2), "w": torch.ones(4, dtype=torch.bfloat16), "x": torch.zeros(2)}
    found = compared(folder, a, b).changed
    assert found[0] == Change("v", "shape", "float32 [2, 3]", "float32 [3, 2]")
    assert found[1] == Change("w", "dtype", "float32 [4]", "bfloat16 [4]")
    assert (found[2].name, found[2].why) == ("x", "values")


def test_changes_are_in_the_order_of_the_first_file(folder: Path) -> None:
    a = {f"{i}": torch.zeros(2 if i % 3 else 3) for i in range(9)}
    b = {f"{i}": torch.ones(2) for i in reversed(range(9))}
    assert [change.name for change in compared(folder, a, b).changed] == [f"{i}" for i in range(9)]


def test_the_order_of_names_and_the_kind_of_dict_make_no_difference(folder: Path) -> None:
    a = {"model": OrderedDict(a=torch.ones(2), b=torch.zeros(2)), "config": {"x": 1, "y": (1, 2)}}
    b = {"config": {"y": [1, 2], "x": 1}, "model": {"b": torch.zeros(2), "a": torch.ones(2)}}
    assert compared(folder, a, b).same


# Values beside the model's state.


def test_everything_beside_the_state_is_compared_by_its_dotted_name(folder: Path) -> None:
    w = {"w": torch.ones(2)}
    a = {"model": w, "epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(2)}}, "lr": 0.1}}
    b = {"state_dict": w, "epoch": 4, "optimizer": {"state": {0: {"m": torch.zeros(2)}}}, "x": ""}
    found = compared(folder, a, b)
    assert (found.only_a, found.only_b) == (("optimizer.lr",), ("x",))
    assert found.changed[0] == Change("epoch", "value", "3", "4")
    assert {change.name for change in found.changed} == {"epoch", "optimizer.state.0.m"}
    assert compared(folder, a, b, model_only=True).same
    assert compared(folder, a, b, state="model").same


VALUES = [(1, 2), (0.0, -0.0), ("a", "b"), (torch.float32, torch.float16), ({1, 2}, {1, 3})]
TYPES = [(1, 1.0), (True, 1), (b"a", "a"), (None, 0), ({}, None), (torch.ones(1), 1.0)]


PAIRS = [*((*pair, "value") for pair in VALUES), *((*pair, "type") for pair in TYPES)]


@pytest.mark.parametrize(("x", "y", "why"), PAIRS)
def test_plain_values_differ_by_value_or_by_type(x: Any, y: Any, why: str, folder: Path) -> None:
    model = {"w": torch.ones(1)}
    (change,) = compared(folder, {"model": model, "x": x}, {"model": model, "x": y}).changed
    assert (change.name.partition(".")[0], change.why) == ("x", why)
    assert compared(folder, {"model": model, "x": x}, {"model": model, "x": x}).same
    assert compared(folder, {"model": model, "x": float("nan")}, {"model": model, "x": float("nan")}).same


def test_an_empty_container_differs_from_a_missing_one(folder: Path) -> None:
    model = {"w": torch.ones(1)}
    found = compared(folder, {"model": model, "x": {}}, {"model": model})
    assert (found.only_a, found.only_b) == (("x",), ())


def test_the_model_under_a_second_name_is_compared_there_too(folder: Path) -> None:
    """As `torch.save({"model": state, "ema": state})` has it: one dict in two places."""
    state = {"w": torch.ones(2)}
    twice = {"ema": state, "model": state}
    assert compared(folder, twice, {"model": state}).only_a == ("ema",)
    assert compared(folder, {"model": state}, twice).only_b == ("ema",)
    assert compared(folder, twice, {"model": state, "ema": {"w": torch.ones(2)}}).same
    (change,) = compared(folder, twice, {"model": state, "ema": {"w": torch.zeros(2)}}).changed
    assert (change.name, change.why) == ("ema.w", "values")


def test_values_that_contain_themselves_are_compared(folder: Path) -> None:
    def tree(last: int) -> dict[str, Any]:
        loop: list[Any] = [1]
        loop += [loop, last]
        return {"model": {"w": torch.ones(1)}, "loop": loop}

    assert compared(folder, tree(2), tree(2)).same
    assert [change.name for change in compared(folder, tree(2), tree(3)).changed] == ["loop.2"]


def test_contents_that_a_tensor_format_cannot_hold_are_set_aside(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    a, b, c = (ckpttool.open(tmp_path / name) for name in ("a.pt", "b.safetensors", "c.pt"))
    assert diff(a, b).same and diff(a, b).aside_a == ("epoch",)
    assert diff(b, a).same and diff(b, a).aside_b == ("epoch",)
    assert diff(a, c).only_a == ("epoch",)  # a .pt could hold it


def test_files_without_a_state_are_compared_whole(folder: Path) -> None:
    net = table.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert compared(folder, optimizer.state_dict(), optimizer.state_dict()).same
    other = torch.optim.SGD(net.parameters(), lr=0.2).state_dict()
    (change,) = compared(folder, optimizer.state_dict(), other).changed
    assert change == Change("param_groups.0.lr", "value", "0.1", "0.2")
    with pytest.raises(ckpttool.CkptToolError, match="no model's state"):
        compared(folder, optimizer.state_dict(), other, model_only=True)
    with pytest.raises(ckpttool.CkptToolError, match="holds no state named 'x'"):
        compared(folder, {"w": torch.ones(1)}, {"w": torch.ones(1)}, state="x")


# Wrappers.


WRAPPINGS = ["module.", "_orig_mod.module.", "model.", "ema.module."]


@pytest.mark.parametrize("prefix", WRAPPINGS)
@pytest.mark.parametrize("swapped", [False, True])
def test_prefixes_are_ignored_when_asked(prefix: str, swapped: bool, folder: Path) -> None:
    state = table.state()
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    pair = (wrapped, state) if swapped else (state, wrapped)
    found = compared(folder, *pair)
    assert (len(found.only_a), len(found.only_b)) == (len(state), len(state))
    assert found.matched_without_prefix == len(state)
    assert compared(folder, *pair, ignore_prefix=True).same


def test_prefixes_inside_names_and_in_the_optimizer_are_ignored_too(folder: Path) -> None:
    plain = {"model": {"0.w": torch.ones(2), "1.w": torch.ones(2)}, "names": ["0.w", "1.w"], "by": {"0.w": 1}}
    names = ["module.0._orig_mod.w", "module.1.w"]
    model = {**dict.fromkeys(names, torch.ones(2)), "module.n": torch.ones(1)}
    wrapped = {"model": model, "names": names, "by": {names[0]: 1}}
    found = compared(folder, wrapped, plain, ignore_prefix=True)
    assert (found.only_a, found.only_b, found.changed) == (("module.n",), (), ())


def test_a_prefix_that_distinguishes_two_names_is_not_ignored(folder: Path) -> None:
    state = {"a": torch.ones(1), "module.a": torch.zeros(1)}
    assert compared(folder, state, state, ignore_prefix=True).same
    assert compared(folder, state, {"a": torch.ones(1)}, ignore_prefix=True).only_a == ("module.a",)


# Other formats.


def training() -> dict[str, Any]:
    """A tree that is hard for formats: ties, views, lazy bits, every kind of value beside the tensors."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    state = {
        "tied": base,
        "head": base,
        "turned": base.t(),
        "row": base[2],
        "half": base.to(torch.bfloat16),
        "phases": torch.complex(base, -base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "counter": torch.tensor(2**53 + 1),
        "none": torch.empty(0, 3),
    }
    net = table.training()
    return {"model": state, "epoch": 3, "best": 0.1, "note": "x", "optimizer": net["optimizer"]}


WAYS: dict[str, dict[str, Any]] = {
    "torch zip": {"to": "torch-zip"},
    "safetensors": {"to": "safetensors"},
    "safetensors with copies": {"to": "safetensors", "keep_copies": True},
    "safetensors --full": {"to": "safetensors", "full": True},
    "shards": {"to": "safetensors-sharded", "shard_size": 300},
    "shards of torch": {"to": "torch-sharded", "shard_size": 300},
    "DCP": {"to": "dcp"},
    "DCP --full": {"to": "dcp", "full": True},
}


@pytest.fixture(scope="module")
def in_every_format(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    files = {"as torch saves it": saved(training(), folder / "in.pt"), "legacy": folder / "legacy.pt"}
    torch.save(training(), files["legacy"], _use_new_zipfile_serialization=False)
    source = ckpttool.open(folder / "in.pt")
    for number, (name, wanted) in enumerate(WAYS.items()):
        files[name] = folder / f"out{number}"
        ckpttool.save(source, files[name], **wanted)
    return files


FORMATS = ["as torch saves it", "legacy", *WAYS]


@pytest.mark.parametrize("one", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_a_file_is_the_same_in_every_format(one: str, other: str, in_every_format: dict[str, Path]) -> None:
    with ckpttool.open(in_every_format[one]) as a, ckpttool.open(in_every_format[other]) as b:
        found = diff(a, b)
        assert verify(a, against=b).ok
        assert ckpttool.digest(a) == ckpttool.digest(b)
    assert (found.only_a, found.only_b, found.changed) == ((), (), ())
    assert found.tensors >= 9


@pytest.mark.parametrize("name", ["torch tar (before 0.1.12)", "TorchScript", "`torch.save(model)`"])
def test_rarer_formats_hold_the_same_state(name: str, tmp_path: Path) -> None:
    table.INPUTS[name](tmp_path / "in")
    expected = table.state() if "tar" in name else table.model().state_dict()
    torch.save(expected, tmp_path / "plain.pt")
    with ckpttool.open(tmp_path / "in") as a, ckpttool.open(tmp_path / "plain.pt") as b:
        assert diff(a, b, model_only=True).same
        assert diff(b, a, model_only=True).same


def test_progress_counts_every_byte_of_the_first_file(folder: Path) -> None:
    state = {"a": torch.ones(1000), "b": torch.ones(7, 9).t(), "c": torch.empty(0)}
    seen: list[int] = []
    compared(folder, state, state, progress=seen.append)
    assert sum(seen) == 4000 + 4 * 63


def test_numpy_arrays_in_a_file_are_compared_by_their_bytes(folder: Path) -> None:
    model = {"w": torch.ones(1)}
    a, b = ({"model": model, "x": np.arange(4) + i} for i in (0, 1))
    assert compared(folder, a, a).same
    assert not compared(folder, a, b).same


def test_numbers_that_became_text_as_keys_are_the_same_and_said(folder: Path) -> None:
    a = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"step": 1}}, "param_groups": []}}
    b = {**a, "optimizer": {"state": {"0": {"step": 1}}, "param_groups": []}}
    found = compared(folder, a, b)
    assert (found.same, found.text_keys_a, found.text_keys_b) == (True, (), ("optimizer.state",))
    assert compared(folder, b, a).text_keys_a == ("optimizer.state",)
    assert compared(folder, b, b).text_keys_b == compared(folder, a, a).text_keys_b == ()


LONG = {bytes(90) + end: 1 for end in (b"a", b"b")}, {bytes(90) + end: 1 for end in (b"a", b"c")}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({np.int64(0): 1, np.int64(1): 2}, {np.int64(0): 1, np.int64(2): 2}),
        ({torch.device("cpu"): 1}, {torch.device("meta"): 1}),
        ({((0, 1), 2): 1}, {((0, 1), 3): 1}),
        ({tuple(range(9)): 1}, {tuple(range(1, 10)): 1}),
        ({("a, b",): 1}, {("a", "b"): 1}),
        ({frozenset({1}): 1}, {frozenset({2}): 1}),
        ({1j: 1, 2j: 1}, {1j: 1, 3j: 1}),
        ({2**300: 1}, {2**300 + 1: 1}),
        (defaultdict(int, {np.int64(3): 1}), defaultdict(int, {np.int64(4): 1})),
        LONG,
    ],
    ids=lambda tree: str(list(tree)[-1])[-20:],
)
def test_keys_that_a_short_text_tells_only_in_part_are_compared_whole(a: Any, b: Any, folder: Path) -> None:
    model = {"w": torch.ones(2)}
    assert not compared(folder, {"model": model, "x": a}, {"model": model, "x": b}).same
    assert not compared(folder, {"x": [a]}, {"x": [b]}).same
    assert compared(folder, {"model": model, "x": a}, {"model": model, "x": a}).same


def test_keys_that_are_tuples_are_the_same_in_any_order(folder: Path) -> None:
    keys = [(0, 1), ("a", 2), (0, 1, 2)]
    assert compared(folder, {"x": dict.fromkeys(keys)}, {"x": dict.fromkeys(reversed(keys))}).same


@pytest.mark.parametrize(("a", "b"), [([1], {"0": 1}), ([], {}), ({1}, [1]), (frozenset(), ())], ids=str)
def test_a_list_is_no_dict_and_no_set(a: Any, b: Any, folder: Path) -> None:
    found = compared(folder, {"x": a}, {"x": b})
    assert [(change.name, change.why) for change in found.changed] == [("x", "type")]


def test_attributes_of_an_ordered_dict_are_compared_but_for_module_versions(folder: Path) -> None:
    trees = [OrderedDict(a=1) for _ in range(3)]
    vars(trees[0]).update(note=1, _metadata={"": {"version": 1}})
    vars(trees[1]).update(note=2)
    vars(trees[2]).update(note=1)
    a, b, c = ({"x": tree} for tree in trees)
    assert [change.name for change in compared(folder, a, b).changed] == ["x.note"]
    assert compared(folder, a, c).same
    assert compared(folder, a, {"x": {"a": 1}}).only_a == ("x.note",)


def test_a_dict_with_a_number_and_its_text_as_keys_is_like_itself(folder: Path) -> None:
    both = {"model": {"w": torch.ones(2)}, "counts": {0: 1, "0": 2}}
    found = compared(folder, both, both)
    assert (found.same, found.text_keys_a, found.text_keys_b) == (True, (), ())
