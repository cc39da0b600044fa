"""A tensor described as a view of a storage, against torch's own idea of it; and one made of chunks."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import Damaged
from ckpttool.tensors.chunks import TensorPart, assembled
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.tensors.ref import Computed, Storage, TensorRef
from ckpttool.tensors.source import ByteRange, Source
from tests.support.layouts import strided

FLOAT32 = DTYPES["float32"]


def source_of(path: Path) -> Source:
    return Source(str(path), os.open(path, os.O_RDONLY))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "bytes").write_bytes(bytes(range(100)))
    return source_of(tmp_path / "bytes")


def a_storage() -> Storage:
    return Storage(ByteRange(source_of(Path(os.devnull)), 0, 1 << 20), "FloatStorage")


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_has_the_width_that_torch_gives_it(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    assert DTYPES[name].itemsize == dtype.itemsize


def test_no_element_type_that_torch_saves_is_unknown() -> None:
    known = {str(each).removeprefix("torch.") for each in vars(torch).values() if type(each) is torch.dtype}
    unsaved = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}  # torch can't save those
    assert not known - unsaved - DTYPES.keys()


views = strided(ranks=(0, 3), least=0, stride=12)


@given(views)
def test_contiguity_and_extent_are_those_of_torch(view: tuple[list[int], list[int], int]) -> None:
    shape, stride, offset = view
    theirs = torch.zeros(200).as_strided(shape, stride, offset)
    mine = TensorRef(a_storage(), FLOAT32, tuple(shape), tuple(stride), offset)
    assert mine.is_contiguous == theirs.is_contiguous()
    assert (mine.numel, mine.nbytes) == (theirs.numel(), theirs.nbytes)
    if theirs.numel():
        last = int(torch.arange(200).as_strided(shape, stride, offset).max())
        assert tuple(mine.span) == (4 * offset, 4 * (1 + last))


@given(st.lists(st.integers(0, 4), max_size=4))
def test_a_contiguous_tensor_has_the_strides_that_torch_gives_it(shape: list[int]) -> None:
    mine = TensorRef.contiguous(a_storage(), FLOAT32, tuple(shape))
    assert mine.stride == torch.empty(shape).stride()


def test_reading_past_the_end_is_refused_and_not_cut(source: Source) -> None:
    assert source.read(98, 2) == b"bc"
    for offset, nbytes in [(99, 2), (101, 0), (-1, 1), (0, -1), (1 << 63, 1)]:
        with pytest.raises(Damaged, match="ends at byte 100"):
            source.read(offset, nbytes)


def test_chunks_go_through_one_buffer_and_add_up_to_the_range(source: Source) -> None:
    chunks = [bytes(chunk) for chunk in ByteRange(source, 10, 50).chunks(memoryview(bytearray(7)))]
    assert [len(chunk) for chunk in chunks] == [7] * 7 + [1]
    assert b"".join(chunks) == bytes(range(10, 60))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(source: Source) -> None:
    os.truncate(source.path, 10)
    with pytest.raises(Damaged, match="became shorter"):
        source.read(0, 100)
    with pytest.raises(Damaged, match="became shorter"):
        list(ByteRange(source, 0, 100).chunks(memoryview(bytearray(64))))


def test_a_source_that_is_closed_twice_or_dropped_gives_its_descriptor_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    closed, dropped = source_of(tmp_path / "file"), source_of(tmp_path / "file")
    descriptors = closed.fd, dropped.fd
    closed.close()
    closed.close()
    del dropped
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# Tensors made of chunks: any cut of any box, chunks made of chunks, read from any place on.

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 40, 150]), min_size=1, max_size=3).map(tuple)
"""Rows of 4 to 600 bytes: of those that are put in place one by one, and together."""


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], depth: int = 2) -> Any:
    """Draw how a box is cut along one axis, and each part of it again; None leaves it whole."""
    axis = draw(st.integers(0, len(shape) - 1))
    if not depth or shape[axis] < 2:
        return None
    places = draw(st.sets(st.integers(1, shape[axis] - 1), min_size=1, max_size=3))
    ends = [0, *sorted(places), shape[axis]]
    inner = []
    for start, stop in itertools.pairwise(ends):
        inner.append((start, stop, draw(cuts((*shape[:axis], stop - start, *shape[axis + 1 :]), depth - 1))))
    return axis, inner


def written(values: np.ndarray[Any, Any]) -> Source:
    """Return an open file of the values."""
    with tempfile.TemporaryFile() as file:
        file.write(values.tobytes())
        file.flush()
        return Source("values", os.dup(file.fileno()))


def built(values: np.ndarray[Any, Any], cut: Any) -> TensorRef:
    """Return a tensor of these values, a file for each box; a cut of a cut is a chunk of chunks."""
    if cut is None:
        data = ByteRange(written(values), 0, values.nbytes)
        return TensorRef.contiguous(Storage(data, "FloatStorage"), FLOAT32, values.shape)
    axis, inner = cut
    parts = []
    for start, stop, below in inner:
        box = values[(slice(None),) * axis + (slice(start, stop),)]
        begin = tuple(start if i == axis else 0 for i in range(values.ndim))
        parts.append(TensorPart(begin, built(np.ascontiguousarray(box), below)))
    return assembled("w", "folder", FLOAT32, values.shape, parts)


def filled(tensor: TensorRef, first: int, count: int) -> np.ndarray[Any, Any]:
    """Return elements of a tensor, read by way of the caller's memory as the copier does."""
    out = np.empty(count, np.float32)
    data = tensor.data.part(first * 4, count * 4)
    for _ in data.chunks(memoryview(out).cast("B")):
        pass
    return out


@given(st.data())
def test_chunks_of_chunks_are_the_whole_from_any_place_on(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensor = built(values, data.draw(cuts(shape)))
    for _ in range(2):
        assert np.array_equal(filled(tensor, 0, values.size), values.ravel())
    first = data.draw(st.integers(0, values.size - 1))
    count = data.draw(st.integers(1, values.size - first))
    assert np.array_equal(filled(tensor, first, count), values.ravel()[first : first + count])


def test_threads_put_chunks_of_one_tensor_together_at_once() -> None:
    """Each thread has memory of its own for what it puts together, and chunks of chunks need it twice."""
    values = np.arange(64 * 400, dtype=np.float32).reshape(64, 400)
    inner = (1, [(0, 9, None), (9, 167, None)])
    tensor = built(values, (1, [(0, 133, None), (133, 300, inner), (300, 400, None)]))
    assert isinstance(tensor.storage.data, Computed)
    wrong: list[int] = []

    def read(start: int) -> None:
        places = range(start, values.size - 500, 997)
        flat = values.ravel()
        wrong.extend(i for i in places if not np.array_equal(filled(tensor, i, 500), flat[i : i + 500]))

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
