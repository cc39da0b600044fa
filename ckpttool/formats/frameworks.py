"""Opening what many ranks wrote as one checkpoint, by all frameworks that know files of it."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.optimizer_view import is_optimizer
from ..checkpoint.ranks import HINT, Ranks
from ..checkpoint.state import elsewhere
from ..errors import Damaged, UsageFault
from ..remote.places import exists, folders_in, is_folder, names_in, open_source_at
from ..system import join
from . import shards
from .dcp import reading as dcp
from .dcp.tree import not_read
from .deepspeed import reading as deepspeed
from .deepspeed import universal
from .ranks import dtensor_files as rank_files
from .ranks import hugging_face as hf_pieces
from .ranks.pieces import Framework, Take, is_known, opened
from .roots import is_evaluation

COMPARED = Take()

FRAMEWORKS: tuple[Framework, ...] = (universal, deepspeed, hf_pieces, rank_files)

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
    if parts and exists(join(folder, dcp.METADATA)):
        parts.append(_read(folder))
    if not parts and is_evaluation(names_in(folder)):  # with as many samples on each rank
        return None
    if not parts:
        paths = rank_files.candidates(folder).paths
        are_copies = len(paths) > 1 and all(map(is_known, paths))
        return rank_files.read_copies(folder, opened(paths), take) if are_copies else None
    _require_to_compare(folder, parts, take)
    return parts[0] if len(parts) == 1 else _as_one(folder, parts)


def _by_ranks(folder: str, take: Take) -> Iterator[Checkpoint]:
    """Yield what each framework makes of its files; none is taken by two."""
    taken: set[str] = set()
    is_dcp = exists(join(folder, dcp.METADATA))  # whose neighbours may be anything
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
    if take.rank is not None and all(part.format in (hf_pieces.NAME, dcp.NAME) for part in parts):
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
        if part.format == dcp.NAME:
            inputs += [shlex.quote(join(path, dcp.METADATA)) for path in folders]
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
    names = [name for name in folders_in(folder) if exists(join(folder, name, dcp.METADATA))]
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
    return dcp.read(open_source_at(join(folder, dcp.METADATA), shown=folder))
