"""Running statistics of several ranks as one: the arithmetic, for arrays of any library.

Under plain BatchNorm every rank keeps the statistics of its own samples. Those of all samples follow from
them and their counts (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
sample variances"):

    mean = sum n_r mean_r / N        variance = sum n_r (b_r + (mean_r - mean)^2) / N        N = sum n_r

where b_r is rank r's variance without the factor n/(n-1) that BatchNorm puts on what it keeps. The factor of
a rank's own count is taken out before, and that of N is put on after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Counts = Sequence[float]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Statistics of all ranks.

    Attributes:
        mean, variance: one value per channel, float64; the variance with the factor of all values.
        count: how many values per channel they rest on, in one batch of all ranks.
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
) -> Pooled:
    """The running mean and variance of all ranks from those of each; computed in float64, in rank order.

    It is exact for what the statistics are statistics of. With momentum 1 that is a rank's last batch, and
    the result is what one process would keep of the whole batch. With a smaller momentum they are averages
    over batches: where each rank has the same share of every batch the mean is still that of one process,
    and so is the variance within ranks; between ranks, the square of the averaged difference is taken for the
    average of the squared one, which is larger by what the difference varied from batch to batch. Averages
    over all batches (`momentum=None`) weigh a rank by its batches too.

    Args:
        means, variances: of each rank, as BatchNorm keeps them: NumPy arrays, torch tensors or numbers, of
            one shape.
        counts: values per channel in a batch of each rank, batch × positions. A rank of 0 has met nothing and
            is passed over. None: equal and large, so that the factor is 1.
        batches: how many batches of that size a rank has met, for averages over all batches; None: as many as
            the others.

    Raises:
        ValueError: lists of different lengths, a count is negative, or fewer than two values in all.
    """
    exact = counts is not None
    counts = [1.0] * len(means) if counts is None else counts
    batches = [1.0] * len(means) if batches is None else batches
    if not len(means) == len(variances) == len(counts) == len(batches):
        raise ValueError("each rank needs a mean, a variance and a count")
    if min(counts, default=0) < 0 or min(batches, default=0) < 0:
        raise ValueError("a count is negative")
    ranks = [
        (n * t, _double(mean), _double(variance) * ((n - 1) / n if exact else 1.0))
        for mean, variance, n, t in zip(means, variances, counts, batches, strict=True)
        if n * t
    ]
    count = float(sum(n for n, t in zip(counts, batches, strict=True) if t))
    total = sum(weight for weight, _, _ in ranks)
    if not ranks or (exact and count <= 1):
        raise ValueError("a variance needs at least two values")
    mean = sum(weight * own for weight, own, _ in ranks) / total
    biased = sum(weight * (spread + (own - mean) ** 2) for weight, own, spread in ranks) / total
    return Pooled(mean, biased * (count / (count - 1) if exact else 1.0), count)


def _double(value: Any) -> Any:
    """In float64, whatever library it is of."""
    if hasattr(value, "double"):
        return value.detach().double()
    return value.astype("float64") if hasattr(value, "astype") else float(value)
