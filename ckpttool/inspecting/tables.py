"""The tables of `inspect`: tensors, statistics of their values, checkpoints. Imports numpy when called."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums, expect
from ..core.checkpoint.dotted_names import Entry, contents, dotted, is_tensor
from ..core.checkpoint.optimizer_view import is_optimizer
from ..core.checkpoint.special_tensors import SHARDED, plain_tensor, special_tensor
from ..core.files.threads import Progress
from ..core.formats.reading import open as open_checkpoint
from ..core.formats.roots import checkpoints_below, lacking_parts, step_in
from ..core.formats.shards import piece_of
from ..core.inert_pickle.known_names import names_in, names_that_run
from ..core.inert_pickle.values import Record, walk
from ..core.lazy import NDArray, np
from ..core.remote.places import is_folder, nbytes_of
from ..core.tensors.cast import FLOATS, carrier, reader
from ..core.tensors.ref import INTEGERS, TensorRef
from ..core.tensors.values import MAX_REPEATED, require_bounded, stream, without_repeats
from ..errors import CkptToolError

# ---- A histogram of values that come in blocks, in one pass and bounded memory


FINE = 1024  # cells of the grid, at most; a bin is the sum of many
DIGITS = 60  # bits of a cell's number: it is an int64


class Histogram:
    """Counts on a grid of cells 2^e wide, where e grows with the range of the values.

    Cells of one grid lie whole in those of a wider one, so neither the size nor the order of blocks makes a
    difference.
    """

    def __init__(self) -> None:
        self.count = 0
        self.least = self.most = 0.0
        self._exponent: int | None = None  # None while all values are equal
        self._first = 0  # the number of the cell that the first count is of
        self._counts: NDArray[Any] | None = None

    def add(self, block: NDArray[Any]) -> None:
        """Add finite numbers: (n,), n > 0."""
        least, most = float(block.min()), float(block.max())
        before = (self.least, self.most) if self.count else (least, most)
        self.least, self.most = min(before[0], least), max(before[1], most)
        if self.least < self.most:
            exponent = _exponent(self.least, self.most)
            if self._exponent is None:
                self._first, self._counts = _cell(before[0], exponent), np.array([self.count])
            else:
                self._widen(exponent - self._exponent)
            self._exponent = exponent
            cells = np.floor(np.ldexp(block.astype("f8"), -exponent)).astype("i8")
            cells[(block < 0) & (cells == 0)] = -1  # of a number too small to be scaled
            self._insert(int(cells.min()), np.bincount(cells - cells.min()))
        self.count += len(block)

    def _widen(self, bits: int) -> None:
        if bits and self._counts is not None:
            cells = np.arange(self._first, self._first + len(self._counts)) >> bits
            self._first = int(cells[0])
            self._counts = np.bincount(cells - self._first, weights=self._counts).astype("i8")

    def _insert(self, first: int, counts: NDArray[Any]) -> None:
        assert self._counts is not None
        start = min(first, self._first)
        end = max(first + len(counts), self._first + len(self._counts))
        total = np.zeros(end - start, dtype="i8")
        for at, part in ((self._first, self._counts), (first, counts)):
            total[at - start : at - start + len(part)] += part
        self._first, self._counts = start, total

    def bins(self, number: int) -> tuple[int, ...]:
        """Return the counts of `number` bins of equal width from the least value to the most.

        A value may be counted in the bin next to its own if it lies within 2 / FINE of the range of their
        edge. Equal values give one bin, no values give none.
        """
        if self._exponent is None or self._counts is None:
            return (self.count,) * (self.count > 0)
        cells = np.arange(self._first, self._first + len(self._counts)) + 0.5
        half = self.most / 2 - self.least / 2  # the range of the largest doubles is not one
        places = (np.ldexp(cells, self._exponent - 1) - self.least / 2) / half if half else cells * 0
        found = np.clip((places * number).astype("i8"), 0, number - 1)
        return tuple(np.bincount(found, weights=self._counts, minlength=number).astype("i8").tolist())


def _exponent(least: float, most: float) -> int:
    """Return the least exponent that gives at most FINE cells from the least to the most value."""
    # The number of the largest cell must fit into DIGITS bits.
    size = math.frexp(max(-least, most))[1]
    spread = math.frexp(most / 2 - least / 2)[1]
    exponent = max(spread - 12, size - DIGITS)
    while _cell(most, exponent) - _cell(least, exponent) >= FINE:
        exponent += 1
    return exponent


def _cell(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent)) or -(value < 0)


# ---- The tables


BINS = 16  # of a histogram that is shown
MOST_CHECKPOINTS = 200  # that are opened; the newest of a run come first

ADAPTER = re.compile(r"(?:^|[._])lora_(?:[ab]|up|down|magnitude|embedding_[ab])(?:\.|_|$)", re.IGNORECASE)
BLOCK = 1 << 18  # Elements per step: as float64 they stay in the processor's cache


class TensorRow(NamedTuple):
    """A tensor by its dotted path in the file.

    Attributes:
        name: the dotted path.
        dtype, shape: of the whole tensor; None when the file does not say.
        nbytes: bytes in this file.
        shared_with: the first name that uses the same bytes; None when no other does.
        kind: what it is when it is not a plain tensor: `DTensor`, `sparse COO`, …; None for a plain one.
        local_shape: the shape of the piece in this file; None when the file has all of it.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    shared_with: str | None
    kind: str | None = None
    local_shape: tuple[int, ...] | None = None

    @property
    def type(self) -> str:
        """The dtype, and the kind of a tensor that is not a plain one: `float32 DTensor`."""
        return " ".join(filter(None, (self.dtype, self.kind)))

    @property
    def sizes(self) -> str:
        """The shape as `[7,5]`, and that of the piece in this file: `[3,5] of [7,5]`."""
        both = (self.local_shape, self.shape) if self.local_shape is not None else (self.shape,)
        return " of ".join("?" if each is None else f"[{','.join(map(str, each))}]" for each in both)


def tensor_rows(checkpoint: Checkpoint) -> Iterator[TensorRow]:
    """Yield every tensor of a file, in the file's order."""

    def inside(value: object) -> Iterable[Entry] | None:
        return None if isinstance(value, Record) and is_tensor(value) else contents(value)

    first: dict[int, str] = {}
    for path, value in checkpoint.named(inside):
        if (tensor := plain_tensor(value)) is not None:
            name = dotted(path)
            owner = first.setdefault(id(tensor.storage), name)
            shared = owner if owner is not name and tensor.nbytes else None
            yield TensorRow(name, tensor.dtype.name, tensor.shape, tensor.nbytes, shared)
        elif like := special_tensor(value):
            dtype = like.dtype.name if like.dtype else None
            yield TensorRow(dotted(path), dtype, like.shape, like.nbytes, None, like.kind, like.local_shape)


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a tensor's values.

    Attributes:
        minimum, maximum: of the finite values, in the tensor's own type; None when there are none.
        mean, deviation: of the finite values, computed in float64; the deviation is a population's (÷ n).
        non_finite: the number of values that are NaN or infinite.
        histogram: how many of the finite values lie in each of the bins of equal width from the minimum to
            the maximum; empty where none were asked for.
    """

    minimum: float | int | None = None
    maximum: float | int | None = None
    mean: float | None = None
    deviation: float | None = None
    non_finite: int = 0
    histogram: tuple[int, ...] = field(default=(), metadata={"json": None})


def measure(name: str, tensor: TensorRef, bins: int = 0) -> Stats | None:
    """Return the statistics of a tensor; None for complex, quantised and other types that have no order."""
    kind = tensor.dtype.name
    if kind not in FLOATS and kind not in INTEGERS:
        return None
    once, repeats = without_repeats(tensor)  # equal repetition of all values changes no mean
    require_bounded(name, once, MAX_REPEATED)
    sums = _Sums(Histogram() if bins else None)
    for piece in stream(once):
        values = _values(kind, tensor, piece)
        for start in range(0, len(values), BLOCK):
            sums.add(values[start : start + BLOCK])
    return sums.stats(repeats, bins)


def measure_all(
    checkpoint: Checkpoint, *, bins: int = 0, verify: bool = True, progress: Progress | None = None
) -> dict[str, Stats | None]:
    """Return the statistics of every plain tensor of a file by its name; reads each value once.

    Raises:
        Damaged: a file ends early, or with `verify` a checksum is wrong.
    """
    found: dict[str, Stats | None] = {}
    expect(checkpoint.storages())
    with Checksums(checkpoint, checkpoint.storages() if verify else ()) as checksums:
        for name, tensor in checkpoint.tensors():
            found[name] = measure(name, tensor, bins)
            if progress:
                progress(tensor.nbytes)
        checksums.finish()
    return found


def _values(kind: str, tensor: TensorRef, piece: memoryview) -> NDArray[Any]:
    if kind in FLOATS:
        return reader(tensor.dtype)(np.frombuffer(piece, dtype=carrier(tensor.dtype)))
    return np.frombuffer(piece, dtype="u1" if kind == "bool" else np.dtype(kind).newbyteorder("<"))


class _Sums:
    """Sums over blocks, merged as in Chan, Golub and LeVeque (1979)."""

    def __init__(self, histogram: Histogram | None) -> None:
        self.histogram = histogram
        self.count = self.non_finite = 0
        self.mean = self.squares = 0.0
        self.least: Any = None
        self.most: Any = None

    def add(self, block: NDArray[Any]) -> None:
        if block.dtype.kind == "f":
            finite = np.isfinite(block)
            if not finite.all():
                self.non_finite += int(block.size - np.count_nonzero(finite))
                block = block[finite]
        if not block.size:
            return
        if self.histogram is not None:
            self.histogram.add(block)
        least, most = block.min(), block.max()
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        wide = block.astype("f8")
        with np.errstate(over="ignore", invalid="ignore"):  # the squares of the largest doubles
            mean = float(wide.mean())
            wide -= mean
            squares = float(np.dot(wide, wide))
            apart, total = mean - self.mean, self.count + block.size
            self.squares += squares + apart * apart * self.count * block.size / total
            self.mean += apart * block.size / total
        self.count = total

    def stats(self, repeats: int, bins: int) -> Stats:
        if not self.count:
            return Stats(non_finite=self.non_finite * repeats)
        least, most = self.least.item(), self.most.item()
        counts = tuple(n * repeats for n in self.histogram.bins(bins)) if self.histogram else ()
        deviation = (self.squares / self.count) ** 0.5
        return Stats(least, most, self.mean, deviation, self.non_finite * repeats, counts)


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint of a run.

    Attributes:
        path: of the file or folder.
        step: of the training; None where it does not say.
        format: None where it can't be read.
        nbytes: its size.
        problem: why it is not whole; empty where it is.
        optimizer: whether an optimizer's state is in it, without which a training can't go on; None where
            that isn't known: of a file that can't be read, and of a folder that may have it in another file.
        is_part: what it is that needs another model: `LoRA adapter`, `delta`; None for a model of its own.
        could_run: names in it that could run something when it is unpickled without `weights_only`.
    """

    path: str
    step: int | None
    format: str | None
    nbytes: int = field(metadata={"json": "bytes"})
    problem: str = field(metadata={"json": None})
    optimizer: bool | None = None
    is_part: str | None = None
    could_run: tuple[str, ...] = ()


def checkpoint_rows(folder: str) -> list[CheckpointRow]:
    """Return the checkpoints below a folder, the newest first; the folder itself is not one."""
    return [_checkpoint_row(folder, path) for path in checkpoints_below(folder)[:MOST_CHECKPOINTS]]


def _step_of(tree: object) -> int | None:
    """Return the step that a checkpoint of this trainer says it is of, or one of Lightning."""
    tree = tree.get("progress", tree) if isinstance(tree, dict) else None
    step = tree.get("global_step") if isinstance(tree, dict) else None
    return step if type(step) is int else None


def _part_in_words(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "delta":
        return "delta"
    state = checkpoint.found_state()
    names = [] if state is None else [*state.tensors]
    of_adapter = sum(map(bool, map(ADAPTER.search, names)))
    return "LoRA adapter" if 2 * of_adapter > len(names) else None  # it may have whole modules too


def _checkpoint_row(folder: str, path: str) -> CheckpointRow:
    step = step_in(os.path.relpath(path, folder))
    try:
        with open_checkpoint(path) as checkpoint:
            ranks = checkpoint.ranks
            missing = ", ".join(map(str, ranks.missing[:8])) if ranks else ""
            problem = f"files of ranks {missing} are missing" if missing else ""
            if any(like.kind in SHARDED for _, like in checkpoint.special_tensors()):
                problem = "it holds one rank's pieces of tensors"
            elif not is_folder(path) and (piece := piece_of(path)) and piece.others:
                problem = f"it is {piece.what}"
            else:
                problem = problem or lacking_parts(checkpoint)
            stated = step if step is not None else ranks.step if ranks else _step_of(checkpoint.tree)
            trained = any(map(is_optimizer, walk(checkpoint.tree))) or (None if is_folder(path) else False)
            running = tuple(names_that_run(checkpoint.names | names_in(checkpoint.tree)))
            whole = CheckpointRow(path, stated, checkpoint.format, checkpoint.nbytes, problem, trained)
            return replace(whole, is_part=_part_in_words(checkpoint), could_run=running)
    except CkptToolError as error:
        return CheckpointRow(path, step, None, nbytes_of(path), error.reason)
