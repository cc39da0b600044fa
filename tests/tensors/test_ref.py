"""A tensor described as a view of a storage, against torch's own idea of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import Damaged
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.tensors.ref import ByteRange, Source, Storage, TensorRef


def source_of(path: Path) -> Source:
    return Source(str(path), os.open(path, os.O_RDONLY))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "bytes").write_bytes(bytes(range(100)))
    return source_of(tmp_path / "bytes")


def ref(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, dtype: str = "float32"
) -> TensorRef:
    with open(os.devnull, "rb") as nothing:
        source = Source("nothing", os.dup(nothing.fileno()))
    return TensorRef(
        Storage(ByteRange(source, 0, 1 << 20), "FloatStorage"), DTYPES[dtype], shape, stride, offset
    )


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_has_the_width_that_torch_gives_it(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    assert DTYPES[name].itemsize == dtype.itemsize


def test_no_element_type_that_torch_saves_is_unknown() -> None:
    named = {
        str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    of_a_few_bits = {
        f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
    }  # torch can't save those
    assert not named - of_a_few_bits - DTYPES.keys()


views = st.integers(0, 3).flatmap(
    lambda rank: st.tuples(
        st.lists(st.integers(0, 4), min_size=rank, max_size=rank),
        st.lists(st.integers(0, 12), min_size=rank, max_size=rank),
        st.integers(0, 20),
    )
)


@given(views)
def test_contiguity_and_extent_are_those_of_torch(view: tuple[list[int], list[int], int]) -> None:
    shape, stride, offset = view
    theirs = torch.zeros(200).as_strided(shape, stride, offset)
    mine = ref(tuple(shape), tuple(stride), offset)
    assert mine.is_contiguous == theirs.is_contiguous()
    assert mine.numel == theirs.numel()
    assert mine.nbytes == theirs.nbytes
    if theirs.numel():
        assert mine.span[0] == 4 * offset
        assert mine.span[1] == 4 * (1 + int(torch.arange(200).as_strided(shape, stride, offset).max()))


@given(st.lists(st.integers(0, 4), max_size=4))
def test_a_contiguous_tensor_has_the_strides_that_torch_gives_it(shape: list[int]) -> None:
    storage = ref((), ()).storage
    assert (
        TensorRef.contiguous(storage, DTYPES["float32"], tuple(shape)).stride == torch.empty(shape).stride()
    )


def test_reading_past_the_end_is_refused_and_not_cut(source: Source) -> None:
    assert source.read(98, 2) == b"bc"
    for offset, nbytes in [(99, 2), (101, 0), (-1, 1), (0, -1), (1 << 63, 1)]:
        with pytest.raises(Damaged, match="ends at byte 100"):
            source.read(offset, nbytes)


def test_chunks_go_through_one_buffer_and_add_up_to_the_range(source: Source) -> None:
    buffer = bytearray(7)
    chunks = [bytes(chunk) for chunk in ByteRange(source, 10, 50).chunks(memoryview(buffer))]
    assert [len(chunk) for chunk in chunks] == [7] * 7 + [1]
    assert b"".join(chunks) == bytes(range(10, 60))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(100))
    source = source_of(path)
    path.write_bytes(bytes(10))
    with pytest.raises(Damaged, match="became shorter"):
        source.read(0, 100)
    with pytest.raises(Damaged, match="became shorter"):
        list(ByteRange(source, 0, 100).chunks(memoryview(bytearray(64))))


def test_a_source_closes_its_descriptor_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    source = source_of(tmp_path / "file")
    fd = source.fd
    source.close()
    source.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_dropped_source_gives_its_descriptor_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    source = source_of(tmp_path / "file")
    fd = source.fd
    del source
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
