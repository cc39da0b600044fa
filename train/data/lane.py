"""One lane of a stream: its samples in their order, and the positions from which a run can go on in it."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ckpttool.distributed.randomness import seed_all, seed_from
from ckpttool.errors import CheckFailed, CkptToolError, Unreadable, UsageFault
from ckpttool.files.failures import reason
from train.data.collate import digest_of

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
            hint = (
                "read the same files; __iter__ has to begin anew, to give each rank all samples, and to seed "
            )
            hint += "what it draws from by the epoch"
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
