"""The newer checkpoint as a delta in the form of another program makes it. Imports numpy.

A payload is one stream, a frame of zstd or places and values, so values are made from front to back: a chain
of deltas costs what each costs alone. What is stated of the new values is compared at the end of a tensor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.checkpoint.checkpoint import Checkpoint, Remark
from ..core.inert_pickle.values import remade
from ..core.lazy import NDArray, np
from ..core.tensors.ref import Computed, Storage, TensorRef
from ..core.tensors.values import stream
from ..errors import Damaged, Refused
from . import differences
from .differences import UNSIGNED, BadFrame
from .forms import GAPS, OVERWRITE, SUMMED, XOR, TensorPatch, VersionPatch, hashing, summed

if TYPE_CHECKING:
    Pieces = Iterator[NDArray[np.uint8]]
    Groups = tuple[Iterator[NDArray[np.int64]], Callable[[int], bytes]]


LACKED = "and the base lacks it"


def passed_over(made: Checkpoint) -> tuple[str, ...]:
    """Return the tensors of deltas that a base lacks, where a form passes over those."""
    return tuple(remark.name for remark in made.remarks if remark.message.endswith(LACKED))


def made_of(below: Checkpoint, patch: VersionPatch, file: Checkpoint) -> Checkpoint:
    """Return what a delta makes of a checkpoint, of which nothing else changes. No value is read.

    Raises:
        Refused: the base lacks a tensor, has it in another form, or ties it to another that changes.
        NoState: the base holds no model's state.
    """
    state, new = below.state(), dict[str, TensorRef]()
    absent = [name for name in patch.changes if name not in state.tensors]
    if absent and not patch.form.skips:
        raise _not_of(below, file, f"it has no tensor '{absent[0][:80]}'")
    of_view: dict[tuple[object, ...], dict[object, TensorRef]] = {}
    for name, change in patch.changes.items():
        if name in absent:
            continue
        base = state.tensors[name]
        made = of_view.setdefault(base.view, {})
        if (key := change.checksum or name) not in made:
            made[key] = _new(below, file, name, base, change)
        new[name] = made[key]
    tied = ((name, of_view.get(tensor.view)) for name, tensor in state.tensors.items() if name not in new)
    new |= {name: next(iter(made.values())) for name, made in tied if made}

    def change_of(value: object) -> object:
        if value is not state.container or not isinstance(value, dict):
            return value
        return remade(value, [(key, new.get(str(key), old)) for key, old in value.items()])

    changed = below.changed(state, change_of)
    remarks = tuple(Remark(name, f"changes in {file.path}, {LACKED}") for name in absent)
    return replace(changed, remarks=(*below.remarks, *remarks))


def _new(below: Checkpoint, file: Checkpoint, name: str, base: TensorRef, change: TensorPatch) -> TensorRef:
    for what, stated, has in (("type", change.dtype, base.dtype.name), ("shape", change.shape, base.shape)):
        if stated not in (None, has):
            raise _not_of(below, file, f"'{name[:80]}' has the {what} {has}, and {stated} in the delta")
    made = Rewritten(file.path, name, base, change)
    data = Computed.filling(file.path, base.nbytes, made.fill)
    data = replace(data, make=made.make, is_divisible=False, require=made.require)
    origins = (base.storage, *(part.storage for part in change.parts))
    storage = Storage(data, base.dtype.kind, origins=origins)
    made_one = TensorRef.contiguous(storage, base.dtype, base.shape)
    return replace(made_one, requires_grad=base.requires_grad)


def _not_of(below: Checkpoint, file: Checkpoint, what: str) -> Refused:
    hint = "name the base that the delta was made from, in its type"
    return Refused(below.path, f"is not the base of {file.path}: {what}", hint=hint)


WINDOW = 32 << 20  # bytes made that stay, for threads that ask for blocks not quite in order


class Rewritten:
    """The values of a base as a change makes them, compared with what is stated of them at their end."""

    def __init__(self, path: str, name: str, base: TensorRef, change: TensorPatch) -> None:
        self.path, self.name, self.base, self.change = path, name, base, change
        self._lock = threading.Lock()
        self._first = self._end = 0  # of what is kept
        self._kept: deque[tuple[int, NDArray[np.uint8]]] = deque()
        self._rest = self._pieces()

    def require(self) -> None:
        """Raise Unsupported where a package is missing."""
        if self.change.encoding in (XOR, OVERWRITE):
            differences.require(self.path)
        if self.change.checksum and self.change.checksum[0] != SUMMED:
            hashing(self.path, self.change.checksum[0])

    def make(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a stretch. What is before it is made too."""
        at, end = 0, start + nbytes
        for piece in self._pieces():
            inside = piece[max(start - at, 0) : max(end - at, 0)]
            if len(inside):
                yield memoryview(inside)  # type: ignore[arg-type]
            if (at := at + len(piece)) >= end:
                return

    def fill(self, start: int, out: memoryview) -> None:
        """Fill a buffer with a stretch: cheap where stretches come about in order, in any thread."""
        with self._lock:
            if start < self._first:
                self._forget()
            end = start + len(out)
            while self._end < end:
                try:
                    piece = next(self._rest)
                except BaseException:
                    self._forget()  # another thread asks again, and is told the same
                    raise
                self._kept.append((self._end, piece))
                self._end += len(piece)
                while self._end - self._first > WINDOW and len(self._kept) > 1 and self._kept[1][0] <= start:
                    self._kept.popleft()
                    self._first = self._kept[0][0]
            for at, piece in self._kept:
                low, high = max(at, start), min(at + len(piece), end)
                if low < high:
                    out[low - start : high - start] = memoryview(piece)[low - at : high - at]  # type: ignore[arg-type]
            if end == self.base.nbytes:
                self._forget()

    def _forget(self) -> None:
        self._first = self._end = 0
        self._kept.clear()
        self._rest = self._pieces()

    def _pieces(self) -> Pieces:
        """Yield all bytes; the last piece only if they are what is stated."""
        kind, stated = self.change.checksum or ("", "")
        value = hashing(self.path, kind) if kind not in ("", SUMMED) else None
        left = self.base.nbytes
        try:
            for piece in _xored(self) if self.change.encoding == XOR else _scattered(self):
                left -= len(piece)
                if value is not None:
                    value.update(piece)
                    if not left:
                        _require_same(kind, value.hexdigest(), stated)
                yield piece
        except BadFrame as fault:
            what = f"'{self.name[:80]}' {fault}"
            hint = f"either {self.path} is damaged, or what stands before it is not its base"
            raise Damaged(self.path, what, hint=hint) from None

    def before(self) -> Pieces:
        """Yield the base's values, whole elements, from front to back; at least once."""
        data = self.base.storage.data if self.base.is_stretch else None
        if isinstance(data, Computed) and data.nbytes == self.base.nbytes:
            pieces = data.make(0, data.nbytes)  # of a chain each link is made once
        else:
            pieces = stream(self.base)
        for piece in pieces:
            yield np.frombuffer(piece, np.uint8)
        if not self.base.nbytes:
            yield np.empty(0, np.uint8)


def _require_same(kind: str, found: object, stated: object) -> None:
    if found != stated:
        raise BadFrame(f"comes out with another checksum ({kind}) than is stated")


def _xored(of: Rewritten) -> Pieces:
    take = differences.taking(of.change.parts[0].data)
    for piece in of.before():
        if len(found := take(len(piece))) < len(piece):
            raise BadFrame("has a difference that is cut short")
        yield piece ^ np.frombuffer(found, np.uint8)
    if take(1):
        raise BadFrame("has a difference that is longer than the tensor")


def _scattered(of: Rewritten) -> Pieces:
    """Yield the base's values with others in some places: flat, ascending, each once."""
    is_frame = of.change.encoding == OVERWRITE
    width, dtype = (1, "uint8") if is_frame else (of.base.dtype.itemsize, of.base.dtype.name)
    groups, values_of = _in_frame(of) if is_frame else _in_tensors(of)
    last, total, count = -1, 0, of.base.nbytes // width
    is_summed = bool(of.change.checksum) and not is_frame
    waiting = np.empty(0, np.int64)
    at = 0
    for piece in of.before():
        items = piece.view(UNSIGNED[width]).copy()
        end = at + len(items)
        while True:
            inside = waiting[: np.searchsorted(waiting, end)]
            if len(inside):
                raw = values_of(len(inside) * width)
                if len(raw) < len(inside) * width:
                    raise BadFrame("has fewer values than places")
                values = np.frombuffer(raw, UNSIGNED[width])
                items[inside - at] = values
                if is_summed:
                    total ^= summed(inside, "int64") ^ summed(values, dtype)
            waiting = waiting[len(inside) :]
            if len(waiting) or (group := next(groups, None)) is None:
                break
            if not len(group):
                continue
            if group[0] <= last or (np.diff(group) <= 0).any():
                raise BadFrame("has places that do not ascend")
            if (last := int(group[-1])) >= count:
                raise BadFrame(f"has a place outside of its {count} elements: {last}")
            waiting = group
        if end == count and (len(waiting) or values_of(1)):
            raise BadFrame("has more places or values than it states")
        if end == count and is_summed and total != of.change.checksum[1]:  # type: ignore[index]
            raise BadFrame("has places or values of another checksum (hash_tensor)")
        at = end
        yield items.view(np.uint8)


MANY = 1 << 17  # places that are read together


def _in_frame(of: Rewritten) -> Groups:
    """Return the places in a frame, and what takes values: it is unpacked twice, side by side."""
    data = of.change.parts[0].data
    take, values_of = differences.taking(data), differences.taking(data)
    raw = take(4)
    count = int.from_bytes(raw, "little")
    if len(raw) < 4 or count > of.base.nbytes:
        raise BadFrame("has no places, or more than bytes")

    def groups() -> Iterator[NDArray[np.int64]]:
        for start in range(0, count, MANY):
            raw = take(4 * min(MANY, count - start))
            if len(raw) < 4 * min(MANY, count - start):
                raise BadFrame("has a difference that is cut short")
            yield np.frombuffer(raw, "<u4").astype(np.int64)

    left = 4 + 4 * count
    while left and (skipped := len(values_of(min(left, 1 << 20)))):
        left -= skipped
    return groups(), values_of


def _in_tensors(of: Rewritten) -> Groups:
    """Return the places in one tensor, absolute or the gaps between them, and what takes another's values."""
    places, values = of.change.parts
    are_gaps = of.change.encoding == GAPS
    kinds = ("uint16", "uint32") if are_gaps else ("int32", "int64")
    if places.dtype.name not in kinds or (places.shape, values.dtype) != (values.shape, of.base.dtype):
        raise BadFrame("is kept in tensors of other types or shapes")

    def groups() -> Iterator[NDArray[np.int64]]:
        last = -1
        for piece in stream(places):
            found = np.frombuffer(piece, f"<{'u' if are_gaps else 'i'}{places.dtype.itemsize}").astype(
                np.int64
            )
            if are_gaps and len(found):
                found = np.cumsum(found + 1) + last
                last = int(found[-1])
            if len(found) and (found[0] < 0 or last < -1):
                raise BadFrame("has places that do not ascend")
            yield found

    at, data = 0, values.data

    def take(nbytes: int) -> bytes:
        nonlocal at
        count = min(nbytes, values.nbytes - at)
        raw = data.part(at, count).read() if count else b""
        at += count
        return raw

    return groups(), take
