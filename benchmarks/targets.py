"""Comparisons of two ways, pair by pair: each run with the other way's run in the same round."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from .case import Results, Target
from .sizes import show_size


def ratio(results: Results, way: str, against: str) -> float:
    """The median of the per-round ratios of seconds: a busy round affects both and cancels out."""
    return _paired(results, way, against, lambda ours, theirs: ours / theirs)


def beyond(results: Results, way: str, against: str) -> float:
    """The median of the per-round differences, in seconds."""
    return _paired(results, way, against, lambda ours, theirs: ours - theirs)


def peak(results: Results, way: str) -> int:
    """The largest of all rounds, in bytes."""
    return max(run.peak for run in results[way])


def _paired(results: Results, way: str, against: str, compare: Callable[[float, float], float]) -> float:
    pairs = zip(results[way], results[against], strict=True)
    return median(compare(ours.seconds, theirs.seconds) for ours, theirs in pairs)


def at_most_times(way: str, against: str, limit: float) -> Target:
    """No slower than `limit` times another way."""
    return Target(f"{way} / {against}", lambda r: ratio(r, way, against), limit, "{:.2f} ×".format, way)


def floor(way: str, against: str) -> Target:
    """No target, but what no way of the kind could do in less, as a row between the targets."""
    return at_most_times(way, against, math.inf)


def at_least_times_faster(way: str, against: str, limit: float) -> Target:
    """The other way takes at least `limit` times as long."""
    text, show = f"{against} / {way}", "{:.2f} ×".format
    return Target(text, lambda r: ratio(r, against, way), limit, show, way, at_least=True)


def at_most_beyond(way: str, against: str, limit: float) -> Target:
    """At most `limit` seconds longer than another way."""
    text = f"{way}, beyond {against}"
    return Target(text, lambda r: beyond(r, way, against), limit, "{:.3f} s".format, way)


def at_most_seconds(way: str, limit: float) -> Target:
    """At most `limit` seconds in total, including start-up."""
    seconds = "{:.2f} s".format
    return Target(f"{way}, seconds", lambda r: median(run.seconds for run in r[way]), limit, seconds, way)


def peak_at_most(way: str, limit: int) -> Target:
    """At most `limit` bytes of memory, whatever the size."""
    return Target(f"{way}, memory", lambda r: float(peak(r, way)), limit, show_size, way)
