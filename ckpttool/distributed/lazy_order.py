"""Orders of samples that are computed where they are asked for, so that 10^9 samples take no memory."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from ..lazy import NDArray, np

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
        """Return what is in these places."""
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
