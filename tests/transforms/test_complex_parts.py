"""Complex tensors are split into real and imaginary parts, and joined again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Collision, NothingToDo, Refused
from ckpttool.tensors import values as tensor_values
from ckpttool.transforms.layout import join_complex, split_complex
from tests.support.comparing import assert_same, values
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.layouts import numbers
from tests.support.saved import loaded, opened


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
    new, names = split_complex(opened({**state, "plain": numbers(2)}, tmp_path))
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
    split, _ = split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.pt")
    joined, names = join_complex(ckpttool.open(tmp_path / "split.pt"))
    assert names == tuple(key for key in state if key != "plain")
    assert_same(state, loaded(joined, tmp_path))


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_parts_that_went_through_safetensors_are_joined_by_value(
    dtype: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    monkeypatch.setattr("ckpttool.transforms.layout.CHUNK", chunk)
    state = layouts(dtype)
    split, _ = split_complex(opened(state, tmp_path))
    ckpttool.save(split, tmp_path / "split.safetensors")
    joined, _ = join_complex(ckpttool.open(tmp_path / "split.safetensors"))
    found = loaded(joined, tmp_path)
    assert sorted(found) == sorted(state)
    for key, whole in state.items():
        assert (found[key].dtype, found[key].shape) == (dtype, whole.shape)
        assert values(found[key]) == values(whole), key
    assert found["base"].data_ptr() == found["tied"].data_ptr()


def test_parts_written_by_torch_are_joined_as_torch_joins_them(tmp_path: Path) -> None:
    parts = {"a.imag": numbers(6).view(2, 3).t(), "a.real": -numbers(6).view(3, 2), "b": numbers(1)}
    joined, names = join_complex(opened(parts, tmp_path))
    found = loaded(joined, tmp_path)
    assert names == ("a",)
    assert torch.equal(found["a"], torch.complex(parts["a.real"], parts["a.imag"].contiguous()))
    assert list(found) == ["a", "b"]


def test_parts_expanded_beyond_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    parts = {f"a.{part}": torch.zeros(1).expand(1 << 20, 1 << 20) for part in ("real", "imag")}
    checkpoint = opened(parts, tmp_path)
    with pytest.raises(Refused, match="'a' is a view that expands 4 bytes"):
        join_complex(checkpoint)


def test_adjacent_parts_that_are_not_halves_of_one_number_are_joined_by_value(tmp_path: Path) -> None:
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
    joined, _ = join_complex(opened(parts, tmp_path))
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
        join_complex(opened(state, tmp_path))


def test_splitting_without_complex_tensors_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no tensor is complex"):
        split_complex(opened({"w": numbers(2)}, tmp_path))


@pytest.mark.parametrize("order", [["a", "a.imag"], ["a.imag", "a"]])
def test_a_part_whose_name_is_taken_is_refused(order: list[str], tmp_path: Path) -> None:
    both = {"a": complex_numbers(2), "a.imag": numbers(2)}
    with pytest.raises(Collision, match=r"'a' would be split into 'a\.imag', which already exists"):
        split_complex(opened({key: both[key] for key in order}, tmp_path))


def test_a_pair_whose_name_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Collision, match=r"'a\.real' and 'a\.imag' would be joined into 'a'"):
        join_complex(opened({"a.real": numbers(2), "a.imag": numbers(2), "a": numbers(1)}, tmp_path))


def test_big_endian_complex_numbers_are_split_and_joined_by_value(tmp_path: Path) -> None:
    pairs = np.array([1 + 2j, -3.5 + 4j], ">c8")
    body = dict_of({"z": tensor(storage(2, kind="ComplexFloatStorage"), (2,)), "n": tensor(storage(key="1"))})
    other = np.array([1, 2, 3, 4], ">f4").tobytes()
    torch_zip(tmp_path / "in.pt", body, {"0": pairs.tobytes(), "1": other}, byteorder="big")
    split, _ = split_complex(ckpttool.open(tmp_path / "in.pt"))
    ckpttool.save(split, tmp_path / "split.safetensors")
    assert load_file(tmp_path / "split.safetensors")["z.imag"].tolist() == [2, 4]
    for again in (split, ckpttool.open(tmp_path / "split.safetensors")):
        joined, _ = join_complex(again)
        assert loaded(joined, tmp_path)["z"].tolist() == [1 + 2j, -3.5 + 4j]


def test_big_endian_parts_are_joined_beside_other_big_endian_tensors(tmp_path: Path) -> None:
    raw = {key: np.array([key, 2, 3, 4], ">f4").tobytes() for key in (1.0, 5.0, 9.0)}
    body = dict_of({name: tensor(storage(key=str(i))) for i, name in enumerate(("z.real", "z.imag", "n"))})
    files = {str(i): each for i, each in enumerate(raw.values())}
    torch_zip(tmp_path / "in.pt", body, files, byteorder="big")
    joined, _ = join_complex(ckpttool.open(tmp_path / "in.pt"))
    found = loaded(joined, tmp_path)
    assert found["z"].tolist() == [1 + 5j, 2 + 2j, 3 + 3j, 4 + 4j]
    assert found["n"].tolist() == [9, 2, 3, 4]


def test_a_joined_tensor_keeps_requires_grad(tmp_path: Path) -> None:
    parts = {"a.real": numbers(2).requires_grad_(), "a.imag": numbers(2).requires_grad_()}
    joined, _ = join_complex(opened(parts, tmp_path))
    assert loaded(joined, tmp_path)["a"].requires_grad


@pytest.mark.parametrize("layout", ["rows", "turned"])
def test_any_range_of_joined_numbers_equals_that_range_of_the_whole(layout: str, tmp_path: Path) -> None:
    parts = {"a.real": numbers(40).reshape(5, 8), "a.imag": -numbers(40).reshape(5, 8)}
    state = parts if layout == "rows" else {name: part.t() for name, part in parts.items()}
    joined, _ = join_complex(opened(state, tmp_path))
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
def test_any_complex_view_survives_split_and_join(view: Any, conjugate: bool) -> None:
    seen = complex_numbers(60).as_strided(*view)
    seen = seen.conj() if conjugate else seen
    with tempfile.TemporaryDirectory() as folder:
        split, _ = split_complex(opened({"z": seen}, Path(folder)))
        ckpttool.save(split, Path(folder) / "split.pt")
        joined, _ = join_complex(ckpttool.open(Path(folder) / "split.pt"))
        assert_same({"z": seen}, loaded(joined, Path(folder)))
