"""The data set that `--data` names, as training and test samples, and whether all ranks have the same.

Ranks that load different samples would use some twice and others never, and a run that resumes with other
samples may train on those it is tested with. Neither shows in the name of a data set or in its sizes: an
unseeded `random_split` in a user's factory draws other samples each time. So contents are compared, at a
bounded cost: all labels, where the data set lists them, and the samples at the first, the last and four drawn
places. Ranks also compare as many samples as can be read in a moment: of a small data set, all.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import Keyed, seeded
from ckpttool.errors import CheckFailed, FileError, RanksDiffer, UsageFault
from train.config.sections import DataConfig
from train.data import builtin, formats
from train.data import samples as common
from train.data.batches import Undamaged
from train.data.samples import CLASSIFICATION, Collation, Given, Parts, Samples, by_name, count
from train.data.stream import Stream, listed

DRAWN = 4  # samples read besides the first and the last, at places that depend only on their number
SECONDS = 0.5  # in which a rank reads more samples of each part, to be compared between ranks only
BLOCKS = 16  # pieces into which the labels are cut, so that a difference can be located
REDRAWS = 8  # how often a sample is read again to find out whether it differs each time

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
        parts = self._batched(0) if is_own else common.leaves(self.samples[0], where)
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
            sample, label = common.checked(self.samples[index], where) if raw is None else raw(place)
            return {SAMPLE: sample, LABEL: label}
        return {f"{SAMPLE}{key}": leaf for key, leaf in common.leaves(self.samples[index], where).items()}

    def _batched(self, index: int) -> Leaves:
        """Return the parts of a batch of one sample."""
        batch = self.collation.batch([self.samples[index]], [index])
        return {f"{SAMPLE}{key}": leaf for key, leaf in common.leaves_of(batch)}

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
    kept = ((kind, of_kind) for kind, of_kind in contents.items() if kind not in leave_out)
    return {f"{kind} {where}": digest for kind, of_kind in kept for where, digest in of_kind.items()}


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
            ways = "pad or resize them in the data set, or give it collate(samples)"
            raise UsageFault(what, hint=f"{ways}, which makes a batch of any shapes")


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


# ---- data sets ---------------------------------------------------------------------------------------

# A sample of the data sets known by name is (image, label): a float32 tensor of channels × height × width,
# and an int. One of a user's own can be any structure of tensors that its task takes. Nothing here is random,
# except in a user's own data set; that is keyed by (seed, epoch, sample).


FEW = 8  # samples that differ between ranks, of which each reads its own again
NAMES = "digits, cifar10[:DIR], mnist[:DIR], folder:PATH, fake:N, tokens:PATTERN, wds:PATTERN, hf:NAME"
NAMES += " or file.py:factory"


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        classes: their names, by label; none where the task has none.
        shape: of the first tensor in a sample: channels, height and width of an image. If a user's function
            makes batches, in a batch of the first sample; others may differ.
        fingerprint: differs between data sets with different samples, as far as known without reading them.
        contents: digests of some samples and of the labels.
        collations: how the samples of each part become batches; as torch's where none is given.
        others: more test sets, by name.
    """

    name: str
    train: Samples
    test: Samples | None  # None: nothing is scored
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    fingerprint: str
    contents: Contents = field(default_factory=dict)
    task: str = CLASSIFICATION
    collations: Mapping[str, Collation] = field(default_factory=dict)

    others: Mapping[str, Data] = field(default_factory=dict)

    def collation(self, part: str) -> Collation:
        return self.collations.get(part) or Collation(part=part)

    def parts(self) -> list[Part]:
        """Return the parts, to be read and compared."""
        named = by_name(self.train, self.test)
        return [Part(name, s, self.name, self.task, self.collation(name)) for name, s in named.items()]

    def redrawn(self) -> set[str]:
        """Return the kinds of `contents` that differ each time they are read."""
        return set[str]().union(*(part.redrawn(self.contents) for part in self.parts()))

    def check_labels(self, labels: torch.Tensor, samples: Sequence[int], part: str) -> None:
        """Refuse a label that is not one of the classes.

        The loss would end in a traceback, or skip a label equal to its `ignore_index`.
        """
        for sample, label in zip(samples, labels.tolist(), strict=True):
            if not 0 <= label < len(self.classes):
                raise common.no_class(part, sample, label, len(self.classes), self.name)

    def check_tokens(self, targets: torch.Tensor, samples: Sequence[int], part: str, *, ignored: int) -> None:
        """Refuse a target [n, ...] that is not `ignored` and none of the classes; without any, below 0."""
        known = len(self.classes)
        wrong = (targets < 0) | (targets >= known) if known else targets < 0
        wrong = (wrong & (targets != ignored)).flatten(1)
        if wrong.any():
            row = int(wrong.any(dim=1).nonzero()[0])
            token = int(targets.flatten(1)[row][wrong[row]][0])
            is_token = f"one of the {known} tokens (0 to {known - 1})"
            tokens = is_token if known else "a token, which is 0 or more"
            what = f"{part} sample {samples[row]} has the target {token}, which is not {tokens}"
            hint = f"check the targets of --data {self.name}; {ignored} stands for none"
            raise CheckFailed(what, hint=hint)


def load(settings: DataConfig, *, seed: int = 0, batch_size: int = 1, collate: Given | None = None) -> Data:
    """Return the data set that `--data` names. What a user's draws is keyed by (seed, epoch, sample).

    Args:
        collate: how its task makes batches, and the flag that names the task.
    """
    parts = load_parts(settings, seed=seed, batch_size=batch_size)
    # The shuffle depends on the number of samples, so other sizes are other data.
    named = by_name(parts.train, parts.test).values()
    sizes = ["stream" if isinstance(samples, Stream) else str(count(samples)) for samples in named]
    return _data(settings, parts, f" {'/'.join(sizes)}", collate, seed)


def specs_of_others(settings: DataConfig) -> list[str]:
    """Return what `--also-test` gives after the names."""
    return [given.partition("=")[2] for given in settings.also_test]


def with_others(
    settings: DataConfig, data: Data, *, batch_size: int = 1, collate: Given | None = None
) -> Data:
    """Return a data set with the test sets of `--also-test`, each `NAME=DATA`.

    Of tokens and shards, which have no parts, all samples are taken.

    Args:
        collate: as for `load`.

    Raises:
        UsageFault: two have one name, or one has other classes than `data`, or no test samples.
    """
    others: dict[str, Data] = {}
    for given in settings.also_test:
        name, equals, spec = given.partition("=")
        flag = f"--also-test {given}"
        if not (equals and spec and name.replace("-", "").isidentifier()):
            raise UsageFault(f"{flag}: is not NAME=DATA", hint="for example: --also-test ood=folder:b")
        if name in others:
            raise UsageFault(f"{flag}: another test set is named {name}", hint="name it otherwise")
        own = replace(settings, name=spec, test_data=None)
        has_parts = spec.partition(":")[0] not in formats.BY_NAME
        try:
            own = own if has_parts else replace(own, test_data=spec)
            other = load_test(own, batch_size=batch_size, collate=collate)
        except UsageFault as fault:
            raise UsageFault(f"{flag}: {fault.message}", hint=fault.hint) from fault
        if other.classes != data.classes:
            what = f"{flag}: its classes are not those of --data {data.name}"
            raise UsageFault(what, hint=f"those are {', '.join(data.classes[:9]) or 'none'}")
        assert other.test is not None
        others[name] = replace(other, train=other.test)
    return replace(data, others=others)


def load_parts(settings: DataConfig, *, seed: int = 0, batch_size: int = 1) -> Parts:
    """Return the parts of a data set, none of them empty, without reading a sample but a stream's first."""
    # What a factory draws, as for random_split, must be the same on every rank, in each run, and in an
    # evaluation, which has no --seed: else samples that were trained on would be tested with.
    with seeded("data"):
        parts = _parts(settings, seed, batch_size)
        if settings.test_data is not None:
            elsewhere = _parts(replace(settings, name=settings.test_data), seed, batch_size)
            source = f"{parts.source}, test {elsewhere.source}"
            parts = parts._replace(test=elsewhere.test or elsewhere.train, source=source)
        if isinstance(parts.test, Stream):
            parts = parts._replace(test=listed(parts.test))
    for name, samples in by_name(parts.train, parts.test).items():
        is_empty = not samples.head if isinstance(samples, Stream) else not count(samples)
        if is_empty:
            flag = f"--test-data {settings.test_data}" if name == "test" and settings.test_data else None
            raise UsageFault(f"{flag or f'--data {settings.name}'}: there are no {name} samples")
    return parts


def load_test(settings: DataConfig, *, batch_size: int = 1, collate: Given | None = None) -> Data:
    """Return the data set for an evaluation: a folder with one level of classes is the test set itself."""
    path = settings.name.removeprefix("folder:")
    if settings.test_data or path == settings.name or builtin.is_divided(path) or not os.path.isdir(path):
        data = load(settings, batch_size=batch_size, collate=collate)
        if data.test is None:
            what = f"--data {settings.name}: has no test samples"
            raise UsageFault(what, hint="--test-data names others; it may be the same")
        return data
    return _data(settings, builtin.test_folder(settings, path), "", collate)


def _parts(settings: DataConfig, seed: int, batch_size: int) -> Parts:
    name, _, argument = settings.name.partition(":")
    if settings.name == "digits":
        return builtin.digits(settings)
    if name in ("cifar10", "mnist"):
        return builtin.torchvision(settings)
    if name == "folder" and argument:
        return builtin.folder(settings, argument)
    if name == "fake":
        return builtin.fake(settings, argument)
    if name in formats.BY_NAME and argument:
        return formats.BY_NAME[name](settings, argument, seed, batch_size)
    if argument:
        return builtin.from_factory(settings, seed)
    raise UsageFault(f"--data {settings.name}: no such data set", hint=f"one of {NAMES}")


def _data(
    settings: DataConfig, parts: Parts, sizes: str, collate: Given | None = None, seed: int = 0
) -> Data:
    contents: dict[str, dict[str, str]] = {}
    read: list[Part] = []
    for name, samples in by_name(parts.train, parts.test).items():
        collation = common.collation_of(source_of(samples), settings.name, collate, name, seed)
        read.append(Part(name, samples, settings.name, settings.task, collation))
    of_training, *of_test = read
    collations = {part.name: part.collation for part in read}
    for part in [*of_test, of_training] if parts.train is not parts.test else of_test:
        skips = settings.skip_damaged and part is of_training
        for kind, digests in part.describe(skip_damaged=skips).items():
            contents.setdefault(kind, {}).update(digests)
    looked_at = (of_test or [of_training])[0]
    if settings.skip_damaged and looked_at is of_training:
        looked_at = replace(looked_at, samples=Undamaged(looked_at.samples))
    shape = looked_at.shape()
    # Other numbers are another data set.
    given = {"mean": settings.mean, "std": settings.std, "resize": settings.resize}
    prepared = "".join(f", {name} {value}" for name, value in given.items() if value is not None)
    source = f"{parts.source}{sizes}{prepared}"
    about = (parts.classes, shape, source, contents, settings.task, collations)
    return Data(settings.name, parts.train, parts.test, *about)


def compare(data: Data, when: str, *, workers: int = 0) -> None:
    """Raise RanksDiffer, whose message ends in `when`, unless all ranks have the same data. A collective."""
    for other in data.others.values():
        compare(other, when, workers=workers)
    hint = "the files of --data must be the same on every machine, and a factory must seed its own generators"
    if isinstance(data.train, Stream):
        hint = "every rank reads the whole stream, from which the trainer deals: don't divide it by rank"
    known = {"--data": (data.fingerprint, data.classes)}
    redrawn: set[str] = set()
    try:
        collectives.compare({**known, **flat(data.contents)}, when, hint=hint)
    except RanksDiffer:
        with collectives.fail_together():
            own = data.redrawn()
        redrawn = set[str]().union(*collectives.gather(own))
        if not redrawn:
            raise
        collectives.compare({**known, **flat(data.contents, redrawn)}, when, hint=hint)
    _compare_samples(data, redrawn, when, hint, workers)


def _compare_samples(data: Data, redrawn: set[str], when: str, hint: str, workers: int) -> None:
    """Compare as many more samples as all ranks can read in a second or so: of a small data set, all."""
    if collectives.world_size() == 1:
        return
    parts = {part.name: part for part in data.parts()}
    # With workers, reading in this process may be slow.
    read = {name: part.sampled() for name, part in parts.items() if not workers or part.is_in_memory()}
    counts = collectives.gather({part: len(samples) for part, samples in read.items()})
    digests = {
        name: digest
        for part in read
        for sample in read[part][: min(of_rank.get(part, 0) for of_rank in counts)]
        for name, digest in sample.items()
        if name.rpartition(" ")[0] not in redrawn
    }
    try:
        collectives.compare(digests, when, hint=hint)
    except RanksDiffer:
        of_ranks = collectives.gather(digests)
        differing = [name for name in digests if len({of_rank.get(name) for of_rank in of_ranks}) > 1]
        with collectives.fail_together():
            own_draws = any(_is_drawn(parts, name) for name in differing[:FEW])
        if not any(collectives.gather(own_draws)):
            raise


def _is_drawn(parts: dict[str, Part], name: str) -> bool:
    """Return whether the sample of this name differs each time this rank reads it: it is drawn at random."""
    title, _, index = name.rpartition(" ")
    return title in next(parts[part] for part in parts if f"{part} sample" in title).varying(int(index))
