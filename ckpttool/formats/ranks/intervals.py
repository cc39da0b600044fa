"""What one rank has of a tensor that was cut: of each dimension a list of intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...tensors.ref import TensorRef

Intervals = list[tuple[int, int]]


def share(held: Intervals, ranks: int, at: int, chunks: int) -> Intervals:
    """Return the share of one rank of an index set, as `torch.chunk` cuts it."""
    taken: Intervals = []
    for first, last in _chunks(sum(stop - start for start, stop in held), chunks):
        step = -(-(last - first) // ranks)
        start = min(first + at * step, last)
        taken += _between(held, start, min(start + step, last))
    return taken or [(0, 0)]


def _chunks(size: int, count: int) -> Iterator[tuple[int, int]]:
    step = -(-size // count)
    return ((start, min(start + step, size)) for start in range(0, size, step or 1))


def _between(held: Intervals, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of the numbers from `start` to `stop` of an index set."""
    before = 0
    for first, last in held:
        low, high = max(start - before, 0) + first, min(stop - before, last - first) + first
        if low < high:
            yield low, high
        before += last - first


def boxes(local: TensorRef, held: Sequence[Intervals]) -> Iterator[tuple[tuple[int, ...], TensorRef]]:
    """Cut a rank's values into boxes of the whole: each is begin and values."""
    if all(len(each) == 1 for each in held):
        yield tuple(start for [(start, _)] in held), local
        return
    places = [list(zip(_starts(each), each, strict=True)) for each in held]
    for box in itertools.product(*places):
        offset = local.offset + sum(here * step for (here, _), step in zip(box, local.stride, strict=True))
        shape = tuple(stop - start for _, (start, stop) in box)
        yield tuple(start for _, (start, _) in box), replace(local, shape=shape, offset=offset)


def _starts(held: Intervals) -> Iterator[int]:
    return itertools.accumulate((stop - start for start, stop in held[:-1]), initial=0)
