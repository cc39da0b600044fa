"""Files of ranks that each hold the whole, as programs write them whose every rank saves: one is taken.

DDP keeps the same model on each rank, and nothing in its files says so. They are named after the ranks from 0
on, and their tensors have the same names and shapes; the values are compared when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import Ranks
from ...checkpoint.states import is_optimizer
from .dtensor_files import names_of_kinds, rank_in
from .merge_trees import SideBySide
from .pieces import RankFile, Take, Wholes, require_rank, whole_of

NAME = "rank-copies"


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of all ranks as one checkpoint; None if they are no copies of one."""
    kinds = _kinds(files)
    if kinds is None:
        return None
    first, *_ = kinds.values()
    require_rank(path, take.rank, range(len(first)))
    names = names_of_kinds({stem: copies[0].tree for stem, copies in kinds.items()})
    trees: dict[object, object] = {}
    replicated: list[str] = []
    left: list[str] = []
    for stem, copies in kinds.items():
        wholes = Wholes(path, world_size=len(copies), take_rank=take.rank)
        merging = SideBySide(wholes, copies, (names[stem],) if len(kinds) > 1 else ())
        trees[names[stem]] = merging.merge()
        replicated += wholes.replicated
        left += merging.left
    held = dict.fromkeys(range(len(first)), 0)
    for copies in kinds.values():
        for copy in copies:
            file = next(file for file in files if file.source is copy.source)
            held[copy.rank] += sum(tensor.nbytes for _, tensor in file.tensors())
    ranks = Ranks("whole copies", len(first), held=held, replicated=tuple(replicated))
    tree = trees if len(trees) > 1 else trees.popitem()[1]
    return whole_of(path, NAME, tree, files, ranks, tuple(left))


def _kinds(files: Sequence[Checkpoint]) -> dict[str, list[RankFile]] | None:
    """Return the copies by the rest of their names, in the order of the ranks; None if they are none."""
    kinds: dict[str, dict[int, Checkpoint]] = {}
    for file in files:
        name = os.path.basename(file.path)
        if (named := rank_in(name)) is None:
            return None
        kind = kinds.setdefault(f"{name[: named.start()]}rank{name[named.end() :]}", {})
        if kind.setdefault(int(named[1]), file) is not file:
            return None
    for kind in kinds.values():
        if (
            {*kind} != {*range(len(kind))}
            or len(kind) < 2
            or len({_form(file) for file in kind.values()}) > 1
        ):
            return None
    if len({len(kind) for kind in kinds.values()}) != 1 or any(map(_is_flat, files)):
        return None
    return {
        stem: [RankFile(kind[rank].source, kind[rank].tree, rank, len(kind)) for rank in sorted(kind)]
        for stem, kind in kinds.items()
    }


def _form(file: Checkpoint) -> tuple[object, ...]:
    return tuple((name, tensor.dtype.name, tensor.shape) for name, tensor in file.tensors())


def _is_flat(file: Checkpoint) -> bool:
    """Return whether a file is an optimizer's alone, which FSDP1 keeps as flat pieces of each rank."""
    return is_optimizer(file.tree)
