"""Streams: samples that come in an order of their own, dealt to ranks and workers by their place in it.

A stream is one iterable, or several lanes of shards. Place p of an epoch is in lane p mod L, at depth
p div L, so every process knows from the plan alone which samples it takes. It opens the lanes that these are
in, reads each from its beginning on, and takes its own. So neither ranks nor workers change the order, and a
run goes on from its place on any number of them. A lane whose source knows its position (`state_dict` and
`load_state_dict`) is set to the last one before that place; of another, samples before it are read again.

A source shall not deal its samples itself, and is the same on every rank. Python's, numpy's and torch's
random numbers are seeded before each sample by (seed, epoch, lane, depth).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils

from ckpttool.distributed.plan import ENDLESS
from ckpttool.distributed.randomness import restored
from ckpttool.errors import UsageFault
from train import console
from train.data.collate import digest_of
from train.data.lane import Lane, Position, Shard
from train.data.samples import Samples

MOST_LISTED = 1_000_000  # samples of a stream to test with
HEAD = 8  # samples that are read at the start, to be looked at and compared


class Read(NamedTuple):
    """What was read for one batch.

    Attributes:
        samples: a list of them; then the batch that they were made, None for none.
        taken: the place of each.
        more: of each lane that these are from, by its number: the digest of the sample after the global
            batch, "" if there is none.
        skipped: what could not be read, each with the reason.
        positions: new kept positions of these lanes, by their number.
    """

    samples: Any
    taken: list[int]
    more: Mapping[int, str] = {}
    skipped: Sequence[str] = ()
    positions: Mapping[int, Position] = {}


class Stream(Dataset[Any]):
    """The samples of a stream by their place in an epoch. Global batches must be read in their order.

    Args:
        shards: iterables, dealt to the lanes in turn.
        lanes: not more than samples in a global batch: in each the end of every lane is looked for.
        shuffled: deal them in another order in each epoch.
        window: shuffle the samples of a lane within so many that follow each other.

    Attributes:
        head: the first samples, as they are looked at before training.
        length: how many there are in an epoch, if the source says so. Only the schedule relies on it.
        resumes: whether the source knows its position.
        batch_size: of the global batch.
        start: an epoch and the positions in it from which the run goes on.
        fingerprint: what ranks, and a run that goes on, compare.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        name: str,
        *,
        seed: int,
        lanes: int = 1,
        shuffled: bool = False,
        window: int = 1,
        skip_damaged: bool = False,
        length: int | None = None,
    ) -> None:
        self.shards = [Shard(source) for source in shards]
        self.name, self.seed, self.lanes, self.shuffled = name, seed, lanes, shuffled
        self.how: dict[str, Any] = {"window": window, "skip_damaged": skip_damaged}
        self.batch_size, self.epoch = 1, 0
        self.start: tuple[int, Mapping[int, Position]] = (0, {})
        self._opened: dict[int, Lane] = {}
        self._reads: tuple[int, int] | None = None  # the epoch, and the place of the global batch
        self.length = _length(shards) if length is None else length
        self.collate = getattr(shards[0], "collate", None)  # of the samples, if the source has one
        self.head, begins, self.resumes = self._read_head()
        # Compared when training begins: a source may go on where it was left.
        self.start = 0, {number: begin._replace(state=None) for number, begin in begins.items()}
        given = getattr(shards[0], "fingerprint", None)
        self.fingerprint = given if isinstance(given, str) else digest_of(self.head)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        """Return one of the first samples, to try a model on."""
        return self.head[index % len(self.head)]

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch."""
        self.epoch = epoch

    def steps(self, batch_size: int) -> int | None:
        """Return the steps of an epoch, as far as the source says; None if it does not say its length."""
        return None if self.length is None else max(1, -(-self.length // batch_size))

    def varies(self) -> bool:
        """Return whether the first samples differ when they are read again: they are drawn at random."""
        return digest_of(self._read_head()[0]) != digest_of(self.head)

    def __getitems__(self, places: list[int]) -> Read:
        """Return the samples in these places, which are of one global batch, as far as there are some."""
        with restored():
            return self._read(places) if places else Read([], [])

    def _read(self, places: list[int]) -> Read:
        first = places[0] // self.batch_size * self.batch_size
        if self._reads is None or self._reads[0] != self.epoch or first < self._reads[1]:
            self._opened = {}
            self._tell(self.epoch)
        self._reads = (self.epoch, first)
        samples, taken, lanes = [], [], {}
        for place in places:
            depth, number = divmod(place, self.lanes)
            lanes[number] = lane = self._lane(number)
            lane.release(self._depth(first, number))
            if (sample := lane.get(depth)) is not None:
                samples.append(sample[0])
                taken.append(place)
        behind = first + self.batch_size
        following = {number: lane.get(self._depth(behind, number)) for number, lane in lanes.items()}
        more = {number: "" if one is None else digest_of(one[0]) for number, one in following.items()}
        positions = {number: news for number, lane in lanes.items() if (news := lane.tell()) is not None}
        skipped = [what for lane in lanes.values() for what in lane.skipped]
        for lane in lanes.values():
            lane.skipped = []
        return Read(samples, taken, more, skipped, positions)

    def _depth(self, place: int, number: int) -> int:
        """Return how many samples of a lane come before a place."""
        return max(0, -(-(place - number) // self.lanes))

    def _lane(self, number: int) -> Lane:
        if number not in self._opened:
            epoch, positions = self.start
            self._opened[number] = self._new(number, positions.get(number) if epoch == self.epoch else None)
        return self._opened[number]

    def _new(self, number: int, start: Position | None = None) -> Lane:
        order = list(range(len(self.shards)))
        if self.shuffled:
            random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        shards = [self.shards[shard] for shard in order[number :: self.lanes]]
        key = self.seed, self.epoch, number
        return Lane(shards, key, f"--data {self.name}", start=start, **self.how)

    def _tell(self, epoch: int) -> None:
        """Tell the sources the epoch; and hide the workers from them, of which each would take a part."""
        _utils.worker._worker_info = None
        for source in (shard.source for shard in self.shards):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def _read_head(self) -> tuple[list[Any], dict[int, Position], bool]:
        """Return the first samples of an epoch, where their lanes begin, and whether these know it."""
        lanes: dict[int, Lane] = {}
        head = []
        with restored():
            self._tell(self.epoch)
            for place in range(HEAD):
                depth, number = divmod(place, self.lanes)
                if number not in lanes:
                    lanes[number] = self._new(number)
                if (sample := lanes[number].get(depth)) is not None:
                    head.append(sample[0])
        begins = {number: lane.position for number, lane in lanes.items() if lane.position is not None}
        return head, begins, all(lane.knows_position() for lane in lanes.values())


def is_stream(samples: Any) -> bool:
    """Return whether a data set has samples in an order, and none by index; UsageFault if neither.

    A generator can be read only once, and a loader makes batches of its own.
    """
    if isinstance(samples, Iterator | DataLoader):
        what = f"--data: {type(samples).__name__} is no data set"
        hint = "return an object whose __iter__ begins anew, and yields samples"
        raise UsageFault(what, hint=hint)
    has_index = hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset)
    return not has_index and hasattr(samples, "__iter__")


def listed(stream: Stream) -> Samples:
    """Return the samples of a stream that ends, as a list in its own order: those to test with."""
    stream.shuffled, stream.how["window"] = False, 1  # by a seed, which an evaluation does not know
    stream.batch_size, stream.start = stream.lanes, (0, {})
    samples: list[Any] = []
    for first in range(0, MOST_LISTED, stream.lanes):
        read = stream.__getitems__([first + lane for lane in range(stream.lanes)])
        samples += read.samples
        for what in read.skipped:
            console.warn(f"--skip-damaged: left out of the test samples: {what}")
        if not any(read.more.values()):
            return Listed(samples, stream.collate)
    what = f"--data {stream.name}: a stream of more than {MOST_LISTED:,} test samples"
    raise UsageFault(what, hint="samples to test with are held in memory: give fewer, or some by index")


class Listed(Dataset[Any]):
    """Samples in memory."""

    def __init__(self, samples: Sequence[Any], collate: Any = None) -> None:
        self.samples, self.collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _length(shards: Sequence[Any]) -> int | None:
    """Return how many samples the shards say they have together; None if one does not say it."""
    try:
        return sum(map(len, shards))
    except (TypeError, ValueError):
        return None
