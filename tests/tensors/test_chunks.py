"""Tensors made of chunks: any cut of any box, chunks made of chunks, read from any place on."""

import itertools
import os
import tempfile
import threading
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.tensors.chunks import Part, assembled
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.tensors.ref import ByteRange, Computed, Source, Storage, TensorRef

FLOAT32 = DTYPES["float32"]

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
        parts.append(Part(begin, built(np.ascontiguousarray(box), below)))
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
    tensor = built(
        values, (1, [(0, 133, None), (133, 300, (1, [(0, 9, None), (9, 167, None)])), (300, 400, None)])
    )
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
