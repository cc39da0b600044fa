"""Rows of all ranks joined by sample, each exactly once. Imports torch.

Two small messages per rank say what it has, and that it has memory for all rows. Then rows travel as bytes,
all columns of a rank in one message, in rounds of bounded size. So any dtype can be gathered, nothing is
pickled, and NCCL sends from the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..core.lazy import NDArray
from ..errors import CheckFailed
from . import collectives, transport
from .plan import faults

# Bytes of all ranks' rows in flight at a time. More than that leaves the cache and takes longer per byte.
PIECE = 8 << 20

# Each column begins at a multiple of this many bytes in a message, so that it can be viewed as numbers.
ALIGNED = 8

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, piece: int = PIECE
) -> dict[str, torch.Tensor]:
    """Return the rows of all ranks, in the order of their samples, on every rank. A collective.

    Args:
        index: int64 [n], the samples of this rank's rows, in any order; n may differ between ranks and be 0.
        columns: name -> tensor [n, ...]; the same names, dtypes and further axes on all ranks.
        samples: the number of samples over all ranks, which are 0 to samples - 1.
        piece: bytes in flight at a time, of all ranks together; at least one row per rank.

    Returns:
        name -> tensor [samples, ...], on the device of this rank's column.

    Raises:
        CheckFailed: on rank 0, if a sample is missing, repeated or out of range; RankFailed on the others.
        RanksDiffer: the ranks have different columns, `samples` or `piece`.
        TypeError, ValueError: on a rank whose index is not int64 [n], or with a column that lacks a row for
            each sample; RankFailed on the others.
    """
    counts = collectives.agree(
        lambda: _describe(index, columns, samples, piece),
        "in gather",
        hint="give every rank the same columns, dtypes and further axes, and the same numbers",
    )
    ends = [0, *accumulate(counts)]
    with collectives.fail_together():  # one rank may be short of memory
        # If the numbers of rows don't add up, nothing is joined; `samples` may then be any number.
        joined = [_Column(column, samples if ends[-1] == samples else 0) for column in columns.values()]
        places = torch.empty(ends[-1], dtype=torch.int64)
    for rank, start, rows in _pieces([index, *columns.values()], counts, piece):
        samples_sent = rows[0].view(torch.int64)
        at = samples_sent.cpu()
        places[ends[rank] + start :][: len(at)] = at
        if ends[-1] == samples and bool(((at >= 0) & (at < samples)).all()):
            for column, raw in zip(joined, rows[1:], strict=True):
                column.put(samples_sent, raw)
    # Every rank has the places of all rows, so each comes to the same verdict without asking.
    of_ranks = [places[start:end].numpy() for start, end in pairwise(ends)]
    collectives.report_once(lambda: _check_once(of_ranks, samples))
    return {name: column.joined() for name, column in zip(columns, joined, strict=True)}


def gather_arrays(array: NDArray[Any], kind: str = "") -> list[NDArray[Any]]:
    """Return every rank's int64 [n] array, in rank order, on every rank; n may differ. A collective."""
    hint = "reduce the same metrics, in the same order, on every rank"
    counts = collectives.agree(lambda: ({kind: None}, len(array)), "in reduce", hint=hint)
    parts = [torch.empty(count, dtype=torch.int64) for count in counts]
    for rank, start, (raw,) in _pieces([torch.from_numpy(array)], counts, PIECE):
        rows = raw.view(torch.int64)
        parts[rank][start : start + len(rows)] = rows
    return [part.numpy() for part in parts]


def _describe(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], samples: int, piece: int
) -> tuple[dict[str, Any], int]:
    """Return what must be the same on all ranks, and this rank's number of rows."""
    for name, column in (("index", index), *columns.items()):
        if not isinstance(column, torch.Tensor):
            raise TypeError(f"'{name}' is a {type(column).__name__}, not a tensor")
        transport.require_plain(column)
    if index.dtype != torch.int64 or index.dim() != 1:
        raise TypeError(f"index is int64 [n], not {index.dtype} {list(index.shape)}")
    for name, column in columns.items():
        if column.dim() == 0 or len(column) != len(index):
            raise ValueError(f"'{name}' is {list(column.shape)}, and index has {len(index)} rows")
    kinds = {f"kind of column '{name}'": (c.dtype, tuple(c.shape[1:])) for name, c in columns.items()}
    return {**kinds, "number of samples": samples, "size of a piece": piece}, len(index)


def _check_once(places: list[NDArray[Any]], samples: int) -> None:
    if said := faults({f"rank {number}": place for number, place in enumerate(places)}, samples):
        raise CheckFailed("; ".join(said), hint="deal every sample to one rank: no padding, no repeats")


class _Column:
    """One column of all ranks while it is joined: rows of integers, whatever their bytes mean."""

    def __init__(self, column: torch.Tensor, samples: int) -> None:
        self.dtype, self.shape = column.dtype, (samples, *column.shape[1:])
        width = _row_bytes(column)
        word = next(word for word in WORDS if width % word.itemsize == 0)
        self.rows = torch.empty((samples, width // word.itemsize), dtype=word, device=column.device)

    def put(self, places: torch.Tensor, raw: torch.Tensor) -> None:
        rows = raw.to(self.rows.device).view(self.rows.dtype).reshape(len(places), self.rows.shape[1])
        self.rows.index_copy_(0, places.to(self.rows.device), rows)

    def joined(self) -> torch.Tensor:
        return self.rows.reshape(-1).view(self.dtype).reshape(self.shape)


# ---- Messages


def _row_bytes(column: torch.Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _pieces(
    columns: Sequence[torch.Tensor], counts: list[int], piece: int
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yield all ranks' rows piece by piece: (rank, first row, the bytes of each column)."""
    # The bytes may lie in a buffer that the next piece overwrites.
    widths = [_row_bytes(column) for column in columns]
    data = [transport.as_bytes(column) for column in columns]
    if len(counts) == 1:
        yield 0, 0, [_aligned(column) for column in data]
        return
    at_once = max(1, piece // (sum(widths) * len(counts)))  # rows of every rank that has rows left
    if at_once > ALIGNED:
        at_once -= at_once % ALIGNED
    # By broadcasts, which gloo does in place; its all-gather copies everything twice.
    sizes = [_size(widths, min(at_once, count)) for count in counts]
    buffers = [torch.empty(size, dtype=torch.uint8, device=transport.device()) for size in sizes]
    for start in range(0, max(counts), at_once):
        in_flight = []
        for rank, count in enumerate(counts):
            rows = min(at_once, count - start)
            if rows <= 0:
                continue
            message = buffers[rank][: _size(widths, rows)]
            parts = _parts(message, widths, rows)
            if rank == collectives.rank():
                for place, column, width in zip(parts, data, widths, strict=True):
                    place.copy_(column[start * width :][: rows * width])
            in_flight.append((transport.begin_broadcast(message, rank), rank, parts))
        for work, rank, parts in in_flight:
            work.wait()
            yield rank, start, parts


def _size(widths: list[int], rows: int) -> int:
    """Return the bytes of a message of this many rows."""
    return sum(_padded(rows * width) for width in widths)


def _parts(message: torch.Tensor, widths: list[int], rows: int) -> list[torch.Tensor]:
    """Return each column's part of a message of this many rows."""
    starts = accumulate((_padded(rows * width) for width in widths), initial=0)
    return [message[start:][: rows * width] for start, width in zip(starts, widths, strict=False)]


def _aligned(raw: torch.Tensor) -> torch.Tensor:
    """Return the bytes, copied if they can't be viewed as numbers where they lie."""
    return raw.clone() if raw.data_ptr() % ALIGNED or raw.storage_offset() % ALIGNED else raw


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
