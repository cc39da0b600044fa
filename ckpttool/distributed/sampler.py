"""Batch samplers that deal each global batch to the ranks, for a training loop of your own. Imports torch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from ..errors import UsageFault
from . import collectives
from .group import given_world_size
from .plan import Plan, check, deal, dealt_sizes
from .randomness import seed_from, seeded


@dataclass(frozen=True)
class Drawn:
    """An epoch as one rank takes it."""

    share: Callable[[int], list[Any]]  # step -> this rank's indices
    sizes: Sequence[int]  # samples of all ranks in each step
    compared: Mapping[str, Any]  # what must be the same on all ranks


class DealtBatches(Sampler[list[int]]):
    """This rank's part of each global batch of an epoch; a `batch_sampler` for DataLoader."""

    # All ranks take the same number of steps, unless a global batch has fewer samples than there are ranks.
    # Such a step is refused. With `uneven`, ranks without a sample leave it out, and `Uneven` waits for them.

    def __init__(
        self, draw: Callable[[int], Drawn], weights: tuple[int, ...], rank: int, uneven: bool, compared: bool
    ) -> None:
        self.rank, self.world_size = rank, len(weights)
        self._draw, self._weights, self._uneven, self._epoch, self._start = draw, weights, uneven, 0, 0
        self._drawn: Drawn | None = None
        if compared:
            hint = "create it with the same arguments on every rank, after seeding what it draws from"
            collectives.agree(lambda: (self._epoch_drawn().compared, 0), "in the sampler", hint=hint)
        else:
            self._epoch_drawn()

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Take the samples of an epoch, from its step `start` on. Without it, every epoch is epoch 0."""
        if epoch != self._epoch:
            self._drawn = None
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each global batch."""
        drawn = self._epoch_drawn()
        return filter(None, map(drawn.share, range(self._start, len(drawn.sizes))))

    def __len__(self) -> int:
        """Return the number of this rank's batches in the epoch, from its start on."""
        return sum(self.rank not in _idle(size, self._weights) for size in self.global_sizes)

    @property
    def global_sizes(self) -> list[int]:
        """The samples of all ranks in each step, in the order of the batches, for `global_mean_loss`."""
        return list(self._epoch_drawn().sizes[self._start :])

    def _epoch_drawn(self) -> Drawn:
        if self._drawn is None:
            drawn = self._draw(self._epoch)
            # A rank whose samples have ended takes part in the rest (`Uneven`), but can't skip a step before.
            ended = frozenset(range(self.world_size))
            for size in reversed(drawn.sizes):
                idle = _idle(size, self._weights)
                if idle and (not self._uneven or idle - ended):
                    left = f"leaves {len(idle)} of {self.world_size} ranks without a sample"
                    wrap = "give uneven=True and wrap the loader in ckpttool.distributed.Uneven"
                    reason = f"a batch of {size} {left}, and the others would wait for them"
                    raise UsageFault(reason, hint=f"leave it out by drop_last=True, or {wrap}")
                ended &= idle
            self._drawn = drawn
        return self._drawn


@lru_cache(maxsize=256)
def _idle(size: int, weights: tuple[int, ...]) -> frozenset[int]:
    """Return the ranks that get no sample of `size`."""
    return frozenset(rank for rank, share in enumerate(dealt_sizes(size, weights)) if not share)


class ExactBatchSampler(DealtBatches):
    """The batches of a `Plan`: every sample once in an epoch, in the same steps on any number of ranks.

        batches = ExactBatchSampler(dataset, batch_size=64)
        loader = DataLoader(dataset, batch_sampler=batches)
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for (inputs, target), size in zip(loader, batches.global_sizes):
                loss_sum = F.cross_entropy(ddp(inputs), target, reduction="sum")
                global_mean_loss(loss_sum, size).backward()

    A run that stopped after some steps of an epoch continues with `batches.set_epoch(epoch, start=steps)`.
    """

    def __init__(
        self,
        samples: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
        rank_batch: tuple[int, ...] | None = None,
        rank_share: tuple[int, ...] | None = None,
        uneven: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Make the plan. A collective, unless `rank` and `world_size` are given.

        Args:
            samples: the data set, or its length.
            batch_size: samples per step over all ranks.
            seed, drop_last, rank_batch, rank_share: as in `Plan`.
            uneven: let ranks without a sample in the last batch end a step earlier.
            rank, world_size: those of the process group by default.

        Raises:
            UsageFault: the plan can't be dealt; the last batch leaves a rank with nothing, without `uneven`;
                only one of `rank` and `world_size` is given, or there is no process group yet although
                torchrun started several ranks.
            RanksDiffer: the arguments or data sets differ between ranks.
        """
        count = samples if isinstance(samples, int) else len(samples)
        batch, share = _tuple(rank_batch), _tuple(rank_share)
        plan = Plan(count, batch_size, seed, drop_last, rank_batch=batch, rank_share=share)
        own, ranks = _place(rank, world_size)
        check(plan, ranks)

        def draw(epoch: int) -> Drawn:
            sizes = [plan.global_size(step, ranks) for step in range(plan.steps_of(ranks))]
            return Drawn(plan.of_rank(epoch, own, ranks).share, sizes, {"plan": plan})

        super().__init__(draw, plan.weights(ranks), own, uneven, compared=rank is None)


def distribute(
    sampler: Iterable[Any],
    batch_size: int | None = None,
    *,
    seed: int = 0,
    drop_last: bool = False,
    rank_share: tuple[int, ...] | None = None,
    uneven: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
) -> DealtBatches:
    """Return a batch sampler that deals what another sampler draws to the ranks, each index exactly once.

    Every rank draws the whole sequence of an epoch, with Python's, numpy's and torch's generators, and those
    that are attributes of the sampler, seeded by (seed, epoch): all draw the same. What a sampler draws
    twice, as a weighted one does, is taken twice. A batch sampler's batches are global: each is split over
    the ranks, so more ranks do not mean larger steps.

        sampler = WeightedRandomSampler(weights, 10_000)
        loader = DataLoader(dataset, batch_sampler=distribute(sampler, batch_size=64))

    A collective, unless `rank` and `world_size` are given.

    Args:
        sampler: yields finitely many indices, or batches of them as lists or tuples.
        batch_size: samples per step over all ranks; None if the sampler yields batches.
        seed: with the epoch, determines what is drawn.
        drop_last: leave out a last batch that is smaller than `batch_size`.
        rank_share: weights of the ranks in every batch; equal by default.
        uneven: let a rank without samples in the last steps of an epoch leave them out.
        rank, world_size: those of the process group by default.

    Raises:
        UsageFault: the sampler is already distributed, yields batches though `batch_size` is given, or
            indices though it is not, or draws differently each time; otherwise as `ExactBatchSampler`.
        RanksDiffer: the ranks draw different samples.
    """
    own, ranks = _place(rank, world_size)
    weights = _tuple(rank_share) or (1,) * ranks
    # Its batches may have any size, so only the numbers are checked if the sampler makes them itself.
    check(Plan(0, batch_size or sum(weights), rank_share=_tuple(rank_share)), ranks)
    reseeding = _generators(sampler)

    def draw(epoch: int) -> Drawn:
        cut = _cut(_drawn(sampler, reseeding, seed, epoch), batch_size, drop_last)
        batches = [batch for batch in cut if batch]
        shares = [deal(batch, weights)[own] for batch in batches]
        return Drawn(shares.__getitem__, list(map(len, batches)), {"order of samples": batches})

    return DealtBatches(draw, weights, own, uneven, compared=rank is None)


def _drawn(sampler: Iterable[Any], generators: list[Any], seed: int, epoch: int) -> list[Any]:
    """Return what a sampler draws in an epoch, seeded by (seed, epoch)."""
    drawn = []
    for _ in range(2):
        with seeded(seed, "sampler", epoch), _reseeded(generators, seed, epoch):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
            drawn.append(list(sampler))
    if repr(drawn[0]) != repr(drawn[1]):
        reason = "draws other samples each time from one seed, so ranks would differ"
        hint = "let it draw from torch's generator, or from a torch.Generator that is its attribute"
        raise UsageFault(f"{type(sampler).__name__} {reason}", hint=hint)
    return drawn[0]


def _cut(drawn: list[Any], batch_size: int | None, drop_last: bool) -> list[list[Any]]:
    """Return the global batches of what a sampler has drawn."""
    in_batches = [isinstance(item, list | tuple) for item in drawn]
    if batch_size is None:
        if not all(in_batches):
            raise UsageFault("the sampler yields indices, not batches", hint="give batch_size")
        return [list(batch) for batch in drawn]
    if any(isinstance(item, list) for item in drawn):
        raise UsageFault("the sampler yields batches, not indices", hint="leave out batch_size")
    batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks: those given, or those of the process group."""
    if (rank is None) != (world_size is None):
        raise UsageFault("rank and world_size: only one of them is given", hint="give both or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise UsageFault(f"rank {rank}: is none of {world_size} ranks", hint="count from 0")
        return rank, world_size
    if given_world_size() > 1 and not torch.distributed.is_initialized():
        reason = f"one of {given_world_size()} ranks would take every sample, as there is no process group"
        raise UsageFault(reason, hint="call init_process_group first, or give rank and world_size")
    return collectives.rank(), collectives.world_size()


def _tuple(weights: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if weights is None else tuple(weights)


def _generators(sampler: Any) -> list[Any]:
    """Return the random generators among the attributes of a sampler and of the samplers in it."""
    import numpy

    generators: list[Any] = []
    waiting, seen = [sampler], set[int]()
    while waiting:
        inner = waiting.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        if isinstance(inner, DistributedSampler | DealtBatches):
            reason = f"{type(inner).__name__} is already distributed"
            raise UsageFault(reason, hint="give the sampler that it deals")
        for value in getattr(inner, "__dict__", {}).values():
            if isinstance(value, torch.Generator | random.Random | numpy.random.Generator):
                generators.append(value)
            elif isinstance(value, Sampler):
                waiting.append(value)
    return generators


@contextlib.contextmanager
def _reseeded(generators: list[Any], *parts: object) -> Iterator[None]:
    """Seed generators by `parts`, each differently, and restore them after the block."""
    with contextlib.ExitStack() as restored:
        for number, generator in enumerate(generators):
            seed = seed_from(*parts, number)
            if isinstance(generator, torch.Generator):
                restored.callback(generator.set_state, generator.get_state())
                generator.manual_seed(seed)
            elif isinstance(generator, random.Random):
                restored.callback(generator.setstate, generator.getstate())
                generator.seed(seed)
            else:
                bits = generator.bit_generator
                restored.callback(setattr, bits, "state", bits.state)
                bits.state = type(bits)(seed).state
        yield
