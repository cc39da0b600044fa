"""The mean of several checkpoints, tensor by tensor."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.rebuilt_tensors import plain_tensor, with_plain_tensor
from ..checkpoint.special_tensors import require_plain
from ..checkpoint.state import State
from ..checkpoint.states import MEAN, VARIANCE
from ..errors import Refused, UsageFault
from ..formats.reading import File
from ..formats.reading import open as open_checkpoint
from ..inert_pickle.values import remade
from ..tensors.dtypes import DType, real_dtype
from ..tensors.ref import ByteRange, Computed, Storage, TensorRef
from ..tensors.values import CHUNK, MAX_REPEATED, in_pieces, require_bounded
from .keys import stripping
from .mean import Means, mean

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))

SMALL = 1 << 14  # bytes of a tensor averaged together with others: few elements take as long as thousands
BATCH = 1 << 18  # bytes of small tensors averaged together
HELD = 16  # batches whose means stay in memory: a file may have its tensors in another order


@dataclass(frozen=True, slots=True)
class Averaged:
    """The outcome of an average.

    Attributes:
        files: the number of inputs.
        averaged: names of the tensors that hold means.
        kept: names of integer and boolean tensors that are the same in all files.
        taken: names of integer and boolean tensors that differ, and are taken from the last file.
        statistics: names of BatchNorm's running statistics among the means. An averaged model has others of
            its own, which only data can give.
    """

    files: int
    averaged: tuple[str, ...]
    kept: tuple[str, ...]
    taken: tuple[str, ...]
    statistics: tuple[str, ...]


def average(
    files: Sequence[File], *, weights: Sequence[float] | None = None, state: str | None = None
) -> tuple[Checkpoint, Averaged]:
    """Return a checkpoint of the model's state alone, whose values are means, computed when they are written.

    Floats and complex numbers are added in pairs of float64 and rounded once, half to even; `mean` states
    what that guarantees. Integers and booleans, such as BatchNorm's counters, are never averaged: when the
    files differ, the last one's are taken. Names that share a tensor in every file share it in the result.

    Args:
        files: two or more paths, or open checkpoints, which must stay open until the result is saved.
        weights: one per file, at least 0, not all 0; all equal when None.
        state: dotted path of the model's state in each; found when None.

    Returns:
        The new checkpoint, whose values lie in the files until it is saved, and which tensors are means.

    Raises:
        TypeError: `files` is one path or one checkpoint.
        UsageFault: fewer than two files, or malformed weights.
        Refused: names, types or shapes differ; or a tensor has a type that can't be averaged, or is sharded,
            sparse or quantised.
        NoState: a file holds no state, or none at `state`.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.
    """
    if isinstance(files, Checkpoint | str | os.PathLike):
        raise TypeError("average() takes a list of paths or checkpoints: ckpttool.average([a, b])")
    shares = _checked(weights, len(files))
    checkpoints = [file if isinstance(file, Checkpoint) else open_checkpoint(file) for file in files]
    states = [checkpoint.state(state) for checkpoint in checkpoints]
    for checkpoint, chosen in zip(checkpoints, states, strict=True):
        require_plain(checkpoint.path, chosen.likes, "can't be averaged")
    for checkpoint, chosen in zip(checkpoints[:-1], states, strict=False):
        _require_same(checkpoint, chosen, checkpoints[-1], states[-1])
    last, work = states[-1], _Averaging(states, shares)
    entries = ((key, work.entry(str(key), value)) for key, value in last.container.items())
    container = remade(last.container, entries)
    statistics = tuple(name for name in work.averaged if name.endswith((MEAN, VARIANCE)))
    done = Averaged(len(states), tuple(work.averaged), tuple(work.kept), tuple(work.taken), statistics)
    return replace(checkpoints[-1], tree=container, opened=()), done


def _checked(weights: Sequence[float] | None, count: int) -> list[float]:
    if count < 2:
        raise UsageFault("an average needs two files or more", hint="ckpttool average a.pt b.pt mean.pt")
    shares = [1.0] * count if weights is None else list(weights)
    if len(shares) != count:
        raise UsageFault(f"{len(shares)} weights for {count} files", hint="--weights w0,w1,… one per file")
    are_sane = all(math.isfinite(share) and (share == 0 or 1e-30 < share < 1e30) for share in shares)
    if not are_sane or not any(shares):
        raise UsageFault("weights must be 0 or more, and not all 0", hint="--weights 0.5,0.25,0.25")
    return shares


def _require_same(one: Checkpoint, a: State, other: Checkpoint, b: State) -> None:
    hint = f"ckpttool diff --model-only {shlex.quote(one.path)} {shlex.quote(other.path)}"
    for mine, theirs, has, lacks in ((a, b, one, other), (b, a, other, one)):
        if absent := [name for name in mine.tensors if name not in theirs.tensors]:
            hint = stripping(one.path, a, b) or stripping(other.path, b, a) or hint
            raise Refused(lacks.path, f"has no '{absent[0]}', which {has.path} has", hint=hint)
    for name, tensor in a.tensors.items():
        against = b.tensors[name]
        if (tensor.dtype, tensor.shape) != (against.dtype, against.shape):
            forms = [f"{form.dtype.name} {list(form.shape)}" for form in (tensor, against)]
            raise Refused(one.path, f"'{name}' is {forms[0]}, and {forms[1]} in {other.path}", hint=hint)


class _Averaging:
    """The work of one average: the outcome for each tensor, and the storages that names share."""

    def __init__(self, states: list[State], weights: list[float]) -> None:
        self.states, self.weights = states, weights
        self.averaged: list[str] = []
        self.kept: list[str] = []
        self.taken: list[str] = []
        self.storages: dict[tuple[object, ...], Storage] = {}
        self.batches: dict[str, _Batch] = {}  # to which tensors of a type are added
        self.work: dict[str, _Work] = {}  # for each type
        self.held = lru_cache(HELD)(_Batch.means)

    def entry(self, name: str, value: object) -> object:
        """Return the result's value for an entry of the last file's state."""
        last = plain_tensor(value)
        return value if last is None else with_plain_tensor(value, self.tensor(name, last))

    def tensor(self, name: str, last: TensorRef) -> TensorRef:
        inputs = [state.tensors[name] for state in self.states]
        part = real_dtype(last.dtype)
        if last.dtype.name in INTEGERS:
            same = all(_same(name, tensor, last) for tensor in inputs[:-1])
            (self.kept if same else self.taken).append(name)
            return last
        if part.name not in FLOATS:
            path, what = last.storage.data.path, f"'{name}' is {last.dtype.name}, which can't be averaged"
            convert = f"ckpttool convert {shlex.quote(path)} bf16.pt --dtype bf16"
            raise Refused(path, what, hint=f"convert each file first: {convert}")
        for tensor in inputs:
            require_bounded(name, tensor)
        self.averaged.append(name)
        views = tuple(tensor.view for tensor in inputs)
        if views not in self.storages:
            kind, origins = last.dtype.storage or "UntypedStorage", tuple(tensor.storage for tensor in inputs)
            data = self._computed(inputs, part)
            self.storages[views] = Storage(data, kind, last.storage.location, origins=origins)
        new = TensorRef.contiguous(self.storages[views], last.dtype, last.shape)
        return replace(new, requires_grad=last.requires_grad)

    def _computed(self, inputs: list[TensorRef], part: DType) -> Computed:
        """Return the bytes of the means of one tensor; small plain tensors share a batch."""
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


def _same(name: str, a: TensorRef, b: TensorRef) -> bool:
    for tensor in (a, b):
        require_bounded(name, tensor, MAX_REPEATED)
    return all(x == y for x, y in zip(in_pieces(a, CHUNK), in_pieces(b, CHUNK), strict=True))


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
    import numpy as np

    return memoryview(np.frombuffer(piece, dtype=f"<u{part.itemsize}").byteswap().view("u1"))
