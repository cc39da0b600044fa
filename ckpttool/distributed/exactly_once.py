"""The check that each sample appears exactly once, and what it says if not. Imports numpy when called."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..core.lazy import NDArray, np

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
