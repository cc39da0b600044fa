"""The plan of a training run: which rank takes which sample, at which step. Imports numpy when called.

Pure arithmetic, so every rank knows the plan without communication. An epoch is an order of the sample
indices that depends on (seed, epoch) alone. It is cut into global batches, and each is dealt to the ranks by
their weights. So the steps take the same samples on any number of ranks, and a run can resume at any step on
other ranks.

`DistributedSampler` repeats or drops samples to make all shares equal; `sampler="torch"` is its order, cut
and dealt in the same way. torch is imported only for that.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..core.lazy import NDArray, np
from ..core.words import counted
from ..errors import UsageFault

# ---- The check that each sample appears exactly once

VERSION = b"ckpttool index set 1\n"
# How many samples, or runs of consecutive samples, a message names.
MOST_SHOWN = 6


def faults(parts: Mapping[str, NDArray[Any]], samples: int) -> list[str]:
    """Describe how the samples 0 to `samples` - 1 fail to appear once over all parts: name -> int64 [n]."""
    if _each_once(parts.values(), samples):
        return []
    joined = np.concatenate([np.zeros(0, dtype=np.int64), *parts.values()])
    present, counts = np.unique(joined, return_counts=True)
    in_range = (present >= 0) & (present < samples)
    beyond, repeated = present[~in_range], present[counts > 1]
    missing = _gaps(present[in_range], samples)
    said = []
    if len(beyond):
        verb = "is" if len(beyond) == 1 else "are"
        said.append(f"{_named(_runs(beyond))} in {_holders(parts, beyond)} {verb} not among the {samples}")
    if len(repeated):
        verb = "appears" if len(repeated) == 1 else "appear"
        said.append(f"{_named(_runs(repeated))} {verb} more than once: in {_holders(parts, repeated)}")
    if missing:
        verb = "is" if missing[0][0] == missing[-1][1] else "are"
        said.append(f"{_named(missing)} of {samples} {verb} missing")
    return said


def index_digest(samples: int) -> str:
    """Return the SHA-256 of the index set 0 to samples - 1: a version line, then little-endian int64s."""
    sha256 = hashlib.sha256(VERSION)
    for start in range(0, samples, 1 << 20):
        sha256.update(np.arange(start, min(start + (1 << 20), samples), dtype="<i8").tobytes())
    return sha256.hexdigest()


def _each_once(parts: Collection[NDArray[Any]], samples: int) -> bool:
    """Return whether each of 0 to samples - 1 appears once: quickly, since this is usual."""
    if sum(map(len, parts)) != samples:
        return False
    seen = np.zeros(samples, dtype=bool)
    for part in parts:
        if len(part) and not (part.min() >= 0 and part.max() < samples):
            return False
        seen[part] = True
    return bool(seen.all())  # there are `samples` of them and none is missing, so none appears twice


def _gaps(ascending: NDArray[Any], samples: int) -> list[tuple[int, int]]:
    """Return the runs (first, last) of 0 to samples - 1 that are missing."""
    edges = np.concatenate([[-1], ascending, [samples]])
    before = np.flatnonzero(np.diff(edges) > 1)
    return [(int(edges[at]) + 1, int(edges[at + 1]) - 1) for at in before]


def _runs(ascending: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the runs (first, last) of consecutive numbers."""
    breaks = np.flatnonzero(np.diff(ascending) > 1) + 1
    return [(int(run[0]), int(run[-1])) for run in np.split(ascending, breaks)]


def _named(runs: list[tuple[int, int]]) -> str:
    """Name the first few runs: `samples 3, 7–9`."""
    shown = [str(first) if first == last else f"{first}–{last}" for first, last in runs[:MOST_SHOWN]]
    left = sum(last - first + 1 for first, last in runs[MOST_SHOWN:])
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"sample{'' if is_one else 's'} {listed(shown, left)}"


def listed(names: Iterable[object], left: int) -> str:
    """Join names, and say how many more there are."""
    return ", ".join(map(str, names)) + (f" and {left} more" if left > 0 else "")


def _holders(parts: Mapping[str, NDArray[Any]], samples: NDArray[Any]) -> str:
    """Name the first few parts that hold any of these samples."""
    names = [name for name, index in parts.items() if np.isin(index, samples).any()]
    return listed(names[:MOST_SHOWN], len(names) - MOST_SHOWN)


# ---- Python's shuffle of a range, as an array and ten times as fast


FEW, MANY_WORDS = 2_000, 2**31  # outside these the plain loop: it is short, or each draw takes two words
WORDS = 8.0  # times the square root of the places left; in larger chunks too many swaps meet
MARKS = 1 << 16  # slots for targets that meet, by their last bits


def shuffled(count: int, seed: str) -> NDArray[Any]:
    """Return 0 to count - 1 in the order of `random.Random(seed).shuffle`, as int32 (from 2^31 on int64).

    A string seed is hashed by random itself, the same way on every Python and machine.
    """
    order: NDArray[Any] = np.arange(count, dtype=np.int32 if count < MANY_WORDS else np.int64)
    generator = random.Random(seed)
    if count < FEW or count >= MANY_WORDS:
        generator.shuffle(cast("MutableSequence[Any]", order))
        return order
    words = _Words(generator)
    marks = np.zeros(MARKS, dtype=bool)
    last = count - 1
    while last > 0:
        # From the last place down, `shuffle` swaps each place with one that is drawn from those up to it.
        targets = words.targets(last, max(64, int(WORDS * last**0.5)))
        _swap(order[: last + 1], targets, marks)
        last -= len(targets)
    return order


class _Words:
    """The 32-bit words of a Python generator, drawn by numpy, whose Mersenne Twister is the same."""

    def __init__(self, generator: random.Random) -> None:
        _, state, _ = generator.getstate()
        self.twister = np.random.RandomState(0)
        self.twister.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1], 0, 0.0))
        self.unused: NDArray[Any] = np.zeros(0, dtype=np.uint32)

    def targets(self, last: int, most: int) -> NDArray[Any]:
        """Return what `shuffle` draws for the next places: one of 0 to `last` for `last`, and so on down."""
        # `shuffle` takes as many leading bits of a word as last + 1 has. If their number is too large, it
        # takes another word. The count of bits must not change within a chunk.
        bits = (last + 1).bit_length()
        wanted = min(most, last + 1 - max(1, 2 ** (bits - 1) - 1))
        share = (last + 1 - wanted / 2) / 2**bits  # of the words that are taken, about
        words = self._next(int(wanted / share + 4 * wanted**0.5) + 64)
        drawn: NDArray[Any] = (words >> np.uint32(32 - bits)).view(np.int32)
        # A word is taken if it is at most `last` less the words taken before it: only few are close to that.
        places = np.flatnonzero(drawn <= last)
        refused: list[int] = []
        for number in np.flatnonzero(drawn[places] > last - len(places)).tolist():
            if drawn[places[number]] > last - (number - len(refused)):
                refused.append(number)
        places = np.delete(places, refused)[:wanted]
        # What follows the last word that is needed is left; if there were too few, all are used up.
        used = int(places[-1]) + 1 if len(places) == wanted else len(words)
        self.unused = self.unused[used:]
        return drawn[places]

    def _next(self, count: int) -> NDArray[Any]:
        if len(self.unused) < count:
            more = self.twister.randint(0, 2**32, max(count, 1 << 16), dtype=np.uint32)
            self.unused = np.concatenate([self.unused, more])
        return self.unused[:count]


def _swap(order: NDArray[Any], targets: NDArray[Any], marks: NDArray[Any]) -> None:
    """Swap the last place with the first target, the one before it with the second, and so on, in order."""
    last, first = len(order) - 1, len(order) - len(targets)
    # Swaps that share no place with another one can be done at once. The others share a target, or their
    # target is the place of another one; `marks` may find a few too many.
    ascending = np.sort(targets)
    shared = ascending[1:][ascending[1:] == ascending[:-1]] & (MARKS - 1)
    marks[shared] = True
    meets = marks[targets & (MARKS - 1)] | (targets >= first)
    marks[shared] = False
    meets[last - ascending[np.searchsorted(ascending, first) :]] = True
    one_by_one = np.flatnonzero(meets)
    places, others = last - one_by_one, targets[one_by_one]
    values = order[places], order[others]

    at = targets.astype(np.intp)
    of_places, of_targets = order[first:][::-1].copy(), order.take(at)
    order[at] = of_places
    order[first:] = of_targets[::-1]

    order[places], order[others] = values
    cells = memoryview(cast(Any, order))
    for place, other in zip(places.tolist(), others.tolist(), strict=True):
        cells[place], cells[other] = cells[other], cells[place]


# ---- Orders that are computed where they are used: 10^9 samples take no memory


ROUNDS = 8
CHUNK = 1 << 13  # places that are computed at once: numpy's calls cost more than their work for a batch


class InOrder:
    """0 to count - 1, as a sequence that is sliced into int64 arrays."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(self.count)
        return self.at(np.arange(start, max(start, stop), dtype=np.int64))

    def at(self, places: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers in these places."""
        return places


class Permuted(InOrder):
    """0 to count - 1 in an order that depends on a seed alone; each slice costs what it is long.

    A Feistel network over two digits of base ⌈√count⌉, walked on while it leaves the range: the generalised
    Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """

    def __init__(self, count: int, seed: str) -> None:
        super().__init__(count)
        self.base = math.isqrt(max(count - 1, 0)) + 1
        drawn = hashlib.sha512(seed.encode()).digest()
        self.keys = [int.from_bytes(drawn[8 * i : 8 * i + 8], "big") for i in range(ROUNDS)]
        self._chunk: tuple[int, NDArray[Any]] | None = None

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(self.count)
        first = start // CHUNK * CHUNK
        if stop > first + CHUNK:
            return super().__getitem__(part)
        if self._chunk is None or self._chunk[0] != first:
            self._chunk = first, super().__getitem__(slice(first, first + CHUNK))
        return self._chunk[1][start - first : max(start, stop) - first]

    def at(self, places: NDArray[Any]) -> NDArray[Any]:
        found = self._enciphered(places)
        while (outside := found >= self.count).any():  # at most 2√count of the values lie outside
            found[outside] = self._enciphered(found[outside])
        return found

    def _enciphered(self, values: NDArray[Any]) -> NDArray[Any]:
        left, right = np.divmod(values.astype(np.uint64), np.uint64(self.base))
        for key in self.keys:
            left, right = right, (left + _mixed(right, key) % np.uint64(self.base)) % np.uint64(self.base)
        enciphered: NDArray[Any] = (left * np.uint64(self.base) + right).astype(np.int64)
        return enciphered


def _mixed(values: NDArray[Any], key: int) -> NDArray[Any]:
    """Return 64 bits for each value, all of which change with each bit of it (as SplitMix64 ends)."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)  # these wrap around, as they shall
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: NDArray[Any] = mixed ^ (mixed >> np.uint64(31))
    return last


# ---- The plan


if TYPE_CHECKING:
    Order = NDArray[Any] | InOrder

Item = TypeVar("Item")

SAMPLERS = ("exact", "torch", "none")

ENDLESS = 1 << 62  # the samples of a stream that may end anywhere
MANY = 1 << 26  # samples from which on an order is computed where it is used: shuffled, it would take memory


@dataclass(frozen=True)
class Step:
    """One rank's part of one optimizer step."""

    index: int  # number of the step in its epoch
    global_size: int  # samples that all ranks together take in this step; repeats count
    # sample indices, one list per forward pass; none if this rank's share is empty
    micro_batches: tuple[list[int], ...]
    passes: int  # forward passes of the rank that has the most; at least 1


@dataclass(frozen=True)
class Plan:
    """How an epoch of samples is ordered, cut into global batches, and dealt to ranks."""

    samples: int  # size of the data set
    batch_size: int  # samples per optimizer step over all ranks
    seed: int = 0  # with the epoch, determines the order
    # leave out the short batch that ends an epoch; with `sampler="torch"` also the samples that do not
    # divide by the ranks, as `drop_last` of the sampler and of the loader do together
    drop_last: bool = False
    accumulate: int = 1  # forward passes of a rank per step; fewer if its share is smaller
    # `exact`: each sample once, in an order by Python's generator. `torch`: rank r takes what
    # `DataLoader(data, batch_size // ranks, sampler=DistributedSampler(data, ranks, r, True, seed))` takes:
    # a random order by torch's generator, which repeats samples from its front until it divides by the
    # ranks. `none`: every rank takes all samples, as without a sampler
    sampler: str = "exact"
    set_epoch: bool = True  # give each epoch its own order; if not, all have that of epoch 0
    # samples of each rank in a full batch; `batch_size` is their sum
    rank_batch: tuple[int, ...] | None = None
    rank_share: tuple[int, ...] | None = None  # weights of the ranks in every batch
    in_order: bool = False  # sample i is used in place i: a stream, which has its own order

    def length(self, world_size: int) -> int:
        """Return the number of samples in an epoch's order over all ranks; repeats count."""
        if self.sampler == "torch":
            per_rank = self.samples // world_size if self.drop_last else -(-self.samples // world_size)
            return per_rank * world_size
        return self.samples * (world_size if self.sampler == "none" else 1)

    def steps_of(self, world_size: int) -> int:
        """Return the number of optimizer steps in an epoch, the same on every rank."""
        full, rest = divmod(self.length(world_size), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def order(self, epoch: int, world_size: int = 1) -> Order:
        """Return the sample indices of an epoch in their order, before they are cut into batches.

        int32; or int64, and computed where it is sliced, for a stream and for `MANY` samples or more. Only
        the repeats of the samplers `torch` and `none` depend on the number of ranks.
        """
        if self.in_order:
            return InOrder(self.samples)
        if self.samples >= MANY and self.sampler == "exact":
            return Permuted(self.samples, f"{self.seed}:{epoch if self.set_epoch else 0}")
        permutation = self._permutation(epoch if self.set_epoch else 0)
        if self.sampler == "none":
            return np.repeat(permutation, world_size)
        length = self.length(world_size)
        return permutation[:length] if length <= self.samples else np.resize(permutation, length)

    def _permutation(self, epoch: int) -> NDArray[Any]:
        if self.sampler == "exact":
            return shuffled(self.samples, f"{self.seed}:{epoch}")
        import torch

        generator = torch.Generator().manual_seed(self.seed + epoch)
        dtype = torch.int32 if self.samples < 2**31 else torch.int64
        return torch.randperm(self.samples, generator=generator, dtype=dtype).numpy()

    def global_size(self, step: int, world_size: int = 1) -> int:
        """Return the number of samples in a step of an epoch over all ranks; repeats count.

        Only the last step may be smaller than the others.
        """
        return min(self.batch_size, self.length(world_size) - step * self.batch_size)

    def weights(self, world_size: int) -> tuple[int, ...]:
        """Return the weights by which each batch is dealt to the ranks."""
        return self.rank_batch or self.rank_share or (1,) * world_size

    def batches(self, epoch: int, world_size: int = 1, start: int = 0) -> Iterator[list[int]]:
        """Yield the global batches of an epoch, before they are dealt, from step `start` on."""
        order, size = self.order(epoch, world_size), self.batch_size
        for index in range(start, self.steps_of(world_size)):
            yield order[index * size : (index + 1) * size].tolist()

    def of_rank(self, epoch: int, rank: int, world_size: int, start: int = 0) -> RankSteps:
        """Return one rank's steps of an epoch, from step `start` on, each made when it is used."""
        return RankSteps(self, self.order(epoch, world_size), rank, world_size, start)

    def of_ranks(self, epoch: int, ranks: Iterable[int], world_size: int, start: int = 0) -> list[RankSteps]:
        """Return the steps of several ranks, as `of_rank`, with the order made once."""
        order = self.order(epoch, world_size)
        return [RankSteps(self, order, rank, world_size, start) for rank in ranks]

    def share_sizes(self, world_size: int) -> set[int]:
        """Return all sizes that a rank's share of a step can have."""
        return {size for sizes in self.splits(world_size) for size in sizes}

    def micro_batch_sizes(self, world_size: int) -> set[int]:
        """Return all sizes that the batch of a forward pass can have, on any rank in any step."""
        return {size for share in self.share_sizes(world_size) for size in self._pass_sizes(share)}

    def pass_sizes(self, world_size: int) -> set[int]:
        """Return all numbers of samples that the ranks can have together in a forward pass of a step."""
        steps = [[self._pass_sizes(share) for share in sizes] for sizes in self.splits(world_size)]
        return {sum(sizes) for step in steps for sizes in zip_longest(*step, fillvalue=0)}

    def _pass_sizes(self, share: int) -> list[int]:
        return dealt_sizes(share, (1,) * min(self.accumulate, share))

    def splits(self, world_size: int) -> list[list[int]]:
        """Return how many samples each rank gets in a full batch, and in the last one if it is smaller."""
        steps = self.steps_of(world_size)
        batches = dict.fromkeys(self.global_size(step, world_size) for step in (0, steps - 1) if steps)
        return [dealt_sizes(size, self.weights(world_size)) for size in batches]

    def seen(self, epoch: int, world_size: int) -> NDArray[Any]:
        """Return how often all ranks together take each sample in an epoch, by its index."""
        taken = min(self.steps_of(world_size) * self.batch_size, self.length(world_size))
        return np.bincount(self.order(epoch, world_size)[:taken], minlength=self.samples)


class RankSteps:
    """One rank's steps of an epoch: a sequence that keeps its samples as an array, 4 bytes for each.

    Of an order that is computed where it is used it keeps none.
    """

    def __init__(self, plan: Plan, order: Order, rank: int, world_size: int, start: int) -> None:
        self.plan, self.world_size, self.start = plan, world_size, start
        self.steps, self.full = plan.steps_of(world_size), len(order) // plan.batch_size
        size, weights = plan.batch_size, plan.weights(world_size)
        places = _places(size, weights)
        own = slice(rank, None, world_size) if isinstance(places[rank], range) else list(places[rank])
        self._lazy = (order, own) if isinstance(order, InOrder) else None
        if not isinstance(order, InOrder):
            rows = order[start * size : self.full * size].reshape(-1, size)
            # A view of a part would keep the whole order in memory.
            self._rows = rows if world_size == 1 else rows[:, own].copy()
        last = order[self.full * size :]
        self._last = last[list(_places(len(last), weights)[rank])]
        self._passes = [self._most_passes(size), self._most_passes(len(last))]

    def _most_passes(self, size: int) -> int:
        most = max(dealt_sizes(size, self.plan.weights(self.world_size)))
        return max(1, min(self.plan.accumulate, most))

    def __len__(self) -> int:
        return max(0, self.steps - self.start)

    def share(self, number: int) -> list[int]:
        """Return the sample indices of a step, before they are dealt to its forward passes."""
        indices: list[int] = self._share(range(self.start, self.steps)[number]).tolist()
        return indices

    def _share(self, index: int) -> NDArray[Any]:
        if index >= self.full:
            return self._last
        if self._lazy is None:
            row: NDArray[Any] = self._rows[index - self.start]
            return row
        order, own = self._lazy
        size = self.plan.batch_size
        return order[index * size : (index + 1) * size][own]

    def __getitem__(self, number: int) -> Step:
        index = range(self.start, self.steps)[number]
        is_last, share = index >= self.full, self._share(index)
        passes = min(self.plan.accumulate, len(share))
        micro_batches = tuple(share[part::passes].tolist() for part in range(passes))
        size = self.plan.global_size(index, self.world_size)
        return Step(index, size, micro_batches, self._passes[is_last])

    def __iter__(self) -> Iterator[Step]:
        return map(self.__getitem__, range(len(self)))


def check(plan: Plan, world_size: int, called: Callable[[str], str] = str) -> None:
    """Check that a plan can be dealt to this many ranks. Its number of samples does not matter."""
    for field in ("batch_size", "accumulate"):
        if getattr(plan, field) < 1:
            raise UsageFault(f"{called(field)} {getattr(plan, field)}: must be 1 or more")
    if plan.sampler not in SAMPLERS:
        raise UsageFault(f"{called('sampler')} {plan.sampler}: is none of {', '.join(SAMPLERS)}")
    if plan.rank_batch is not None and plan.rank_share is not None:
        reason = f"{called('rank_batch')} and {called('rank_share')}: both say how a batch is dealt"
        raise UsageFault(reason, hint="give one of them")
    field = "rank_share" if plan.rank_batch is None else "rank_batch"
    if (weights := getattr(plan, field)) is not None:
        _check_weights(plan, world_size, weights, called, field)
    elif plan.sampler != "exact" and plan.batch_size % world_size:
        lower = plan.batch_size - plan.batch_size % world_size
        given = f"{called('batch_size')} {plan.batch_size}: does not divide by {world_size} ranks"
        reason = f"{given}, and {called('sampler')} {plan.sampler} gives each the same number"
        sizes = f"{lower} or {lower + world_size}" if lower else str(world_size)
        raise UsageFault(reason, hint=f"give {sizes}, or {called('sampler')} exact")
    _check_nobody_idle(plan, plan.weights(world_size), called, field)


def _check_weights(
    plan: Plan, world_size: int, weights: tuple[int, ...], called: Callable[[str], str], field: str
) -> None:
    given = f"{called(field)} {','.join(map(str, weights))}"
    if plan.sampler != "exact":
        reason = f"{given}: {called('sampler')} {plan.sampler} gives each rank the same number of samples"
        raise UsageFault(reason, hint=f"leave out {called(field)} or {called('sampler')}")
    if len(weights) != world_size:
        reason = f"{given}: {counted(len(weights), 'number')} for {counted(world_size, 'rank')}"
        raise UsageFault(reason, hint="give one number for each rank, or start as many ranks as numbers")
    if min(weights) < 1:
        reason = f"{given}: gives rank {weights.index(min(weights))} nothing"
        raise UsageFault(reason, hint="give every rank 1 or more, or start fewer ranks")
    if field == "rank_batch" and sum(weights) != plan.batch_size:
        reason = f"{given}: its sum is {sum(weights)}, and {called('batch_size')} is {plan.batch_size}"
        raise UsageFault(reason, hint=f"leave out {called('batch_size')}, or give {sum(weights)}")


def _check_nobody_idle(
    plan: Plan, weights: tuple[int, ...], called: Callable[[str], str], field: str
) -> None:
    sizes, batch = dealt_sizes(plan.batch_size, weights), called("batch_size")
    if min(sizes):
        return
    least, idle = min(weights), f"leaves rank {sizes.index(0)} without samples in every step"
    enough = sum((weight + least) // (2 * least) for weight in weights)
    if least == max(weights):
        reason = f"{batch} {plan.batch_size}: {idle}, on {len(weights)} ranks"
        raise UsageFault(reason, hint=f"give {batch} {enough} or more, or start fewer ranks")
    reason = f"{called(field)} {','.join(map(str, weights))}: {idle}, with {batch} {plan.batch_size}"
    raise UsageFault(reason, hint=f"give {batch} {enough} or more, or closer numbers")


def dealt_sizes(size: int, weights: Sequence[int]) -> list[int]:
    """Return how many of `size` items each rank gets by its weight."""
    return [len(places) for places in _places(size, tuple(weights))]


def deal(items: Sequence[Item], weights: Sequence[int]) -> list[list[Item]]:
    """Deal items like cards, each to the part that is furthest behind its share."""
    return [[items[place] for place in places] for places in _places(len(items), tuple(weights))]


@lru_cache(maxsize=256)
def _places(size: int, weights: tuple[int, ...]) -> tuple[Sequence[int], ...]:
    """Return the places of each part's items among `size` items."""
    if len(set(weights)) <= 1:  # taking turns; the loop below would find the same
        return tuple(range(part, size, len(weights)) for part in range(len(weights)))
    whole = math.lcm(*weights)
    due = [(whole // weight, part) for part, weight in enumerate(weights)]  # of (2k - 1) * whole / weight
    heapq.heapify(due)
    places: tuple[list[int], ...] = tuple([] for _ in weights)
    for place in range(size):
        when, part = due[0]
        places[part].append(place)
        heapq.heapreplace(due, (when + 2 * (whole // weights[part]), part))
    return places


def evaluation_batches(samples: int, batch_size: int, rank: int, world_size: int) -> dict[int, range]:
    """Return this rank's batches of a test set, by their number."""
    starts = range(rank * batch_size, samples, world_size * batch_size)
    return {start // batch_size: range(start, min(start + batch_size, samples)) for start in starts}
