"""Checkpoints with fewer keys, without some entries, or the state alone."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import NoState, NothingToDo, Refused
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms import layout, selection
from tests.support.comparing import assert_same, values
from tests.support.layouts import numbers
from tests.support.saved import loaded, opened, saved

# select


STATE = {f"{part}.{kind}": numbers(2) for part in ("stem", "layer1.0", "layer1.1", "fc") for kind in "wb"}


@pytest.mark.parametrize(
    ("only", "exclude", "kept"),
    [
        (["layer1.*"], [], ["layer1.0.w", "layer1.0.b", "layer1.1.w", "layer1.1.b"]),
        (["stem.*", "fc.*"], [], ["stem.w", "stem.b", "fc.w", "fc.b"]),
        ([], ["layer1.*", "*.b"], ["stem.w", "fc.w"]),
        (["layer1.*"], ["*.1.*"], ["layer1.0.w", "layer1.0.b"]),
        (["fc.[!b]"], [], ["fc.w"]),
        (["stem.?"], [], ["stem.w", "stem.b"]),
    ],
)
def test_keys_are_chosen_by_shell_patterns(only: Any, exclude: Any, kept: Any, tmp_path: Path) -> None:
    new, selected = selection.select(opened(STATE, tmp_path), only=only, exclude=exclude)
    assert list(loaded(new, tmp_path)) == kept
    assert selected.kept == tuple(kept)
    assert selected.left_out == tuple(key for key in STATE if key not in kept)


def versioned(**state: Any) -> Any:
    """Return a state with module versions."""
    made = OrderedDict(state)
    made._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return made


def test_the_rest_of_the_checkpoint_stays_when_keys_are_chosen(tmp_path: Path) -> None:
    tree = {"model": versioned(**STATE), "epoch": 3}
    found = loaded(selection.select(opened(tree, tmp_path), only=["fc.*"])[0], tmp_path)
    assert (list(found["model"]), found["model"]._metadata) == (["fc.w", "fc.b"], {"": {"version": 2}})
    assert found["epoch"] == 3
    new, _ = selection.select(opened({"A": numbers(1), "a": numbers(1)}, tmp_path), only=["a"])
    assert list(loaded(new, tmp_path)) == ["a"]  # patterns are case-sensitive


@pytest.mark.parametrize(
    ("tree", "patterns", "said"),
    [
        (STATE, {"only": ["fc.*", "head.*"]}, r"no key matches 'head\.\*'"),
        (STATE, {"exclude": ["fc.*", "head.*"]}, r"no key matches 'head\.\*'"),
        (STATE, {"exclude": ["*"]}, "no key would be left"),
        ({}, {"only": ["*"]}, "no key matches"),
    ],
)
def test_patterns_that_leave_nothing_to_do(tree: Any, patterns: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=said) as nothing:
        selection.select(opened(tree, tmp_path), **patterns)
    assert "head" not in said or "stem.w" in str(nothing.value.hint)


# drop


RUN = {
    "model": {"w": numbers(2)},
    "optimizer": {"state": {0: {"exp_avg": numbers(2), "step": 3}}, "param_groups": [{"lr": 0.1, "x": 1}]},
    "config": {"data.root": "/x", "data": {"root": 1, "kept": 2}},
    7: "seven",
    "epoch": 3,
}


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("epoch", lambda run: run.pop("epoch")),
        ("optimizer", lambda run: run.pop("optimizer")),
        ("model.w", lambda run: run["model"].pop("w")),
        ("config.data.root", lambda run: run["config"].pop("data.root")),
        ("config.data.kept", lambda run: run["config"]["data"].pop("kept")),
        ("optimizer.state.0", lambda run: run["optimizer"]["state"].pop(0)),
        ("optimizer.state.0.step", lambda run: run["optimizer"]["state"][0].pop("step")),
        ("optimizer.param_groups.0.x", lambda run: run["optimizer"]["param_groups"][0].pop("x")),
        ("7", lambda run: run.pop(7)),
    ],
)
def test_an_entry_is_dropped_by_its_dotted_name(name: str, gone: Any, tmp_path: Path) -> None:
    wanted = torch.load(saved(RUN, tmp_path / "given.pt"))
    gone(wanted)
    assert_same(wanted, loaded(selection.drop(opened(RUN, tmp_path), [name]), tmp_path))


def test_several_entries_are_dropped_at_once_and_order_and_versions_stay(tmp_path: Path) -> None:
    state = versioned(**dict.fromkeys("abc", numbers(1)))
    found = loaded(selection.drop(opened(state, tmp_path), ["c", "a"]), tmp_path)
    assert (list(found), found._metadata) == (["b"], {"": {"version": 2}})


def test_what_is_in_two_places_is_dropped_where_it_was_named_alone(tmp_path: Path) -> None:
    state = {"w": numbers(2), "x": numbers(3)}
    tree = {"model": state, "ema": state, "list": [state, {"a": state}], "same": None}
    tree["same"] = tree["list"]
    new = loaded(selection.drop(opened(tree, tmp_path), ["ema.x", "list.1.a.w", "ema.x", "model"]), tmp_path)
    assert (list(new["ema"]), list(new["list"][0]), list(new["list"][1]["a"])) == (["w"], ["w", "x"], ["x"])
    assert [list(new["same"][0]), list(new["same"][1]["a"]), "model" in new] == [
        ["w", "x"],
        ["w", "x"],
        False,
    ]
    assert new["ema"]["w"].data_ptr() == new["same"][0]["w"].data_ptr()


@pytest.mark.parametrize(
    "name", ["nothing", "model.v", "optimizer.param_groups.0", "optimizer.param_groups.1.x", "", "model."]
)
def test_dropping_a_missing_name_is_nothing_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=f"holds nothing named '{name}'"):
        selection.drop(opened(RUN, tmp_path), [name])


# slim


def storage_bytes(found: dict[str, torch.Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in found.values())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def slimmed(tree: Any, folder: Path, **given: Any) -> Any:
    return loaded(selection.slim(opened(tree, folder), **given), folder)


def all_values(state: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {key: (tensor.dtype, tensor.shape, values(tensor)) for key, tensor in state.items()}


def test_slim_keeps_only_the_state(tmp_path: Path) -> None:
    state = versioned(a=numbers(3), n=torch.tensor(1))
    assert_same(state, slimmed({"epoch": 1, "model": state}, tmp_path))


def test_slim_cuts_bytes_that_no_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100_000)
    state = {"part": big[50_000:50_003], "row": numbers(100).view(10, 10)[3], "own": numbers(5)}
    found = slimmed(state, tmp_path)
    assert all_values(found) == all_values(state)
    assert storage_bytes(found) < 200
    assert (tmp_path / "out.pt").stat().st_size < 4_000 < (tmp_path / "in.pt").stat().st_size


def test_slim_keeps_ties_and_overlaps_and_strides(tmp_path: Path) -> None:
    big = numbers(1000)
    state = {"a": big[100:200], "b": big[150:160], "c": big[100:200].view(10, 10).t()}
    state |= {"d": big[101:190:7], "empty": big[5:5]}
    found = slimmed(state, tmp_path)
    assert all_values(found) == all_values(state)
    assert all(found[key].stride() == before.stride() for key, before in state.items())
    shared = [found[key].untyped_storage() for key in "abcd"]
    assert len({each.data_ptr() for each in shared}) == 1
    assert shared[0].nbytes() <= 4 * 108
    assert found["b"].data_ptr() - found["a"].data_ptr() == 200


def test_slim_keeps_a_storage_whole_that_a_nested_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100)
    state = {"w": big[10:20], "_extra_state": {"all": big}}
    wanted = torch.load(saved(state, tmp_path / "given.pt"))
    assert_same(wanted, slimmed({"model": state}, tmp_path, state="model"))


def test_slim_keeps_parameters_and_types(tmp_path: Path) -> None:
    big = torch.randn(64)
    state = {"p": torch.nn.Parameter(big[:2]), "c": (1j * numbers(9))[4], "b": torch.tensor([True])}
    found = slimmed(state, tmp_path)
    assert isinstance(found["p"], torch.nn.Parameter)
    assert all_values(found) == all_values(state)
    assert storage_bytes(found) < 50
    found = slimmed({"e": numbers(100)[7:7], "w": numbers(1)}, tmp_path)  # "e" is empty
    assert (found["e"].shape, storage_bytes(found)) == ((0,), 4)


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), min_size=1, max_size=5),
    st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]),
)
def test_any_slimmed_state_keeps_its_values(stretches: list[tuple[int, int]], dtype: torch.dtype) -> None:
    big = torch.arange(100).to(dtype)
    state = {str(i): big[begin : begin + count] for i, (begin, count) in enumerate(stretches)}
    with tempfile.TemporaryDirectory() as folder:
        found = slimmed(state, Path(folder))
        assert all_values(found) == all_values(state)
        spanned = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values() if t.numel()]
        most = max(e for _, e in spanned) - min(b for b, _ in spanned) if spanned else 0
        assert storage_bytes({key: each for key, each in found.items() if each.numel()}) <= most + 30


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    checkpoint = opened({"model": STATE}, tmp_path)
    for change in (selection.select, selection.slim, layout.split_complex, layout.join_complex):
        with pytest.raises(NoState, match="no state named 'ema'"):
            change(checkpoint, state="ema")


def test_a_file_nested_too_deep_to_copy_is_refused_by_every_change(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(250):
        nested = [nested]
    state = {"w": numbers(2), "z": 1j * numbers(2), "a.real": numbers(1), "a.imag": numbers(1)}
    checkpoint = opened({"model": state, "deep": nested, "epoch": 1}, tmp_path)
    for change in (
        lambda: selection.select(checkpoint, only=["w"]),
        lambda: selection.cast(checkpoint, DTYPES["float16"]),
        lambda: layout.split_complex(checkpoint),
        lambda: layout.join_complex(checkpoint),
    ):
        with pytest.raises(Refused, match="nested too deeply"):
            change()
    assert list(loaded(selection.slim(checkpoint), tmp_path)) == list(state)
    less = selection.drop(selection.slim(checkpoint), ["z"])
    assert list(loaded(less, tmp_path)) == ["w", "a.real", "a.imag"]
