"""What packing or rounding took from a tensor: both are read once, in step, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.files.findings import Bytes, Findings, Told, current, shared
from ..core.files.threads import Progress, cores, cut, map_pieces
from ..core.lazy import NDArray, np
from ..core.tensors.cast import FLOATS, carrier, reader
from ..core.tensors.ref import DTYPES, PLAIN_FLOATS, DType, Storage, TensorRef
from ..core.tensors.values import MAX_REPEATED, in_pieces, require_bounded, same_values
from .compare_values import WORKERS, Norms, ValueLoss, as_list, floats, from_list, sums_of
from .distances import Distance, Tolerance, measurer
from .packed import PackedTensor, Stored, words_of

ELEMENTS = 1 << 18  # read at a time: to unpack few costs as much as to unpack many
STRETCH = 1 << 22  # elements that one thread compares


class LossyPair(NamedTuple):
    """A tensor of each file, of one shape, of which one is packed or they are floats of two types."""

    name: str
    a: Stored
    b: Stored
    tolerance: Tolerance
    place: tuple[int, ...]  # for the caller, to put its outcome in order

    @property
    def is_packed(self) -> bool:
        """Whether one of them is packed."""
        return isinstance(self.a, PackedTensor) or isinstance(self.b, PackedTensor)

    @property
    def of(self) -> str:
        """The one that the other was made of: `a` or `b`."""
        exactness = [0 if isinstance(x, PackedTensor) else x.dtype.itemsize for x in (self.a, self.b)]
        return "a" if exactness[0] >= exactness[1] else "b"

    @property
    def words(self) -> tuple[str, str]:
        """What each of them is."""
        return words_of(self.a), words_of(self.b)

    @property
    def storages(self) -> tuple[Sequence[Storage], Sequence[Storage]]:
        """The storages that are read of each."""
        return _storages(self.a), _storages(self.b)

    @property
    def are_same_files(self) -> bool:
        """Whether all parts lie at the same place in files of one hash."""
        hashes = [(one.contents, other.contents) for one, other in _alike(self.a, self.b)]
        return bool(hashes) and all(one is not None and one == other for one, other in hashes)

    @property
    def nbytes(self) -> int:
        """Bytes that are read of the first file."""
        packed = isinstance(self.a, PackedTensor)
        return sum(each.nbytes for each in self.storages[0]) if packed else self.a.nbytes  # type: ignore[union-attr]


def lossy_pair(
    name: str, a: Stored, b: Stored, tolerance: Tolerance | None, place: tuple[int, ...]
) -> LossyPair | None:
    """Return two tensors of one shape as a pair, if one is packed or they are floats of two types."""
    types = [each.dtype for each in (a, b) if isinstance(each, TensorRef)]
    if any(each.name not in FLOATS for each in types) or (len(types) == 2 and types[0] is types[1]):
        return None
    return LossyPair(name, a, b, tolerance or Tolerance(), place)


def _storages(tensor: Stored) -> Sequence[Storage]:
    return tensor.storages if isinstance(tensor, PackedTensor) else (tensor.storage,)


def _alike(a: Stored, b: Stored) -> tuple[tuple[TensorRef, TensorRef], ...]:
    """Return the parts of two tensors that are packed in the same way; () for others."""
    if not (isinstance(a, PackedTensor) and isinstance(b, PackedTensor)):
        return ()
    if a.form != b.form or a.parts.keys() != b.parts.keys():
        return ()
    pairs = tuple((part, b.parts[name]) for name, part in a.parts.items())
    return pairs if all((x.dtype, x.shape) == (y.dtype, y.shape) for x, y in pairs) else ()


class Lost(NamedTuple):
    """What was found of a pair, or of a stretch of it."""

    distance: Distance
    norms: Norms
    loss: ValueLoss

    def joined(self, other: Lost) -> Lost:
        """Return what was found of two stretches."""
        return Lost(self.distance + other.distance, self.norms + other.norms, self.loss + other.loss)


class _Stretch(NamedTuple):
    """Elements of a pair, in row-major order."""

    pair: LossyPair
    first: int
    size: int
    nbytes: int  # of the first file
    is_last: bool


def losses(
    pairs: Iterable[LossyPair], progress: Progress | None = None
) -> Iterator[tuple[LossyPair, Lost | None]]:
    """Yield each pair with what was lost; None where both are packed alike, and in the same bytes."""
    nothing: Lost | None = None
    so_far = nothing
    work = shared("loss", _told, nothing, _listed, _as_it_was)(_lost)
    for stretch, found in map_pieces(work, _stretches(pairs), cores(WORKERS)):
        so_far = so_far.joined(found) if so_far and found else found or so_far
        if progress and stretch.nbytes:
            progress(stretch.nbytes)
        if stretch.is_last:
            of = math.prod(stretch.pair.a.shape)
            yield stretch.pair, so_far and so_far._replace(distance=replace(so_far.distance, of=of))
            so_far = None


def _stretches(pairs: Iterable[LossyPair]) -> Iterator[_Stretch]:
    for pair in pairs:
        count = math.prod(pair.a.shape)
        plain = (each for each in (pair.a, pair.b) if isinstance(each, TensorRef))
        is_whole = _alike(pair.a, pair.b) or not all(each.is_contiguous for each in plain)
        for start, size in [(0, count)] if is_whole or count <= STRETCH else cut(count, STRETCH):
            nbytes = pair.nbytes * size // (count or 1)  # as far as a bar of progress has to know
            yield _Stretch(pair, start, size, nbytes, start + size == count)


def expected(pairs: Sequence[LossyPair]) -> Iterator[Storage]:
    """Yield the storages that are read of both files, where one process reads them all."""
    for side in (0, 1) if current.get() is None else ():
        yield from (storage for pair in pairs for storage in pair.storages[side])


def _told(findings: Findings, stretch: _Stretch) -> Told:
    """Return what the comparison of a stretch falls to a part by, and what tells it from all others."""
    pair, name = stretch.pair, f"{stretch.pair.name} {stretch.first}"
    sides = (each for side, its in zip(pair[1:3], pair.storages, strict=True) for each in _places(side, its))
    told = [findings.piece(place, pair.name)[1] for place in sides]
    return name, f"{name} {pair.words} {pair.tolerance}: {told}"


def _places(tensor: Stored, storages: Sequence[Storage]) -> Iterator[Bytes]:
    yield from (each.data for each in storages) if isinstance(tensor, PackedTensor) else (tensor,)


def _listed(found: Lost | None) -> Any:
    return found and [as_list(found.distance), astuple(found.norms), astuple(found.loss)]


def _as_it_was(listed: Any) -> Lost | None:
    if listed is None:
        return None
    distance, norms, loss = listed
    return Lost(from_list(distance), Norms(*map(float, norms)), ValueLoss(*loss))


def _lost(stretch: _Stretch) -> Lost | None:
    """Compare a stretch: None where both are packed alike, and in the same bytes."""
    pair, first = stretch.pair, stretch.first
    alike = _alike(pair.a, pair.b)
    if alike and all(same_values(one, other) for one, other in alike):
        return None
    plain = (each.dtype for each in (pair.a, pair.b) if isinstance(each, TensorRef))
    to = next((dtype for dtype in plain if dtype.name in PLAIN_FLOATS), DTYPES["float32"])
    (a, edges_a), (b, edges_b) = (_made(stretch, each, to) for each in (pair.a, pair.b))
    is_of_a = pair.of == "a"
    edges = edges_b if is_of_a else edges_a
    end = None if pair.is_packed else _end_of((b if is_of_a else a).dtype)
    measure = measurer(a.dtype, b.dtype, pair.tolerance)
    sides = [side for side in (a, b, edges) if side is not None]
    distance, norms, zeroed, saturated = Distance(0), Norms(), 0, 0
    for x, y, *ends in zip(*(in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in sides), strict=True):
        one, other = floats(a.dtype, x), floats(b.dtype, y)
        exact, kept = (one, other) if is_of_a else (other, one)
        with np.errstate(all="ignore"):
            norms += sums_of(one, other)
            found = _distance(one, other, pair.tolerance, first)
            distance += found or measure(memoryview(x), memoryview(y), first)
            first += len(one)
            zeroed += int(np.count_nonzero((exact != 0) & (kept == 0)))
            for last in (np.frombuffer(each, "<f4") for each in ends):
                saturated += int(np.count_nonzero((exact - last) * (last - kept) > 0))
            if end is not None:
                saturated += int(np.count_nonzero(np.isfinite(exact) & (np.abs(exact) >= end)))
    loss = ValueLoss(pair.of, zeroed, saturated if edges is not None or end is not None else None)
    return Lost(replace(distance, max_ulp=None), norms, loss)  # codes are not a few steps apart


def _distance(a: NDArray[Any], b: NDArray[Any], tolerance: Tolerance, first: int) -> Distance | None:
    """Return the distance of numbers; None where some are not finite, which `measurer` tells apart."""
    apart, size = np.abs(a - b), np.abs(b)
    if not np.isfinite(apart).all():
        return None
    apart[apart <= tolerance.atol + tolerance.rtol * size] = 0
    if not (differ := int(np.count_nonzero(apart))):
        return Distance(0)
    where = int(np.argmax(apart))
    values, most = {"a": a[where].item(), "b": b[where].item()}, apart[where].item()
    relative = float(np.nanmax(apart / size))
    return Distance(differ, max_abs=most, max_rel=relative, where=first + where, **values)


def _made(stretch: _Stretch, tensor: Stored, to: DType) -> tuple[TensorRef, TensorRef | None]:
    """Return a stretch of a tensor as a plain one, and the edges of its codes."""
    made, edges = tensor.made(to) if isinstance(tensor, PackedTensor) else (tensor, None)
    require_bounded(stretch.pair.name, made, MAX_REPEATED)
    return _part(made, stretch), None if edges is None else _part(edges, stretch)


def _part(tensor: TensorRef, stretch: _Stretch) -> TensorRef:
    if stretch.size == tensor.numel:
        return tensor
    return replace(tensor, shape=(stretch.size,), stride=(1,), offset=tensor.offset + stretch.first)


@lru_cache
def _end_of(dtype: DType) -> float:
    """Return the least number that does not round to a finite one of a type."""
    if dtype.itemsize > 2:
        type_ = np.finfo(f"f{dtype.itemsize}")
        return float(type_.max) * (1 + float(type_.eps) / 4) if dtype.itemsize < 8 else math.inf
    bits = np.arange(256**dtype.itemsize, dtype=f"<u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        values = np.unique(reader(dtype)(bits.view(carrier(dtype))).astype("f8"))
    second, most = values[np.isfinite(values)][-2:]
    return float(most + (most - second) / 2)
