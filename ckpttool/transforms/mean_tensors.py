"""The bytes of mean tensors, computed when they are written; small tensors together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

from ..lazy import np
from ..tensors.dtypes import DType
from ..tensors.losses import CastReport
from ..tensors.ref import Computed, TensorRef
from ..tensors.source import ByteRange
from ..tensors.values import in_pieces
from .mean import Means, mean

SMALL = 1 << 14  # bytes of a tensor averaged together with others: few elements take as long as thousands
BATCH = 1 << 18  # bytes of small tensors averaged together
HELD = 16  # batches whose means stay in memory: a file may have its tensors in another order


class MeanTensors:
    """Makes the bytes of means; those of small tensors together."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.parallel: list[str] = []
        self.casting = CastReport()
        self.batches: dict[str, _Batch] = {}  # to which tensors of a type are added
        self.work: dict[str, _Work] = {}  # for each type
        self.held = lru_cache(HELD)(_Batch.means)

    def computed(self, name: str, inputs: list[TensorRef], part: DType) -> Computed:
        """Return the bytes of the means of one tensor."""
        path, nbytes = inputs[-1].storage.data.path, inputs[-1].nbytes
        if nbytes > SMALL or not all(tensor.is_plain for tensor in inputs):
            work = self.work.setdefault(part.name, _Work(self.weights, part))
            if all(tensor.is_stretch and _fills_buffers(tensor.storage.data) for tensor in inputs):
                stretches = partial(_means_of_stretches, work, [tensor.data for tensor in inputs])
                return Computed(path, nbytes, stretches, is_divisible=True)
            return Computed(path, nbytes, partial(_means, work, inputs))
        batch = self.batches.get(part.name)
        if batch is None or batch.nbytes > BATCH or not batch.is_near(inputs[-1]):
            self.batches[part.name] = batch = _Batch(self.weights, part)
        return Computed(path, nbytes, partial(_stretch_of, partial(self.held, batch), batch.add(inputs)))


class _Work:
    """What computes the means of one type: as many as threads compute at once."""

    def __init__(self, weights: list[float], part: DType) -> None:
        self.part = part
        self._weights = weights
        self._idle: list[Means] = []

    @contextmanager
    def means(self) -> Iterator[Means]:
        """Lend one that no thread uses."""
        try:
            means = self._idle.pop()
        except IndexError:  # not asked first: another thread may take the last one in between
            means = Means(self._weights, self.part)
        yield means
        self._idle.append(means)


class _Batch:
    """Small tensors of one type whose means are computed together."""

    def __init__(self, weights: list[float], part: DType) -> None:
        self.nbytes = 0
        self._weights, self._part = weights, part
        self._tensors: list[list[TensorRef]] = []

    def is_near(self, tensor: TensorRef) -> bool:
        """Return whether a tensor lies next to the last of these: others are read when their turn comes."""
        last, data = self._tensors[-1][-1].data, tensor.data
        ends = last.offset + last.nbytes if isinstance(last, ByteRange) else 0
        return isinstance(data, ByteRange) and 0 <= data.offset - ends < BATCH

    def add(self, inputs: list[TensorRef]) -> int:
        """Add a tensor of each file; return where its means begin."""
        start = self.nbytes
        self._tensors.append(inputs)
        self.nbytes += inputs[-1].nbytes
        return start

    def means(self) -> memoryview:
        """Return the bytes of all means."""
        by_file = zip(*self._tensors, strict=True)
        raw = [memoryview(b"".join(each.data.read() for each in tensors)) for tensors in by_file]
        return mean(raw, self._weights, self._part)


def _stretch_of(means: Callable[[], memoryview], first: int, start: int, nbytes: int) -> Iterator[memoryview]:
    yield means()[first + start : first + start + nbytes]


def _fills_buffers(data: ByteRange | Computed) -> bool:
    """Return whether bytes come in pieces of the size of the buffer they are read through."""
    return isinstance(data, ByteRange) or data.fill is not None


def _means_of_stretches(
    work: _Work, inputs: list[ByteRange | Computed], start: int, nbytes: int
) -> Iterator[memoryview]:
    """Yield a part of the means' bytes."""
    with work.means() as means:
        parts = (data.part(start, nbytes) for data in inputs)
        blocks = (part.chunks(buffer) for part, buffer in zip(parts, means.buffers, strict=True))
        yield from map(means.of, zip(*blocks, strict=True))


def _means(work: _Work, inputs: list[TensorRef], start: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a part of the means' bytes; inputs of any layout are read from their beginning."""
    at, end = 0, start + nbytes
    with work.means() as means:
        for block in zip(*(in_pieces(each, len(means.buffers[0])) for each in inputs), strict=True):
            if at >= end:
                break
            begin, at = at, at + len(block[0])
            if at > start:
                piece = means.of(block)[max(start - begin, 0) : end - begin]
                yield _swapped(piece, work.part) if inputs[-1].is_swapped else piece


def _swapped(piece: memoryview, part: DType) -> memoryview:
    """Return a big-endian piece, as the last file's storages are: a file has one byte order."""
    return memoryview(np.frombuffer(piece, dtype=f"<u{part.itemsize}").byteswap().view("u1"))
