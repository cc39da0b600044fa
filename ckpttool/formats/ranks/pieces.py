"""Whole tensors from the pieces that ranks wrote, whatever framework cut them.

The reader of a framework finds the files of a run and the pieces in them; everything after that is here:

    run = in_order(files)                       # one world size, no rank twice; those missing are named
    wholes = Wholes(path, run.missing, run.world_size, take_rank)
    tensor = wholes.tensor(name, dtype, shape, [Piece(rank, begin, ref), …])

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple, Protocol

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import HINT, Ranks, require_all
from ...errors import Damaged, Unreadable, UsageFault
from ...files.open_source import allow_open_files, open_source_descriptor
from ...tensors.chunks import Index, Part, assembled
from ...tensors.dtypes import DType
from ...tensors.ref import BadTensor, Computed, Source, Storage, TensorRef, contiguous_stride, extent
from ...tensors.values import MAX_EXPANSION
from .. import safetensors
from ..pytorch import legacy as torch_legacy
from ..pytorch import zip as torch_zip
from ..strangers import known
from .sharded_values import with_pieces

# The most ranks of a run: a larger number in a file or its name is a mistake, or means harm.
MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file that one rank wrote."""

    source: Source  # the open file
    tree: object  # its contents
    rank: int  # who wrote it
    world_size: int | None  # how many ranks there were, as the file says; None when it does not


@dataclass(frozen=True, slots=True)
class Piece:
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
    def lacking(self) -> tuple[str, ...]:
        """The names of the files that are not there, if those of the others differ in the rank alone."""
        names = [re.split(r"(\d+)", os.path.basename(file.source.path)) for file in self.files]
        first, ranks = names[0], [file.rank for file in self.files]
        if any(len(name) != len(first) for name in names):
            return ()
        numbers = {i: [int(name[i]) for name in names] for i in range(1, len(first), 2)}
        places = [i for i, found in numbers.items() if found == ranks]
        if len(places) != 1 or any(
            name[:i] + name[i + 1 :] != first[:i] + first[i + 1 :] for i in places for name in names
        ):
            return ()
        before, old, after = first[: places[0]], first[places[0]], first[places[0] + 1 :]
        width = len(old) if old.startswith("0") else 1
        return tuple("".join((*before, f"{rank:0{width}}", *after)) for rank in self.missing[:8])


def in_order(files: Iterable[RankFile]) -> RankFiles:
    """Return the files of one run in the order of its ranks."""
    by_rank: dict[int, RankFile] = {}
    world: tuple[int, RankFile] | None = None
    for file in files:
        path = file.source.path
        if max(file.rank, (file.world_size or 1) - 1) >= MAX_RANKS:
            raise Damaged(path, f"says that rank {file.rank} of {file.world_size or 'many'} ranks wrote it")
        if file.world_size is not None:
            world = world or (file.world_size, file)
            if world[0] != file.world_size:
                raise Damaged(
                    path,
                    f"was written by one of {file.world_size} ranks, and {world[1].source.path} by one of "
                    f"{world[0]}",
                    hint="take the files of the other run out of the folder, or name the files to merge",
                )
        other = by_rank.setdefault(file.rank, file)
        if other is not file:
            raise Damaged(path, f"was written by rank {file.rank}, and so was {other.source.path}", hint=HINT)
    size = world[0] if world else None
    for rank, file in sorted(by_rank.items()):
        if size is not None and rank >= size:
            raise Damaged(file.source.path, f"says that rank {rank} of {size} ranks wrote it")
    ranks = range(size if size is not None else max(by_rank) + 1)
    missing = tuple(rank for rank in ranks if rank not in by_rank)
    return RankFiles(tuple(file for _, file in sorted(by_rank.items())), size, missing)


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
    _made: dict[object, TensorRef] = field(default_factory=dict)
    _of_several: set[int] = field(default_factory=set)

    def tensor(
        self, name: str, dtype: DType, shape: Index, pieces: Sequence[Piece], *, flat: bool = False
    ) -> TensorRef:
        """Return a whole tensor; nothing is read yet."""
        key = dtype.name, shape, flat, tuple((piece.rank, piece.begin, piece.tensor.view) for piece in pieces)
        if key not in self._made:
            grid = (extent(shape) if 0 not in shape else 0,) if flat else shape
            for piece in pieces:
                _check(name, dtype, grid, piece)
            whole = self._joined(name, dtype, grid, pieces)
            if flat:
                whole = replace(whole, shape=shape, stride=contiguous_stride(shape))
            self._made[key] = whole
            boxes = [(piece.begin, piece.tensor.shape) for piece in pieces if piece.tensor.numel]
            if len({*boxes}) < len(boxes):
                self._of_several.add(id(whole))
        self.note(name, self._made[key])
        return self._made[key]

    def note(self, name: str, tensor: TensorRef) -> None:
        """Count a name of a tensor that was made here, among the replicas if it is one."""
        if id(tensor) in self._of_several:
            self.replicated.append(name)

    def _joined(self, name: str, dtype: DType, grid: Index, pieces: Sequence[Piece]) -> TensorRef:
        boxes: dict[tuple[Index, Index], list[Piece]] = {}
        for piece in pieces:
            if piece.tensor.numel:
                boxes.setdefault((piece.begin, piece.tensor.shape), []).append(piece)
        parts = [self._part(replicas) for replicas in boxes.values()]
        if len(parts) == 1 and parts[0].tensor.shape == grid and not parts[0].copies:
            return replace(parts[0].tensor, requires_grad=False)
        try:
            return assembled(name, self.path, dtype, grid, parts)
        except BadTensor as fault:
            if not self.missing:
                raise Damaged(self.path, str(fault)) from None
            return self._with_gaps(dtype, grid)

    def _part(self, replicas: list[Piece]) -> Part:
        replicas = sorted(replicas, key=lambda piece: (piece.rank != self.take_rank, piece.rank))
        first, *others = replicas
        if self.take_rank is not None:
            others = []
        ranks = tuple(each.rank for each in (first, *others))
        return Part(first.begin, first.tensor, tuple(other.tensor for other in others), ranks)

    def _with_gaps(self, dtype: DType, shape: Index) -> TensorRef:
        """Return a tensor of which some values are not there; reading them raises Damaged."""

        def fill(start: int, out: memoryview) -> None:
            require_all(self.path, self.missing, self.world_size)

        data = Computed.filling(self.path, extent(shape) * dtype.itemsize if 0 not in shape else 0, fill)
        return TensorRef.contiguous(Storage(data, dtype.storage or "UntypedStorage"), dtype, shape)


def _check(name: str, dtype: DType, grid: Index, piece: Piece) -> None:
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
        raise Damaged(
            path, f"{here} repeats its elements {tensor.nbytes // max(tensor.storage.nbytes, 1)} times"
        )


def require_rank(path: str, take_rank: int | None, ranks: Iterable[int]) -> None:
    """Check that the rank whose values are to be taken is one of those there are."""
    if take_rank is not None and take_rank not in set(ranks):
        raise UsageFault(
            f"{path}: no file of it was written by rank {take_rank}",
            hint=f"see which ranks there are: ckpttool inspect {shlex.quote(path)}",
        )


READERS = (torch_zip, torch_legacy, safetensors)


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
    for path in paths:
        source = Source(path, open_source_descriptor(path))
        reader = _reader_of(source)
        if reader is None:
            if fault := known(path, source.read(0, min(source.size, 512))):
                raise fault
            raise Unreadable(
                path,
                "is not a file that torch or safetensors wrote",
                hint="copy it again, or name the files to merge",
            )
        files.append(with_pieces(reader.read(source)))
    return files


def is_known(path: str) -> bool:
    """Return whether a file begins as those do that torch or safetensors write; Unreadable if it can't be."""
    return _reader_of(Source(path, open_source_descriptor(path))) is not None


def _reader_of(source: Source) -> ModuleType | None:
    head = source.read(0, min(source.size, 512))
    return next((reader for reader in READERS if reader.sniff(head)), None)


def whole_of(
    path: str, kind: str, tree: object, files: Sequence[Checkpoint], ranks: Ranks, unread: tuple[str, ...]
) -> Checkpoint:
    """Return the files of ranks as one checkpoint."""
    telling = Source(path, os.dup(files[0].source.fd))
    telling.size = 0  # its bytes are those of the first file, which counts itself
    return Checkpoint(
        telling,
        kind,
        tree,
        max(file.protocol for file in files),
        shards=tuple(file.source for file in files),
        unread=unread,
        names=frozenset().union(*(file.names for file in files)),
        remarks=tuple(remark for file in files for remark in file.remarks),
        device="cpu",  # each rank's storages are tagged with its own device
        ranks=ranks,
    )
