"""`--data wds:PATTERN`: shards as webdataset writes them, tar files whose members share a name up to a dot.

    train-000.tar:   0001.jpg  0001.cls  0002.jpg  0002.cls  ...

The headers of all shards are read once, so that each sample has a place. They are then dealt out and shuffled
as those of any data set by index, a rank reads the bytes of its own samples alone, and nothing is read again
on a resume. For classification each rank reads all labels first. The index takes 24 bytes for a member.
Only files on this machine, and not compressed: others go through webdataset's own pipeline, as a stream from
file.py:factory.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault
from ckpttool.files.failures import reason
from train import console
from train.config.shared import DataConfig
from train.data.builtin import picture_in
from train.data.patterns import files_of
from train.data.samples import Parts, Scale, scale_of
from train.data.tokens import Files

# The name that the members of a sample share, and what tells them apart, as webdataset divides a path.
MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")
IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "bmp", "webp", "tif", "tiff")
CLASSES = ("cls", "cls2", "class", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript")
BLOCK = 512  # bytes of a tar header
SKIPS = "--skip-damaged uses the samples before that"


class Index(NamedTuple):
    """Where the members of a shard's samples are."""

    starts: array[int]  # of each sample, in members; and their number
    offsets: array[int]
    sizes: array[int]
    kinds: array[int]  # of each member: what follows the dot, by its place in `names`
    names: list[str]


class TarShards(Dataset[Any]):
    """The samples of shards: (image, label) if `labelled`, else a dict of their members by their endings."""

    def __init__(
        self, paths: Sequence[str], scale: Scale, resize: int | None, *, labelled: bool, skip_damaged: bool
    ) -> None:
        self.paths, self.scale, self.resize, self.labelled = paths, scale, resize, labelled
        self.files = Files()
        self.shards = [_index(path, skip_damaged=skip_damaged) for path in paths]
        self.ends = list(itertools.accumulate(len(shard.starts) - 1 for shard in self.shards))
        if labelled:
            labels = (int(self._label(index)) for index in range(len(self)))
            self.labels = numpy.fromiter(labels, dtype=numpy.int64, count=len(self))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, members = self._members(index)
        if self.labelled:
            return self._pixels(number, *members[self._one(index, members, IMAGES)]), int(self.labels[index])
        return {name: self._decoded(number, name, *span) for name, span in members.items()}

    def raw_sample(self, index: int) -> tuple[str, Any]:
        """Return the SHA-256 of a sample's members, and its label."""
        number, members = self._members(index)
        digest = hashlib.sha256()
        for name, span in members.items():
            digest.update(f"{name}:{span[1]}:".encode() + self._bytes(number, *span))
        return digest.hexdigest(), int(self.labels[index]) if self.labelled else 0

    def _members(self, index: int) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return the shard of a sample, and the offsets and sizes of its members by their endings."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.ends, index)
        shard, place = self.shards[number], index - (self.ends[number - 1] if number else 0)
        members = range(shard.starts[place], shard.starts[place + 1])
        return number, {shard.names[shard.kinds[m]]: (shard.offsets[m], shard.sizes[m]) for m in members}

    def _label(self, index: int) -> int:
        number, members = self._members(index)
        name = self._one(index, members, CLASSES)
        return int(self._decoded(number, name, *members[name]))

    def _one(self, index: int, members: dict[str, Any], wanted: Sequence[str]) -> str:
        name = next((name for name in members if name.rpartition(".")[2].lower() in wanted), None)
        if name is None:
            number = bisect.bisect_right(self.ends, index)
            what = f"sample {index} has none of {', '.join(wanted[:4])} among {', '.join(members)}"
            hint = "for classification a sample has an image and a class; --task names other tasks"
            raise UsageFault(f"{self.paths[number]}: {what}", hint=hint)
        return name

    def _bytes(self, number: int, offset: int, size: int) -> bytes:
        return self.files.read(self.paths[number], offset, size)

    def _pixels(self, number: int, offset: int, size: int) -> torch.Tensor:
        name = f"{self.paths[number]} at byte {offset:,}"
        return self.scale.apply(picture_in(self._bytes(number, offset, size), name, self.resize))

    def _decoded(self, number: int, name: str, offset: int, size: int) -> Any:
        """Return a member as its ending says. Nothing is unpickled: other endings stay bytes."""
        ending = name.rpartition(".")[2].lower()
        if ending in IMAGES:
            return self._pixels(number, offset, size)
        data = self._bytes(number, offset, size)
        decode = DECODERS.get(ending)
        try:
            return data if decode is None else decode(data)
        except Exception as error:  # decoders raise all kinds of errors
            what = f"the member .{name} at byte {offset:,} is not what its ending says: {error}"
            raise Damaged(self.paths[number], what) from error


def _array(data: bytes) -> torch.Tensor:
    return torch.from_numpy(numpy.load(io.BytesIO(data), allow_pickle=False))


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(CLASSES, lambda data: int(data)),
    **dict.fromkeys(TEXTS, bytes.decode),
    "json": json.loads,
    "npy": _array,
}


def _index(path: str, *, skip_damaged: bool) -> Index:
    """Return where the samples of a shard are; of a damaged one, with `skip_damaged`, those before that."""
    index = Index(array("q"), array("q"), array("q"), array("L"), [])
    kinds: dict[str, int] = {}
    before, of_sample = None, set[str]()
    try:
        for member in _files_in(path):
            match = MEMBER.fullmatch(member.name)
            if match is None or member.name.startswith("__"):
                continue
            if match[1] != before:
                index.starts.append(len(index.offsets))
                before, of_sample = match[1], set()
            if match[2] in of_sample:
                raise Damaged(path, f"has {member.name} twice in one sample", hint=SKIPS)
            of_sample.add(match[2])
            index.offsets.append(member.offset_data)
            index.sizes.append(member.size)
            index.kinds.append(kinds.setdefault(match[2], len(kinds)))
    except FileError as fault:
        if not skip_damaged:
            raise
        if index.starts:  # the last may lack members
            last = index.starts.pop()
            del index.offsets[last:], index.sizes[last:], index.kinds[last:]
        console.warn(f"--skip-damaged: {fault}; {len(index.starts)} samples before that are used")
    index.starts.append(len(index.offsets))
    return index._replace(names=list(kinds))


def _files_in(path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar file. Raises Unreadable, Damaged, or Refused if it is compressed."""
    try:
        size = os.stat(path).st_size
        if not size:  # an empty shard
            return
        with open(path, "rb") as file:
            if file.read(2) == b"\x1f\x8b":
                why = "is compressed, so that its samples have no places"
                raise Refused(path, why, hint=f"gunzip {path}")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                    if member.isreg():
                        if member.offset_data + member.size > size:
                            raise Damaged(path, f"is cut short within {member.name}", hint=SKIPS)
                        yield member
                file.seek(tar.offset)
                if file.read(BLOCK) != bytes(BLOCK):  # which tarfile does not ask for
                    raise Damaged(path, "is cut short: its end is missing", hint=SKIPS)
    except tarfile.TarError as error:
        raise Damaged(path, f"is not a whole tar file: {error}", hint=SKIPS) from error
    except OSError as error:
        raise Unreadable(path, reason(error)) from error


def load(config: DataConfig, pattern: str, seed: int) -> Parts:
    """Return the samples of the shards that `wds:PATTERN` names, as training samples."""
    if "://" in pattern or pattern.startswith("pipe:"):
        what = f"--data wds:{pattern}: reads shards on this machine"
        raise UsageFault(what, hint="download them, or return a webdataset pipeline from file.py:factory")
    paths = files_of(pattern, "--data wds:")
    labelled, scale = config.task == "classification", scale_of(config, channels=3)
    how = {"labelled": labelled, "skip_damaged": config.skip_damaged}
    samples = TarShards(paths, scale, config.resize, **how)
    classes: tuple[str, ...] = ()
    if labelled and len(samples):
        classes = tuple(map(str, range(int(samples.labels.max()) + 1)))
    names = "\n".join(
        f"{os.path.basename(path)} {end}" for path, end in zip(paths, samples.ends, strict=True)
    )
    return Parts(samples, None, classes, f"wds {hashlib.sha256(names.encode()).hexdigest()[:16]}")
