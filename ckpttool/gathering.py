"""Rows of all ranks joined by sample, each exactly once. Imports torch.

Ranks hold any number of rows, none too. Tensors travel as their bytes, so every dtype does, nothing is
pickled, and NCCL sends what lies on the GPU from there. A rank sends and receives pieces of bounded size,
whatever the number of rows, and puts them where they belong in the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import ranks
from .errors import CheckFailed
from .exactly_once import faults

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 16 << 20
"""Bytes of all ranks' rows that are under way at a time."""


def gather(
    index: torch.Tensor, columns: Mapping[str, torch.Tensor], *, samples: int, piece: int = PIECE
) -> dict[str, torch.Tensor]:
    """The rows of all ranks in the order of their samples, on every rank. A collective.

    Args:
        index: int64 [n], the samples of this rank's rows, in any order; n may differ between ranks, and be 0.
        columns: name -> tensor [n, ...]; names, dtypes and further axes are the same on all ranks.
        samples: how many samples there are over all ranks: 0 to samples - 1.
        piece: bytes that are under way at a time, of all ranks together.

    Returns:
        name -> tensor [samples, ...], on the device on which this rank's columns lie.

    Raises:
        CheckFailed: a sample is missing, stands more than once, or is none; names samples and ranks. On
            other ranks than 0 RankFailed.
        RanksDiffer: columns are not the same kind on all ranks.
        TypeError, ValueError: index is no int64 [n], or a column has another number of rows.
    """
    with ranks.together():
        _check_rows(index, columns)
    ranks.compare({name: (column.dtype, column.shape[1:]) for name, column in columns.items()}, "in gather")
    counts = _counts(len(index))
    places = _join(index, counts, piece)
    own = [place.cpu().numpy() for place in places]
    ranks.decide(lambda: _check_once(own, samples))
    joined = {}
    for name, column in columns.items():
        whole = torch.empty((samples, *column.shape[1:]), dtype=column.dtype, device=column.device)
        moved = [place.to(column.device) for place in places]
        for number, start, rows in _pieces(column, counts, piece):
            whole[moved[number][start : start + len(rows)]] = rows.to(column.device)
        joined[name] = whole
    return joined


def arrays_of_all_ranks(own: NDArray[Any], kind: str = "") -> list[NDArray[Any]]:
    """Each rank's int64 [n], in the order of ranks, on every rank; n may differ. A collective.

    Args:
        kind: what it is, the same on all ranks.

    Raises:
        RanksDiffer: it is not.
    """
    ranks.compare({kind: None}, "in reduce")
    counts = _counts(len(own))
    return [part.cpu().numpy() for part in _join(torch.from_numpy(own), counts, PIECE)]


def _check_rows(index: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
    if index.dtype != torch.int64 or index.dim() != 1:
        raise TypeError(f"index is int64 [n], not {index.dtype} {list(index.shape)}")
    for name, column in columns.items():
        if column.dim() == 0 or len(column) != len(index):
            raise ValueError(f"'{name}' is {list(column.shape)}, and index has {len(index)} rows")


def _check_once(places: list[NDArray[Any]], samples: int) -> None:
    said = faults({f"rank {number}": place for number, place in enumerate(places)}, samples)
    if said:
        raise CheckFailed("; ".join(said), hint="deal every sample to one rank: no padding, no repeats")


def _counts(own: int) -> list[int]:
    """Every rank's number of rows."""
    counts = torch.zeros(ranks.world_size(), dtype=torch.int64)
    counts[ranks.rank()] = own
    return [int(count) for count in ranks.total(counts).tolist()]


def _join(rows: torch.Tensor, counts: list[int], piece: int) -> list[torch.Tensor]:
    """Every rank's rows, in the order of ranks."""
    parts: list[list[torch.Tensor]] = [[rows[:0]] for _ in counts]
    for number, _, found in _pieces(rows, counts, piece):
        parts[number].append(found.to(rows.device))
    return [torch.cat(part) for part in parts]


def _pieces(rows: torch.Tensor, counts: list[int], piece: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(rank, first row, rows) of all ranks' rows, a stretch at a time."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    if len(counts) == 1:
        yield 0, 0, rows
    elif width:  # else there is nothing to send
        yield from _exchanged(rows, counts, width, piece)


def _exchanged(
    rows: torch.Tensor, counts: list[int], width: int, piece: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The same, sent around, with `width` bytes a row.

    In each round every rank sends a stretch of one length, that of the longest: the others' are filled up.
    """
    at_once = max(1, piece // (width * len(counts)))
    plain = rows.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # Of an empty tensor numpy may have chosen a stride that torch will not view as bytes.
    data = plain.view(torch.uint8) if len(plain) else torch.zeros(0, dtype=torch.uint8)
    for start in range(0, max(counts), at_once):
        length = min(at_once, max(counts) - start)
        sent = torch.empty(length * width, dtype=torch.uint8, device=ranks._device())
        mine = data[start * width : (start + length) * width]
        sent[: len(mine)] = mine
        received = torch.empty(len(counts) * len(sent), dtype=torch.uint8, device=sent.device)
        dist.all_gather_into_tensor(received, sent)
        for number, count in enumerate(counts):
            stretch = min(length, count - start)
            if stretch > 0:
                raw = received[number * len(sent) :][: stretch * width]
                yield number, start, raw.view(rows.dtype).reshape(stretch, *rows.shape[1:])
