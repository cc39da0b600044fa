"""Running statistics of several ranks pooled: the arithmetic, for arrays of any library.

Under plain BatchNorm each rank keeps the statistics of its own samples. Those of all samples in a batch
follow from them and their counts (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm
for computing sample variances"):

    mean = sum n_r mean_r / N        variance = sum n_r (b_r + (mean_r - mean)^2) / N        N = sum n_r

where b_r is rank r's variance without the factor n/(n-1) of the unbiased variance that BatchNorm keeps. The
factor of a rank's own count is taken out before, and that of N is put on after.

Statistics averaged over batches no longer tell how far apart the ranks' means were in each batch: the random
part of these differences averages out. With p_r = n_r / N, what one process would have beyond the formula is

    sum p_r (1 - p_r) var_r / n_r * (1 - 1 / k)

in expectation, for samples dealt to ranks at random, where k is the number of equally weighted batches whose
average varies as much: (2 - m) / m for a momentum m, 19 for 0.1. Of 4 ranks with 2 samples each, 0.62 of the
variance is left without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Counts = Sequence[float]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Statistics of all ranks.

    Attributes:
        mean, variance: float64 [C]; the variance is unbiased if counts were given.
        count: values per channel in one batch of all ranks.
    """

    mean: Any
    variance: Any
    count: float


def pool(
    means: Sequence[Any],
    variances: Sequence[Any],
    counts: Counts | None = None,
    *,
    batches: Counts | None = None,
    momentum: float | None = None,
) -> Pooled:
    """Pool the running means and variances of all ranks, in float64 and in rank order.

    For a single batch (momentum 1) the result is exactly what one process would keep. For averages over
    batches the mean is exact, if each rank's share of the batches is constant, and the variance too small
    unless `momentum` is given, then right in expectation. `RunningStatistics` is exact for any momentum.

    Args:
        means, variances: of each rank, as BatchNorm keeps them: NumPy arrays, torch tensors or numbers, of
            one shape.
        counts: values per channel in a batch of each rank, batch × positions. A rank with 0 is left out. None
            for equal and large counts, whose factors are 1.
        batches: that each rank has seen, for averages over all batches (a layer's `momentum=None`); ranks
            are also weighted by them. None for equal numbers.
        momentum: of the layer, above 0 and at most 1: add the variance between ranks that averaging over
            batches removes. None adds nothing, as 1 does. With `batches`, these take its place.

    Raises:
        ValueError: lists of different lengths, a negative count, fewer than two values in all, or a momentum
            that is out of range or given without counts.
    """
    exact, equal = counts is not None, [1.0] * len(means)
    if momentum is not None and not (exact and 0 < momentum <= 1):
        raise ValueError(f"a momentum of {momentum:g} needs counts, and is above 0 and at most 1")
    ranks = _ranks(
        means, variances, equal if counts is None else counts, equal if batches is None else batches
    )
    count = float(sum(rank.values for rank in ranks))
    total = sum(rank.weight for rank in ranks)
    if not ranks or (exact and count <= 1):
        raise ValueError("a variance needs at least two values")
    mean = sum(rank.weight * rank.mean for rank in ranks) / total
    biased = sum(rank.weight * (rank.biased(exact) + (rank.mean - mean) ** 2) for rank in ranks) / total
    if momentum is not None:
        averaged = [(2 - momentum) / momentum if batches is None else rank.batches for rank in ranks]
        biased = sum(
            (rank.between(total) * (1 - 1 / k) for rank, k in zip(ranks, averaged, strict=True)), biased
        )
    return Pooled(mean, biased * (count / (count - 1) if exact else 1.0), count)


class _Rank(NamedTuple):
    """What one rank has seen, its statistics in float64."""

    mean: Any
    variance: Any
    values: float  # per channel in a batch
    batches: float

    @property
    def weight(self) -> float:
        return self.values * self.batches

    def biased(self, exact: bool) -> Any:
        return self.variance * ((self.values - 1) / self.values if exact else 1.0)

    def between(self, total: float) -> Any:
        """Return this rank's term of the variance between ranks, which averaging over batches removes."""
        share = self.weight / total
        return share * (1 - share) * self.variance / self.values


def _ranks(means: Sequence[Any], variances: Sequence[Any], counts: Counts, batches: Counts) -> list[_Rank]:
    """Return the ranks that have seen anything."""
    if not len(means) == len(variances) == len(counts) == len(batches):
        raise ValueError("each rank needs a mean, a variance and a count")
    if min(counts, default=0) < 0 or min(batches, default=0) < 0:
        raise ValueError("a count is negative")
    rows = zip(means, variances, counts, batches, strict=True)
    return [_Rank(_double(mean), _double(variance), n, t) for mean, variance, n, t in rows if n * t]


def _double(value: Any) -> Any:
    """Return a value of any library in float64."""
    if hasattr(value, "double"):
        return value.detach().double()
    return value.astype("float64") if hasattr(value, "astype") else float(value)
