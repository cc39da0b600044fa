"""Reading what HuggingFaceStorageWriter(save_distributed=True) wrote: the pieces of each rank.

The files are named `shard-{rank + 1}-model-{file}-of-{files}.safetensors`. The header of each says where its
pieces begin; how large the whole is, and how many ranks there were, no file says. A tensor ends where its
last piece does. So nothing shows that the last rank's file is missing.
Source: torch's `distributed/checkpoint/hf_storage.py` and `_hf_utils.py`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...checkpoint.checkpoint import SHARDING, Checkpoint
from ...checkpoint.ranks import HINT, Ranks
from ...checkpoint.special_tensors import attributes, shape_of
from ...errors import Damaged
from ...inert_pickle.values import OrderedDict_
from ...remote.places import names_in
from ...system import join
from ...tensors.ref import TensorRef
from ..json_objects import parse_object
from .pieces import MAX_RANKS, Candidates, RankPiece, Take, Wholes, whole_of

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
