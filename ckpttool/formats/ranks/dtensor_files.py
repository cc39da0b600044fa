"""Reading the files that ranks wrote with `torch.save`, each its own: DTensors and ShardedTensors.

FSDP2, tensor parallelism, HSDP and FSDP1 save so, and what is built on them (verl, accelerate, scripts). The
order of ranks is in the pickles: each sharded tensor says who wrote it. File names only tell which files
belong together: `model_world_size_4_rank_0.pt` and `optim_world_size_4_rank_0.pt`, or
`pytorch_model_fsdp_0_rank0.bin` and `optimizer_0_rank0.bin`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.flat_optimizers import as_nested
from ...checkpoint.ranks import HINT, Ranks
from ...checkpoint.states import is_optimizer
from ...errors import Damaged, Unsupported
from ...files.open_source import CHECKPOINT_ENDINGS, names_in
from ...inert_pickle.values import tensor_of
from .agreement import step_of
from .device_meshes import Mesh
from .merge_trees import SideBySide
from .pieces import Candidates, RankFile, RankFiles, Take, Wholes, in_order, require_rank, whole_of
from .sharded_values import DTENSOR, Sharded, ShardedValues, unless_sharded

FORMATS = DTENSORS, FSDP = "dtensor-ranks", "fsdp-ranks"

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
            path = os.path.join(folder, name)
            hint = f"remove one of them: rm {shlex.quote(path)}"
            raise Damaged(path, f"is a second download of {first}, by its name", hint=hint)
    return Candidates([os.path.join(folder, name) for name in named])


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one file says of its rank."""

    file: Checkpoint  # the file
    sharded: Sharded | None  # one of its sharded tensors; None when it has none
    mesh: Mesh | None  # the largest device mesh in it
    # how many ranks there were: a tensor may lie on a part of them, whose mesh says no more, so it is the
    # most that a tensor or the file's name says; None when nothing says it.
    world_size: int | None
    nbytes: int  # bytes of the tensors in it

    @property
    def rank(self) -> int | None:
        """Who wrote it: as its tensors say, else as its name does."""
        if self.sharded is not None:
            return self.sharded.rank
        named = rank_in(os.path.basename(self.file.path))
        return int(named[1]) if named else None


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of ranks as one checkpoint; None if none of them holds a sharded tensor."""
    # What several kinds of files hold (`model_…`, `optim_…`) becomes one dict. Of files without any sharded
    # tensor it gets the entries that are the same on all ranks, or those of `take_rank`; the contents of
    # `extra_state_…` join the model. The rest is left out, by name, as are files that are not those of all
    # ranks of the run.
    facts = [_facts(file) for file in files]
    first = next((each.sharded for each in facts if each.sharded), None)
    if first is None:
        return None
    runs, others, left = _kinds(facts)
    _require_one_run(runs)
    require_rank(path, take.rank, (file.rank for run in runs.values() for file in run.files))
    tree, replicated, apart = _joined(path, runs, others, take.rank)
    kind = DTENSORS if first.kind == DTENSOR else FSDP
    ranks = _ranks(kind, facts, runs, replicated)
    return whole_of(path, kind, tree, files, ranks, (*left, *apart))


# The files of each kind that hold pieces.
Runs = dict[str, RankFiles]


def _kinds(facts: Sequence[_Facts]) -> tuple[Runs, dict[str, Sequence[_Facts]], list[str]]:
    """Return files by kind: those that hold pieces, others of as many ranks, and the names of the rest."""
    runs: Runs = {}
    rest: dict[str, Sequence[_Facts]] = {}
    left: list[str] = []
    for stem, group in _groups(facts).items():
        if any(each.sharded for each in group) or _is_mergeable_optimizer(group):
            runs[stem] = in_order(map(_rank_file, group))
        elif all(is_optimizer(each.file.tree) for each in group):
            left.append(f"{_named(group)} (flat pieces without names and places)")
        else:
            rest[stem] = group
    size, others = _size(runs), dict[str, Sequence[_Facts]]()
    for stem, files in rest.items():
        others[stem] = [each for each in files if each.world_size in (None, size)]
        for stated in sorted({each.world_size or size for each in files} - {size}):
            foreign = [each for each in files if each.world_size == stated]
            left.append(f"{_named(foreign)} (of {stated} ranks, and the pieces are of {size})")
    return runs, others, left


def _size(runs: Mapping[str, RankFiles]) -> int:
    """Return how many ranks there were: sharded tensors say it."""
    return next(run.world_size for run in runs.values() if run.world_size is not None)


def _ranks(kind: str, facts: Sequence[_Facts], runs: Runs, replicated: Sequence[str]) -> Ranks:
    """Return what is known of the run."""
    size, nbytes = _size(runs), dict[int, int]()
    for each in facts:
        if each.rank is not None and each.world_size in (None, size):
            nbytes[each.rank] = nbytes.get(each.rank, 0) + each.nbytes
    mesh = reduce(_larger, (each.mesh for each in facts))
    return Ranks(
        "DTensor" if kind == DTENSORS else "FSDP1 (ShardedTensor)",
        size,
        str(mesh or ""),
        step_of([file for run in runs.values() for file in run.files]),
        dict(sorted(nbytes.items())),
        tuple(replicated),
        tuple(sorted({rank for run in runs.values() for rank in run.missing})),
        tuple(name for run in runs.values() for name in run.lacking),
        mesh.device if mesh else "",
    )


def _joined(
    path: str, runs: Runs, others: Mapping[str, Sequence[_Facts]], take_rank: int | None
) -> tuple[object, list[str], list[str]]:
    """Return the whole, the names of replicas, and what it lacks in words."""
    names = names_of_kinds({stem: run.files[0].tree for stem, run in runs.items()})
    replicated, left = list[str](), list[str]()

    def merged(wholes: Wholes, files: Sequence[RankFile], where: tuple[str, ...], common: bool) -> Any:
        merging = SideBySide(wholes, files, where, common=common)
        tree = merging.merge()
        replicated.extend(wholes.replicated)
        left.extend(merging.left)
        return tree

    beside: dict[object, object] = {}
    for stem, group in others.items():
        if not group:
            continue
        try:
            run = _complete(_size(runs), group, take_rank)
        except Damaged as fault:  # of what may be done without
            left.append(f"{_named(group)} ({os.path.basename(fault.path)} {fault.reason})")
            continue
        files = _beside({*names.values(), *beside}, stem, run, take_rank)
        beside |= merged(Wholes(path, take_rank=take_rank), files, (), True)
    trees: dict[object, object] = {}
    for stem, run in runs.items():
        where = (names[stem],) if len(runs) > 1 or others else ()
        wholes = Wholes(path, run.missing, run.world_size, take_rank)
        trees[names[stem]] = merged(wholes, run.files, where, False)
    return (trees | beside if len(trees) > 1 or others else trees.popitem()[1]), replicated, left


def _facts(file: Checkpoint) -> _Facts:
    reader = ShardedValues(file.source)
    first: Sharded | None = None
    mesh: Mesh | None = None
    nbytes = 0
    stated = WORLD.search(os.path.basename(file.path))
    world = int(stated[1]) if stated else None
    for path, value in file.named(unless_sharded):
        tensor = tensor_of(value)
        if tensor is not None:
            nbytes += tensor.nbytes
        elif found := reader.read(dotted(path), value):
            if path and path[-1].endswith(FLAT):
                raise Unsupported(
                    file.path,
                    f"is FSDP's LOCAL_STATE_DICT: '{dotted(path)[:80]}' is a run of flattened parameters, "
                    "without their names and shapes",
                    hint="save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT, which have them",
                )
            nbytes += sum(piece.nbytes for _, piece in found.pieces)
            first = first or found
            world = max(world or 0, found.world_size)
            mesh = _larger(mesh, found.mesh)
    return _Facts(file, first, mesh, world, nbytes)


def _larger(one: Mesh | None, other: Mesh | None) -> Mesh | None:
    """Return the mesh with more axes, or with as many and more ranks; the first of equals."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda mesh: (len(mesh.sizes), len(mesh.ranks)))


def _groups(facts: Sequence[_Facts]) -> dict[str, list[_Facts]]:
    """Return the files by kind: those whose names differ in numbers alone; else those of like contents."""
    # One rank's files of several kinds have names unlike each other too, and their names say a rank.
    groups: dict[str, list[_Facts]] = {}
    for facts_of in facts:
        groups.setdefault(re.sub(r"\d+", "#", os.path.basename(facts_of.file.path)), []).append(facts_of)
    if len(groups) == len(facts) > 1:
        alike: dict[str, list[_Facts]] = {}
        for stem, (facts_of,) in groups.items():
            kind = "optimizer" if is_optimizer(facts_of.file.tree) else "model" if facts_of.sharded else stem
            alike.setdefault(kind, []).append(facts_of)
        once = all(len({facts_of.rank for facts_of in group}) == len(group) for group in alike.values())
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
    ranks, last = {file.rank for file in run.files}, run.files[-1]
    if last.rank >= size:
        raise Damaged(last.source.path, f"was written by rank {last.rank}, and there were {size} ranks")
    for rank in range(size) if take_rank is None else [take_rank]:
        if rank not in ranks:
            way = "" if take_rank is not None else "; merge --take-rank R takes one rank's"
            raise Damaged(run.files[0].source.path, f"lies here without that of rank {rank}{way}")
    return run


def _is_mergeable_optimizer(group: Sequence[_Facts]) -> bool:
    """Return whether files without sharded tensors are an optimizer's, the same on all ranks."""
    # FSDP1's own `optimizer.state_dict()` has flat pieces of momentum without names, shapes or places.
    trees = [facts.file.tree for facts in group]
    return all(map(is_optimizer, trees)) and not any(map(_has_rows, trees))


def _has_rows(optimizer: Any) -> bool:
    state = as_nested(optimizer)["state"]
    entries = state.values() if isinstance(state, dict) else ()
    values = (value for entry in entries if isinstance(entry, dict) for value in entry.values())
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
    rank = facts.rank
    if rank is None:
        raise Damaged(
            facts.file.path,
            "has no sharded tensor, and its name does not say which rank wrote it",
            hint="give it a name that ends in rank_0.pt, with its rank, or leave it out",
        )
    return RankFile(facts.file.source, facts.file.tree, rank, facts.world_size)


def _require_one_run(runs: Runs) -> None:
    """Check that files of all kinds are of as many ranks."""
    first, *others = runs.values()
    for run in others:
        if None not in (run.world_size, first.world_size) and run.world_size != first.world_size:
            raise Damaged(
                run.files[0].source.path,
                f"was written by one of {run.world_size} ranks, and {first.files[0].source.path} by one of "
                f"{first.world_size}",
                hint=HINT,
            )


def names_of_kinds(trees: Mapping[str, object]) -> dict[str, str]:
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
