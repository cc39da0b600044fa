"""Whole tensors from the pieces that ranks wrote, whatever framework cut them.

The reader of a framework finds the files of a run and the pieces in them; everything after that is here:

    run = in_order(files)                       # one world size, no rank twice; those missing are named
    wholes = Wholes(path, run.missing, run.world_size, take_rank)
    tensor = wholes.tensor(name, dtype, shape, [RankPiece(rank, begin, ref), …])

A piece is a box within the tensor: `begin` is its first index in each dimension, the shape of `ref` its size.
Where a tensor was flattened before it was cut (ZeRO, FlatParameter), a piece is a run of the flattened
whole: `begin` is `(start,)`, `ref` has one dimension, and `flat=True` says so. Empty pieces count as none.
Equal boxes of several ranks are replicas. They are compared bit by bit when the values are read, never at
opening; with `take_rank` that rank's are taken, and nothing is compared.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ..core.checkpoint.checkpoint import HINT, SHARDING, Checkpoint, Ranks, with_gaps
from ..core.checkpoint.special_tensors import attributes, shape_of
from ..core.files.commit import allow_open_files
from ..core.formats.safetensors import parse_object
from ..core.formats.shards import of_all, reader_of
from ..core.formats.strangers import known
from ..core.inert_pickle.values import OrderedDict_
from ..core.remote.places import names_in, open_source_at, prepare
from ..core.system import join
from ..core.tensors.ref import BadTensor, DType, Source, TensorRef, contiguous_stride, extent
from ..core.tensors.values import MAX_EXPANSION, Index, TensorPart, assembled
from ..errors import Damaged, Unreadable, UsageFault
from .sharded_values import with_pieces

# The most ranks of a run: a larger number in a file or its name is a mistake, or means harm.
MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file that one rank wrote."""

    source: Source  # the open file
    tree: Any  # its contents
    rank: int  # who wrote it
    world_size: int | None  # how many ranks there were, as the file says; None when it does not

    @property
    def path(self) -> str:
        """The file's name, for messages."""
        return self.source.path

    def damaged(self, reason: str, hint: str = HINT) -> Damaged:
        """Return the error that says what is wrong with this file."""
        return Damaged(self.source.path, reason, hint=hint)

    def require_world_of(self, first: RankFile, hint: str = HINT) -> None:
        """Check that two files are of as many ranks, where both say it."""
        size, known = self.world_size, first.world_size
        if None not in (size, known) and size != known:
            what = f"was written by one of {size} ranks, and {first.path} by one of {known}"
            raise self.damaged(what, hint)


@dataclass(frozen=True, slots=True)
class RankPiece:
    """A piece of a tensor that one rank wrote."""

    rank: int  # who wrote it
    # its first index in each dimension of the whole; of a run of the flattened whole, one number.
    begin: Index
    tensor: TensorRef  # the values; their shape is the size of the piece


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one kind, one a rank, in the order of the ranks."""

    files: tuple[RankFile, ...]  # those that are there
    world_size: int | None  # how many there should be; None when nothing says it
    missing: tuple[int, ...]  # the ranks whose file is not there

    @property
    def by_rank(self) -> dict[int, RankFile]:
        return {file.rank: file for file in self.files}

    @property
    def lacking(self) -> tuple[str, ...]:
        """The names of the files that are not there, if those of the others differ in the rank alone."""
        names = [re.split(r"(\d+)", os.path.basename(file.path)) for file in self.files]
        if len({*map(len, names)}) != 1:
            return ()
        first, columns, ranks = names[0], [*zip(*names, strict=True)], [file.rank for file in self.files]
        places = [i for i in range(1, len(columns), 2) if [*map(int, columns[i])] == ranks]
        if len(places) != 1 or any(len({*column}) > 1 for i, column in enumerate(columns) if i not in places):
            return ()
        (place,) = places
        width = len(first[place]) if first[place].startswith("0") else 1
        before, after = "".join(first[:place]), "".join(first[place + 1 :])
        return tuple(f"{before}{rank:0{width}}{after}" for rank in self.missing[:8])


def in_order(files: Iterable[RankFile]) -> RankFiles:
    """Return the files of one run in the order of its ranks."""
    by_rank: dict[int, RankFile] = {}
    telling: RankFile | None = None  # the first that says how many ranks there were
    for file in files:
        if max(file.rank, (file.world_size or 1) - 1) >= MAX_RANKS:
            ranks = file.world_size or "many"
            raise Damaged(file.path, f"says that rank {file.rank} of {ranks} ranks wrote it")
        if file.world_size is not None:
            telling = telling or file
            hint = "take the files of the other run out of the folder, or name the files to merge"
            file.require_world_of(telling, hint)
        if (other := by_rank.setdefault(file.rank, file)) is not file:
            raise file.damaged(f"was written by rank {file.rank}, and so was {other.path}")
    in_ranks = tuple(file for _, file in sorted(by_rank.items()))
    size = telling.world_size if telling else None
    for file in in_ranks:
        if size is not None and file.rank >= size:
            raise Damaged(file.path, f"says that rank {file.rank} of {size} ranks wrote it")
    missing = {*range(max(by_rank, default=-1) + 1 if size is None else size)} - by_rank.keys()
    return RankFiles(in_ranks, size, tuple(sorted(missing)))


@dataclass(slots=True)
class Wholes:
    """Join pieces into whole tensors. The names of one tied tensor become one tensor again."""

    path: str  # the folder, for messages
    # ranks whose files are not there: a tensor with gaps is then made, and reading its values raises Damaged.
    # Without missing ranks a gap is an error at once.
    missing: tuple[int, ...] = ()
    world_size: int | None = None  # how many ranks there were, for messages
    # the rank whose replicas are taken without comparing them with the others'; None compares.
    take_rank: int | None = None
    # all names of the tensors of which several ranks hold the same piece.
    replicated: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what the whole lacks of the ranks' files, in words
    _made: dict[object, TensorRef] = field(default_factory=dict)
    _of_several: set[int] = field(default_factory=set)

    def tensor(
        self, name: str, dtype: DType, shape: Index, pieces: Sequence[RankPiece], *, flat: bool = False
    ) -> TensorRef:
        """Return a whole tensor; nothing is read yet."""
        key = dtype.name, shape, flat, tuple((piece.rank, piece.begin, piece.tensor.view) for piece in pieces)
        if key not in self._made:
            grid = (0 if 0 in shape else extent(shape),) if flat else shape
            boxes: dict[tuple[Index, Index], list[RankPiece]] = {}
            for piece in pieces:
                _check(name, dtype, grid, piece)
                if piece.tensor.numel:
                    boxes.setdefault((piece.begin, piece.tensor.shape), []).append(piece)
            whole = self._joined(name, dtype, grid, [self._part(replicas) for replicas in boxes.values()])
            if flat:
                whole = replace(whole, shape=shape, stride=contiguous_stride(shape))
            self._made[key] = whole
            if any(len(replicas) > 1 for replicas in boxes.values()):
                self._of_several.add(id(whole))
        self.note(name, self._made[key])
        return self._made[key]

    def note(self, name: str, tensor: TensorRef) -> None:
        """Count a name of a tensor that was made here, among the replicas if it is one."""
        if id(tensor) in self._of_several:
            self.replicated.append(name)

    def _joined(self, name: str, dtype: DType, grid: Index, parts: Sequence[TensorPart]) -> TensorRef:
        if len(parts) == 1 and parts[0].tensor.shape == grid and not parts[0].copies:
            return replace(parts[0].tensor, requires_grad=False)
        try:
            return assembled(name, self.path, dtype, grid, parts)
        except BadTensor as fault:
            if not self.missing:
                raise Damaged(self.path, str(fault)) from None
            return with_gaps(self.path, dtype, grid, self.missing, self.world_size)

    def _part(self, replicas: list[RankPiece]) -> TensorPart:
        replicas = sorted(replicas, key=lambda piece: (piece.rank != self.take_rank, piece.rank))
        replicas = replicas if self.take_rank is None else replicas[:1]
        first, *copies = (piece.tensor for piece in replicas)
        return TensorPart(replicas[0].begin, first, tuple(copies), tuple(piece.rank for piece in replicas))


def _check(name: str, dtype: DType, grid: Index, piece: RankPiece) -> None:
    """Check a piece by itself."""
    tensor, path = piece.tensor, piece.tensor.storage.data.path
    here = f"its piece of '{name[:80]}'"
    if tensor.dtype is not dtype:
        raise Damaged(path, f"{here} is {tensor.dtype.name}, and the tensor is {dtype.name}")
    if len(piece.begin) != len(grid) or len(tensor.shape) != len(grid):
        raise Damaged(path, f"{here} has {len(tensor.shape)} dimensions, and the tensor {len(grid)}")
    if any(b + n > whole for b, n, whole in zip(piece.begin, tensor.shape, grid, strict=True)):
        what = f"{list(tensor.shape)} at {list(piece.begin)}"
        raise Damaged(path, f"{here}, {what}, does not fit into the tensor, {list(grid)}")
    if tensor.nbytes > tensor.storage.nbytes + MAX_EXPANSION:
        times = tensor.nbytes // max(tensor.storage.nbytes, 1)
        raise Damaged(path, f"{here} repeats its elements {times} times")


def require_rank(path: str, take_rank: int | None, ranks: Iterable[int]) -> None:
    """Check that the rank whose values are to be taken is one of those there are."""
    if take_rank is not None and take_rank not in set(ranks):
        hint = f"see which ranks there are: ckpttool inspect {shlex.quote(path)}"
        raise UsageFault(f"{path}: no file of it was written by rank {take_rank}", hint=hint)


class Candidates(NamedTuple):
    """The paths of the files that may be a run's, and the open files that named them."""

    paths: list[str]
    telling: tuple[Source, ...] = ()


class Take(NamedTuple):
    """What the user chose where files contradict each other; None has them compared."""

    rank: int | None = None  # whose values are taken of what several ranks hold
    step: int | None = None  # the training step that the files are of


class Framework(Protocol):
    """A module that reads the files of one framework's ranks."""

    def candidates(self, folder: str) -> Candidates:
        """Return the files in a folder whose names are those of this framework's ranks."""
        # They may lie in folders below it. No file is opened, but one that names others.

    def read(self, path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
        """Return the files of a run's ranks as one checkpoint; None if they are something else."""


def opened(paths: Sequence[str]) -> list[Checkpoint]:
    """Return files as checkpoints, each by itself, in whose trees sharded tensors are `Sharded` ones."""
    allow_open_files(len(paths), paths[0])
    files = []
    prepare(paths)
    for path in paths:
        source = open_source_at(path)
        reader = reader_of(source)
        if reader is None:
            hint = "copy it again, or name the files to merge"
            unknown = Unreadable(path, "is not a file that torch or safetensors wrote", hint=hint)
            raise known(source) or unknown
        files.append(with_pieces(reader.read(source)))
        source.opened()
    return files


def is_known(path: str) -> bool:
    """Return whether a file begins as those do that torch or safetensors write; Unreadable if it can't be."""
    return reader_of(open_source_at(path)) is not None


def whole_of(
    path: str, kind: str, tree: object, files: Sequence[Checkpoint], ranks: Ranks, unread: Iterable[str]
) -> Checkpoint:
    """Return the files of ranks as one checkpoint."""
    telling, fields = files[0].source.called(path), {**of_all(files), "unread": tuple(unread)}
    # Each rank's storages are tagged with its own device.
    return Checkpoint(telling, kind, tree, device="cpu", ranks=ranks, **fields)


# ---- Reading what HuggingFaceStorageWriter(save_distributed=True) wrote: the pieces of each rank.
#
# The files are named `shard-{rank + 1}-model-{file}-of-{files}.safetensors`. The header of each says
# where its pieces begin; how large the whole is, and how many ranks there were, no file says. A tensor
# ends where its last piece does. So nothing shows that the last rank's file is missing. Source: torch's
# `distributed/checkpoint/hf_storage.py` and `_hf_utils.py`.


NAME = "safetensors-ranks"

FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")

# Metadata that says where pieces lie, and is not kept.
OWN = (SHARDING, "DCP_VERSION")


def candidates(folder: str) -> Candidates:
    """Return the files in a folder that are named as the writer names them."""
    return Candidates([join(folder, name) for name in names_in(folder) if FILE.fullmatch(name)])


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of all ranks as one checkpoint; None if none of them holds pieces."""
    others = [file for file in files if SHARDING not in file.metadata]
    if len(others) == len(files):
        return None
    if others:
        what = f"holds no pieces as safetensors ({SHARDING}), as other files here do"
        raise Damaged(others[0].path, what, hint="name their folder, or merge them by themselves")
    placed = {_place(file): file for file in files}
    if len(placed) < len(files):
        raise Damaged(path, "has two files of one rank and number")
    _require_all_files(path, placed)
    there = {rank for rank, _, _ in placed}
    missing = tuple(sorted({*range(max(there))} - there))
    pieces: dict[str, list[RankPiece]] = {}
    nbytes: Counter[int] = Counter()
    for (rank, _, _), file in sorted(placed.items()):
        for name, tensor, begin in _pieces(file):
            pieces.setdefault(name, []).append(RankPiece(rank, begin, tensor))
            nbytes[rank] += tensor.nbytes
    wholes = Wholes(path, missing)
    tree = OrderedDict_((name, _whole(path, wholes, name, found)) for name, found in pieces.items())
    ranks = Ranks("DCP as safetensors", None, "", None, dict(nbytes), tuple(wholes.replicated), missing)
    return whole_of(path, NAME, tree, files, ranks, _left_out(files))


def _place(file: Checkpoint) -> tuple[int, int, int]:
    """Return the rank, number and count of files that a file's name states."""
    named = FILE.fullmatch(os.path.basename(file.path))
    if named is None or not int(named[1]) or not 0 < int(named[2]) <= int(named[3]):
        what = f"holds one rank's pieces of tensors ({SHARDING}), and its name does not say which rank's"
        hint = "give it the name it was written under: shard-RANK-model-FILE-of-FILES.safetensors"
        raise Damaged(file.path, what, hint=hint)
    if int(named[1]) > MAX_RANKS:
        raise Damaged(file.path, f"says that rank {int(named[1]) - 1} wrote it", hint=HINT)
    return int(named[1]) - 1, int(named[2]), int(named[3])


def _require_all_files(path: str, placed: dict[tuple[int, int, int], Checkpoint]) -> None:
    counts = {count for _, _, count in placed}
    if len(counts) > 1:
        raise Damaged(path, f"has files of saves in {' and in '.join(map(str, sorted(counts)))} files")
    numbers = {number for _, number, _ in placed}
    if lacking := next((n for n in range(1, counts.pop() + 1) if n not in numbers), None):
        hint = "copy the files of all ranks into one folder"
        raise Damaged(path, f"has no file number {lacking}", hint=hint)


def _pieces(file: Checkpoint) -> Iterator[tuple[str, TensorRef, tuple[int, ...]]]:
    """Yield the pieces in a file: name, values, and where they begin."""
    listed = parse_object(file.path, file.metadata[SHARDING].encode(), f"its {SHARDING}")
    tree: Any = file.tree
    if not isinstance(tree, dict) or {*tree} != {*listed}:
        raise Damaged(file.path, f"its {SHARDING} does not list the tensors that it has")
    for name, tensor in tree.items():
        begin = shape_of(attributes(listed[name]).get("saved_offsets"))
        if begin is None or not isinstance(tensor, TensorRef) or len(begin) != len(tensor.shape):
            raise Damaged(file.path, f"its {SHARDING} does not say where '{name[:80]}' begins")
        yield name, tensor, begin


def _whole(path: str, wholes: Wholes, name: str, pieces: list[RankPiece]) -> TensorRef:
    first = pieces[0].tensor
    for piece in pieces:
        if len(piece.begin) != len(first.shape):
            where = piece.tensor.storage.data.path
            raise Damaged(where, f"has '{name[:80]}' with other dimensions than others")
    ends = [tuple(b + n for b, n in zip(p.begin, p.tensor.shape, strict=True)) for p in pieces]
    return wholes.tensor(name, first.dtype, tuple(map(max, zip(*ends, strict=True))), pieces)


def _left_out(files: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return the metadata of the files that says something else, by name."""
    known = {("format", "pt"), *((key, file.metadata.get(key)) for file in files for key in OWN)}
    names = {key for file in files for key, value in file.metadata.items() if (key, value) not in known}
    return tuple(f"metadata '{key}' of the files" for key in sorted(names))
