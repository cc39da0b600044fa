"""The values of two files' tensors, read in step: how far apart they are, their norms, and the outcome.

Values are compared as bytes first, and as numbers only where the bytes differ. Tensors that are plain bytes
in both files are compared in pieces, on several cores; memory holds a few pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from ..core.files.copying import MOST_PIECES, is_tiny, read_together
from ..core.files.findings import Findings, Told, current, shared, takes_small
from ..core.files.threads import Progress, cores, cut, map_pieces
from ..core.lazy import NDArray, np, shown_by
from ..core.tensors.ref import REAL_TYPES, ByteRange, DType, Storage, TensorRef
from ..core.tensors.values import MAX_REPEATED, in_pieces, require_bounded
from ..core.words import counted
from .distances import Distance, Measure, Tolerance, has_numbers, measurer, numbers

# Bytes read of each file at a time; both pieces stay in the processor's cache while they are compared
READ = 1 << 17

ELEMENTS = 1 << 16  # Elements computed at a time: as float64 they stay in the processor's cache

# Bytes of a tensor compared by one thread; values that must be computed are all compared by one
PIECE = 16 << 20

WORKERS = 4

SAME = Distance(0)


class TensorPair(NamedTuple):
    """A tensor of each file, of one shape; types may differ only when there is a tolerance."""

    name: str
    a: TensorRef
    b: TensorRef
    place: tuple[int, ...] = ()  # for the caller, to put its outcome in order

    @property
    def nbytes(self) -> int:
        """Bytes of the first tensor's values."""
        return self.a.nbytes


def distances(
    pairs: Iterable[TensorPair], tolerance: Tolerance | None = None, progress: Progress | None = None
) -> Iterator[tuple[TensorPair, Distance]]:
    """Yield the pairs whose bits differ, with their distance, in the order given; it may be tolerated."""
    # Without a tolerance elements are the same if their bits are: -0.0 differs from 0.0, and two NaNs may
    # differ, at a distance of nothing.
    so_far = SAME
    left = _without_equal(pairs, progress)
    compare = shared(f"distance {tolerance}", _told, SAME, as_list, from_list)(_compare)
    for piece, found in map_pieces(compare, _pieces(left, tolerance), cores(WORKERS)):
        if found is not SAME:
            so_far += found
        if progress and piece.nbytes:
            progress(piece.nbytes)
        if piece.is_last and so_far is not SAME:
            if so_far.differ or so_far.tolerated:
                yield piece.pair, replace(so_far, of=piece.pair.a.numel)
            so_far = SAME


def _without_equal(pairs: Iterable[TensorPair], progress: Progress | None) -> Iterator[TensorPair]:
    """Yield pairs, but not small ones of equal bytes. Small ones may be very many, and are read together."""
    following = iter(pairs)
    while some := [*islice(following, MOST_PIECES)]:
        looked_at = some if takes_small() else ()
        tiny = {number: places for number, pair in enumerate(looked_at) if (places := _tiny(pair))}
        mine, theirs = (read_together([places[side] for places in tiny.values()]) for side in (0, 1))
        equal = {n for n, x, y in zip(tiny, mine, theirs, strict=True) if x == y}
        if progress and equal:
            progress(sum(tiny[number][0].nbytes for number in equal))
        yield from (pair for number, pair in enumerate(some) if number not in equal)


def expected(pairs: Sequence[TensorPair]) -> Iterator[Storage]:
    """Yield the storages that are read of both files; of one of several parts, what falls to it of them."""
    if (now := current.get()) is None:
        yield from (pair.a.storage for pair in pairs)
        yield from (pair.b.storage for pair in pairs)
    elif not now.joins:
        mine = [piece for piece in _pieces(pairs, None) if now.falls_here(_told(now, piece)[0])]
        for side in (0, 1):
            for pair, _, plain, *_ in mine:
                storage = (pair.a, pair.b)[side].storage
                yield Storage(plain[side], storage.kind) if plain else storage


def _tiny(pair: TensorPair) -> tuple[ByteRange, ByteRange] | None:
    """Return where the values of both tensors lie, if these are small and of one type; None for others."""
    a, b = pair.a, pair.b
    if a.dtype is not b.dtype or not (a.is_plain and b.is_plain):
        return None
    one, other = a.data, b.data
    if isinstance(one, ByteRange) and isinstance(other, ByteRange) and is_tiny(one) and is_tiny(other):
        return one, other
    return None


class _Piece(NamedTuple):
    """A stretch of two tensors."""

    pair: TensorPair
    measure: Measure
    # the byte ranges that hold the same elements of one type; None for the whole of two tensors whose values
    # must be computed
    plain: tuple[ByteRange, ByteRange] | None
    first: int  # the number of the first element
    nbytes: int  # of the first tensor's values
    is_last: bool  # whether nothing of the tensors comes after it


def _pieces(pairs: Iterable[TensorPair], tolerance: Tolerance | None) -> Iterator[_Piece]:
    """Cut pairs that are plain bytes of one type into pieces; other pairs are one piece each."""
    for pair in pairs:
        a, b = pair.a, pair.b
        measure = measurer(a.dtype, b.dtype, tolerance)
        mine, theirs = (each.data if each.is_plain else None for each in (a, b))
        if a.dtype is not b.dtype or not (isinstance(mine, ByteRange) and isinstance(theirs, ByteRange)):
            yield _Piece(pair, measure, None, 0, a.nbytes, True)
            continue
        if a.nbytes <= PIECE:
            yield _Piece(pair, measure, (mine, theirs), 0, a.nbytes, True)
            continue
        for start, size in cut(a.nbytes, PIECE):
            both, first = (mine.part(start, size), theirs.part(start, size)), start // a.dtype.itemsize
            yield _Piece(pair, measure, both, first, size, start + size == a.nbytes)


def _told(findings: Findings, piece: _Piece) -> Told:
    """Return what the comparison of a piece falls to a part by, and what tells it from all others."""
    sides = piece.plain or (piece.pair.a, piece.pair.b)
    (by, one), (_, other) = (findings.piece(side, piece.pair.name) for side in sides)
    return by, f"{piece.pair.a.dtype.name} {piece.first}: {one}, {other}"


def as_list(found: Distance) -> list[object]:
    """Return a distance as JSON, which has no complex numbers."""
    return [[each.real, each.imag] if isinstance(each, complex) else each for each in astuple(found)]


def from_list(listed: list[Any]) -> Distance:
    differ, of, nans, *others = listed
    values: list[Any] = [complex(*each) if isinstance(each, list) else each for each in others]
    return found if (found := Distance(int(differ), int(of), int(nans), *values)) != SAME else SAME


def _compare(piece: _Piece) -> Distance:
    """Compare a piece."""
    if piece.plain is None:
        return _in_step(piece.pair, piece.measure)
    if piece.nbytes <= READ:
        one, other = piece.plain[0].read(), piece.plain[1].read()
        return SAME if one == other else piece.measure(memoryview(one), memoryview(other), piece.first)
    found, first, size = SAME, piece.first, READ
    mine, theirs = bytearray(size), bytearray(size)
    chunks = (data.chunks(memoryview(to)) for data, to in zip(piece.plain, (mine, theirs), strict=True))
    for a, b in zip(*chunks, strict=True):
        # Bytearrays are compared by memcmp; memoryviews element by element, 20 times as slowly.
        if mine != theirs if len(a) == size else bytes(a) != bytes(b):
            found += piece.measure(a, b, first)
        first += len(a) // piece.pair.a.dtype.itemsize
    return found


def _in_step(pair: TensorPair, measure: Measure) -> Distance:
    """Compare values of any layout and type; what both repeat by a stride of 0 is compared once."""
    name, a, b, _ = pair
    once, other = repeated_once(a, b)
    found, first = Distance(0), 0
    for side in (once, other):
        require_bounded(name, side, MAX_REPEATED)
    sides = (in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in (once, other))
    for x, y in zip(*sides, strict=True):
        if a.dtype is not b.dtype or x != y:
            found += measure(memoryview(x), memoryview(y), first)
        first += len(x) // a.dtype.itemsize
    if found.where is not None and once.shape != a.shape:
        found = replace(found, where=_place(found.where, once.shape, a.shape)).times(a.numel // once.numel)
    return found


def repeated_once(a: TensorRef, b: TensorRef) -> tuple[TensorRef, TensorRef]:
    """Return two tensors of one shape with what both repeat by a stride of 0 there once."""
    steps = zip(a.shape, a.stride, b.stride, strict=True)
    shape = tuple(size if one or other else min(size, 1) for size, one, other in steps)
    return replace(a, shape=shape), replace(b, shape=shape)


def _place(where: int, within: Sequence[int], shape: Sequence[int]) -> int:
    """Return an element's number in a tensor, from its number in a corner of that tensor."""
    return sum(i * math.prod(shape[axis + 1 :]) for axis, i in enumerate(unravelled(where, within)))


def unravelled(where: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return an element's index along each axis, from its number in row-major order."""
    index = []
    for size in reversed(shape):
        where, i = divmod(where, size)
        index.append(i)
    return tuple(reversed(index))


@dataclass(frozen=True, slots=True)
class Norms:
    """Sums of products of two tensors' elements; `+` makes one of several tensors, as if they were joined.

    Attributes:
        aa: the sum of |a|².
        bb: the sum of |b|².
        dd: the sum of |a - b|².
        ab: the sum of a·b; of complex numbers, its real part.
    """

    aa: float = 0.0
    bb: float = 0.0
    dd: float = 0.0
    ab: float = 0.0

    def __add__(self, other: Norms) -> Norms:
        return Norms(self.aa + other.aa, self.bb + other.bb, self.dd + other.dd, self.ab + other.ab)

    def times(self, count: int) -> Norms:
        """Return the norms of tensors that repeat every element `count` times."""
        return Norms(self.aa * count, self.bb * count, self.dd * count, self.ab * count)

    @property
    def a(self) -> float:
        """The norm of A: the square root of the sum of squares."""
        return math.sqrt(self.aa)

    @property
    def b(self) -> float:
        """The norm of B."""
        return math.sqrt(self.bb)

    @property
    def difference(self) -> float:
        """The norm of A - B."""
        return math.sqrt(self.dd)

    @property
    def relative(self) -> float | None:
        """The norm of A - B as a part of B's; infinite where B is 0; None where a sum exceeds float64."""
        if not (math.isfinite(self.dd) and math.isfinite(self.bb)):
            return None
        return self.difference / self.b if self.b else math.inf if self.dd else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between A and B, from -1 to 1; None where one of them is 0 or too large."""
        lengths = self.a * self.b
        if not lengths or not math.isfinite(lengths) or not math.isfinite(self.ab):
            return None
        return max(-1.0, min(1.0, self.ab / lengths))


def norms(pairs: Iterable[TensorPair]) -> Iterator[Norms | None]:
    """Yield the norms of pairs of tensors, in their order; memory holds a few pieces of 64 Ki elements."""
    total = Norms()
    work = shared("norms", _told, Norms(), astuple, lambda listed: Norms(*map(float, listed)))(_norms)
    for piece, found in map_pieces(work, _pieces(pairs, None), cores(WORKERS)):
        total += found
        if piece.is_last:
            yield total if all(has_numbers(side.dtype) for side in piece.pair[1:3]) else None
            total = Norms()


def _norms(piece: _Piece) -> Norms:
    a, b = piece.pair.a, piece.pair.b
    if not (has_numbers(a.dtype) and has_numbers(b.dtype)):
        return Norms()
    total, once = Norms(), repeated_once(a, b)
    times = a.numel // (once[0].numel or 1)
    if piece.plain:
        count, times = (piece.nbytes // a.dtype.itemsize,), 1
        x, y = (replace(each, shape=count, stride=(1,), offset=each.offset + piece.first) for each in (a, b))
        once = x, y
    sides = (in_pieces(side, ELEMENTS * side.dtype.itemsize) for side in once)
    with np.errstate(all="ignore"):
        for x, y in zip(*sides, strict=True):
            total += sums_of(floats(a.dtype, x), floats(b.dtype, y))
    return total.times(times)


def floats(dtype: DType, raw: bytes | bytearray) -> NDArray[Any]:
    """Return elements as float64: (elements,), or (elements, 2) of complex ones."""
    values = numbers(dtype, memoryview(raw))
    return values.view("<f8").reshape(-1, 2) if dtype.name in REAL_TYPES else values.astype("<f8", copy=False)


def sums_of(a: NDArray[Any], b: NDArray[Any]) -> Norms:
    if a.ndim != b.ndim:  # one is complex, the other real
        a, b = (each if each.ndim == 2 else np.stack([each, np.zeros_like(each)], axis=1) for each in (a, b))
    a, b = a.reshape(-1), b.reshape(-1)
    d = a - b
    # Not np.dot: BLAS would start its own threads, and they wait busily for each other.
    found = Norms(*(float((x * y).sum()) for x, y in ((a, a), (b, b), (d, d), (a, b))))
    if math.isfinite(found.dd):
        return found
    finite = np.isfinite(a) & np.isfinite(b)  # all of them, where a sum exceeds float64
    return found if finite.all() else sums_of(a[finite], b[finite])


# ---- The outcome


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """What one of two tensors lost of the other.

    Attributes:
        of: the one that the other was made of: `a` or `b`.
        zeroed: elements that became 0.
        saturated: elements beyond the last step of their code, or of their type; None where the codes are
            not known.
    """

    of: str = field(default="a", metadata={"json": None})
    zeroed: int = 0
    saturated: int | None = 0

    def __add__(self, other: ValueLoss) -> ValueLoss:
        """Join two pieces of one tensor."""
        known = self.saturated is not None and other.saturated is not None
        saturated = (self.saturated or 0) + (other.saturated or 0) if known else None
        return ValueLoss(self.of, self.zeroed + other.zeroed, saturated)


@dataclass(frozen=True, slots=True)
class Change:
    """A name that both files have, with contents that differ.

    Attributes:
        why: `shape`, `dtype` or `values` of a tensor; `type` or `value` of anything else.
        a, b: the contents in each file, in a few words.
        distance: how far apart the values are; None when they were not compared.
        index: the place of the largest difference, along each axis.
        norms: of both tensors and of their difference; None when the values were not compared as numbers.
        loss: what one lost of the other, where one is packed or of a smaller type.
    """

    name: str
    why: str
    a: str
    b: str
    distance: Distance | None = field(default=None, metadata={"json": None})
    index: tuple[int, ...] | None = field(default=None, metadata={"json": None})
    norms: Norms | None = field(default=None, metadata={"json": None})
    loss: ValueLoss | None = field(default=None, metadata={"json": None})

    @property
    def nmse(self) -> float | None:
        """The sum of squares of the difference over that of the tensor that lost nothing, else of A.

        Infinite where that is 0; None where a sum exceeds float64, or the values were not compared.
        """
        relative = None if self.norms is None else self.toward.relative
        return None if relative is None else relative**2

    @property
    def toward(self) -> Norms:
        """The norms with the tensor that lost nothing as B."""
        norms = self.norms or Norms()
        is_b = self.loss is not None and self.loss.of == "b"
        return norms if is_b else replace(norms, aa=norms.bb, bb=norms.aa)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        only_a, only_b: names that the other file lacks; outside the model's state, the shortest that cover
            them.
        changed: in the order of the first file, the model's state first.
        tensors: the number of pairs of tensors that were compared.
        aside_a, aside_b: names outside the model's state that were not looked for in the other file, whose
            format could not hold them.
        matched_without_prefix: how many more names both files would share without wrappers' prefixes.
        tolerated: names in both files whose contents differ, but by no more than the tolerance.
        same_files: how many of the pairs lie at the same place in files of one hash, and were not read.
        packed_a, packed_b: how tensors of this file are packed that were made plain to be compared, in words,
            and how many of them are.
        extra_a, extra_b: scales of activations and the like of packed layers, which the other file lacks.
        unclear: why packed tensors were compared as they are stored.
        text_keys_a, text_keys_b: dicts of this file keyed by text where those of the other are keyed by
            numbers. That is no difference here, as some formats hold no numbers as keys; torch's
            `load_state_dict` of an optimizer finds nothing under text.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Change, ...] = field(metadata={"json": None})
    tensors: int
    aside_a: tuple[str, ...] = field(default=(), metadata={"json": None})
    aside_b: tuple[str, ...] = field(default=(), metadata={"json": None})
    matched_without_prefix: int = field(default=0, metadata={"json": None})
    tolerated: tuple[str, ...] = ()
    same_files: int = field(default=0, metadata={"json": None})
    text_keys_a: tuple[str, ...] = ()
    text_keys_b: tuple[str, ...] = ()
    packed_a: Mapping[str, int] = field(default_factory=dict)
    packed_b: Mapping[str, int] = field(default_factory=dict)
    extra_a: tuple[str, ...] = field(default=(), metadata={"json": None})
    extra_b: tuple[str, ...] = field(default=(), metadata={"json": None})
    unclear: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs by more than the tolerance."""
        return not (self.only_a or self.only_b or self.changed)

    def __repr__(self) -> str:
        return f"<Comparison {self.in_words()}: {counted(self.tensors, 'tensor')} compared>"

    _repr_html_ = shown_by("comparison_html")

    def in_words(self, a: str = "A", b: str = "B") -> str:
        """Return how much differs: `6 tensors and 1 other value changed, 1 only in A`; or `the same`."""
        tensors = sum(change.why not in ("type", "value") for change in self.changed)
        kinds = (tensors, "tensor"), (len(self.changed) - tensors, "other value" if tensors else "value")
        changed = " and ".join(counted(count, kind) for count, kind in kinds if count)
        only = [f"{len(names)} only in {n}" for names, n in ((self.only_a, a), (self.only_b, b)) if names]
        return ", ".join([*([f"{changed} changed"] if changed else []), *only]) or "the same"

    @property
    def identical(self) -> bool:
        """Whether nothing that was compared differs at all."""
        return self.same and not self.tolerated
