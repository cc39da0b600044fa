"""Tensors put together from parts: where each stretch of their bytes lies, if it lies in one place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.tensors.cast import Caster
from ckpttool.tensors.chunks import TensorPart, assembled
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.tensors.ref import Computed, Storage, TensorRef
from ckpttool.tensors.source import ByteRange, Source

FLOAT = DTYPES["float32"]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * 4)
    return Source(str(path), os.open(path, os.O_RDONLY))


def tensor(source: Source, offset: int, shape: tuple[int, ...]) -> TensorRef:
    like = TensorRef.contiguous(Storage(ByteRange(source, 0, 0), "FloatStorage"), FLOAT, shape)
    return TensorRef.contiguous(Storage(ByteRange(source, offset, like.nbytes), "FloatStorage"), FLOAT, shape)


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
def test_parts_that_follow_one_another_are_stretches_of_their_places(cut: str, source: Source) -> None:
    shape, boxes, follows = CUT[cut]
    ends = 0, *(sum(tensor(source, 0, size).nbytes for _, size in boxes[: i + 1]) for i in range(len(boxes)))
    parts = [
        TensorPart(begin, tensor(source, end, size)) for (begin, size), end in zip(boxes, ends, strict=False)
    ]
    whole = assembled("w", source.path, FLOAT, shape, parts[::-1]).storage.data
    assert isinstance(whole, Computed)
    stretches = whole.stretches()
    assert bool(stretches) is follows
    if follows:
        assert b"".join(place.read() for _, place in stretches) == whole.read()
        assert [nbytes for nbytes, _ in stretches] == [place.nbytes for _, place in stretches]


def test_what_several_ranks_hold_has_no_place_of_its_own(source: Source) -> None:
    one, other = tensor(source, 0, (2, 2)), tensor(source, 0, (2, 2))
    parts = [TensorPart((0, 0), one, (other,), (0, 1)), TensorPart((2, 0), tensor(source, 16, (1, 2)))]
    whole = assembled("w", source.path, FLOAT, (3, 2), parts).storage.data
    assert isinstance(whole, Computed)
    assert whole.stretches() == []


def test_a_cast_comes_from_the_places_of_what_is_cast(source: Source) -> None:
    parts = [TensorPart((0,), tensor(source, 0, (3,))), TensorPart((3,), tensor(source, 12, (5,)))]
    whole = assembled("w", source.path, FLOAT, (8,), parts)
    cast = Caster(DTYPES["bfloat16"]).cast(whole).storage.data
    assert isinstance(cast, Computed)
    assert [(nbytes, place.offset, place.nbytes) for nbytes, place in cast.stretches()] == [
        (6, 0, 12),
        (10, 12, 20),
    ]
    assert cast.part(6, 10).stretches() == []
