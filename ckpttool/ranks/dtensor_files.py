"""Reading the files that ranks wrote with `torch.save`, each its own: DTensors and ShardedTensors.

FSDP2, tensor parallelism, HSDP and FSDP1 save so, and what is built on them (verl, accelerate, scripts). The
order of ranks is in the pickles: each sharded tensor says who wrote it. File names only tell which files
belong together: `model_world_size_4_rank_0.pt` and `optim_world_size_4_rank_0.pt`, or
`pytorch_model_fsdp_0_rank0.bin` and `optimizer_0_rank0.bin`.

Files without sharded tensors may each hold the whole, as those of DDP do, and nothing in them says so: they
are named after the ranks from 0 on, their tensors have the same names and shapes, and the values are compared
when they are read.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, Ranks
from ..core.checkpoint.dotted_names import dotted
from ..core.checkpoint.optimizer_view import OptimizerView, is_optimizer
from ..core.files.commit import CHECKPOINT_ENDINGS
from ..core.inert_pickle.values import tensor_of
from ..core.remote.places import names_in
from ..core.system import join
from ..errors import Damaged, Unsupported
from .merge_trees import merged, step_of
from .pieces import Candidates, RankFile, RankFiles, Take, Wholes, in_order, require_rank, whole_of
from .sharded_values import DTENSOR, Mesh, ShardedValue, unless_sharded

DTENSORS, FSDP, COPIES = "dtensor-ranks", "fsdp-ranks", "rank-copies"

# How names of files say which rank wrote them.
RANK = re.compile(r"rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
SHORT = re.compile(r"(?<![a-z0-9])r[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)  # r50_rank0.pth is of rank 0

WORLD = re.compile(r"world_size[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)

# How browsers name the second download of a file.
SECOND = re.compile(r" \(\d{1,3}\)(?=\.[a-z]+$)")

# How the names of the files begin that hold what is neither the model nor its optimizer.
EXTRA = "extra_state"

# The end of the names in FSDP's LOCAL_STATE_DICT.
FLAT = "_flat_param"


def rank_in(name: str) -> re.Match[str] | None:
    """Return where a file's name says which rank wrote it."""
    return RANK.search(name) or SHORT.search(name)


def candidates(folder: str) -> Candidates:
    """Return the files in a folder that are named after a rank."""
    names = names_in(folder)
    named = [name for name in names if rank_in(name) and name.endswith(CHECKPOINT_ENDINGS)]
    for name in named:
        if (first := SECOND.sub("", name)) != name and first in names:
            path = join(folder, name)
            hint = f"remove one of them: rm {shlex.quote(path)}"
            raise Damaged(path, f"is a second download of {first}, by its name", hint=hint)
    return Candidates([join(folder, name) for name in named])


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one file says of its rank."""

    file: Checkpoint  # the file
    first: ShardedValue | None  # the first of its sharded tensors; None when it has none
    mesh: Mesh | None  # the largest device mesh in it
    # how many ranks there were: a tensor may lie on a part of them, whose mesh says no more, so it is the
    # most that a tensor or the file's name says; None when nothing says it.
    world_size: int | None
    nbytes: int  # bytes of the tensors in it

    @property
    def rank(self) -> int | None:
        """Who wrote it: as its tensors say, else as its name does."""
        if self.first is not None:
            return self.first.rank
        named = rank_in(os.path.basename(self.file.path))
        return int(named[1]) if named else None


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of ranks as one checkpoint; None if none of them holds a sharded tensor."""
    # What several kinds of files hold (`model_…`, `optim_…`) becomes one dict. Of files without any sharded
    # tensor it gets the entries that are the same on all ranks, or those of `take_rank`; the contents of
    # `extra_state_…` join the model. The rest is left out, by name, as are files that are not those of all
    # ranks of the run.
    facts = [_facts(file) for file in files]
    first = next((each.first for each in facts if each.first), None)
    if first is None:
        return None
    wholes = Wholes(path, take_rank=take.rank)
    runs, others = _kinds(facts, wholes.left)
    telling, *rest = (replace(run.files[0], world_size=run.world_size) for run in runs.values())
    for file in rest:
        file.require_world_of(telling)
    require_rank(path, take.rank, (file.rank for run in runs.values() for file in run.files))
    tree = _joined(wholes, runs, others)
    kind = DTENSORS if first.kind == DTENSOR else FSDP
    return whole_of(path, kind, tree, files, _ranks(kind, facts, runs, wholes.replicated), wholes.left)


# The files of each kind that hold pieces.
Runs = dict[str, RankFiles]


def _kinds(facts: Sequence[_Facts], left: list[str]) -> tuple[Runs, dict[str, Sequence[_Facts]]]:
    """Return the files that hold pieces by kind, and others of as many ranks; add the names of the rest."""
    runs: Runs = {}
    rest: dict[str, Sequence[_Facts]] = {}
    for stem, group in _groups(facts).items():
        is_optimizers = all(is_optimizer(each.file.tree) for each in group)
        has_rows = is_optimizers and any(_has_rows(each.file.tree) for each in group)
        if any(each.first for each in group) or (is_optimizers and not has_rows):
            runs[stem] = in_order(map(_rank_file, group))
        elif is_optimizers:  # as FSDP1's own `optimizer.state_dict()` is
            left.append(f"{_named(group)} (flat pieces without names and places)")
        else:
            rest[stem] = group
    size, others = _size(runs), dict[str, Sequence[_Facts]]()
    for stem, files in rest.items():
        others[stem] = [each for each in files if each.world_size in (None, size)]
        for stated in sorted({each.world_size or size for each in files} - {size}):
            foreign = [each for each in files if each.world_size == stated]
            left.append(f"{_named(foreign)} (of {stated} ranks, and the pieces are of {size})")
    return runs, others


def _size(runs: Mapping[str, RankFiles]) -> int:
    """Return how many ranks there were: sharded tensors say it."""
    return next(run.world_size for run in runs.values() if run.world_size is not None)


def _ranks(kind: str, facts: Sequence[_Facts], runs: Runs, replicated: Sequence[str]) -> Ranks:
    """Return what is known of the run."""
    size, nbytes = _size(runs), Counter[int]()
    for each in facts:
        if each.rank is not None and each.world_size in (None, size):
            nbytes[each.rank] += each.nbytes
    mesh, held = largest(each.mesh for each in facts), dict(sorted(nbytes.items()))
    name, device = "DTensor" if kind == DTENSORS else "FSDP1 (ShardedTensor)", mesh.device if mesh else ""
    step = step_of([file for run in runs.values() for file in run.files])
    missing = tuple(sorted({rank for run in runs.values() for rank in run.missing}))
    lacking = tuple(name for run in runs.values() for name in run.lacking)
    return Ranks(name, size, str(mesh or ""), step, held, tuple(replicated), missing, lacking, device)


def _joined(wholes: Wholes, runs: Runs, others: Mapping[str, Sequence[_Facts]]) -> object:
    names = _names_of_kinds({stem: run.files[0].tree for stem, run in runs.items()})
    beside: dict[object, object] = {}
    for stem, group in others.items():
        if not group:
            continue
        try:
            run = _complete(_size(runs), group, wholes.take_rank)
        except Damaged as fault:  # of what may be done without
            wholes.left.append(f"{_named(group)} ({os.path.basename(fault.path)} {fault.reason})")
            continue
        files = _beside({*names.values(), *beside}, stem, run, wholes.take_rank)
        beside |= merged(wholes, files, common=True)
    trees: dict[object, object] = {}
    for stem, run in runs.items():
        where = (names[stem],) if len(runs) > 1 or others else ()
        of_run = replace(wholes, missing=run.missing, world_size=run.world_size)
        trees[names[stem]] = merged(of_run, run.files, where)
    return trees | beside if len(trees) > 1 or others else trees.popitem()[1]


def _facts(file: Checkpoint) -> _Facts:
    sharded: list[ShardedValue] = []
    nbytes = 0
    for path, value in file.named(unless_sharded):
        if tensor := tensor_of(value):
            nbytes += tensor.nbytes
        elif isinstance(value, ShardedValue):
            if path and path[-1].endswith(FLAT):
                what = f"is FSDP's LOCAL_STATE_DICT: '{dotted(path)[:80]}' is a run of flattened parameters"
                hint = "save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT, which have them"
                raise Unsupported(file.path, f"{what}, without their names and shapes", hint=hint)
            nbytes += sum(piece.nbytes for _, piece in value.pieces)
            sharded.append(value)
    named = WORLD.search(os.path.basename(file.path))
    sizes = [*([int(named[1])] if named else []), *(value.world_size for value in sharded)]
    mesh = largest(value.mesh for value in sharded)
    return _Facts(file, sharded[0] if sharded else None, mesh, max(sizes, default=None), nbytes)


def largest(meshes: Iterable[Mesh | None]) -> Mesh | None:
    """Return the mesh with the most axes, of those the one with the most ranks; the first of equals."""
    return max(filter(None, meshes), key=lambda mesh: (len(mesh.sizes), len(mesh.ranks)), default=None)


def _groups(facts: Sequence[_Facts]) -> dict[str, list[_Facts]]:
    """Return the files by kind: those whose names differ in numbers alone; else those of like contents."""
    # One rank's files of several kinds have names unlike each other too, and their names say a rank.
    groups: dict[str, list[_Facts]] = {}
    alike: dict[str, list[_Facts]] = {}
    for each in facts:
        stem = re.sub(r"\d+", "#", os.path.basename(each.file.path))
        kind = "optimizer" if is_optimizer(each.file.tree) else "model" if each.first else stem
        groups.setdefault(stem, []).append(each)
        alike.setdefault(kind, []).append(each)
    if len(groups) == len(facts) > 1:
        once = all(len({each.rank for each in group}) == len(group) for group in alike.values())
        if once or not all(rank_in(stem.replace("#", "0")) for stem in groups):
            return alike
    return groups


def _named(group: Sequence[_Facts]) -> str:
    """Return the files of one kind as one name."""
    name = os.path.basename(group[0].file.path)
    named = rank_in(name)
    return f"{name[: named.start()]}rank_*{name[named.end() :]}" if named else name


def _complete(size: int, group: Sequence[_Facts], take_rank: int | None) -> RankFiles:
    """Return the files of one kind, checked to be all ranks of the run or `take_rank`."""
    run = in_order(map(_rank_file, group))
    first, last = run.files[0], run.files[-1]
    if last.rank >= size:
        raise Damaged(last.path, f"was written by rank {last.rank}, and there were {size} ranks")
    needed = {*range(size)} if take_rank is None else {take_rank}
    if lacking := needed - {file.rank for file in run.files}:
        way = "" if take_rank is not None else "; merge --take-rank R takes one rank's"
        raise Damaged(first.path, f"lies here without that of rank {min(lacking)}{way}")
    return run


def _has_rows(optimizer: Any) -> bool:
    values = (value for entry in OptimizerView(optimizer).entries for value in entry.values())
    return any((tensor := tensor_of(value)) is not None and tensor.shape for value in values)


def _beside(taken: set[object], stem: str, run: RankFiles, take_rank: int | None) -> Sequence[RankFile]:
    """Return the files of one kind that hold no pieces, as dicts without keys that are taken."""
    files = [file for file in run.files if file.rank == take_rank] or run.files
    name = _begin(stem)
    if name == EXTRA and all(isinstance(f.tree, dict) and taken.isdisjoint(f.tree) for f in files):
        return files
    while name in taken:
        name += "_"
    return [replace(file, tree={name: file.tree}) for file in files]


def _rank_file(facts: _Facts) -> RankFile:
    if facts.rank is None:
        what = "has no sharded tensor, and its name does not say which rank wrote it"
        hint = "give it a name that ends in rank_0.pt, with its rank, or leave it out"
        raise Damaged(facts.file.path, what, hint=hint)
    return RankFile(facts.file.source, facts.file.tree, facts.rank, facts.world_size)


def _names_of_kinds(trees: Mapping[str, object]) -> dict[str, str]:
    """Return the name of each kind of files in the whole: `model`, `optimizer`, or how their names begin."""
    names = {stem: _begin(stem) for stem in trees}
    optimizers = [stem for stem, tree in trees.items() if is_optimizer(tree)]
    rest = [stem for stem in trees if stem not in optimizers]
    for stems, name in ((rest, "model"), (optimizers, "optimizer")):
        if len(stems) == 1:
            names[stems[0]] = name
    return names if len({*names.values()}) == len(trees) else {stem: stem for stem in trees}


def _begin(stem: str) -> str:
    return re.split(r"_?(?:world_size|rank)", stem)[0].strip("_-.#") or stem


# Files that each hold the whole.


def read_copies(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of all ranks as one checkpoint; None if they are no copies of one."""
    kinds = _kinds_of_copies(files)
    if kinds is None:
        return None
    size = len(next(iter(kinds.values())))
    require_rank(path, take.rank, range(size))
    runs = {
        stem: in_order(RankFile(copy.source, copy.tree, rank, size) for rank, copy in enumerate(copies))
        for stem, copies in kinds.items()
    }
    wholes = Wholes(path, take_rank=take.rank)
    tree = _joined(wholes, runs, {})
    of_ranks = enumerate(zip(*kinds.values(), strict=True))
    held = {rank: sum(t.nbytes for copy in copies for _, t in copy.tensors()) for rank, copies in of_ranks}
    ranks = Ranks("whole copies", size, held=held, replicated=tuple(wholes.replicated))
    return whole_of(path, COPIES, tree, files, ranks, wholes.left)


def _kinds_of_copies(files: Sequence[Checkpoint]) -> dict[str, list[Checkpoint]] | None:
    """Return the copies by the rest of their names, in the order of the ranks; None if they are none."""
    kinds: dict[str, dict[int, Checkpoint]] = {}
    for file in files:
        name = os.path.basename(file.path)
        # FSDP1 keeps files that are an optimizer's alone as flat pieces of each rank.
        if (named := rank_in(name)) is None or is_optimizer(file.tree):
            return None
        kind = kinds.setdefault(f"{name[: named.start()]}rank{name[named.end() :]}", {})
        if kind.setdefault(int(named[1]), file) is not file:
            return None
    if len({len(kind) for kind in kinds.values()}) != 1:
        return None
    for kind in kinds.values():
        forms = {tuple((name, t.dtype.name, t.shape) for name, t in file.tensors()) for file in kind.values()}
        if len(kind) < 2 or len(forms) > 1 or {*kind} != {*range(len(kind))}:
            return None
    return {stem: [kind[rank] for rank in sorted(kind)] for stem, kind in kinds.items()}
