"""The data set that `--data` names, as training and test samples, and whether all ranks have the same.

A sample of the data sets known by name is (image, label): a float32 tensor of channels × height × width, and
an int. One of a user's own can be any structure of tensors that its task takes. Nothing here is random,
except in a user's own data set; that is keyed by (seed, epoch, sample).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CheckFailed, RanksDiffer, UsageFault
from train.config.shared import DataConfig
from train.data import builtin, fingerprint, own_data
from train.data.batches import Undamaged
from train.data.collate import Collate, Collation, collation_of
from train.data.fingerprint import CLASSIFICATION, Contents, Part
from train.data.samples import Parts, Samples, by_name, count, no_class
from train.data.stream import Stream, listed

FEW = 8  # samples that differ between ranks, of which each reads its own again
NAMES = "digits, cifar10, mnist, folder:PATH, fake:N, tokens:PATTERN, wds:PATTERN, hf:NAME or file.py:factory"

BY_PATTERN = {"tokens": "tokens", "wds": "tar_shards", "hf": "hugging_face"}  # their modules, by name


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
                raise no_class(part, sample, label, len(self.classes), self.name)

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


def load(config: DataConfig, *, seed: int = 0, collate: tuple[Collate, str] | None = None) -> Data:
    """Return the data set that `--data` names. What a user's draws is keyed by (seed, epoch, sample).

    Args:
        collate: how its task makes batches, and the flag that names the task.
    """
    parts = load_parts(config, seed=seed)
    # The shuffle depends on the number of samples, so other sizes are other data.
    named = by_name(parts.train, parts.test).values()
    sizes = ["stream" if isinstance(samples, Stream) else str(count(samples)) for samples in named]
    return _data(config, parts, f" {'/'.join(sizes)}", collate, seed)


def specs_of_others(config: DataConfig) -> list[str]:
    """Return what `--also-test` gives after the names."""
    return [given.partition("=")[2] for given in config.also_test]


def with_others(config: DataConfig, data: Data, collate: tuple[Collate, str] | None = None) -> Data:
    """Return a data set with the test sets of `--also-test`, each `NAME=DATA`.

    Of tokens and shards, which have no parts, all samples are taken.

    Args:
        collate: as for `load`.

    Raises:
        UsageFault: two have one name, or one has other classes than `data`, or no test samples.
    """
    others: dict[str, Data] = {}
    for given in config.also_test:
        name, equals, spec = given.partition("=")
        flag = f"--also-test {given}"
        if not (equals and spec and name.replace("-", "").isidentifier()):
            raise UsageFault(f"{flag}: is not NAME=DATA", hint="for example: --also-test ood=folder:b")
        if name in others:
            raise UsageFault(f"{flag}: another test set is named {name}", hint="name it otherwise")
        own = replace(config, data=spec, test_data=None)
        has_parts = spec.partition(":")[0] not in BY_PATTERN
        try:
            other = load_test(own if has_parts else replace(own, test_data=spec), collate=collate)
        except UsageFault as fault:
            raise UsageFault(f"{flag}: {fault.message}", hint=fault.hint) from fault
        if other.classes != data.classes:
            what = f"{flag}: its classes are not those of --data {data.name}"
            raise UsageFault(what, hint=f"those are {', '.join(data.classes[:9]) or 'none'}")
        assert other.test is not None
        others[name] = replace(other, train=other.test)
    return replace(data, others=others)


def load_parts(config: DataConfig, *, seed: int = 0) -> Parts:
    """Return the parts of a data set, none of them empty, without reading a sample but a stream's first."""
    # What a factory draws, as for random_split, must be the same on every rank, in each run, and in an
    # evaluation, which has no --seed: else samples that were trained on would be tested with.
    with seeded("data"):
        parts = _parts(config, seed)
        if config.test_data is not None:
            elsewhere = _parts(replace(config, data=config.test_data), seed)
            source = f"{parts.source}, test {elsewhere.source}"
            parts = parts._replace(test=elsewhere.test or elsewhere.train, source=source)
        if isinstance(parts.test, Stream):
            parts = parts._replace(test=listed(parts.test))
    for name, samples in by_name(parts.train, parts.test).items():
        is_empty = not samples.head if isinstance(samples, Stream) else not count(samples)
        if is_empty:
            flag = f"--test-data {config.test_data}" if name == "test" and config.test_data else None
            raise UsageFault(f"{flag or f'--data {config.data}'}: there are no {name} samples")
    return parts


def load_test(config: DataConfig, *, collate: tuple[Collate, str] | None = None) -> Data:
    """Return the data set for an evaluation: a folder with one level of classes is the test set itself."""
    path = config.data.removeprefix("folder:")
    if config.test_data or path == config.data or builtin.is_divided(path) or not os.path.isdir(path):
        data = load(config, collate=collate)
        if data.test is None:
            what = f"--data {config.data}: has no test samples"
            raise UsageFault(what, hint="--test-data names others; it may be the same")
        return data
    return _data(config, builtin.test_folder(config, path), "", collate)


def _parts(config: DataConfig, seed: int) -> Parts:
    name, _, argument = config.data.partition(":")
    if config.data == "digits":
        return builtin.digits(config)
    if config.data in ("cifar10", "mnist"):
        return builtin.torchvision(config)
    if name == "folder" and argument:
        return builtin.folder(config, argument)
    if name == "fake":
        return builtin.fake(config, argument)
    if name in BY_PATTERN and argument:
        source = importlib.import_module(f"train.data.{BY_PATTERN[name]}")
        parts: Parts = source.load(config, argument, seed)
        return parts
    if argument:
        return own_data.from_factory(config, seed)
    raise UsageFault(f"--data {config.data}: no such data set", hint=f"one of {NAMES}")


def _data(
    config: DataConfig, parts: Parts, sizes: str, collate: tuple[Collate, str] | None = None, seed: int = 0
) -> Data:
    contents: dict[str, dict[str, str]] = {}
    named = by_name(parts.train, parts.test)
    collations = {
        name: collation_of(fingerprint.source_of(samples), config.data, collate, name, seed)
        for name, samples in named.items()
    }
    of_training, *of_test = [
        Part(name, samples, config.data, config.task, collations[name]) for name, samples in named.items()
    ]
    for part in [*of_test, of_training] if parts.train is not parts.test else of_test:
        skips = config.skip_damaged and part is of_training
        for kind, digests in part.describe(skip_damaged=skips).items():
            contents.setdefault(kind, {}).update(digests)
    looked_at = (of_test or [of_training])[0]
    if config.skip_damaged and looked_at is of_training:
        looked_at = replace(looked_at, samples=Undamaged(looked_at.samples))
    shape = looked_at.shape()
    # Other numbers are another data set.
    given = {"mean": config.mean, "std": config.std, "resize": config.resize}
    prepared = "".join(f", {name} {value}" for name, value in given.items() if value is not None)
    source = f"{parts.source}{sizes}{prepared}"
    about = (parts.classes, shape, source, contents, config.task, collations)
    return Data(config.data, parts.train, parts.test, *about)


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
        collectives.compare({**known, **fingerprint.flat(data.contents)}, when, hint=hint)
    except RanksDiffer:
        with collectives.fail_together():
            own = data.redrawn()
        redrawn = set[str]().union(*collectives.gather(own))
        if not redrawn:
            raise
        collectives.compare({**known, **fingerprint.flat(data.contents, redrawn)}, when, hint=hint)
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
