"""Running statistics of several ranks pooled: arrays of any library, or files. Imports numpy when called.

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

import glob
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import digest_of_value
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.state import COUNTER, MEAN, VARIANCE, State
from ..core.files.digest import tensor_digests
from ..core.inert_pickle.values import tensor_of
from ..core.lazy import NDArray, np
from ..core.tensors.cast import TARGETS, in_float64, nearest, reader
from ..core.tensors.ref import Computed, Storage, TensorRef
from ..core.tensors.values import require_bounded, stream
from ..core.words import noted
from ..errors import NothingToDo, Refused, UsageFault
from .convert_states import find, fits, key

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
    seen = equal if counts is None else counts, equal if batches is None else batches
    ranks = _ranks(means, variances, *seen)
    count = float(sum(rank.values for rank in ranks))
    total = sum(rank.weight for rank in ranks)
    if not ranks or (exact and count <= 1):
        raise ValueError("a variance needs at least two values")
    mean = sum(rank.weight * rank.mean for rank in ranks) / total
    biased = sum(rank.weight * (rank.biased(exact) + (rank.mean - mean) ** 2) for rank in ranks) / total
    if momentum is not None:
        averaged = [(2 - momentum) / momentum if batches is None else rank.batches for rank in ranks]
        for rank, k in zip(ranks, averaged, strict=True):
            biased = biased + rank.between(total) * (1 - 1 / k)
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
        """Return this rank's term of the variance between ranks that averaging over batches removes."""
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


# ---- Checkpoints


MAX_NAMED = 8  # keys that a hint lists, each with its flag


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What was pooled.

    Attributes:
        layers: names of the BatchNorm layers.
        pooled: keys with a new value.
        from_first: keys that differ between the files and were taken from the first, as asked.
        exact: counts were given; otherwise equal ones were assumed and the unbiased factors kept.
        not_finite: keys whose new value has a NaN or an infinity, as a rank's has.
    """

    layers: tuple[str, ...]
    pooled: tuple[str, ...]
    from_first: tuple[str, ...]
    exact: bool
    not_finite: tuple[str, ...] = noted("NaN or infinite values")


def pool_states(
    checkpoints: Sequence[Checkpoint],
    counts: Mapping[str, Counts] | None = None,
    *,
    cumulative: Iterable[str] = (),
    momentum: float | None = None,
    exclude: Iterable[str] = (),
    keep_first: Iterable[str] = (),
    state: str | None = None,
) -> tuple[Checkpoint, PoolReport]:
    """Return the first of several ranks' checkpoints with the running statistics of all, pooled by `pool`."""
    _check_counts(checkpoints, counts)
    if momentum is not None and not (counts and 0 < momentum <= 1):
        reason = f"--momentum {momentum:g}: needs --counts, and is above 0 and at most 1"
        raise UsageFault(reason, hint="give the momentum of the layers: torch's default is 0.1")
    first, states = checkpoints[0], [checkpoint.state(state) for checkpoint in checkpoints]
    layers = find(first.path, states[0], exclude)
    if not layers:
        raise NothingToDo(f"{first.path}: there is no BatchNorm to pool")
    averaged = tuple(cumulative)
    _check_patterns(layers, {"--counts": counts or (), "--cumulative": averaged})
    of_batchnorm = {key(layer, name) for layer in layers for name in (MEAN, VARIANCE, COUNTER)}
    from_first = _check_same(checkpoints, states, of_batchnorm, tuple(keep_first))
    new: dict[str, TensorRef] = {}
    made: dict[tuple[object, str], TensorRef] = {}  # so that layers that are tied on all ranks stay tied
    for layer in layers:
        given = _counts_of(layer, counts), fits(layer, averaged), momentum
        form = _views(states, layer), str(given)
        for name, tensor in _pooled_layer(checkpoints, states, layer, *given).items():
            new[name] = made.setdefault((form, name.removeprefix(layer)), tensor)
    if not new:
        reason = f"{first.path}: all {len(checkpoints)} files hold the same statistics"
        raise NothingToDo(reason, hint="they were synchronised or pooled already: take any one of them")
    pooled = replace_state(first, states[0], lambda old: type(old)(_replaced(old, new)))
    values = ((name, _values(first.path, name, tensor)) for name, tensor in new.items())
    not_finite = tuple(name for name, numbers in values if not np.isfinite(numbers).all())
    return pooled, PoolReport(tuple(layers), tuple(new), from_first, counts is not None, not_finite)


def _check_counts(checkpoints: Sequence[Checkpoint], counts: Mapping[str, Counts] | None) -> None:
    if len(checkpoints) < 2:
        raise UsageFault("pooling needs the files of two ranks or more")
    for numbers in (counts or {}).values():
        if any(number >= 2**63 for number in numbers):
            raise UsageFault("--counts: a count is below 2^63")
        listed = ",".join(f"{number:g}" for number in numbers)
        if len(numbers) != len(checkpoints):
            hint = f"give {len(checkpoints)}, one for each IN, 0 for a rank without samples"
            raise UsageFault(f"--counts {listed}: {len(checkpoints)} files, {len(numbers)} counts", hint=hint)
        if min(numbers) < 0 or 1 in numbers or sum(numbers) <= 1:
            reason = f"--counts {listed}: a variance needs at least two values"
            raise UsageFault(reason, hint="a count is batch × positions: 64 images of 8×8 are 4096")


def _check_patterns(layers: Sequence[str], given: Mapping[str, Iterable[str]]) -> None:
    for flag, pattern in ((flag, pattern) for flag, patterns in given.items() for pattern in patterns):
        if not any(fits(layer, [pattern]) for layer in layers):
            reason = f"{flag}: no BatchNorm layer matches '{pattern}'"
            raise UsageFault(reason, hint=f"there are {', '.join(layers[:3])}")


def _counts_of(layer: str, counts: Mapping[str, Counts] | None) -> Counts | None:
    chosen = (numbers for pattern, numbers in (counts or {}).items() if fits(layer, [pattern]))
    if (found := next(chosen, None)) is None and counts is not None:
        reason = f"--counts: none matches the layer '{layer}'"
        raise UsageFault(reason, hint="give the last one without a pattern")
    return found


def _check_same(
    checkpoints: Sequence[Checkpoint], states: Sequence[State], of_batchnorm: set[str], keep: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the keys that may differ and do. Raises Refused for any other difference between the files."""
    first, known = checkpoints[0].path, _described(states[0], of_batchnorm)
    differing: dict[str, str] = {}
    for checkpoint, state in zip(checkpoints[1:], states[1:], strict=True):
        described = _described(state, of_batchnorm)
        for name in dict.fromkeys((*known, *described)):
            if known.get(name) != described.get(name):
                differing.setdefault(name, checkpoint.path)
    wrong = [name for name in differing if not fits(name, keep)]
    if wrong:
        more = f" (and {len(wrong) - 1} more keys)" if wrong[1:] else ""
        what = (
            f"'{wrong[0]}' is not as in {first}{more}: ranks of a run differ only in BatchNorm's statistics"
        )
        hint = f"are they of one step? to take the first file's: {_keeping(wrong)}"
        raise Refused(differing[wrong[0]], what, hint=hint)
    return tuple(differing)


def _keeping(names: Sequence[str]) -> str:
    """Return the flags that take keys from the first file; of many keys, by their first modules."""
    patterns = dict.fromkeys(map(glob.escape, names))
    if len(patterns) > MAX_NAMED:
        patterns = dict.fromkeys(f"{glob.escape(name.partition('.')[0])}*" for name in names)
    shown = patterns if len(patterns) <= MAX_NAMED else ("*",)
    return " ".join(f"--keep-first {shlex.quote(pattern)}" for pattern in shown)


def _described(state: State, of_batchnorm: set[str]) -> dict[str, tuple[object, ...]]:
    """Return what must be equal: all forms, entries that are no tensors, and values but BatchNorm's own."""
    others = {name: tensor for name, tensor in state.tensors.items() if name not in of_batchnorm}
    values = dict(tensor_digests(others))
    described: dict[str, tuple[object, ...]] = {
        name: (tensor.dtype.name, tensor.shape, values.get(name)) for name, tensor in state.tensors.items()
    }
    return described | {name: (digest_of_value(value),) for name, value in state.others.items()}


def _pooled_layer(
    checkpoints: Sequence[Checkpoint],
    states: Sequence[State],
    layer: str,
    counts: Counts | None,
    cumulative: bool,
    momentum: float | None,
) -> dict[str, TensorRef]:
    """Return the new tensors of one layer; none if all ranks have the same."""
    path = checkpoints[0].path
    names = {name: key(layer, name) for name in (MEAN, VARIANCE, COUNTER)}
    there = {name: at for name, at in names.items() if at in states[0].tensors}
    read = {name: [_values(path, at, state.tensors[at]) for state in states] for name, at in there.items()}
    sources = [state.tensors[at] for state in states for at in names.values() if at in state.tensors]
    origins = tuple(tensor.storage for tensor in sources)
    new = {}
    if any(not np.array_equal(rank, read[name][0]) for name in (MEAN, VARIANCE) for rank in read[name]):
        if cumulative and COUNTER not in read:
            raise Refused(path, f"'{names[COUNTER]}' is not there: how many batches were averaged?")
        each = zip(checkpoints, read[VARIANCE], counts or repeat(1), strict=False)
        for checkpoint, variance, count in each:
            if count and (variance < 0).any():
                raise Refused(checkpoint.path, f"'{names[VARIANCE]}' is negative, which no variance is")
        batches = [float(count) for count in read[COUNTER]] if cumulative else None
        try:
            with np.errstate(all="ignore"):  # infinite statistics give NaN, as in one process
                pooled = pool(read[MEAN], read[VARIANCE], counts, batches=batches, momentum=momentum)
        except ValueError as error:
            raise Refused(path, f"'{layer}' can't be pooled: {error}") from error
        new = {names[MEAN]: pooled.mean, names[VARIANCE]: pooled.variance}
    if COUNTER in read and any(count != read[COUNTER][0] for count in read[COUNTER]):
        # The largest: a rank without samples in a step does not count that step.
        new[names[COUNTER]] = np.max(read[COUNTER], axis=0)
    old = states[0].tensors
    return {name: _tensor(path, name, old[name], values, origins) for name, values in new.items()}


def _views(states: Sequence[State], layer: str) -> tuple[object, ...]:
    """Return a key that two layers share which are tied on all ranks."""
    names = [key(layer, name) for name in (MEAN, VARIANCE, COUNTER)]
    return tuple(state.tensors[name].view for state in states for name in names if name in state.tensors)


def _values(path: str, name: str, tensor: TensorRef) -> NDArray[Any]:
    """Return a tensor's values in float64, or int64 for counters."""
    require_bounded(name, tensor)
    if tensor.dtype.name == "int64":
        return np.frombuffer(b"".join(map(bytes, stream(tensor))), dtype="<i8").reshape(tensor.shape)
    if tensor.dtype.name not in TARGETS:
        raise Refused(path, f"'{name}' is {tensor.dtype.name}, which can't be pooled")
    return in_float64(tensor)


def _tensor(
    path: str, name: str, old: TensorRef, values: NDArray[Any], origins: tuple[Storage, ...]
) -> TensorRef:
    """Return a tensor like `old`, with these values in its own storage."""
    with np.errstate(over="ignore"):
        raw = values.astype("<i8") if old.dtype.name == "int64" else nearest(values, old.dtype)
        if old.dtype.name != "int64" and (np.isfinite(values) & ~np.isfinite(reader(old.dtype)(raw))).any():
            hint = "convert each file first: ckpttool convert FILE NEWFILE --dtype fp32"
            raise Refused(path, f"'{name}' of all ranks is larger than {old.dtype.name} holds", hint=hint)
    if old.storage.byteorder == "big":
        raw = raw.byteswap()
    data = Computed.in_memory(old.storage.data.path, raw.tobytes())
    storage = replace(old.storage, data=data, crc32=None, digest=None, origins=origins)
    return replace(TensorRef.contiguous(storage, old.dtype, old.shape), requires_grad=old.requires_grad)


def _replaced(old: Mapping[object, object], new: Mapping[str, TensorRef]) -> Iterator[tuple[object, object]]:
    for name, value in old.items():
        tensor = new.get(str(name)) if tensor_of(value) is not None else None
        yield name, value if tensor is None else tensor
