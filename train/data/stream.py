"""Streams: samples that come one after another, without numbers. Imports torch."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils

from ckpttool.core.files.commit import reason
from ckpttool.distributed.plan import ENDLESS
from ckpttool.distributed.randomness import restored, seed_all, seed_from
from ckpttool.errors import CheckFailed, CkptToolError, Unreadable, UsageFault
from train import console
from train.data.samples import IGNORED, Samples, digest_of

BETWEEN = 256  # samples between two positions that are kept
PLAIN = (str, int, float, bool, type(None), torch.Tensor)


class Position(NamedTuple):
    """Where a lane was before it gave the sample at a depth.

    Its state is {"shard": its number, "source": what state_dict returned, None for the beginning}; or None if
    the shard does not know it.
    """

    depth: int
    state: Any
    digest: str | None  # of that sample, "" if there is none; None if it may be another one


class Shard:
    """An iterable that is read from its beginning, wherever it was left, or from a position.

    The position is its own (`state_dict` and `load_state_dict`, as data sets of `datasets` have it) or its
    iterator's (as torchdata has it); many have none.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._was_open = False
        self._first: Any = None  # its position before it was opened

    def open(self, epoch: int, state: Any) -> Iterator[Any]:
        """Return the samples from a position on; from the beginning if it is None."""
        source, is_own = self.source, has_position(self.source)
        if is_own and not self._was_open:
            self._first = copy.deepcopy(source.state_dict())
        if is_own and (state is not None or self._was_open):
            source.load_state_dict(copy.deepcopy(self._first if state is None else state))
            if state is None and hasattr(source, "set_epoch"):  # which it may have set back
                source.set_epoch(epoch)
        self._was_open = True
        iterator: Any = iter(source)
        if state is not None and not is_own:
            iterator.load_state_dict(copy.deepcopy(state))
        return iterator  # type: ignore[no-any-return]

    def state(self, iterator: Any) -> Any:
        """Return its position; None if it does not know it, in values that a checkpoint can hold."""
        if not self.has_position(iterator):
            return None
        part = self.source if has_position(self.source) else iterator
        state = part.state_dict()
        return copy.deepcopy(state) if is_plain(state) else None

    def has_position(self, iterator: Any) -> bool:
        """Return whether it, or its iterator, may know its position: nothing is asked of it."""
        return has_position(self.source) or has_position(iterator)


def has_position(part: Any) -> bool:
    """Return whether an iterable, or an iterator, knows its position."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


class Lane:
    """One lane in one epoch: the samples of its shards, which are read one after the other.

    Args:
        key: seed, epoch and lane. With a sample's depth they determine what is drawn when it is read.
        name: for errors.
        window: with more than 1, samples are shuffled within as many that follow each other.
        skip_damaged: leave out the rest of a shard that can't be read.
        start: where to begin; without a state, its sample is only compared.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        key: tuple[int, int, int],
        name: str,
        *,
        window: int = 1,
        skip_damaged: bool = False,
        start: Position | None = None,
    ) -> None:
        self.shards, self.key, self.name, self.window = shards, key, name, window
        self.skip_damaged, self._expected = skip_damaged, start
        self.position: Position | None = None  # the last that is kept
        self._told: Position | None = None
        self.skipped: list[str] = []
        self._held: deque[Any] = deque()
        self._first = self._next = 0  # depths: of the first sample held, and of the next one to be read
        self._orders: dict[int, list[int]] = {}  # of the samples of a window, by its first depth
        self._shard = 0
        self._iterator: Iterator[Any] | None = None
        self._began: tuple[Any] | None = None  # the position at which it was opened, if nothing was read yet
        if start is not None and start.state is not None:
            self._first = self._next = start.depth
            self._shard = start.state["shard"]
            self._open(start.state["source"])

    def get(self, depth: int) -> tuple[Any] | None:
        """Return the sample at a depth that is not released, in a tuple; None behind the end."""
        if self.window > 1:
            first = depth // self.window * self.window
            if first not in self._orders:
                self._read_to(first + self.window)
                order = list(range(min(self._next - first, self.window)))
                random.Random(repr((*self.key, first))).shuffle(order)
                self._orders[first] = order
            if depth - first >= len(self._orders[first]):
                return None
            depth = first + self._orders[first][depth - first]
        else:
            self._read_to(depth + 1)
        assert depth >= self._first, "it was released"
        return (self._held[depth - self._first],) if depth < self._next else None

    def release(self, depth: int) -> None:
        """Forget the samples below a depth; none of them may be asked for any more."""
        depth = depth // self.window * self.window
        while self._first < depth and (self._held or self._read()):
            self._held.popleft()
            self._first += 1
        self._orders = {first: order for first, order in self._orders.items() if first >= depth}

    def tell(self) -> Position | None:
        """Return the last position that is kept, once: with a worker it is sent."""
        news = None if self.position is self._told else self.position
        self._told = self.position
        return news

    def knows_position(self) -> bool:
        """Return whether the shard that is being read does; True at the end, where there is none."""
        at_end = self._shard >= len(self.shards)
        return at_end or self.shards[self._shard].state(self._iterator) is not None

    def _read_to(self, end: int) -> None:
        while self._next < end and self._read():
            pass

    def _read(self) -> bool:
        """Read the next sample; return whether there was one."""
        depth, state = self._next, None
        is_kept = depth % (self.window if self.window > 1 else BETWEEN) == 0
        seed_all(seed_from(*self.key, depth), gpu=False)
        while self._shard < len(self.shards):
            try:
                if self._iterator is None:
                    self._open()
                assert self._iterator is not None
                state = self._state() if is_kept else None
                self._held.append(next(self._iterator))
                self._began = None
                self._next += 1
                break
            except StopIteration:
                self._iterator = None
            except Exception as error:  # whatever a source raises for a file that is gone, or its bytes
                fault = self._unreadable(error)
                if not self.skip_damaged or isinstance(fault, UsageFault):
                    raise fault from error
                self.skipped.append(fault.message)
                self._iterator = None
            self._shard += 1
        if is_kept:
            has_sample = self._next > depth
            self._keep(Position(depth, state, digest_of(self._held[-1]) if has_sample else ""))
        return self._next > depth

    def _open(self, state: Any = None) -> None:
        """Begin with the shard whose turn it is, or at a position in it."""
        self._iterator = self.shards[self._shard].open(self.key[1], state)
        self._began = (state,)

    def _state(self) -> Any:
        """Return the position before the next sample; None if the shard does not know it."""
        state = self.shards[self._shard].state(self._iterator)
        if state is None:
            return None
        # Many say where they were left until the first sample is asked for.
        return {"shard": self._shard, "source": state if self._began is None else self._began[0]}

    def _keep(self, now: Position) -> None:
        """Keep a position; CheckFailed if a run that goes on finds another sample there than it left."""
        self.position, then = now, self._expected
        if then is None or then.digest is None or now.depth < then.depth:
            return
        self._expected = None
        if now.depth == then.depth and now.digest != then.digest:
            how = "set by load_state_dict" if then.state is not None else "read again from the beginning"
            what = f"{self.name}: sample {now.depth} is another one than before, {how}"
            hint = "read the same files; __iter__ has to begin anew, to give each rank all samples"
            hint += ", and to seed what it draws from by the epoch"
            raise CheckFailed(f"{what}: the stream's position can't be restored", hint=hint)

    def _unreadable(self, error: Exception) -> CkptToolError:
        if isinstance(error, CkptToolError):
            return error
        shard = getattr(self.shards[self._shard].source, "name", f"shard {self._shard}")
        where = f"{self.name}, {shard}" if len(self.shards) > 1 else self.name
        why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        hint = "--skip-damaged leaves out the rest of what can't be read, and counts"
        return Unreadable(where, f"sample {self._next} can't be read: {why}", hint=hint)


def is_plain(value: Any) -> bool:
    """Return whether `torch.load(weights_only=True)` would read a value from a checkpoint."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    # Not of a subclass: numpy.float64 is a float, and refused there.
    return all(map(is_plain, value)) if type(value) in (list, tuple) else type(value) in PLAIN


# ---- packing -----------------------------------------------------------------------------------------

# Documents follow each other without padding; only the block that ends the stream is filled up. A target is
# the next token of the same document. So the first token of a document is never a target, and each other
# token is the target of exactly one: the mean over tokens does not depend on the length of the blocks.


LAST = torch.tensor([IGNORED])  # the target of a document's last token
END = object()  # of the documents; any value may be one
NAMES = ("input_ids", "tokens", "ids")  # of the tokens in a document that is a mapping


class Packed:
    """The blocks of documents: (inputs, targets), both int64 [block].

    Args:
        documents: an iterable of sequences of token numbers, or of mappings that hold one as `input_ids`,
            `tokens` or `ids`. It may know its position (`state_dict`, `load_state_dict`).
        block: tokens of a block.
    """

    def __init__(self, documents: Any, block: int) -> None:
        self.documents, self.block, self.epoch = Shard(documents), block, 0
        for name in ("classes", "name"):
            if hasattr(documents, name):
                setattr(self, name, getattr(documents, name))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.documents.source, "set_epoch"):
            self.documents.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return Blocks(self.documents, self.block, self.epoch)


class Blocks:
    """One pass over the blocks. It knows its position if the documents do."""

    def __init__(self, documents: Shard, block: int, epoch: int) -> None:
        self.shard, self.block, self.epoch = documents, block, epoch
        self.documents: Any = documents.open(epoch, None)
        self.inputs = self.targets = torch.empty(0, dtype=torch.int64)
        self.at = 0  # the first of them that is not in a block yet

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.inputs) - self.at < self.block:
            self._fill()
        if self.at == len(self.inputs):
            raise StopIteration
        end = min(self.at + self.block, len(self.inputs))
        missing = 0, self.at + self.block - end
        inputs, targets = self.inputs[self.at : end], self.targets[self.at : end]
        self.at = end
        # Padding copies: a block that is kept does not keep its document.
        return pad(inputs, missing), pad(targets, missing, value=IGNORED)

    def _fill(self) -> None:
        """Read documents until there are tokens for a block."""
        inputs, targets = [self.inputs[self.at :]], [self.targets[self.at :]]
        count = len(inputs[0])
        while count < self.block and (document := next(self.documents, END)) is not END:
            numbers = _tokens(document)
            inputs.append(numbers)
            targets += [numbers[1:], LAST] if len(numbers) else []
            count += len(numbers)
        self.inputs, self.targets, self.at = torch.cat(inputs), torch.cat(targets), 0

    def __getattr__(self, name: str) -> Any:
        # Where the documents have no position, these have none either.
        if name in ("state_dict", "load_state_dict") and self.shard.has_position(self.documents):
            return {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}[name]
        raise AttributeError(name)

    def _state_dict(self) -> dict[str, Any] | None:
        documents = self.shard.state(self.documents)
        if documents is None:
            return None
        rest = {"inputs": self.inputs[self.at :].clone(), "targets": self.targets[self.at :].clone()}
        return {"documents": documents, **rest}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inputs, self.targets = (torch.as_tensor(state[name]).long() for name in ("inputs", "targets"))
        self.at = 0
        self.documents = self.shard.open(self.epoch, state["documents"])


def _require_all_count(document: Mapping[str, Any], tokens: Any) -> None:
    """Raise UsageFault for labels or a mask that say otherwise: all tokens of a document are targets."""
    numbers = torch.as_tensor(tokens)
    for name, plain in (("labels", numbers), ("attention_mask", torch.ones_like(numbers))):
        if name in document and not torch.equal(torch.as_tensor(document[name]).to(plain.dtype), plain):
            what = f"--block-size: a document's {name} leave some of its tokens out, and packing takes all"
            hint = "leave padding out of the documents; samples with labels of their own: (inputs, targets)"
            raise UsageFault(what, hint=hint)


def _tokens(document: Any) -> torch.Tensor:
    if isinstance(document, Mapping):
        found = next((document[name] for name in NAMES if name in document), None)
        if found is None:
            names = ", ".join(map(repr, document))
            hint = f"one of {', '.join(NAMES)}"
            raise UsageFault(f"--block-size: a document has no tokens among {names}", hint=hint)
        _require_all_count(document, found)
        document = found
    numbers = torch.as_tensor(document)
    if numbers.dim() == 1 and not len(numbers):  # of a dtype of its own
        return numbers.long()
    if numbers.dim() != 1 or numbers.is_floating_point() or numbers.is_complex():
        what = f"--block-size: a document is {type(document).__name__}, not a row of token numbers"
        raise UsageFault(what, hint="encode texts in the data set: its samples are packed as they come")
    return numbers.long()


# ---- streams -----------------------------------------------------------------------------------------

# A stream is one iterable, or several lanes of shards. Place p of an epoch is in lane p mod L, at depth
# p div L, so every process knows from the plan alone which samples it takes. It opens their lanes, reads
# each from its beginning, and takes its own. So neither ranks nor workers change the order, and a
# run goes on from its place on any number of them. A lane whose source knows its position (`state_dict` and
# `load_state_dict`) is set to the last one before that place; of another, samples before it are read again.
#
# A source shall not deal its samples itself, and is the same on every rank. Python's, numpy's and torch's
# random numbers are seeded before each sample by (seed, epoch, lane, depth).


MOST_LISTED = 1_000_000  # samples of a stream to test with
HEAD = 8  # samples that are read at the start, to be looked at and compared


class Read(NamedTuple):
    """What was read for one batch.

    Attributes:
        samples: a list of them; then the batch that they were made, None for none.
        taken: the place of each.
        more: of each lane that these are from, by its number: the digest of the sample after the global
            batch, "" if there is none.
        skipped: what could not be read, each as its number, of a sample or a lane, and the reason.
        positions: new kept positions of these lanes, by their number.
    """

    samples: Any
    taken: list[int]
    more: Mapping[int, str] = {}
    skipped: Sequence[tuple[int, str]] = ()
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
        skipped = [(number, what) for number, lane in lanes.items() for what in lane.skipped]
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
        for _, what in read.skipped:
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
