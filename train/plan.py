"""The plan of a training: which rank takes which sample, at which step.

Pure arithmetic, so every rank knows the whole plan without communication. An epoch is a permutation of the
samples, derived from (seed, epoch) alone, and cut into global batches; each global batch is dealt to the
ranks. So together the ranks take every sample exactly once, in the same steps for any number of ranks, and a
run can resume at any step, on another number of ranks.

DistributedSampler is not used, because it repeats or drops samples to make all shares equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One rank's part of one optimizer step.

    Attributes:
        index: number of the step in its epoch.
        global_size: samples that all ranks together take in this step.
        micro_batches: sample indices, one list per forward pass; none if this rank's share is empty.
    """

    index: int
    global_size: int
    micro_batches: tuple[list[int], ...]


@dataclass(frozen=True)
class Plan:
    """How an epoch of `samples` samples is cut and dealt.

    `batch_size` is global: samples per optimizer step over all ranks. `accumulate` cuts each rank's share
    into that many forward passes (fewer when the share is smaller).
    """

    samples: int
    batch_size: int
    seed: int = 0
    drop_last: bool = False
    accumulate: int = 1

    @property
    def steps(self) -> int:
        """The number of optimizer steps in an epoch, the same on every rank."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> list[int]:
        """Return the epoch's permutation of the sample indices."""
        indices = list(range(self.samples))
        # A string seed is hashed by random itself, the same way on every Python and machine.
        random.Random(f"{self.seed}:{epoch}").shuffle(indices)
        return indices

    def global_size(self, step: int) -> int:
        """Return the number of samples in a step, over all ranks. Only the last step may be smaller."""
        return min(self.batch_size, self.samples - step * self.batch_size)

    def of_rank(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Step]:
        """Yield one rank's steps of an epoch, from step `start` on."""
        order = self.order(epoch)
        for index in range(start, self.steps):
            batch = order[index * self.batch_size : (index + 1) * self.batch_size]
            share = deal(batch, world_size)[rank]
            yield Step(index, len(batch), tuple(self._micro_batches(share)))

    def _micro_batches(self, share: list[int]) -> list[list[int]]:
        return deal(share, min(self.accumulate, len(share)))

    def share_sizes(self, world_size: int) -> set[int]:
        """Return all sizes that a rank's share of a step can have."""
        batches = {self.global_size(step) for step in (0, self.steps - 1) if self.steps}
        return {len(share) for size in batches for share in deal(range(size), world_size)}

    def micro_batch_sizes(self, world_size: int) -> set[int]:
        """Return all sizes that the batch of a forward pass can have, on any rank in any step."""
        shares = self.share_sizes(world_size)
        return {len(micro) for size in shares for micro in self._micro_batches(list(range(size)))}


def deal(items: Sequence[int], parts: int) -> list[list[int]]:
    """Deal items like cards: sizes differ by at most one, and no earlier part is smaller than a later one."""
    return [list(items[part::parts]) for part in range(parts)]


def evaluation_batches(samples: int, batch_size: int, rank: int, world_size: int) -> dict[int, range]:
    """Return this rank's batches of a test set, by their number.

    The set is cut into batches before whole batches are dealt, so a sample is in the same batch on any number
    of ranks, and gets the same numbers.
    """
    count = -(-samples // batch_size)
    return {
        number: range(number * batch_size, min((number + 1) * batch_size, samples))
        for number in range(rank, count, world_size)
    }
