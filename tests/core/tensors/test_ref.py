"""A tensor described as a view of a storage, or put together from parts; and its values."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

import ckpttool
from ckpttool.core.tensors import values as tensor_values
from ckpttool.core.tensors import values as to_torch
from ckpttool.core.tensors.cast import Caster
from ckpttool.core.tensors.ref import DTYPES, ByteRange, Computed, Source, Storage, TensorRef
from ckpttool.core.tensors.values import TensorPart, assembled, require_bounded, stream, without_repeats
from ckpttool.errors import Damaged, Refused, Unreadable, Unsupported
from tests.support.comparing import opened, values
from tests.support.trees import LAYOUTS, LAZY, PLAIN_DTYPES, WIDTHS, big_endian, numbers, strided

# ---- A tensor described as a view of a storage, against torch's own idea of it; and one made of chunks


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


# ---- Tensors put together from parts: where each stretch of their bytes lies, if it lies in one place -


FLOAT = DTYPES["float32"]


@pytest.fixture
def places(tmp_path: Path) -> Source:
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * 4)
    return Source(str(path), os.open(path, os.O_RDONLY))


def tensor(places: Source, offset: int, shape: tuple[int, ...]) -> TensorRef:
    like = TensorRef.contiguous(Storage(ByteRange(places, 0, 0), "FloatStorage"), FLOAT, shape)
    return TensorRef.contiguous(Storage(ByteRange(places, offset, like.nbytes), "FloatStorage"), FLOAT, shape)


CUT = {  # shape of the whole, begin and shape of each part -> whether they follow one another
    "rows": ((5, 3), [((0, 0), (2, 3)), ((2, 0), (3, 3))], True),
    "rows of different lengths, some without any": (
        (4, 2),
        [((0, 0), (3, 2)), ((3, 0), (1, 2)), ((4, 0), (0, 2))],
        True,
    ),
    "columns": ((2, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2))], False),
    "columns of one row": ((1, 4), [((0, 0), (1, 1)), ((0, 1), (1, 3))], True),
    "both": ((4, 2), [((i, j), (2, 1)) for i in (0, 2) for j in (0, 1)], False),
    "single rows, each in two": ((2, 4), [((i, j), (1, 2)) for i in (0, 1) for j in (0, 2)], True),
    "flat": ((7,), [((0,), (4,)), ((4,), (3,))], True),
}


@pytest.mark.parametrize("cut", CUT)
def test_parts_that_follow_one_another_are_stretches_of_their_places(cut: str, places: Source) -> None:
    shape, boxes, follows = CUT[cut]
    ends = 0, *(sum(tensor(places, 0, size).nbytes for _, size in boxes[: i + 1]) for i in range(len(boxes)))
    pairs = zip(boxes, ends, strict=False)
    parts = [TensorPart(begin, tensor(places, end, size)) for (begin, size), end in pairs]
    whole = assembled("w", places.path, FLOAT, shape, parts[::-1]).storage.data
    assert isinstance(whole, Computed)
    stretches = whole.stretches()
    assert bool(stretches) is follows
    if follows:
        assert b"".join(place.read() for _, place in stretches) == whole.read()
        assert [nbytes for nbytes, _ in stretches] == [place.nbytes for _, place in stretches]


def test_what_several_ranks_hold_has_no_place_of_its_own(places: Source) -> None:
    one, other = tensor(places, 0, (2, 2)), tensor(places, 0, (2, 2))
    parts = [TensorPart((0, 0), one, (other,), (0, 1)), TensorPart((2, 0), tensor(places, 16, (1, 2)))]
    whole = assembled("w", places.path, FLOAT, (3, 2), parts).storage.data
    assert isinstance(whole, Computed)
    assert whole.stretches() == []


def test_a_cast_comes_from_the_places_of_what_is_cast(places: Source) -> None:
    parts = [TensorPart((0,), tensor(places, 0, (3,))), TensorPart((3,), tensor(places, 12, (5,)))]
    whole = assembled("w", places.path, FLOAT, (8,), parts)
    cast = Caster(DTYPES["bfloat16"]).cast(whole).storage.data
    assert isinstance(cast, Computed)
    assert [(nbytes, place.offset, place.nbytes) for nbytes, place in cast.stretches()] == [
        (6, 0, 12),
        (10, 12, 20),
    ]
    assert cast.part(6, 10).stretches() == []


# ---- The values of tensors, as a stream of bytes and as numpy arrays, against torch's of the same file


def stored(tensor: torch.Tensor, folder: Path) -> TensorRef:
    """The tensor as this library sees it in a file of torch's."""
    return opened({"t": tensor}, folder).state().tensors["t"]


def streamed(ref: TensorRef) -> bytes:
    return b"".join(bytes(piece) for piece in stream(ref))


PLAIN = {"contiguous": numbers(2, 3, 4), "empty": numbers(2, 3)[:0], "a number": torch.tensor(3.0)}
ALL_LAYOUTS = PLAIN | LAYOUTS | LAZY


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 16, 48, 256])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_values_of_every_layout_are_right(layout: str, chunk: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    meant = ALL_LAYOUTS[layout]
    ref = stored(meant, tmp_path)
    assert streamed(ref) == values(meant)
    assert (ref.conj, ref.neg) == (meant.is_conj(), meant.is_neg())
    assert not (layout in LAZY and ref.is_plain)
    found = ref.numpy()
    assert found.flags.writeable and found.flags.c_contiguous
    assert torch.equal(torch.from_numpy(found), meant.resolve_conj().resolve_neg())
    live = to_torch.live_tensors({"t": ref})["t"]
    assert (live.dtype, live.shape, values(live)) == (meant.dtype, meant.shape, values(meant))


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_width_is_gathered(dtype: torch.dtype, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 64)
    tensor = numbers(6, 5, dtype=dtype).t()
    assert streamed(stored(tensor, tmp_path)) == values(tensor)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_every_type_is_numpy_s_or_is_refused_with_the_way_out(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip("this torch has no such type")
    meant = torch.arange(1, 9, dtype=torch.uint8).repeat(4).view(kind)
    tensor = stored(meant, tmp_path)
    try:
        found = tensor.numpy()
    except Unsupported as error:
        assert error.hint is not None and "state.load()" in error.hint
        return
    assert found.dtype.name == dtype
    assert found.tobytes() == meant.view(torch.uint8).numpy().tobytes()


def test_a_large_tensor_comes_in_pieces(tmp_path: Path) -> None:
    tensor = numbers(1300, 1000).t()
    pieces = [bytes(piece) for piece in stream(stored(tensor, tmp_path))]
    assert len(pieces) > 1 and max(map(len, pieces)) <= tensor_values.CHUNK
    assert b"".join(pieces) == values(tensor)


def test_a_file_that_shrinks_while_a_view_of_it_is_gathered_is_damaged(tmp_path: Path) -> None:
    tensor = stored(numbers(1300, 1000).t(), tmp_path)
    os.truncate(tensor.storage.data.path, 4096)
    with pytest.raises(Damaged, match="became shorter"):
        list(stream(tensor))


views_of_values = strided(ranks=(1, 4), least=1, stride=20)


@given(views_of_values, st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
def test_any_view_is_read_as_torch_reads_it(view: tuple[Any, ...], dtype: torch.dtype) -> None:
    tensor = numbers(300, dtype=dtype).as_strided(*view)
    with tempfile.TemporaryDirectory() as folder:
        assert streamed(stored(tensor, Path(folder))) == values(tensor)


def test_a_small_storage_expanded_by_stride_0_is_refused_by_name(tmp_path: Path) -> None:
    ref = stored(torch.zeros(1).expand(1 << 20, 1 << 20), tmp_path)
    with pytest.raises(Refused, match=r"'t' is a view that expands 4 bytes to 4398046511104") as refusal:
        require_bounded("t", ref, hint="do this")
    assert refusal.value.hint == "do this"
    require_bounded("t", ref, most=1 << 42)


REPEATED = [((3, 4), (0, 1)), ((2, 0), (0, 1)), ((4,), (1,)), ((5, 2), (0, 0))]


@pytest.mark.parametrize(("shape", "stride"), REPEATED)
def test_repeats_of_stride_0_are_removed(shape: Any, stride: Any, tmp_path: Path) -> None:
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


BIG_ENDIAN = [
    *(numbers(7, dtype=kind) for kind in (torch.float64, torch.int16, torch.bfloat16, torch.complex64)),
    *(numbers(3, 4, dtype=torch.complex128).t(), numbers(4, 5).t(), numbers(7, dtype=torch.uint8)),
    *(numbers(3, 4), numbers(5, dtype=torch.complex64).conj()),
]


@pytest.mark.parametrize("tensor", BIG_ENDIAN, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
def test_a_big_endian_file_has_torch_s_values(tensor: torch.Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", 32)
    path = big_endian(tensor, tmp_path / "big.pt")
    theirs = torch.load(path)["t"]
    assert values(theirs) == values(tensor), "the file is not what this test thinks"
    ref = ckpttool.open(path).state().tensors["t"]
    assert streamed(ref) == values(to_torch.live_tensors({"t": ref})["t"]) == values(tensor)
    if tensor.dtype != torch.bfloat16:
        assert torch.equal(torch.from_numpy(ref.numpy()), tensor.resolve_conj())


def test_loading_values_that_must_be_made_takes_little_more_than_their_own_memory(tmp_path: Path) -> None:
    with ckpttool.open(big_endian(torch.zeros(1 << 21), tmp_path / "big.pt")) as checkpoint:
        tensors = [tensor for _, tensor in checkpoint.tensors()]
        tracemalloc.start()
        loaded = [to_torch.loaded_tensor("w", tensor) for tensor in tensors]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert loaded[0].nbytes == 1 << 23
    assert peak < (1 << 23) + (4 << 20)


# A state and its tensors, as a person asks for them.


def test_what_can_not_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with opened({"w": torch.ones(1).expand(1 << 30), "v": torch.ones(2)}, tmp_path) as checkpoint:
        state = checkpoint.state()
        with pytest.raises(Refused, match="expands"):
            state["w"].numpy()
    with pytest.raises(Unreadable, match="closed"):
        state["v"].numpy()


def test_a_state_is_asked_by_name_and_may_be_empty(tmp_path: Path) -> None:
    with opened({"a": numbers(2, 3, 4), "b": torch.ones(2), "epoch": 3}, tmp_path) as checkpoint:
        state = checkpoint.state()
        assert state["a"].shape == (2, 3, 4)
        assert ([*state], len(state), [*state.keys()]) == (["a", "b"], 2, ["a", "b"])
        assert {name: tensor.numel for name, tensor in state.items()} == {"a": 24, "b": 2}
        assert "a" in state and "epoch" not in state
        with pytest.raises(KeyError):
            state["epoch"]
        assert max(len(repr(shown)) for shown in (checkpoint, state, state["a"])) < 200
    with opened({}, tmp_path) as checkpoint:
        assert checkpoint.state() and len(checkpoint.state()) == 0


def test_a_traceback_ends_in_the_hint(tmp_path: Path) -> None:
    with pytest.raises(Unreadable) as caught:
        ckpttool.open(tmp_path / "nope.pt")
    assert "\n  hint: " in traceback.format_exception(caught.value)[-1]
