"""What Python's shuffle makes of a range, as an array and ten times as fast. Imports numpy when called."""

from __future__ import annotations

import random
from collections.abc import MutableSequence
from typing import Any, cast

from ..lazy import NDArray, np

FEW, MANY = 2_000, 2**31  # outside these the plain loop: it is short, or each draw takes two words
CHUNK = 8.0  # times the square root of what is left; of larger chunks too many swaps meet
MARKS = 1 << 16  # slots for targets that meet, by their last bits


def shuffled(count: int, seed: str) -> NDArray[Any]:
    """Return 0 to count - 1 in the order of `random.Random(seed).shuffle`, as int32 (from 2^31 on int64).

    A string seed is hashed by random itself, the same way on every Python and machine.
    """
    order: NDArray[Any] = np.arange(count, dtype=np.int32 if count < MANY else np.int64)
    generator = random.Random(seed)
    if count < FEW or count >= MANY:
        generator.shuffle(cast("MutableSequence[Any]", order))
        return order
    words = _Words(generator)
    marks = np.zeros(MARKS, dtype=bool)
    last = count - 1
    while last > 0:
        # From the last place down, `shuffle` swaps each place with one that is drawn from those up to it.
        targets = words.targets(last, max(64, int(CHUNK * last**0.5)))
        _swap(order[: last + 1], targets, marks)
        last -= len(targets)
    return order


class _Words:
    """The 32-bit words of a generator of Python's, drawn by numpy, which has the same Mersenne Twister."""

    def __init__(self, generator: random.Random) -> None:
        _, state, _ = generator.getstate()
        self.twister = np.random.RandomState(0)
        self.twister.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1], 0, 0.0))
        self.unused: NDArray[Any] = np.zeros(0, dtype=np.uint32)

    def targets(self, last: int, most: int) -> NDArray[Any]:
        """Return what `shuffle` draws for the next places: one of 0 to `last` for `last`, and so on down."""
        # It takes as many leading bits of a word as last + 1 has, and another word if that is too large. The
        # number of bits must not change within a chunk.
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
