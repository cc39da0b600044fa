"""Checkpoints with fewer keys, complex tensors split and joined, or the state alone."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpttool
from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.errors import Collision, NoState, NothingToDo, Refused
from ckpttool.tensors import values as tensor_values
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms import complex_parts, selection
from tests.support.comparing import assert_same, values
from tests.support.crafting import dict_of, storage, tensor, torch_zip


def opened(value: Any, folder: Path) -> Checkpoint:
    torch.save(value, folder / "in.pt")
    return ckpttool.open(folder / "in.pt")


def loaded(checkpoint: Checkpoint, folder: Path) -> Any:
    """Return what torch reads from the checkpoint written as a `.pt` file."""
    ckpttool.save(checkpoint, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt", weights_only=False)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


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
def test_keys_are_chosen_by_shell_patterns(
    only: list[str], exclude: list[str], kept: list[str], tmp_path: Path
) -> None:
    new, selected = selection.select(opened(STATE, tmp_path), only=only, exclude=exclude)
    assert list(loaded(new, tmp_path)) == kept
    assert selected.kept == tuple(kept)
    assert selected.left_out == tuple(key for key in STATE if key not in kept)


def test_the_rest_of_the_checkpoint_stays_when_keys_are_chosen(tmp_path: Path) -> None:
    state = OrderedDict(STATE)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    new, _ = selection.select(opened({"model": state, "epoch": 3}, tmp_path), only=["fc.*"])
    found = loaded(new, tmp_path)
    assert list(found["model"]) == ["fc.w", "fc.b"]
    assert found["model"]._metadata == {"": {"version": 1}}
    assert found["epoch"] == 3


def test_patterns_are_case_sensitive(tmp_path: Path) -> None:
    new, _ = selection.select(opened({"A": numbers(1), "a": numbers(1)}, tmp_path), only=["a"])
    assert list(loaded(new, tmp_path)) == ["a"]


@pytest.mark.parametrize("which", ["only", "exclude"])
def test_a_pattern_that_matches_no_key_is_nothing_to_do(which: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=r"no key matches 'head\.\*'") as nothing:
        selection.select(opened(STATE, tmp_path), **{which: ["fc.*", "head.*"]})
    assert "stem.w" in str(nothing.value.hint)


def test_no_key_left_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no key would be left"):
        selection.select(opened(STATE, tmp_path), exclude=["*"])


def test_an_empty_state_has_no_matching_key(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no key matches"):
        selection.select(opened({}, tmp_path), only=["*"])


# complex


def complex_numbers(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    real = torch.arange(count, dtype=torch.float32)
    return torch.complex(real, -real - 1).to(dtype).reshape(shape)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = complex_numbers(4, 6, dtype=dtype)
    return {
        "base": base,
        "tied": base,
        "turned": base.t(),
        "row": base[1],
        "column": base[:, 3],
        "corner": base[1:3, 2:5],
        "scalar": base[2, 3],
        "of its own": torch.tensor(1 - 2j, dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "empty view": base[4:],
        "one row": base[:1],
        "expanded": complex_numbers(1, 3, dtype=dtype).expand(4, 3),
        "conjugate": base.conj(),
        "conjugate transposed": base.mH,
        "conjugate scalar": base[1, 1].conj(),
    }


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_tensors_are_split_into_their_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    state = layouts(dtype)
    new, names = selection.split_complex(opened({**state, "plain": numbers(2)}, tmp_path))
    found = loaded(new, tmp_path)
    assert names == tuple(state)
    assert list(found) == [*(f"{key}.{part}" for key in state for part in ("real", "imag")), "plain"]
    for key, whole in state.items():
        resolved = whole.resolve_conj()
        for part, wanted in (("real", resolved.real), ("imag", resolved.imag)):
            assert found[f"{key}.{part}"].dtype == wanted.dtype
            assert found[f"{key}.{part}"].shape == wanted.shape
            assert values(found[f"{key}.{part}"]) == values(wanted), (key, part)


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_splitting_and_joining_restores_a_pt_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Views, ties and conjugates survive; two names of one tensor object become two objects."""
    state = {**layouts(dtype), "plain": numbers(2)}
    state["tied"] = state["base"].view(4, 6)
    split, _ = selection.split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.pt")
    joined, names = selection.join_complex(ckpttool.open(tmp_path / "split.pt"))
    assert names == tuple(key for key in state if key != "plain")
    assert_same(state, loaded(joined, tmp_path))


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_parts_that_went_through_safetensors_are_joined_by_value(
    dtype: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    monkeypatch.setattr(complex_parts, "CHUNK", chunk)
    state = layouts(dtype)
    split, _ = selection.split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.safetensors")
    joined, _ = selection.join_complex(ckpttool.open(tmp_path / "split.safetensors"))
    found = loaded(joined, tmp_path)
    assert sorted(found) == sorted(state)
    for key, whole in state.items():
        assert (found[key].dtype, found[key].shape) == (dtype, whole.shape)
        assert values(found[key]) == values(whole), key
    assert found["base"].data_ptr() == found["tied"].data_ptr()


def test_parts_written_by_torch_are_joined_as_torch_joins_them(tmp_path: Path) -> None:
    parts = {"a.imag": numbers(6).view(2, 3).t(), "a.real": -numbers(6).view(3, 2), "b": numbers(1)}
    joined, names = selection.join_complex(opened(parts, tmp_path))
    found = loaded(joined, tmp_path)
    assert names == ("a",)
    assert torch.equal(found["a"], torch.complex(parts["a.real"], parts["a.imag"].contiguous()))
    assert list(found) == ["a", "b"]


def test_parts_expanded_beyond_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    parts = {
        "a.real": torch.zeros(1).expand(1 << 20, 1 << 20),
        "a.imag": torch.zeros(1).expand(1 << 20, 1 << 20),
    }
    checkpoint = opened(parts, tmp_path)
    with pytest.raises(Refused, match="'a' is a view that expands 4 bytes"):
        selection.join_complex(checkpoint)


def test_adjacent_parts_that_are_not_halves_of_one_number_are_joined_by_value(
    tmp_path: Path,
) -> None:
    base = numbers(12)
    parts = {
        "odd start.real": base[1::2],
        "odd start.imag": torch.cat([base[2::2], base[:1]]),
        "odd.real": base[1:10:2],
        "odd.imag": base[2:11:2],
        "rows.real": base[0:4],
        "rows.imag": base[1:5],
        "swapped.imag": base[0::2],
        "swapped.real": base[1::2],
        "one.real": base[4:5],
        "one.imag": base[5:6],
    }
    joined, _ = selection.join_complex(opened(parts, tmp_path))
    found = loaded(joined, tmp_path)
    for key, whole in found.items():
        assert torch.equal(whole, torch.complex(parts[f"{key}.real"], parts[f"{key}.imag"])), key


@pytest.mark.parametrize(
    "state",
    [
        {"a.real": numbers(2), "b": numbers(2)},
        {"a.real": numbers(2), "a.imag": numbers(3)},
        {"a.real": numbers(2), "a.imag": numbers(2).double()},
        {"a.real": torch.arange(2), "a.imag": torch.arange(2)},
        {"a.real": numbers(2).bfloat16(), "a.imag": numbers(2).bfloat16()},
        {"real": numbers(2), "imag": numbers(2)},
    ],
    ids=["no partner", "other shape", "other type", "integers", "no such complex type", "no name"],
)
def test_tensors_that_are_no_pair_are_not_joined(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no pair of tensors"):
        selection.join_complex(opened(state, tmp_path))


def test_splitting_without_complex_tensors_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no tensor is complex"):
        selection.split_complex(opened(STATE, tmp_path))


@pytest.mark.parametrize("order", [["a", "a.imag"], ["a.imag", "a"]])
def test_a_part_whose_name_is_taken_is_refused(order: list[str], tmp_path: Path) -> None:
    both = {"a": complex_numbers(2), "a.imag": numbers(2)}
    with pytest.raises(Collision, match=r"'a' would be split into 'a\.imag', which already exists"):
        selection.split_complex(opened({key: both[key] for key in order}, tmp_path))


def test_a_pair_whose_name_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Collision, match=r"'a\.real' and 'a\.imag' would be joined into 'a'"):
        selection.join_complex(
            opened({"a.real": numbers(2), "a.imag": numbers(2), "a": numbers(1)}, tmp_path)
        )


def test_big_endian_complex_numbers_are_split_and_joined_by_value(tmp_path: Path) -> None:
    pairs = np.array([1 + 2j, -3.5 + 4j], ">c8")
    body = dict_of({"z": tensor(storage(2, kind="ComplexFloatStorage"), (2,)), "n": tensor(storage(key="1"))})
    other = np.array([1, 2, 3, 4], ">f4").tobytes()
    torch_zip(tmp_path / "in.pt", body, {"0": pairs.tobytes(), "1": other}, byteorder="big")
    split, _ = selection.split_complex(ckpttool.open(tmp_path / "in.pt"))
    ckpttool.save(split, tmp_path / "split.safetensors")
    assert load_file(tmp_path / "split.safetensors")["z.imag"].tolist() == [2, 4]
    for again in (split, ckpttool.open(tmp_path / "split.safetensors")):
        joined, _ = selection.join_complex(again)
        assert loaded(joined, tmp_path)["z"].tolist() == [1 + 2j, -3.5 + 4j]


def test_big_endian_parts_are_joined_beside_other_big_endian_tensors(tmp_path: Path) -> None:
    raw = {key: np.array([key, 2, 3, 4], ">f4").tobytes() for key in (1.0, 5.0, 9.0)}
    body = dict_of({name: tensor(storage(key=str(i))) for i, name in enumerate(("z.real", "z.imag", "n"))})
    torch_zip(
        tmp_path / "in.pt", body, {str(i): each for i, each in enumerate(raw.values())}, byteorder="big"
    )
    joined, _ = selection.join_complex(ckpttool.open(tmp_path / "in.pt"))
    found = loaded(joined, tmp_path)
    assert found["z"].tolist() == [1 + 5j, 2 + 2j, 3 + 3j, 4 + 4j]
    assert found["n"].tolist() == [9, 2, 3, 4]


def test_a_joined_tensor_keeps_requires_grad(tmp_path: Path) -> None:
    parts = {"a.real": numbers(2).requires_grad_(), "a.imag": numbers(2).requires_grad_()}
    joined, _ = selection.join_complex(opened(parts, tmp_path))
    assert loaded(joined, tmp_path)["a"].requires_grad


@pytest.mark.parametrize("layout", ["rows", "turned"])
def test_any_range_of_joined_numbers_equals_that_range_of_the_whole(layout: str, tmp_path: Path) -> None:
    parts = {"a.real": numbers(40).reshape(5, 8), "a.imag": -numbers(40).reshape(5, 8)}
    state = parts if layout == "rows" else {name: part.t() for name, part in parts.items()}
    joined, _ = selection.join_complex(opened(state, tmp_path))
    (whole,) = joined.state().tensors.values()
    data, size = whole.storage.data, whole.dtype.itemsize
    everything = data.read()
    for first in range(0, 40 * size, size):
        for end in range(first, 40 * size + 1, size):
            assert data.part(first, end - first).read() == everything[first:end]


@given(
    st.lists(st.integers(1, 3), max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)),
            st.integers(0, 9),
        )
    ),
    st.booleans(),
)
def test_any_complex_view_survives_split_and_join(
    view: tuple[list[int], list[int], int], conjugate: bool
) -> None:
    seen = complex_numbers(60).as_strided(*view)
    seen = seen.conj() if conjugate else seen
    with tempfile.TemporaryDirectory() as folder:
        split, _ = selection.split_complex(opened({"z": seen}, Path(folder)))
        ckpttool.save(split, Path(folder) / "split.pt")
        joined, _ = selection.join_complex(ckpttool.open(Path(folder) / "split.pt"))
        assert_same({"z": seen}, loaded(joined, Path(folder)))


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
    wanted = torch.load(_saved(RUN, tmp_path))
    gone(wanted)
    assert_same(wanted, loaded(selection.drop(opened(RUN, tmp_path), [name]), tmp_path))


def _saved(value: Any, folder: Path) -> Path:
    torch.save(value, folder / "given.pt")
    return folder / "given.pt"


def test_several_entries_are_dropped_at_once_and_order_and_versions_stay(tmp_path: Path) -> None:
    state = OrderedDict(a=numbers(1), b=numbers(1), c=numbers(1))
    state._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    found = loaded(selection.drop(opened(state, tmp_path), ["c", "a"]), tmp_path)
    assert list(found) == ["b"]
    assert found._metadata == {"": {"version": 2}}


@pytest.mark.parametrize(
    "name", ["nothing", "model.v", "optimizer.param_groups.0", "optimizer.param_groups.1.x", "", "model."]
)
def test_dropping_a_missing_name_is_nothing_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match=f"holds nothing named '{name}'"):
        selection.drop(opened(RUN, tmp_path), [name])


# slim


def storage_bytes(found: dict[str, torch.Tensor]) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found.values()}.values()
    )


def test_slim_keeps_only_the_state(tmp_path: Path) -> None:
    state = OrderedDict(a=numbers(3), n=torch.tensor(1))
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    found = loaded(selection.slim(opened({"epoch": 1, "model": state}, tmp_path)), tmp_path)
    assert_same(state, found)


def test_slim_cuts_bytes_that_no_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100_000)
    state = {"part": big[50_000:50_003], "row": numbers(100).view(10, 10)[3], "own": numbers(5)}
    found = loaded(selection.slim(opened(state, tmp_path)), tmp_path)
    assert {key: each.tolist() for key, each in found.items()} == {k: t.tolist() for k, t in state.items()}
    assert storage_bytes(found) < 200
    assert (tmp_path / "out.pt").stat().st_size < 4_000 < (tmp_path / "in.pt").stat().st_size


def test_slim_keeps_ties_and_overlaps_and_strides(tmp_path: Path) -> None:
    big = numbers(1000)
    state = {
        "a": big[100:200],
        "b": big[150:160],
        "c": big[100:200].view(10, 10).t(),
        "d": big[101:190:7],
        "empty": big[5:5],
    }
    found = loaded(selection.slim(opened(state, tmp_path)), tmp_path)
    for key, before in state.items():
        assert found[key].stride() == before.stride()
        assert values(found[key]) == values(before), key
    shared = [found[key].untyped_storage() for key in "abcd"]
    assert len({each.data_ptr() for each in shared}) == 1
    assert shared[0].nbytes() <= 4 * 108
    assert found["b"].data_ptr() - found["a"].data_ptr() == 200


def test_slim_keeps_a_storage_whole_that_a_nested_tensor_uses(tmp_path: Path) -> None:
    big = numbers(100)
    state = {"w": big[10:20], "_extra_state": {"all": big}}
    new = selection.slim(opened({"model": state}, tmp_path), state="model")
    assert_same(torch.load(_saved(state, tmp_path)), loaded(new, tmp_path))


def test_slim_trims_storages_that_only_empty_tensors_use(tmp_path: Path) -> None:
    found = loaded(selection.slim(opened({"e": numbers(100)[7:7], "w": numbers(1)}, tmp_path)), tmp_path)
    assert found["e"].shape == (0,)
    assert storage_bytes(found) == 4


def test_slim_keeps_parameters_and_types(tmp_path: Path) -> None:
    big = torch.randn(64)
    state = {"p": torch.nn.Parameter(big[:2]), "c": complex_numbers(9)[4], "b": torch.tensor([True])}
    found = loaded(selection.slim(opened(state, tmp_path)), tmp_path)
    assert isinstance(found["p"], torch.nn.Parameter)
    assert {key: values(each) for key, each in found.items()} == {k: values(t) for k, t in state.items()}
    assert storage_bytes(found) < 50


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), min_size=1, max_size=5),
    st.sampled_from([torch.uint8, torch.int16, torch.float64, torch.complex128]),
)
def test_any_slimmed_state_keeps_its_values(stretches: list[tuple[int, int]], dtype: torch.dtype) -> None:
    big = torch.arange(100).to(dtype)
    state = {str(i): big[begin : begin + count] for i, (begin, count) in enumerate(stretches)}
    with tempfile.TemporaryDirectory() as folder:
        found = loaded(selection.slim(opened(state, Path(folder))), Path(folder))
        assert {key: values(each) for key, each in found.items()} == {k: values(t) for k, t in state.items()}
        spanned = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in state.values() if t.numel()]
        most = max(e for _, e in spanned) - min(b for b, _ in spanned) if spanned else 0
        assert storage_bytes({key: each for key, each in found.items() if each.numel()}) <= most + 30


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    checkpoint = opened({"model": STATE}, tmp_path)
    for change in (selection.select, selection.slim, selection.split_complex, selection.join_complex):
        with pytest.raises(NoState, match="no state named 'ema'"):
            change(checkpoint, state="ema")


def test_a_file_nested_too_deep_to_copy_is_refused_by_every_change(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(250):
        nested = [nested]
    state = {"w": numbers(2), "z": complex_numbers(2), "a.real": numbers(1), "a.imag": numbers(1)}
    checkpoint = opened({"model": state, "deep": nested, "epoch": 1}, tmp_path)
    for change in (
        lambda: selection.select(checkpoint, only=["w"]),
        lambda: selection.cast(checkpoint, DTYPES["float16"]),
        lambda: selection.split_complex(checkpoint),
        lambda: selection.join_complex(checkpoint),
        lambda: selection.drop(checkpoint, ["epoch"]),
    ):
        with pytest.raises(Refused, match="nested too deeply"):
            change()
    assert list(loaded(selection.slim(checkpoint), tmp_path)) == list(state)
    assert list(loaded(selection.drop(selection.slim(checkpoint), ["z"]), tmp_path)) == [
        "w",
        "a.real",
        "a.imag",
    ]
