"""Opening what many ranks wrote as one checkpoint, by all frameworks that know files of it."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ..core.checkpoint.checkpoint import HINT, Checkpoint, Ranks, not_read
from ..core.checkpoint.optimizer_names import to_names
from ..core.checkpoint.optimizer_view import is_optimizer
from ..core.checkpoint.selection import cast
from ..core.checkpoint.state import elsewhere
from ..core.files.commit import CHECKPOINT_ENDINGS
from ..core.formats import shards
from ..core.formats.destination import Saved, destination
from ..core.formats.folders import DCP, METADATA
from ..core.formats.likeness import Likeness
from ..core.formats.reading import collector_paused, open, read_telling, ready
from ..core.formats.roots import is_evaluation
from ..core.formats.saving import save
from ..core.formats.shards import INDEX
from ..core.remote.places import exists, folders_in, is_folder, names_in, visit
from ..core.remote.urls import canonical
from ..core.system import join
from ..core.tensors.cast import target
from ..errors import Damaged, NothingToDo, Refused, UsageFault
from . import deepspeed, item_files, universal
from . import dtensor_files as rank_files
from . import pieces as hf_pieces
from .pieces import Framework, Take, is_known, opened
from .zero import is_universal, states_in

COMPARED = Take()

FRAMEWORKS: tuple[Framework, ...] = (universal, deepspeed, hf_pieces, item_files, rank_files)

# Keys under which frameworks put a model: a checkpoint has one of them.
OF_MODEL = {"model", "module", "state_dict"}

# Keys under which they put its optimizer.
OF_OPTIMIZER = {"optimizer", "optimizer_states"}


def read_folder(folder: str, take: Take = COMPARED) -> Checkpoint | None:
    """Return what ranks wrote into a folder as one checkpoint; None if no framework knows the files."""
    # Model and optimizer may be files of two kinds: DTensors next to a DCP folder's own, or to pieces as
    # safetensors. A DCP folder alone is not meant: one process may have written it.
    parts = [*_by_ranks(folder, take)]
    if together := _read_together(folder):
        parts.append(together)
    if parts and exists(join(folder, METADATA)):
        parts.append(_read(folder))
    if not parts and is_evaluation(names_in(folder)):  # with as many samples on each rank
        return None
    if not parts:
        item_files.require_finished(folder)
        paths = rank_files.candidates(folder).paths
        are_copies = len(paths) > 1 and all(map(is_known, paths))
        return rank_files.read_copies(folder, opened(paths), take) if are_copies else None
    _require_to_compare(folder, parts, take)
    return parts[0] if len(parts) == 1 else _as_one(folder, parts)


def _by_ranks(folder: str, take: Take) -> Iterator[Checkpoint]:
    """Yield what each framework makes of its files; none is taken by two."""
    taken: set[str] = set()
    is_dcp = exists(join(folder, METADATA))  # whose neighbours may be anything
    for framework in FRAMEWORKS:
        named, telling = framework.candidates(folder)
        paths = [path for path in named if path not in taken and (not is_dcp or is_known(path))]
        if paths and (checkpoint := framework.read(folder, opened(paths), take)):
            taken.update(paths)
            yield replace(checkpoint, shards=(*checkpoint.shards, *telling))


def read_files(paths: Sequence[str], take: Take = COMPARED) -> Checkpoint:
    """Return files that ranks wrote as one checkpoint."""
    folders = {os.path.dirname(path) or "." for path in paths}
    name = paths[0] if len(folders) > 1 else folders.pop()
    files = opened(paths)
    for framework in FRAMEWORKS:
        if checkpoint := framework.read(name, files, take):
            _require_to_compare(name, [checkpoint], take)
            return checkpoint
    if copied := rank_files.read_copies(name, files, take):
        return copied
    if name != paths[0] and (joined := shards.without_index(name, map(os.path.basename, paths))):
        return joined
    if error := next(filter(None, (elsewhere(file.path, file.tree) for file in files)), None):
        raise error
    hint = "for the mean of checkpoints: ckpttool average; for shards, name their index or folder"
    raise UsageFault(f"{paths[0]}: holds no piece of a tensor that one rank of several wrote", hint=hint)


def _require_to_compare(path: str, parts: Sequence[Checkpoint], take: Take) -> None:
    """Check that there is a rank's value to take, if one is to be taken."""
    # What ranks share is stored once in these formats.
    if take.rank is not None and all(part.format in (hf_pieces.NAME, DCP) for part in parts):
        raise nothing_to_take(path, "rank")


def nothing_to_take(path: str, what: str) -> UsageFault:
    """Return the error for a format in which no rank's, or no step's, values can be taken."""
    fault = f"{path}: stores what its ranks share only once, so there is no {what} to take"
    return UsageFault(fault, hint=f"leave out --take-{what}")


def _as_one(folder: str, parts: Sequence[Checkpoint]) -> Checkpoint:
    """Return what lies in a folder in files of several kinds as one checkpoint."""
    run = _of_one_run(folder, parts)
    tree, replicated = dict[object, object](), list[str]()
    for part in parts:
        kind, more = _by_kind(part.tree)
        if twice := _twice(tree, more):
            kinds = " and ".join(map(_framework, parts))
            what = f"has {twice} in files of two kinds, {kinds}, and one checkpoint has one"
            raise Damaged(folder, what, hint=f"merge each by itself: {_commands(folder, parts)}")
        tree |= more
        names = part.ranks.replicated if part.ranks else ()
        replicated += [f"{kind}.{name}" if kind else name for name in names]
    return replace(_joined(parts, tree), ranks=run and replace(run, replicated=tuple(replicated)))


def _joined(parts: Sequence[Checkpoint], tree: Mapping[object, object]) -> Checkpoint:
    """Return the parts as the first of them with this tree, the model first, and all that is said of them."""
    entries, fields = dict(sorted(tree.items(), key=lambda item: item[0] != "model")), shards.of_all(parts)
    fields["shards"] = fields["shards"][1:]  # without the first's own file
    return replace(parts[0], tree=entries, full=any(part.full for part in parts), **fields)


def _by_kind(tree: Any) -> tuple[str, dict[object, object]]:
    """Return the kind under which a part is put, if it names none itself, and the part by kind."""
    if isinstance(tree, dict) and (OF_MODEL | OF_OPTIMIZER) & tree.keys():
        return "", tree
    kind = "optimizer" if is_optimizer(tree) else "model"
    return kind, {kind: tree}


def _twice(tree: Mapping[object, object], more: Mapping[object, object]) -> str:
    """Return what two parts both hold, under one key or under two that mean the same; "" for nothing."""
    same = [str(key) for key in tree if key in more][:1]
    for keys in (OF_MODEL, OF_OPTIMIZER):
        if keys & tree.keys() and keys & more.keys():
            same = sorted(keys & (tree.keys() | more.keys()))
            break
    return " and ".join(f"'{key[:80]}'" for key in same)


def _framework(part: Checkpoint) -> str:
    return part.ranks.framework if part.ranks else "DCP"


def _of_one_run(folder: str, parts: Sequence[Checkpoint]) -> Ranks | None:
    """Return what is known of the run of all parts; None for nothing."""
    known = [part.ranks for part in parts if part.ranks]
    held: Counter[int] = Counter()
    for ranks in known:
        held.update(ranks.held)
    sizes = {ranks.world_size for ranks in known if ranks.world_size is not None}
    steps = {ranks.step for ranks in known if ranks.step is not None}
    for words, stated in (("ranks", sizes), ("training steps", steps)):
        if len(stated) > 1:
            what = f"has files of two kinds, of different numbers of {words}"
            raise Damaged(folder, f"{what}: {' and '.join(map(str, sorted(stated)[:2]))}", hint=HINT)
    if not known:
        return None
    framework = " and ".join(dict.fromkeys(map(_framework, parts)))
    size, step = max(sizes, default=None), max(steps, default=None)
    mesh, of_ranks = next((ranks.mesh for ranks in known if ranks.mesh), ""), dict(sorted(held.items()))
    missing = tuple(sorted({rank for ranks in known for rank in ranks.missing}))
    lacking = tuple(dict.fromkeys(name for ranks in known for name in ranks.lacking))
    return Ranks(framework, size, mesh, step, of_ranks, missing=missing, lacking=lacking)


def _commands(folder: str, parts: Sequence[Checkpoint]) -> str:
    """Return the command that merges each part by itself."""
    inputs, here = list[str](), os.path.dirname(join(folder, ""))
    for part in parts:
        paths = [source.path for source in part.shards]
        folders = sorted({path if is_folder(path) else os.path.dirname(path) for path in paths})
        if part.format == DCP:
            inputs += [shlex.quote(join(path, METADATA)) for path in folders]
        else:
            inputs += [shlex.quote(path) for path in folders if path != here] or [_pattern(paths)]
    return "; ".join(f"ckpttool merge {name} OUTPUT" for name in inputs)


def _pattern(paths: Sequence[str]) -> str:
    """Return a shell's pattern for files that differ in numbers; all of them where it matches others."""
    folder, names = os.path.dirname(paths[0]), [os.path.basename(path) for path in paths]
    patterns = {re.sub(r"\d+", "*", name) for name in names}
    pattern = patterns.pop()
    if patterns or {name for name in names_in(folder) if fnmatchcase(name, pattern)} != {*names}:
        return shlex.join(paths)
    return "*".join(shlex.quote(part) if part else "" for part in join(folder, pattern).split("*"))


# Names of DCP folders that are parts of one checkpoint.
TOGETHER = re.compile(r"(?:pytorch_model|model|optimizer)(?:_fsdp)?(?:_\d+)?")

# What else of a run lies next to them, and is left out.
BESIDE = re.compile(r"random_states_\d+\.pkl|scheduler(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl")


def _read_together(folder: str) -> Checkpoint | None:
    """Return the DCP folders in a folder as one checkpoint; None if there are none that belong together."""
    inside = names_in(folder)
    names = [name for name in folders_in(folder) if exists(join(folder, name, METADATA))]
    if not names or not all(map(TOGETHER.fullmatch, names)):
        return None
    parts = [_read(join(folder, name)) for name in names]
    tree: dict[object, object] = {}
    for part in parts:
        assert isinstance(part.tree, dict)
        if twice := tree.keys() & part.tree.keys():
            raise Damaged(part.path, f"has '{str(twice.pop())[:80]}', and so has another folder next to it")
        tree |= part.tree
    telling = parts[0].source.called(folder)
    parts[0] = replace(parts[0], source=telling, shards=parts[0].sources)
    whole = _joined(parts, tree)
    beside = (not_read(name) for name in inside if BESIDE.fullmatch(name))
    return replace(whole, unread=(*whole.unread, *beside), ranks=_of_one_run(folder, parts))


def _read(folder: str) -> Checkpoint:
    return read_telling(folder, join(folder, METADATA))


def merge(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    like: str | os.PathLike[str] | None = None,
    take_rank: int | None = None,
    state: str | None = None,
    to: str | None = None,
    full: bool = False,
    shard_size: int | None = None,
    force: bool = False,
) -> Saved:
    """Merge the files of many ranks into one checkpoint with whole tensors.

    A format that holds the optimizer gets it keyed by the names of parameters, where they are certain.

    Args:
        files: the folder, or the files of all ranks in any order.
        path: the output, whose name says the format: `.safetensors`, `.pt`, or a folder of shards with `/`.
        dtype: what floating-point tensors of the model are cast to: `bf16`, `fp16`, `fp32` or `fp64`.
        like: a model in safetensors, a path or a URL, whose shards, order and headers the output gets; its
            values are not read.
        take_rank: where several ranks should hold the same values, take those of this rank; None compares
            them bit by bit.
        state: dotted path of the model's state; found when None.
        to, full, shard_size, force: as for `convert`.

    Returns:
        What was written, and by name what was not.

    Raises:
        RanksDiffer: ranks hold other values where they should hold the same.
        OutputExists: there is something at `path`, and `force` is not set.
        UsageFault: one process wrote the files, the name says no format, or `dtype` is none.
        NoState: there is no model's state, or none at `state`.
        Refused: the output lacks a name of `like`, or has another.
        Unreadable, Damaged, Unsupported: as `ckpttool.open_ranks` raises them.

    Example:
        >>> ckpttool.merge("ranks", "whole.safetensors").keys
        7
    """
    with open_ranks(files, take_rank=take_rank) as merged:
        checkpoint: Checkpoint = merged
        if destination(os.fspath(path), checkpoint, to, full=full or None).holds_all:
            with suppress(NothingToDo, Refused):  # then it stays keyed by numbers, which torch loads too
                checkpoint = to_names(checkpoint)[0]
        if dtype is not None:
            with suppress(NothingToDo):  # it has that type already, and to merge is something to do
                checkpoint = cast(checkpoint, target(dtype.lower()), state=state)[0]
        choices: dict[str, Any] = {"to": to, "full": full or None, "shard_size": shard_size, "force": force}
        if like is not None:
            choices |= {"like": Likeness.at(os.fspath(like)), "needed": (like,)}
            checkpoint, _ = choices["like"].fitted(checkpoint, state)
            state = None
        return save(checkpoint, path, state=state, **choices)


@collector_paused()
def open_ranks(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    take_rank: int | None = None,
    take_step: int | None = None,
) -> Checkpoint:
    """Open the files of many ranks as one checkpoint with whole tensors.

    Args:
        paths: the folder, as for `open`; or the files of all ranks, in any order and whatever their names.
        take_rank: where several ranks hold the same values, take those of this rank and do not compare them.
            None compares them, bit by bit, when they are read: RanksDiffer is raised then.
        take_step: where files state different training steps, take them for those of this one. None refuses
            such files.

    Returns:
        The checkpoint; its `ranks` says what is known of the run.

    Raises:
        Unreadable: there is no such file, or the folder holds no checkpoint.
        Damaged: a file is of another run, world size or step, is there twice, or does not fit the others.
        Unsupported: the files do not hold enough to make the tensors whole.
        UsageFault: one process wrote the files; no file was written by `take_rank`, or the format stores what
            ranks share only once.

    Example:
        >>> with ckpttool.open_ranks("ranks") as checkpoint:
        ...     checkpoint.ranks.world_size, checkpoint.state()["0.weight"].shape
        (2, (8, 4))
    """
    take = Take(take_rank, take_step)
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    names = [canonical(os.fspath(path)) for path in given]
    with visit():
        return ready(_open_ranks(names, take))


def _open_ranks(names: Sequence[str], take: Take) -> Checkpoint:
    if len(names) == 1 and (is_folder(names[0]) or names[0].endswith((METADATA, INDEX))):
        # Also where a model.safetensors of rounded weights is there too.
        if is_folder(names[0]) and (checkpoint := read_folder(names[0], take)):
            return checkpoint
        if take.rank is None and take.step is None:
            return open(names[0])
        raise nothing_to_take(names[0], "rank" if take.step is None else "step")
    for name in filter(is_folder, names):
        raise UsageFault(f"{name}: is one of several inputs, and a folder", hint="merge one folder at a time")
    return read_files(names, take)


def holds_a_run(folder: str, names: Collection[str]) -> bool:
    """Return whether the files in a folder look like all that the ranks of a run wrote, by their names."""
    of_ranks = {name: rank_files.rank_in(name) for name in names if name.endswith(CHECKPOINT_ENDINGS)}
    ranks = {int(named[1]) for named in of_ranks.values() if named}
    is_one_of_several = any(
        (world := rank_files.WORLD.search(name)) and int(world[1]) > 1 for name in of_ranks
    )
    return (
        any(hf_pieces.FILE.fullmatch(name) for name in names)
        or is_one_of_several
        or (len(ranks) > 1 and ranks == {*range(len(ranks))})
        or bool(states_in(folder))
        or is_universal(folder)
    )
