"""Digests of a data set's labels and of a few samples, to tell whether two are the same.

Ranks that load different samples would use some twice and others never, and a run that resumes with other
samples may train on those it is tested with. Neither shows in the name of a data set or in its sizes: an
unseeded `random_split` in a user's factory draws other samples each time. So contents are compared, at a
bounded cost: all labels, where the data set lists them, and the samples at the first, the last and four drawn
places. Ranks also compare as many samples as can be read in a moment: of a small data set, all.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import Keyed
from ckpttool.errors import FileError, UsageFault
from train.data import collate
from train.data.collate import Collation
from train.data.samples import Samples, checked, count, leaves

DRAWN = 4  # samples read besides the first and the last, at places that depend only on their number
SECONDS = 0.5  # in which a rank reads more samples of each part, to be compared between ranks only
BLOCKS = 16  # pieces into which the labels are cut, so that a difference can be located
REDRAWS = 8  # how often a sample is read again to find out whether it differs each time

ONE_SHAPE = (
    "pad or resize them in the data set, or give it collate(samples), which makes a batch of any shapes"
)

CLASSIFICATION = "classification"  # the task whose samples are pairs of a tensor and a label

# The parts of a sample with a label. Those of any other sample are `sample` and their place: `sample[0]`.
SAMPLE, LABEL = "sample", "label"

Leaves = Mapping[str, Any]  # the parts of one sample
Contents = Mapping[str, Mapping[str, str]]  # `training sample` -> `17` -> digest


@dataclass(frozen=True)
class Part:
    """One part of a data set, "training" or "test", as it is read to be compared."""

    name: str
    samples: Samples
    data: str  # as on the command line
    task: str = CLASSIFICATION
    collation: Collation = field(default_factory=Collation)

    def describe(self, *, skip_damaged: bool = False) -> dict[str, dict[str, str]]:
        """Return digests of it, without samples that can't be read if those are to be left out.

        A data set can say itself what is to be compared, for example if it differs between ranks on purpose:
        by an attribute `fingerprint`, a text.
        """
        given = getattr(source_of(self.samples), "fingerprint", None)
        if isinstance(given, str):
            return {"fingerprint": {f"of the {self.name} samples": given}}
        contents: dict[str, dict[str, str]] = {}
        first: Leaves = {}
        for index in places(count(self.samples)):
            try:
                sample = self._read(index)
            except FileError:
                if skip_damaged:
                    continue
                raise
            first = first or sample
            if not self.collation.is_own:
                _same_shapes(first, sample, f"--data {self.data}: {self.name} sample {index}")
            for title, digest in self._digests(sample).items():
                contents.setdefault(title, {})[str(index)] = digest
        contents[f"labels of {self.name} samples"] = dict(_listed(self.samples))
        return contents

    def redrawn(self, before: Contents) -> set[str]:
        """Return the kinds of contents that differ each time they are read, although the seeds are the same.

        They are from a data set with generators of its own, and can't be compared. `before` is from
        `describe`, of this part among others.
        """
        if not isinstance(self.samples, Keyed):
            return set()
        first: dict[str, dict[str, str]] = {}
        for title, digests in before.items():
            for index, digest in digests.items() if f"{self.name} sample" in title else ():
                if index.isdigit():
                    first.setdefault(index, {})[title] = digest
        return set[str]().union(*(self.varying(int(index), first[index]) for index in first))

    def draws_itself(self) -> bool:
        """Return whether a sample differs when it is read again, although the seeds are the same."""
        for index in places(count(self.samples)) if isinstance(self.samples, Keyed) else ():
            with contextlib.suppress(FileError):  # training says so when it comes to that sample
                if self.varying(index, times=2):
                    return True
        return False

    def varying(
        self, index: int, first: Mapping[str, str] | None = None, *, times: int = REDRAWS
    ) -> set[str]:
        """Return which digests of a sample differ when it is read again; `first` is what was read before."""
        first = first or self._digests(self._read(index))
        again = (self._digests(self._read(index)) for _ in range(times))
        return {title for read in again for title in read if read[title] != first.get(title)}

    def sampled(self) -> list[dict[str, str]]:
        """Return digests by full name of as many samples as SECONDS allow, always in the same order."""
        read: list[dict[str, str]] = []
        if isinstance(getattr(source_of(self.samples), "fingerprint", None), str):
            return read
        ends = time.monotonic() + SECONDS
        for index in _scattered(count(self.samples)):
            if time.monotonic() >= ends:
                break
            read.append({})
            with contextlib.suppress(Exception, SystemExit):  # training says so when it comes to that sample
                digests = self._digests(self._read(index))
                read[-1] |= {f"{title} {index}": digest for title, digest in digests.items()}
        return read

    def is_in_memory(self) -> bool:
        """Return whether the samples are rows of tensors."""
        return isinstance(_below(self.samples)[0], TensorDataset)

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the first tensor in the first sample; () if there is none."""
        where = f"--data {self.data}: {self.name} sample 0"
        is_own = self.collation.is_own
        parts = self._batched(0) if is_own else leaves(self.samples[0], where)
        shape = next((tuple(leaf.shape) for leaf in parts.values() if isinstance(leaf, torch.Tensor)), ())
        return shape[1:] if is_own else shape

    def _read(self, index: int) -> Leaves:
        """Return the parts of a sample; of a file a digest, as decoders differ in the last bits.

        If a user's function makes batches, a sample may be anything, and its parts are those of its batch.
        """
        source, place = _below(self.samples, index)
        raw, where = getattr(source, "raw_sample", None), f"--data {self.data}: {self.name} sample {index}"
        if raw is None and self.collation.is_own:
            return self._batched(index)
        if raw is not None or self.task == CLASSIFICATION:
            sample, label = checked(self.samples[index], where) if raw is None else raw(place)
            return {SAMPLE: sample, LABEL: label}
        return {f"{SAMPLE}{key}": leaf for key, leaf in leaves(self.samples[index], where).items()}

    def _batched(self, index: int) -> Leaves:
        """Return the parts of a batch of one sample."""
        batch = self.collation.batch([self.samples[index]], [index])
        return {f"{SAMPLE}{key}": leaf for key, leaf in collate.leaves(batch)}

    def _digests(self, sample: Leaves) -> dict[str, str]:
        """Return digests of the parts: of `training sample[0]`, or of `label of training sample`."""
        titles = {kind: f"{self.name} {kind}" for kind in sample} | {LABEL: f"label of {self.name} sample"}
        return {titles[kind]: _digest(leaf) for kind, leaf in sample.items()}


def _below(samples: Any, index: int = 0) -> tuple[Any, int]:
    """Return the data set of which samples are a subset, and the place of one of them in it."""
    source = source_of(samples)
    while isinstance(source, Subset):
        source, index = source_of(source.dataset), source.indices[index]
    return source, index


def _scattered(number: int) -> Iterator[int]:
    """Yield all indices, in an order whose beginning is spread over all of them, without a list of them."""
    step = max(1, int(number * 0.618))
    while math.gcd(step, number) > 1:
        step += 1
    yield from (place * step % number for place in range(number))


def flat(contents: Contents, leave_out: set[str] | frozenset[str] = frozenset()) -> dict[str, str]:
    """Return contents by full name, `training sample 17` -> digest, without some kinds."""
    return {
        f"{kind} {where}": digest
        for kind, of_kind in contents.items()
        if kind not in leave_out
        for where, digest in of_kind.items()
    }


def places(number: int) -> list[int]:
    """Return the indices of the samples that are compared, of `number` samples."""
    inner = range(1, number - 1)
    drawn = random.Random(number).sample(inner, min(DRAWN, len(inner)))
    return sorted({0, number - 1, *drawn})


def listed_labels(samples: Any) -> torch.Tensor | None:
    """Return all labels, int64, without reading a sample; None if the data set does not list them."""
    source = source_of(samples)
    if isinstance(source, Subset):
        whole = listed_labels(source.dataset)
        return None if whole is None else whole[torch.as_tensor(list(source.indices), dtype=torch.int64)]
    if isinstance(source, ConcatDataset):
        parts = [listed_labels(part) for part in source.datasets]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    listed = source.tensors[-1] if isinstance(source, TensorDataset) else None
    for name in ("targets", "labels"):
        listed = getattr(source, name, None) if listed is None else listed
    try:
        labels = torch.as_tensor(listed)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # texts, or rows of different lengths
        return None
    if labels.dim() != 1 or len(labels) != len(source) or labels.is_floating_point():
        return None
    return labels.to(torch.int64, copy=True).cpu()


def _same_shapes(first: Leaves, sample: Leaves, where: str) -> None:
    """Raise UsageFault if a sample has other parts than the first one, or parts of other shapes."""
    if list(first) != list(sample):
        raise UsageFault(f"{where} has other parts than sample 0: {_names(sample)}, not {_names(first)}")
    for kind, leaf in sample.items():
        shapes = [tuple(getattr(part, "shape", ())) for part in (leaf, first[kind])]
        if shapes[0] != shapes[1]:
            sizes = ["×".join(map(str, shape)) for shape in shapes]
            place = kind.removeprefix(SAMPLE)
            what = f"{where}{place} has the shape {sizes[0]}, and sample 0 has {sizes[1]}"
            raise UsageFault(what, hint=ONE_SHAPE)


def _names(sample: Leaves) -> str:
    return ", ".join(kind.removeprefix(SAMPLE) or "itself" for kind in sample) or "none"


def _listed(samples: Samples) -> Iterator[tuple[str, str]]:
    """Yield (`first to last`, digest) for each piece of the labels, if the data set lists them."""
    labels = listed_labels(samples)
    if labels is None:
        return
    size = -(-len(labels) // BLOCKS)
    for first in range(0, len(labels), size):
        block = labels[first : first + size]
        yield f"{first} to {first + len(block) - 1}", _digest(block)


def source_of(samples: Any) -> Any:
    """Return a user's own data set, as the factory returned it."""
    return samples.samples if isinstance(samples, Keyed) else samples


def _digest(value: Any) -> str:
    return collectives.digest(value).hex()[:16]
