"""Reads every byte of a checkpoint: checksums, values that are not finite, and another file's contents."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cast import FLOATS, count_non_finite
from .checkpoint import Checkpoint
from .digest import tensor_digests
from .elements import stream
from .tensor import ByteRange, Computed, Storage, TensorRef
from .transfer import BUFFER, Progress

PARTS_OF_COMPLEX = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong: `checksum`, `non-finite`, or how two states differ. `name`: the tensor or record."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look at every byte found.

    Attributes:
        checked_bytes: bytes that were read and compared with a checksum, or at least read.
        unsummed: storages whose bytes no checksum covers.
        non_finite: tensor -> number of values that are NaN or infinite.
        problems: what makes the file not right.
    """

    checked_bytes: int
    unsummed: int
    non_finite: Mapping[str, int]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    checkpoint: Checkpoint,
    *,
    against: Checkpoint | None = None,
    state: str | None = None,
    finite: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Reads a file whole. Its structure was held to the format's rules when it was opened.

    Args:
        against: a file whose state must have the same names, types, shapes and values.
        state: dotted path of the model's state in both; found when None.
        finite: NaN and infinity are problems; else they are only counted.

    Raises:
        Damaged: a file ends early.
        NoState: there is nothing to compare.
    """
    problems: list[Problem] = []
    checked = unsummed = 0
    buffer = memoryview(bytearray(BUFFER))
    for name, storage in _storages(checkpoint):
        crc = _crc(storage.data, buffer, progress)
        checked += storage.nbytes
        if storage.crc32 is None:
            unsummed += 1
        elif crc != storage.crc32:
            problems.append(Problem("checksum", name, "its bytes do not match their checksum"))
    non_finite = dict(_non_finite(checkpoint))
    if finite:
        problems += [
            Problem("non-finite", n, f"{count} values are NaN or infinite") for n, count in non_finite.items()
        ]
    if against is not None:
        problems += differences(checkpoint.state(state).tensors, against.state(state).tensors)
    return Verified(checked, unsummed, non_finite, tuple(problems))


def _storages(checkpoint: Checkpoint) -> Iterator[tuple[str, Storage]]:
    """Each storage once, under the name of the first tensor that looks at it."""
    seen: set[int] = set()
    for name, value in checkpoint.storages():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _crc(data: ByteRange | Computed, buffer: memoryview, progress: Progress | None) -> int:
    crc = 0
    for chunk in data.chunks(buffer):
        crc = zlib.crc32(chunk, crc)
        if progress:
            progress(len(chunk))
    return crc


def _non_finite(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    for name, tensor in checkpoint.tensors():
        kind = PARTS_OF_COMPLEX.get(tensor.dtype.name, tensor.dtype.name)
        if kind in FLOATS:
            count = sum(count_non_finite(kind, chunk) for chunk in stream(name, tensor))
            if count:
                yield name, count


def differences(mine: Mapping[str, TensorRef], theirs: Mapping[str, TensorRef]) -> list[Problem]:
    """How two states differ, by name: names, types, shapes, values."""
    problems = [Problem("only-here", name, "is not in the other file") for name in mine if name not in theirs]
    problems += [
        Problem("only-there", name, "is only in the other file") for name in theirs if name not in mine
    ]
    alike: dict[str, TensorRef] = {}
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None:
            continue
        if (tensor.dtype, tensor.shape) == (other.dtype, other.shape):
            alike[name] = tensor
        else:
            there = f"{other.dtype.name} {list(other.shape)}"
            problems.append(Problem("form", name, f"{tensor.dtype.name} {list(tensor.shape)}, there {there}"))
    both = zip(tensor_digests(alike), tensor_digests({name: theirs[name] for name in alike}), strict=True)
    problems += [Problem("values", name, "has other values") for (name, a), (_, b) in both if a != b]
    return problems
