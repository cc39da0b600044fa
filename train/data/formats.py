"""Samples in files: tokens, tar shards (WebDataset), and data sets of Hugging Face. Imports torch."""

from __future__ import annotations

import bisect
import glob
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from ckpttool.core.files.commit import reason
from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault, install
from train import console
from train.config.sections import DataConfig
from train.data.builtin import picture_in, pixels
from train.data.samples import IGNORED, Parts, Scale, scale_of
from train.data.stream import Packed, Stream

Load = Callable[[DataConfig, str, int, int], Parts]

INNERMOST = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000  # names of one pattern


def files_of(pattern: str, what: str) -> list[str]:
    """Return the files of `train-{000..099}.tar`, `{a,b}/*.bin` or a plain name: sorted, each once.

    Raises:
        UsageFault: no file matches, or more than a million names; `what` is the flag, as `--data`.
        Unreadable: one that is named without a glob does not exist.
    """
    found: dict[str, None] = {}
    for number, name in enumerate(_braces(pattern)):
        if number == MOST:
            raise UsageFault(f"{what} {pattern}: its braces name more than {MOST:,} files")
        if glob.has_magic(name):
            found |= dict.fromkeys(sorted(glob.glob(os.path.expanduser(name), recursive=True)))
        elif os.path.isfile(path := os.path.expanduser(name)):
            found[path] = None
        else:
            reason = "is not a regular file" if os.path.exists(path) else "no such file"
            raise Unreadable(path, f"{reason}: {what} {pattern}")
    if not found:
        hint = "quote the pattern: the shell expands it too"
        raise UsageFault(f"{what} {pattern}: no file matches", hint=hint)
    return list(found)


def _braces(pattern: str) -> Iterator[str]:
    braces = INNERMOST.search(pattern)
    if braces is None:
        yield pattern
        return
    span = RANGE.fullmatch(braces[1])
    if span:
        first, last = int(span[1]), int(span[2])
        width = max(map(len, span.groups())) if span[1].startswith("0") or span[2].startswith("0") else 0
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        parts: Iterator[str] = (f"{number:0{width}}" for number in numbers)
    else:
        parts = iter(braces[1].split(","))
    for part in parts:
        yield from _braces(pattern[: braces.start()] + part + pattern[braces.end() :])


# ---- files of tokens ---------------------------------------------------------------------------------

# A sample is a block: `--block-size` tokens, and for each the token after it, which is its target. Blocks
# don't overlap, so in an epoch each token but the first of a file is a target exactly once. The last block of
# a file may be short: it is filled up with targets that don't count. Files are read in place, not mapped: one
# that becomes shorter while it is mapped kills the process.


BYTES = 2  # of a token
OPEN = 64  # files held open


class Files:
    """Reads bytes at their places in many files, of which some are held open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return bytes of a file. Raises Unreadable, or Damaged if the file has become shorter."""
        try:
            data = os.pread(self._descriptor(path), length, start)
            while data and len(data) < length:
                more = os.pread(self._open[path], length - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise Unreadable(path, reason(error)) from error
        if len(data) < length:
            at = f"{length:,} bytes at {start:,} are gone"
            raise Damaged(path, f"has become shorter: {at}", hint="don't change files that a run reads")
        return data

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": OrderedDict()}  # for a process that is not forked

    def __del__(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of token files: (inputs, targets), both int64 [block]."""

    def __init__(self, paths: Sequence[str], block: int) -> None:
        self.paths, self.block = paths, block
        self.tokens = [_length(path) for path in paths]
        blocks = (-(-max(tokens - 1, 0) // block) for tokens in self.tokens)
        self.ends = list(itertools.accumulate(blocks))  # of each file, in blocks
        self.files = Files()

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.ends, index)
        first = (index - (self.ends[number - 1] if number else 0)) * self.block
        count = min(self.block + 1, self.tokens[number] - first)
        data = self.files.read(self.paths[number], first * BYTES, count * BYTES)
        tokens = torch.from_numpy(numpy.frombuffer(data, "<u2").astype(numpy.int64))
        if count == self.block + 1:
            return tokens[:-1], tokens[1:]
        missing = (0, self.block + 1 - count)
        return pad(tokens[:-1], missing), pad(tokens[1:], missing, value=IGNORED)


def _length(path: str) -> int:
    """Return how many tokens a file has."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    if size % BYTES:
        what = f"its {size:,} bytes are no uint16 tokens, which have {BYTES} each"
        hint = "write it as numpy.uint16, little-endian: tokens.astype('<u2').tofile(path)"
        raise Damaged(path, what, hint=hint)
    return size // BYTES


def load_tokens(settings: DataConfig, pattern: str, *_: int) -> Parts:
    """Return the blocks of the files that `tokens:PATTERN` names, as training samples."""
    name = f"--data tokens:{pattern}"
    if settings.block_size is None:
        raise UsageFault(f"{name}: needs the tokens of a sample", hint="for example --block-size 256")
    if settings.task == "classification":
        raise UsageFault(f"{name}: tokens have no classes", hint="give --task language-model")
    paths = files_of(pattern, "--data tokens:")
    return Parts(Tokens(paths, settings.block_size), None, (), f"tokens in blocks of {settings.block_size}")


# ---- tar shards --------------------------------------------------------------------------------------

#     train-000.tar:   0001.jpg  0001.cls  0002.jpg  0002.cls  ...
#
# The headers of all shards are read once, so that each sample has a place. They are then dealt out and
# shuffled as those of any data set by index, a rank reads the bytes of its own samples alone, and nothing is
# read again on a resume. For classification each rank reads all labels first. The index takes 24 bytes for a
# member. Only files on this machine, and not compressed: others go through webdataset's own pipeline, as a
# stream from file.py:factory.


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
    """The samples of shards: (image, label) for classification, else a dict of members by ending."""

    def __init__(self, paths: Sequence[str], settings: DataConfig) -> None:
        self.paths, self.resize, self.files = paths, settings.resize, Files()
        self.labelled, self.scale = settings.task == "classification", scale_of(settings, channels=3)
        self.shards = [_index(path, skip_damaged=settings.skip_damaged) for path in paths]
        self.ends = list(itertools.accumulate(len(shard.starts) - 1 for shard in self.shards))
        if self.labelled:
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


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(CLASSES, lambda data: int(data)),
    **dict.fromkeys(TEXTS, bytes.decode),
    "json": json.loads,
    "npy": lambda data: torch.from_numpy(numpy.load(io.BytesIO(data), allow_pickle=False)),
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


def load_tar_shards(settings: DataConfig, pattern: str, *_: int) -> Parts:
    """Return the samples of the shards that `wds:PATTERN` names, as training samples."""
    if "://" in pattern or pattern.startswith("pipe:"):
        what = f"--data wds:{pattern}: reads shards on this machine"
        raise UsageFault(what, hint="download them, or return a webdataset pipeline from file.py:factory")
    paths = files_of(pattern, "--data wds:")
    samples, classes = TarShards(paths, settings), tuple[str, ...]()
    if samples.labelled and len(samples):
        classes = tuple(map(str, range(int(samples.labels.max()) + 1)))
    pairs = zip(paths, samples.ends, strict=True)
    names = "\n".join(f"{os.path.basename(path)} {end}" for path, end in pairs)
    return Parts(samples, None, classes, f"wds {hashlib.sha256(names.encode()).hexdigest()[:16]}")


# ---- data sets of Hugging Face -----------------------------------------------------------------------

# Its shards are dealt to lanes, in another order in each epoch, and within a lane samples are shuffled in a
# window (`--shuffle-window`, 1000). A shard knows its position, so that a resume reads nothing again but one
# window of each lane.


WINDOW = 1000
MOST_LANES = 12  # divides by 1 to 4 and 6 ranks; each lane holds one shard open
LABELS = ("label", "labels", "target", "fine_label", "class")


class HubShard:
    """One shard, made when it is first read: a data set may have thousands."""

    def __init__(self, whole: Any, number: int, of: int, as_sample: AsSample) -> None:
        self.whole, self.number, self.of, self.as_sample = whole, number, of, as_sample
        self.name = f"shard {number} of {of}"
        self._made: Any = None

    @property
    def made(self) -> Any:
        if self._made is None:
            self._made = self.whole.shard(num_shards=self.of, index=self.number)
        return self._made

    def __iter__(self) -> Iterator[Any]:
        return map(self.as_sample, self.made)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.made.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made.load_state_dict(state)


class AsSample:
    """Makes a sample of a row: (image, label) for classification, else a dict of its columns."""

    def __init__(self, columns: tuple[str, str] | None, scale: Scale, resize: int | None) -> None:
        self.columns, self.scale, self.resize = columns, scale, resize

    def __call__(self, row: dict[str, Any]) -> Any:
        if self.columns is None:
            return {name: _as_tensor(value) for name, value in row.items()}
        inputs, label = (row[name] for name in self.columns)
        if hasattr(inputs, "convert"):  # Pillow's
            return self.scale.apply(pixels(inputs, self.resize)), int(label)
        return _as_tensor(inputs), int(label)


def _as_tensor(value: Any) -> Any:
    if hasattr(value, "convert"):
        return pixels(value, None)
    if isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError):
            return value
    return value


def load_hugging_face(settings: DataConfig, name: str, seed: int, batch_size: int) -> Parts:
    """Return a split of a data set (by default `train`) as a stream of training samples."""
    try:
        import datasets
    except ImportError:
        raise UsageFault(f"--data hf:{name}: needs datasets", hint=install("hf")) from None
    where, _, split = name.partition(":")
    path, _, configuration = where.partition(",")
    split = split or "train"
    try:
        loaded = datasets.load_dataset(path, configuration or None, split=split, streaming=True)
        if loaded.features is None:
            loaded = loaded._resolve_features()
    except (OSError, ValueError) as error:  # of many classes, all of which are one of these
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unreadable(f"hf:{name}", why, hint="hf:OWNER/NAME,CONFIG:SPLIT, or hf:FOLDER") from error
    columns, classes = _columns(settings, name, loaded) if settings.task == "classification" else (None, ())
    as_sample = AsSample(columns, scale_of(settings, channels=3), settings.resize)
    number = loaded.num_shards
    shards: list[Any] = [HubShard(loaded, shard, number, as_sample) for shard in range(number)]
    if settings.block_size:
        shards = [Packed(shard, settings.block_size) for shard in shards]
    most = min(MOST_LANES, batch_size)
    known = (loaded.info.splits or {}).get(split)
    stream = Stream(
        shards,
        f"hf:{name}",
        seed=seed,
        lanes=next(lanes for lanes in range(most, 0, -1) if number % lanes == 0),
        shuffled=True,
        window=settings.shuffle_window or WINDOW,
        skip_damaged=settings.skip_damaged,
        length=known.num_examples or None if known and not settings.block_size else None,
    )
    return Parts(stream, None, classes, f"hf {name}")


def _columns(settings: DataConfig, name: str, loaded: Any) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the columns of the inputs and the label, and the names of the classes."""
    features = loaded.features
    labels = [column for column, feature in features.items() if hasattr(feature, "names")]
    labels += [column for column in LABELS if column in features and column not in labels]
    images = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    inputs = images + [column for column in features if column not in labels and column not in images]
    if not labels or not inputs or not hasattr(features[labels[0]], "names"):
        what = f"--data hf:{name}: has no column of classes among {', '.join(features)}"
        hint = "--task names other tasks; file.py:factory may name the classes"
        raise UsageFault(what, hint=hint)
    return (inputs[0], labels[0]), tuple(map(str, features[labels[0]].names))


BY_NAME: dict[str, Load] = {"tokens": load_tokens, "wds": load_tar_shards, "hf": load_hugging_face}
