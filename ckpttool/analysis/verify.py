"""Reads every byte of a checkpoint: checksums, values that are not finite, and another file's contents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from ..checkpoint.checkpoint import Checkpoint, State
from ..checkpoint.checksums import checksum
from ..checkpoint.dotted_names import Entry, contents, dotted
from ..errors import Collision, NoState
from ..files.copying import BUFFER, Progress
from ..files.digest import tensor_digests
from ..formats.folders.sharding import TORCH
from ..formats.pytorch import torchscript
from ..formats.pytorch import zip as torch_zip
from ..formats.pytorch.archive import is_intact
from ..formats.zip.reader import read_directory
from ..inert_pickle.values import OrderedDict_, Record, in_brief, tensor_of
from ..tensors.cast import FLOATS, count_non_finite
from ..tensors.dtypes import real_dtype
from ..tensors.ref import ByteRange, Computed, Source, TensorRef
from ..tensors.values import MAX_REPEATED, require_bounded, stream, without_repeats
from ..transforms.keys import found_prefixes, strip_names

ZIPS = (torch_zip.NAME, torchscript.NAME, TORCH)
"""The formats that are zips, or made of them."""

_NOTHING = ("nothing",)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong: `checksum`, `non-finite`, or how two states differ. `name`: the tensor or record."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading every byte found.

    Attributes:
        checked_bytes: bytes that were read and compared with a checksum, or at least read: of storages and,
            in a zip, of all other records.
        unsummed: storages whose bytes no checksum covers.
        non_finite: tensor -> number of values that are NaN or infinite.
        problems: what makes the file not right.
        compared: what was compared with another file: `state`, or `everything` where both hold more than a
            model's state; None when there was no other file.
        hint: the next thing to do about the problems; None when there is none.
    """

    checked_bytes: int
    unsummed: int
    non_finite: Mapping[str, int]
    problems: tuple[Problem, ...]
    compared: str | None = None
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    checkpoint: Checkpoint,
    *,
    against: Checkpoint | None = None,
    state: str | None = None,
    finite: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Reads a file whole. Its structure was held to the format's rules when it was opened.

    Args:
        against: a file whose state must have the same names, types, shapes and values; where both files hold
            more than that, and no state is named, so must everything else but module versions.
        state: dotted path of the model's state, in both or in one of them; found when None.
        finite: NaN and infinity are problems; else they are only counted.
        progress: called with the number of bytes after each piece. All bytes are read twice, for checksums
            and as numbers, and once more to compare them.

    Raises:
        Damaged: a file ends early.
        NoState: there is nothing to compare.
    """
    sums = _Checksums(progress)
    sums.check_storages(checkpoint)
    if checkpoint.format in ZIPS:
        for source in (checkpoint.source, *checkpoint.shards):
            sums.check_records(source)
    problems = sums.problems
    non_finite = dict(_non_finite(checkpoint, progress))
    if finite:
        problems += [
            Problem("non-finite", name, f"{count} of its values are NaN or infinite")
            for name, count in non_finite.items()
        ]
    if against is None:
        return Verified(sums.checked, sums.unsummed, non_finite, tuple(problems))
    mine, theirs = _states(checkpoint, against, state)
    whole = state is None and _holds_more(checkpoint, mine) and _holds_more(against, theirs)
    if whole:
        problems += differences(dict(checkpoint.tensors()), dict(against.tensors()), progress)
        problems += other_differences(_others(checkpoint), _others(against))
    else:
        problems += differences(mine.tensors, theirs.tensors, progress)
    hint = _hint(checkpoint, mine, theirs) or _hint(against, theirs, mine) if problems else None
    compared = "everything" if whole else "state"
    return Verified(sums.checked, sums.unsummed, non_finite, tuple(problems), compared, hint)


class _Checksums:
    """What checking every checksum found, and which bytes were read."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.problems: list[Problem] = []
        self.checked = self.unsummed = 0
        self.seen: set[tuple[int, int]] = set()
        self.buffer = memoryview(bytearray(BUFFER))

    def check_storages(self, checkpoint: Checkpoint) -> None:
        """Each storage once, under the name of the first tensor that uses it."""
        done: set[int] = set()
        for name, storage in checkpoint.storages():
            if id(storage) in done or not storage.nbytes:
                continue
            done.add(id(storage))
            crc = self.crc(storage.data)
            self.checked += storage.nbytes
            if storage.crc32 is None:
                self.unsummed += 1
            elif crc != storage.crc32:
                self.problems.append(Problem("checksum", name, "its bytes do not match their checksum"))

    def check_records(self, source: Source) -> None:
        """Everything else in a zip: the pickle, code, and storages that no tensor uses."""
        if source.read(0, 4) != b"PK\x03\x04":
            return
        for record in read_directory(source).values():
            if (id(source), record.data.offset) in self.seen:
                continue
            self.checked += record.size
            if is_intact(source, record) is False:
                where = f"record {record.name}"
                self.problems.append(Problem("checksum", where, "its bytes do not match their checksum"))

    def crc(self, data: ByteRange | Computed) -> int:
        if isinstance(data, ByteRange):
            self.seen.add((id(data.source), data.offset))
        return checksum(data, self.buffer, self.progress)


def _states(checkpoint: Checkpoint, against: Checkpoint, where: str | None) -> Iterator[State]:
    """The states to compare; one file may have just the state that is at `where` in the other."""
    both = checkpoint, against
    has = [where is not None and _has(each, where) for each in both]
    for each, here in zip(both, has, strict=True):
        yield each.state(where if here or not any(has) else None)


def _has(checkpoint: Checkpoint, where: str) -> bool:
    try:
        checkpoint.state(where)
    except NoState:
        return False
    return True


def _holds_more(checkpoint: Checkpoint, state: State) -> bool:
    return bool(state.others or checkpoint.outside(state))


def _hint(checkpoint: Checkpoint, state: State, other: State) -> str | None:
    """The command that makes the names of a state those of another one, where a wrapper's prefix will do."""
    for found in found_prefixes(state.tensors):
        try:
            plain = strip_names(state.tensors, found.prefix).names.values()
        except Collision:
            continue
        if set(plain) == set(other.tensors):
            path = shlex.quote(checkpoint.path)
            return (
                f"the names differ only in '{found.prefix}'; remove it, and compare again: "
                f"ckpttool strip-prefix {path} plain.safetensors --prefix {found.prefix}"
            )
    return None


def _others(checkpoint: Checkpoint) -> dict[str, list[object]]:
    """Everything that is neither tensor nor container by its dotted path; of an object, what it is called."""
    found: dict[str, list[object]] = {}
    for path, value in checkpoint.named(_but_versions):
        if isinstance(value, Record) and tensor_of(value) is None:
            found.setdefault(dotted(path), []).append(("object", value.type_name))
        elif isinstance(value, set | frozenset):
            found.setdefault(dotted(path), []).append(sorted(map(in_brief, value)))
        elif isinstance(value, dict | list | tuple):
            if not value:
                found.setdefault(dotted(path), []).append(
                    ("empty", "dict" if isinstance(value, dict) else "list")
                )
        elif tensor_of(value) is None:
            found.setdefault(dotted(path), []).append(repr(value) if isinstance(value, float) else value)
    return found


def _but_versions(value: object) -> Iterable[Entry] | None:
    """What is in a container, without torch's notes on a state dict, which not every format keeps."""
    inside = None if isinstance(value, set | frozenset) else contents(value)
    if inside is None or not isinstance(value, OrderedDict_):
        return inside
    return [(name, item) for name, item in inside if name is not None]


def other_differences(mine: Mapping[str, list[object]], theirs: Mapping[str, list[object]]) -> list[Problem]:
    """How values other than tensors differ, by name: numbers also by their type, and -0.0 from 0.0."""
    both = [*mine, *(name for name in theirs if name not in mine)]
    problems = []
    for name in both:
        if name not in theirs:
            problems.append(Problem("only-here", name, "is not in the other file"))
        elif name not in mine:
            problems.append(Problem("only-there", name, "is only in the other file"))
        elif pair := _first_difference(mine[name], theirs[name]):
            problems.append(Problem("values", name, f"{pair[0]}, there {pair[1]}"))
    return problems


def _first_difference(mine: list[object], theirs: list[object]) -> tuple[str, str] | None:
    """The first two values of one name that differ, in brief."""
    for here, there in zip_longest(mine, theirs, fillvalue=_NOTHING):
        if (type(here), here) != (type(there), there):
            return in_brief(here)[:40], in_brief(there)[:40]
    return None


def _non_finite(checkpoint: Checkpoint, progress: Progress | None) -> Iterator[tuple[str, int]]:
    counts: dict[tuple[object, ...], int] = {}  # of another name for the same tensor too
    for name, tensor in checkpoint.tensors():
        kind = real_dtype(tensor.dtype).name
        if kind not in FLOATS:
            continue
        if tensor.view not in counts:
            once, repeats = without_repeats(tensor)  # with them it may be more than fits anywhere
            require_bounded(name, once, MAX_REPEATED)
            found = sum(count_non_finite(kind, chunk) for chunk in stream(once))
            counts[tensor.view] = found * repeats
            if progress:
                progress(once.nbytes)
        if count := counts[tensor.view]:
            yield name, count


def differences(
    mine: Mapping[str, TensorRef], theirs: Mapping[str, TensorRef], progress: Progress | None = None
) -> list[Problem]:
    """How two states differ, by name: names, types, shapes, values."""
    problems = [Problem("only-here", name, "is not in the other file") for name in mine if name not in theirs]
    problems += [
        Problem("only-there", name, "is only in the other file") for name in theirs if name not in mine
    ]
    alike: dict[str, TensorRef] = {}
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None:
            continue
        if (tensor.dtype, tensor.shape) == (other.dtype, other.shape):
            alike[name] = tensor
        else:
            there = f"{other.dtype.name} {list(other.shape)}"
            problems.append(Problem("form", name, f"{tensor.dtype.name} {list(tensor.shape)}, there {there}"))
    others = {name: theirs[name] for name in alike}
    both = zip(tensor_digests(alike, progress), tensor_digests(others, progress), strict=True)
    problems += [Problem("values", name, "has other values") for (name, a), (_, b) in both if a != b]
    return problems
