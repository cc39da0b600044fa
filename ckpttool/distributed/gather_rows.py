"""Rows of all ranks joined by sample, each exactly once. Imports torch.

Ranks hold any number of rows, none too. Two small messages per rank say what it has, and that it has memory
for the rows of all; then rows travel as bytes, all their columns in one message, in rounds of bounded size,
and are put where they belong in the result. So every dtype does, nothing is pickled, and NCCL sends what lies
on the GPU from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckFailed
from . import collectives, transport
from .exactly_once import faults

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 8 << 20
"""Bytes of all ranks' rows that are under way at a time. More fit into no cache, and take longer a byte."""

ALIGNED = 8
"""Bytes to a multiple of which each column begins in a message, to be seen as numbers where it lies."""

LIKE_OTHERS = "give every rank the same columns, dtypes and further axes, and the same numbers"

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, piece: int = PIECE
) -> dict[str, torch.Tensor]:
    """The rows of all ranks in the order of their samples, on every rank. A collective.

    Args:
        index: int64 [n], the samples of this rank's rows, in any order; n may differ between ranks, and be 0.
        columns: name -> tensor [n, ...]; names, dtypes and further axes are the same on all ranks.
        samples: how many samples there are over all ranks: 0 to samples - 1.
        piece: bytes that are under way at a time, of all ranks together; at least a row of each.

    Returns:
        name -> tensor [samples, ...], on the device on which this rank's columns lie.

    Raises:
        CheckFailed: a sample is missing, repeated or out of range; names samples and ranks. On
            other ranks than 0 RankFailed.
        RanksDiffer: columns are not the same kind on all ranks, or `samples` or `piece` not the same.
        TypeError, ValueError: index is not int64 [n], or a column has another number of rows.
    """
    counts = collectives.agree(lambda: _look(index, columns, samples, piece), "in gather", hint=LIKE_OTHERS)
    ends = [0, *accumulate(counts)]
    with collectives.together():  # memory may be short on only one rank
        # Where the numbers of rows don't add up there is nothing to join, nor word on how large it would be.
        joined = [_Column(column, samples if ends[-1] == samples else 0) for column in columns.values()]
        places = torch.empty(ends[-1], dtype=torch.int64)
    for rank, start, rows in _stretches([index, *columns.values()], counts, piece):
        own = rows[0].view(torch.int64)
        at = own.cpu()
        places[ends[rank] + start :][: len(at)] = at
        if ends[-1] == samples and _all_below(at, samples):
            for column, raw in zip(joined, rows[1:], strict=True):
                column.put(own, raw)
    # Every rank has all places, so each comes to the same verdict by itself.
    collectives.alike(
        lambda: _check_once([places[start:end].numpy() for start, end in pairwise(ends)], samples)
    )
    return {name: column.whole() for name, column in zip(columns, joined, strict=True)}


def arrays_of_all_ranks(own: NDArray[Any], kind: str = "") -> list[NDArray[Any]]:
    """Each rank's int64 [n], in the order of ranks, on every rank; n may differ. A collective.

    Args:
        kind: what it is, the same on all ranks.

    Raises:
        RanksDiffer: it is not.
    """
    hint = "reduce the same metrics, in the same order, on every rank"
    counts = collectives.agree(lambda: ({kind: None}, len(own)), "in reduce", hint=hint)
    parts = [torch.empty(count, dtype=torch.int64) for count in counts]
    for rank, start, (raw,) in _stretches([torch.from_numpy(own)], counts, PIECE):
        rows = raw.view(torch.int64)
        parts[rank][start : start + len(rows)] = rows
    return [part.numpy() for part in parts]


def _look(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], samples: int, piece: int
) -> tuple[dict[str, Any], int]:
    """What must be the same on all ranks, and how many rows this one has. Raises TypeError, ValueError."""
    if index.dtype != torch.int64 or index.dim() != 1:
        raise TypeError(f"index is int64 [n], not {index.dtype} {list(index.shape)}")
    for name, column in columns.items():
        if column.dim() == 0 or len(column) != len(index):
            raise ValueError(f"'{name}' is {list(column.shape)}, and index has {len(index)} rows")
    kinds = {f"kind of column '{name}'": (c.dtype, tuple(c.shape[1:])) for name, c in columns.items()}
    return {**kinds, "number of samples": samples, "size of a piece": piece}, len(index)


def _all_below(places: torch.Tensor, samples: int) -> bool:
    return not len(places) or bool(places.min() >= 0 and places.max() < samples)


def _check_once(places: list[NDArray[Any]], samples: int) -> None:
    said = faults({f"rank {number}": place for number, place in enumerate(places)}, samples)
    if said:
        raise CheckFailed("; ".join(said), hint="deal every sample to one rank: no padding, no repeats")


class _Column:
    """One column of all ranks, as it is put together: rows of whole numbers, whatever they mean."""

    def __init__(self, own: torch.Tensor, samples: int) -> None:
        self.dtype, self.shape = own.dtype, (samples, *own.shape[1:])
        width = _row_bytes(own)
        word = next(word for word in WORDS if width % word.itemsize == 0)
        self.rows = torch.empty((samples, width // word.itemsize), dtype=word, device=own.device)

    def put(self, places: torch.Tensor, raw: torch.Tensor) -> None:
        rows = raw.to(self.rows.device).view(self.rows.dtype).reshape(len(places), self.rows.shape[1])
        self.rows.index_copy_(0, places.to(self.rows.device), rows)

    def whole(self) -> torch.Tensor:
        return self.rows.reshape(-1).view(self.dtype).reshape(self.shape)


def _row_bytes(column: torch.Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _stretches(
    columns: Sequence[torch.Tensor], counts: list[int], piece: int
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """(rank, first row, the bytes of each column) of all ranks' rows, a stretch at a time.

    The bytes may be those of a buffer, and stay until the next stretch is asked for.
    """
    widths = [_row_bytes(column) for column in columns]
    data = [transport.as_bytes(column) for column in columns]
    if len(counts) == 1:
        yield 0, 0, [_aligned(column) for column in data]
    else:
        at_once = max(1, piece // (sum(widths) * len(counts)))
        if at_once > ALIGNED:
            at_once -= at_once % ALIGNED
        yield from _exchanged(data, widths, counts, at_once)


def _exchanged(
    data: list[torch.Tensor], widths: list[int], counts: list[int], at_once: int
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """The same, sent around: in each round a stretch of every rank that has rows left.

    Each by a broadcast, because gloo does that in place, where its all-gather copies everything twice.
    """
    sizes = [_size(widths, min(at_once, count)) for count in counts]
    buffers = [torch.empty(size, dtype=torch.uint8, device=transport.device()) for size in sizes]
    for start in range(0, max(counts), at_once):
        under_way = []
        for rank, count in enumerate(counts):
            rows = min(at_once, count - start)
            if rows <= 0:
                continue
            message = buffers[rank][: _size(widths, rows)]
            stretch = _columns(message, widths, rows)
            if rank == collectives.rank():
                for place, own, width in zip(stretch, data, widths, strict=True):
                    place.copy_(own[start * width :][: rows * width])
            under_way.append((transport.begin_sending(message, rank), rank, stretch))
        for work, rank, stretch in under_way:
            work.wait()
            yield rank, start, stretch


def _size(widths: list[int], rows: int) -> int:
    """Bytes of a message of so many rows."""
    return sum(_padded(rows * width) for width in widths)


def _columns(message: torch.Tensor, widths: list[int], rows: int) -> list[torch.Tensor]:
    """Where each column lies in a message of so many rows."""
    starts = accumulate((_padded(rows * width) for width in widths), initial=0)
    return [message[start:][: rows * width] for start, width in zip(starts, widths, strict=False)]


def _aligned(raw: torch.Tensor) -> torch.Tensor:
    """The same bytes, copied if they are not aligned: they can't be viewed as numbers there."""
    odd = raw.data_ptr() % ALIGNED or raw.storage_offset() % ALIGNED
    return raw.clone() if odd else raw


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
