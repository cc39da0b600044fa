"""Differences between two checkpoints: names, types and shapes; the distance of values, and its histogram."""

from __future__ import annotations

import math
import random
import struct
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.files import threads
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.diffing import compare_values
from ckpttool.diffing.compare import diff
from ckpttool.diffing.compare_values import Change, Norms
from ckpttool.diffing.distances import Distance, Tolerance, measurer
from ckpttool.inspecting.tables import FINE, Histogram
from ckpttool.verifying.verify import verify
from tests.support import comparing
from tests.support import every_format as table
from tests.support.comparing import compared, opened, saved
from tests.support.trees import LAYOUTS, LAZY

# ---- Differences between two checkpoints: names, types, shapes, and everything beside the model's state


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


# ---- The distance of values: how many differ, how far, and by how many steps; and their histogram -----


# ---- The distance of values: how many differ, how far, by how many steps; with a tolerance; and norms -


nan, inf = float("nan"), float("inf")


def distance(folder: Path, a: torch.Tensor, b: torch.Tensor, *tolerance: float) -> Distance | None:
    """Return the distance of two tensors; None when they are the same."""
    found = compared(folder, {"w": a}, {"w": b}, **dict(zip(("rtol", "atol"), tolerance, strict=False)))
    assert found.same == (not found.changed)
    assert not found.changed or found.changed[0].why == "values"
    return found.changed[0].distance if found.changed else None


def far(folder: Path, a: torch.Tensor, b: torch.Tensor, *tolerance: float) -> Distance:
    """Return the distance of two tensors that differ."""
    found = distance(folder, a, b, *tolerance)
    assert found is not None
    return found


def measured(a: torch.Tensor, b: torch.Tensor, *tolerance: float) -> Distance | None:
    """Return the distance of two tensors without files, for the many examples of a property."""
    types = (DTYPES[str(x.dtype).removeprefix("torch.")] for x in (a, b))
    measure = measurer(*types, Tolerance(*tolerance) if tolerance else None)
    found = measure(*(memoryview(comparing.values(x)) for x in (a, b)), 0)
    return found if found.differ else None


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
INTEGERS += [torch.uint64, torch.bool]


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTS, torch.int16, torch.uint8])
def test_a_difference_is_reported_in_numbers(dtype: torch.dtype, folder: Path) -> None:
    a, b = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    a[1, 0], b[1, 0], a[0, 2], b[0, 2] = 5, 2, 3, 4
    found = far(folder, a, b)
    assert (found.differ, found.of, found.nans) == (2, 6, 0)
    assert (found.max_abs, found.max_rel, found.where, found.a, found.b) == (3, 1.5, 3, 5, 2)


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of a type of 8 or 16 bits."""
    carrier = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    return torch.arange(256**dtype.itemsize).to(carrier).view(dtype)


@cache
def line(dtype: torch.dtype) -> list[float]:
    """Return all numbers of a type in their order."""
    return sorted({value for value in all_of(dtype).to(torch.float64).tolist() if not math.isnan(value)})


def steps_between(dtype: torch.dtype, a: float, b: float) -> int:
    """The steps are counted along all numbers of the type."""
    return abs(bisect_left(line(dtype), a) - bisect_left(line(dtype), b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *EIGHTS, torch.float8_e8m0fnu])
def test_steps_between_small_floats_count_the_numbers_between_them(dtype: torch.dtype) -> None:
    values = all_of(dtype)
    numbers = values.to(torch.float64).tolist()
    chosen = random.Random(0)
    for _ in range(500):
        i = chosen.randrange(len(values))
        j = chosen.choice([chosen.randrange(len(values)), (i + 1) % len(values), i])
        found = measured(values[i : i + 1], values[j : j + 1])
        x, y = numbers[i], numbers[j]
        if i == j:
            assert found is None
            continue
        assert found is not None
        if math.isnan(x) != math.isnan(y):
            assert (found.nans, found.max_abs, found.max_ulp) == (1, None, None)
        elif math.isnan(x) or x == y:
            assert (found.nans, found.max_abs, found.max_ulp) == (0, 0, 0)  # NaNs or zeros of other bits
        else:
            assert (found.nans, found.max_abs) == (0, abs(x - y))
            assert found.max_ulp == steps_between(dtype, x, y)


Pairs = list[tuple[float, float]]
floats = st.floats(width=64) | st.sampled_from([0.0, -0.0, nan, inf, -inf, 5e-324, 1.7976931348623157e308])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(pairs=st.lists(st.tuples(floats, floats), min_size=1, max_size=8), equal=st.integers(0, 8))
def test_distances_between_floats_are_exact(dtype: torch.dtype, pairs: Pairs, equal: int) -> None:
    a = torch.tensor([x for x, _ in pairs], dtype=torch.float64).to(dtype)
    b = torch.tensor([y for _, y in pairs], dtype=torch.float64).to(dtype)
    b[:equal] = a[:equal]
    found = measured(a, b)
    raw = "<d" if dtype is torch.float64 else "<f"
    xs, ys = a.tolist(), b.tolist()
    differing = [(x, y) for x, y in zip(xs, ys, strict=True) if struct.pack(raw, x) != struct.pack(raw, y)]
    assert (found.differ if found else 0) == len(differing)
    if found is None:
        return
    numbers = [(x, y) for x, y in differing if math.isnan(x) == math.isnan(y)]
    assert found.nans == len(differing) - len(numbers)
    apart = [0.0 if x == y or math.isnan(x) else abs(x - y) for x, y in numbers]
    assert found.max_abs == (max(apart) if apart else None)
    steps = [steps_of(raw, x, y) for x, y in numbers if not math.isnan(x)]
    assert found.max_ulp == (max(steps, default=0) if numbers else None)


def steps_of(raw: str, x: float, y: float) -> int:
    """Return the place of a float among all floats, from its bits."""
    width = struct.calcsize(raw)

    def place(value: float) -> int:
        bits = int.from_bytes(struct.pack(raw, value), "little")
        sign = 1 << 8 * width - 1
        return -(bits - sign) if bits & sign else bits

    return abs(place(x) - place(y))


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_integers_are_compared_exactly(dtype: torch.dtype, data: st.DataObject) -> None:
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    numbers = st.lists(st.integers(low, high), min_size=3, max_size=3)
    a, b = data.draw(numbers), data.draw(numbers)
    found = measured(*(torch.tensor(values, dtype=dtype) for values in (a, b)))
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    assert (0 if found is None else found.max_abs) == max(apart)
    assert found is None or (found.differ, found.max_ulp) == (sum(map(bool, apart)), None)


near = st.sampled_from([2**24, 2**53, 2**63, 2**64]).flatmap(lambda n: st.integers(n - 2049, n + 2049))
wide = st.integers(-(2**63), 2**64 - 1) | near | near.map(lambda n: -n)


@pytest.mark.parametrize("one", [torch.int64, torch.uint64, torch.int32])
@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.int64, torch.uint64, torch.complex128])
@given(x=wide, y=wide | st.none())
def test_integers_are_exact_beside_other_types(one: torch.dtype, other: torch.dtype, x: int, y: Any) -> None:
    info = torch.iinfo(one)
    x = min(max(x, info.min), info.max)
    y = x if y is None else y
    if other in INTEGERS:
        y = min(max(y, torch.iinfo(other).min), torch.iinfo(other).max)
    a, b = torch.tensor([x], dtype=one), torch.tensor([y], dtype=other)
    apart = abs(x - int(b.real.item() if b.is_complex() else b.item()))
    for left, right in (a, b), (b, a):
        found = measured(left, right, 0.0)
        assert (found.max_abs if found else 0) == pytest.approx(apart, rel=2**-51, abs=0)
        if other in INTEGERS and (min(x, y) >= 0 or max(x, y) < 2**63):
            assert (found.max_abs if found else 0) == apart


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("atol", [2**53, 2**60, 2**63])
def test_a_tolerance_holds_for_integers_to_the_last_one(dtype: torch.dtype, atol: int) -> None:
    a = torch.tensor([1], dtype=dtype)
    for more, same in (atol - 1, True), (atol, False):
        b = torch.tensor([1 + more + 1], dtype=torch.uint64)
        assert (measured(a, b, 0.0, float(atol)) is None) is same
        assert (measured(b, a, 0.0, float(atol)) is None) is same


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_the_distance_of_complex_numbers_is_a_magnitude(dtype: torch.dtype, folder: Path) -> None:
    a, b = (torch.tensor([1 + 2j, z, 5j]).to(dtype) for z in (4 + 6j, 1 + 2j))
    found = far(folder, a, b)
    assert (found.differ, found.max_abs, found.where, found.a, found.b) == (1, 5.0, 1, 4 + 6j, 1 + 2j)
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, torch.float16)
    if part is torch.float16:
        assert found.max_ulp == max(steps_between(part, 4, 1), steps_between(part, 6, 2))
    assert distance(folder, a, b.conj()) is not None
    assert distance(folder, a, a.conj().conj_physical()) is None


def test_a_nan_in_one_part_of_a_complex_number_hides_nothing_in_the_other(folder: Path) -> None:
    a, b = (torch.tensor([complex(nan, x), complex(inf, nan), complex(0, nan)]) for x in (1, 3))
    found = far(folder, a, b)
    assert (found.differ, found.nans, found.max_abs, found.where) == (1, 0, 2.0, 0)
    assert distance(folder, a, b, 0.1) is not None and distance(folder, a, b, 0.7) is None
    assert far(folder, a[:1], a[2:] + 1).nans == 1
    assert distance(folder, a, a.clone(), 0.0, 0.0) is None


def test_elements_without_numbers_are_compared_by_their_bits(folder: Path) -> None:
    a = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 3, torch.quint8)
    b = torch.quantize_per_tensor(torch.tensor([1.0, 3.0]), 0.5, 3, torch.quint8)
    assert compared(folder, {"w": torch.ones(1), "q": a}, {"w": torch.ones(1), "q": a}).same
    (change,) = compared(folder, {"w": torch.ones(1), "q": a}, {"w": torch.ones(1), "q": b}).changed
    assert change.distance is not None
    assert change.distance.differ == 1


def test_the_reported_place_holds_the_largest_difference_in_views_too(folder: Path) -> None:
    base = torch.arange(60.0).view(3, 4, 5)
    other = base.clone()
    other[2, 0, 3] += 100
    for turn in (lambda x: x, lambda x: x.mT, lambda x: x.permute(2, 0, 1), lambda x: x[:, ::2]):
        (change,) = compared(folder, {"w": turn(base)}, {"w": turn(other)}).changed
        assert change.index == tuple(int(i) for i in (turn(other) - turn(base)).nonzero()[0])


@pytest.mark.parametrize("read", [16, 48, 1 << 17])
def test_a_tensor_in_many_pieces_has_one_distance(read: int, folder: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(compare_values, "READ", read)
    monkeypatch.setattr(compare_values, "PIECE", 4 * read)
    monkeypatch.setattr(compare_values, "ELEMENTS", 7)
    a = torch.arange(1000.0).view(20, 50)
    b = a.clone()
    b[[3, 7, 19], [4, 9, 49]] += torch.tensor([2.0, 5.0, -1.0])
    for turn in (lambda x: x, lambda x: x.t()):
        state = {"u": torch.ones(3), "w": turn(a), "x": torch.zeros(0), "z": torch.ones(9)}
        (change,) = compared(folder, state, {**state, "w": turn(b)}).changed
        assert change.name == "w" and change.distance is not None
        assert change.index == tuple(reversed((7, 9)) if turn(a).shape[0] == 50 else (7, 9))
        assert (change.distance.differ, change.distance.of, change.distance.max_abs) == (3, 1000, 5.0)


def test_small_tensors_keep_their_own_differences(folder: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(compare_values, "PIECE", 256)
    monkeypatch.setattr(threads, "MANY", 3)
    a = {f"{i}": torch.zeros(1 + i * 7 % 200) for i in range(60)}
    b = {name: tensor + (int(name) % 5 == 0) * int(name) for name, tensor in a.items()}
    found = compared(folder, a, b).changed
    apart = {change.name: change.distance.max_abs for change in found if change.distance}
    assert apart == {f"{i}": i for i in range(5, 60, 5)}


def test_expanded_tensors_are_compared_once_and_counted_in_full(folder: Path) -> None:
    a, b = torch.arange(3.0), torch.tensor([0.0, 1.0, 4.0])
    wide = [x.expand(10**12, 3) for x in (a, b)]
    assert distance(folder, wide[0], wide[0]) is None
    found = far(folder, *wide)
    assert (found.differ, found.of, found.where) == (10**12, 3 * 10**12, 2)
    (change,) = compared(folder, {"w": a[:, None].expand(3, 4)}, {"w": b[:, None].expand(3, 4)}).changed
    assert change.index == (2, 0)
    assert distance(folder, a.expand(4, 3), a.expand(4, 3).clone()) is None


# Tolerances.


RTOLS, ATOLS = st.sampled_from([0.0, 1e-5, 1e-3, 1.0]), st.sampled_from([0.0, 1e-8, 1e-3, 10.0])
SEVERAL = st.lists(st.tuples(floats, floats), min_size=1, max_size=6)


@given(pairs=SEVERAL, near=st.floats(-1e-3, 1e-3), rtol=RTOLS, atol=ATOLS)
def test_tolerance_as_in_allclose(pairs: Pairs, near: float, rtol: float, atol: float) -> None:
    a = torch.tensor([x for x, _ in pairs] + [x for x, _ in pairs], dtype=torch.float64)
    b = torch.tensor([y for _, y in pairs] + [x * (1 + near) for x, _ in pairs], dtype=torch.float64)
    found = measured(a, b, rtol, atol)
    assert (0 if found is None else found.differ) == int((~a.isclose(b, rtol, atol, equal_nan=True)).sum())


def test_bits_are_compared_without_a_tolerance_and_values_with_one(folder: Path) -> None:
    a = torch.tensor([0.0, nan, inf, 1.0])
    quiet = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    b = torch.cat([torch.tensor([-0.0]), quiet, torch.tensor([inf, 1.0])])
    found = far(folder, a, b)
    assert (found.differ, found.max_abs, found.max_ulp) == (2, 0, 0)
    assert distance(folder, a, a.clone()) is None
    assert distance(folder, a, b, 0.0, 0.0) is None
    missing = far(folder, a, torch.zeros(4), 1.0, 1.0)
    assert (missing.differ, missing.nans, missing.where) == (2, 1, 1)


def test_different_types_are_compared_by_value_with_a_tolerance(folder: Path) -> None:
    a = torch.tensor([1.0, 2.5, -3.0, 1e-3])
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        assert distance(folder, a, a.to(dtype), 1e-2) is None
        assert distance(folder, a.to(dtype), a, 1e-2) is None
    found = far(folder, a, a.to(torch.bfloat16), 1e-9)
    assert (found.differ, found.where, found.max_ulp) == (1, 3, None)
    assert distance(folder, torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), 0.0, 0.0) is None
    assert distance(folder, torch.tensor([True]), torch.tensor([1], dtype=torch.int8), 0.0, 0.0) is None


def test_a_tolerance_is_relative_to_the_second_file_and_covers_plain_numbers(folder: Path) -> None:
    ten, nine = torch.tensor([10]), torch.tensor([9])
    assert distance(folder, nine, ten, 0.1) is None
    assert distance(folder, ten, nine, 0.1) is not None
    a, b = {"w": ten, "best": 0.5, "n": 3}, {"w": ten, "best": 0.5000001, "n": 3.0}
    assert [change.name for change in compared(folder, a, b).changed] == ["best", "n"]
    assert compared(folder, a, b, rtol=1e-5).same


def test_one_bit_in_one_of_2_000_tensors_is_found_and_named(tmp_path: Path) -> None:
    with opened({f"layer.{i}": torch.full((4,), float(i)) for i in range(2_000)}, tmp_path) as checkpoint:
        raw = bytearray((tmp_path / "in.pt").read_bytes())
        raw[checkpoint.state().tensors["layer.1777"].data.offset + 4] ^= 1  # type: ignore[union-attr]
    (tmp_path / "b.pt").write_bytes(raw)
    with ckpttool.open(tmp_path / "in.pt") as a, ckpttool.open(tmp_path / "b.pt") as b:
        (change,) = diff(a, b, verify=False).changed
    assert (change.name, change.index) == ("layer.1777", (1,))
    assert change.distance is not None and (change.distance.differ, change.distance.max_ulp) == (1, 1)


# Norms, against torch in float64.


def norms_of(folder: Path, a: torch.Tensor, b: torch.Tensor, **given: object) -> Norms:
    (change,) = compared(folder, {"t": a}, {"t": b}, **given).changed
    assert change.norms is not None
    return change.norms


def assert_norms(found: Norms, a: torch.Tensor, b: torch.Tensor) -> None:
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = (each.to(wide).reshape(-1) for each in (a, b))
    expected = float((x * y.conj()).sum().real / (x.norm() * y.norm()))
    assert found.a == pytest.approx(float(x.norm()), rel=1e-12)
    assert found.b == pytest.approx(float(y.norm()), rel=1e-12)
    assert found.difference == pytest.approx(float((x - y).norm()), rel=1e-12)
    assert found.relative == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(expected, abs=1e-12)


def pairs_of_norms() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of every kind of tensor that has norms."""
    seeded = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return 10 * torch.randn(*shape, generator=seeded, dtype=dtype)

    numbers = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32]
    pairs = {str(dtype): (drawn(300, 1000).to(dtype), drawn(300, 1000).to(dtype)) for dtype in numbers}
    pairs["complex64"] = drawn(300, 1000, dtype=torch.complex64), drawn(300, 1000, dtype=torch.complex64)
    for layout, a in (LAYOUTS | LAZY).items():
        b = a.clone(memory_format=torch.contiguous_format)
        b.view(-1)[0] += 3
        if a.isfinite().all() and float(b.norm()) and float(a.norm()):
            pairs[layout] = a, b
    pairs["repeated in both files"] = drawn(1, 5).expand(6, 5), drawn(1, 5).expand(6, 5)
    a = torch.ones(1_000_000)  # only elements that differ are compared as numbers, but norms are of all
    pairs["almost all equal"] = a, torch.cat([a[1:], torch.tensor([2.0])])
    pairs["of two types"] = a[:1000] * drawn(1000).float(), a[:1000].bfloat16()
    return pairs


NORMS = pairs_of_norms()


@pytest.mark.parametrize("what", NORMS)
def test_norms_are_those_of_float64(what: str, folder: Path) -> None:
    a, b = NORMS[what]
    assert_norms(norms_of(folder, a, b, **({} if a.dtype == b.dtype else {"rtol": 0.0})), a, b)


def test_elements_that_are_not_finite_are_left_out_of_norms(folder: Path) -> None:
    a = torch.tensor([1.0, nan, 2.0, inf, 3.0])
    b = torch.tensor([1.0, 5.0, 2.5, 4.0, nan])
    assert_norms(norms_of(folder, a, b), a[[0, 2]], b[[0, 2]])


def test_norms_without_a_ratio_have_none(folder: Path) -> None:
    zeros, huge = torch.zeros(3), torch.full((3,), 1e300, dtype=torch.float64)
    for a, b, relative in ((torch.ones(3), zeros, inf), (huge, -huge, None)):
        found = norms_of(folder, a, b)
        assert (found.relative, found.cosine) == (relative, None)
    a, b = (torch.tensor(values, dtype=torch.uint8).view(torch.bits8) for values in ([1, 2], [1, 3]))
    (change,) = compared(folder, {"t": a}, {"t": b}).changed
    assert change.norms is None


def test_norms_of_several_tensors_are_those_of_the_tensors_joined(folder: Path) -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(5), torch.randn(5)), (torch.randn(2, 3), torch.randn(2, 3))]
    total = sum((norms_of(folder, a, b) for a, b in pairs), Norms())
    a, b = (torch.cat([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    assert_norms(total, a, b)


# ---- The histogram of one pass: the same for any blocks, in bounded memory, and numpy's but for its edges


finite = st.floats(allow_nan=False, allow_infinity=False)


def made(*blocks: list[float]) -> Histogram:
    histogram = Histogram()
    for block in blocks:
        histogram.add(np.array(block, dtype="f8"))
    return histogram


@example([[0.0, -2.297302443698339e-286], [1.7766264184340615e308, -1.773115299034121e308]])
@given(st.lists(st.lists(finite, min_size=1, max_size=8), min_size=1, max_size=6))
def test_blocks_and_their_order_make_no_difference_and_every_value_counts(blocks: list[list[float]]) -> None:
    whole = [value for block in blocks for value in block]
    one, apart, back = made(whole), made(*blocks), made(*reversed(blocks))
    assert one.bins(16) == apart.bins(16) == back.bins(16)
    assert sum(one.bins(16)) == len(whole)
    if min(whole) < max(whole):
        assert len(one.bins(16)) == 16
        assert one._counts is not None and len(one._counts) <= FINE


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e30])
def test_it_is_numpys_but_for_values_near_the_edges(spread: float) -> None:
    values = np.random.default_rng(0).normal(spread, spread, 50_000)
    found = np.array(made(values.tolist()).bins(16))
    expected = np.histogram(values, 16)[0]
    near = np.histogram(values, 16 * FINE // 4)[0].reshape(16, -1)
    assert (abs(found - expected) <= near[:, :8].sum(1) + near[:, -8:].sum(1) + 200).all()
    assert abs(found - expected).sum() < 0.03 * len(values)


def test_of_equal_values_there_is_one_bin_and_of_none_there_is_none() -> None:
    assert made([2.5] * 3, [2.5]).bins(16) == (4,)
    assert Histogram().bins(16) == ()


def test_the_least_and_the_most_are_in_the_outer_bins_whatever_the_range() -> None:
    for least, most in (
        (0.0, 1.0),
        (-1.7e308, 1.7e308),
        (1.0, 1 + 2**-52),
        (-(2.0**63), 2.0**63),
        (1e9, 1e9 + 1e-6),
    ):
        bins = made([least], [most, most]).bins(16)
        assert (bins[0], bins[-1]) == (1, 2)
