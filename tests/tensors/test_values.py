"""The values of tensors that are not one range of bytes, against what torch makes of the same file."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

import ckpttool
from ckpttool.errors import Damaged, Refused
from ckpttool.tensors import to_torch
from ckpttool.tensors import values as tensor_values
from ckpttool.tensors.ref import TensorRef
from ckpttool.tensors.values import require_bounded, stream, without_repeats
from tests.support.comparing import values
from tests.support.layouts import LAYOUTS, LAZY, WIDTHS, big_endian, numbers


def stored(tensor: torch.Tensor, folder: Path) -> TensorRef:
    """The tensor as this library sees it in a file of torch's."""
    torch.save({"t": tensor}, folder / "t.pt")
    return ckpttool.open(folder / "t.pt").state().tensors["t"]


def streamed(ref: TensorRef) -> bytes:
    return b"".join(bytes(piece) for piece in stream(ref))


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16, 48, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_every_layout_come_in_row_major_order_whatever_the_chunk(
    layout: str, chunk: int, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    assert streamed(stored(LAYOUTS[layout], tmp_path)) == values(LAYOUTS[layout])


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_width_is_gathered(dtype: torch.dtype, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 64)
    tensor = numbers(6, 5, dtype=dtype).t()
    assert streamed(stored(tensor, tmp_path)) == values(tensor)


def test_a_large_tensor_comes_in_pieces(tmp_path: Path) -> None:
    tensor = numbers(1300, 1000).t()
    pieces = [len(piece) for piece in stream(stored(tensor, tmp_path))]
    assert sum(pieces) == 5_200_000
    assert max(pieces) <= tensor_values.CHUNK
    assert streamed(stored(tensor, tmp_path)) == values(tensor)


def test_a_file_that_shrinks_while_a_view_of_it_is_gathered_is_damaged(tmp_path: Path) -> None:
    tensor = stored(numbers(1300, 1000).t(), tmp_path)
    os.truncate(tensor.storage.data.path, 4096)
    with pytest.raises(Damaged, match="became shorter"):
        list(stream(tensor))


strided = st.integers(1, 4).flatmap(
    lambda rank: st.tuples(
        st.lists(st.integers(1, 4), min_size=rank, max_size=rank),
        st.lists(st.integers(0, 20), min_size=rank, max_size=rank),
        st.integers(0, 20),
    )
)


@given(strided, st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
def test_any_view_is_read_as_torch_reads_it(
    view: tuple[list[int], list[int], int], dtype: torch.dtype
) -> None:
    tensor = numbers(300, dtype=dtype).as_strided(*view)
    with tempfile.TemporaryDirectory() as folder:
        assert streamed(stored(tensor, Path(folder))) == values(tensor)


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16])
@pytest.mark.parametrize("what", LAZY)
def test_lazy_bits_are_resolved(what: str, chunk: int, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    ref = stored(LAZY[what], tmp_path)
    assert (ref.conj, ref.neg) == (LAZY[what].is_conj(), LAZY[what].is_neg())
    assert not ref.is_plain
    assert streamed(ref) == values(LAZY[what])


def test_a_small_storage_expanded_by_stride_0_is_refused_by_name(tmp_path: Path) -> None:
    ref = stored(torch.zeros(1).expand(1 << 20, 1 << 20), tmp_path)
    with pytest.raises(Refused, match=r"'t' is a view that expands 4 bytes to 4398046511104") as refusal:
        require_bounded("t", ref, hint="do this")
    assert refusal.value.hint == "do this"
    require_bounded("t", ref, most=1 << 42)


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 4), (0, 1)), ((2, 0), (0, 1)), ((4,), (1,)), ((5, 2), (0, 0))]
)
def test_repeats_of_stride_0_are_removed(
    shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    whole = torch.arange(4.0).as_strided(shape, stride)
    once, repeats = without_repeats(stored(whole, tmp_path))
    assert once.numel * repeats == whole.numel()
    assert set(streamed(once)) == set(values(whole))


def test_memory_stays_flat_while_a_strided_tensor_is_read(tmp_path: Path) -> None:
    ref = stored(numbers(6, 4 << 20).t(), tmp_path)  # 96 MiB
    tracemalloc.start()
    for _ in stream(ref):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(7, dtype=torch.float64),
        numbers(7, dtype=torch.int16),
        numbers(7, dtype=torch.bfloat16),
        numbers(7, dtype=torch.complex64),
        numbers(3, 4, dtype=torch.complex128).t(),
        numbers(4, 5).t(),
        numbers(7, dtype=torch.uint8),
        numbers(5, dtype=torch.complex64).conj(),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_a_file_of_a_big_endian_machine_has_the_values_that_torch_finds_in_it(
    tensor: torch.Tensor, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 32)
    path = big_endian(tensor, tmp_path / "big.pt")
    theirs = torch.load(path)["t"]
    assert values(theirs) == values(tensor), "the file is not what this test thinks"
    ref = ckpttool.open(path).state().tensors["t"]
    assert streamed(ref) == values(tensor)


def test_loading_values_that_must_be_made_takes_little_more_than_their_own_memory(tmp_path: Path) -> None:
    with ckpttool.open(big_endian(torch.zeros(1 << 21), tmp_path / "big.pt")) as checkpoint:
        tensors = [tensor for _, tensor in checkpoint.tensors()]
        tracemalloc.start()
        loaded = [to_torch.loaded_tensor("w", tensor) for tensor in tensors]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert loaded[0].nbytes == 1 << 23
    assert peak < (1 << 23) + (4 << 20)
