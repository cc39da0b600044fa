"""A folder that is no checkpoint itself: those that a training run left below it, by their names.

`global_step_100/actor` (verl), `checkpoint/step-100` (torchtitan), `checkpoint-500` (transformers, axolotl),
`iter_0000100` (Megatron), `…step=100…/weights` (NeMo 2), `step1000-unsharded` (OLMo), `ep1-ba100` (Composer),
`epoch_0` (torchtune): a folder that looks like a checkpoint, or files that do, at most a few levels below.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator

from ...errors import CkptToolError, SeveralCheckpoints, Unreadable
from ...rooms import find
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.special_tensors import SHARDED
from ..checkpoint.state import parts_beside
from ..files.commit import CHECKPOINT_ENDINGS, checkpoints_among
from ..remote.places import exists, identity_of, is_file, is_folder, names_in
from ..system import join
from ..words import first_few, printable
from .folders import METADATA, PART
from .shards import INDEX, RECORDS, alone_among, series_in

DEEPEST, MOST_FOLDERS = 4, 2_000

# Checkpoints below a folder that are opened to find a whole one, and that a hint names.
MOST_TRIED, MOST_NAMED = 8, 4

Open = Callable[[str], Checkpoint]

# Files of a run that are no model: its optimizer, its random numbers, its arguments.
_OF_TRAINING = "optim|optimizer|scheduler|scaler|rng|random_states?|training_args|train(?:er)?(?:_state)?"
NO_MODELS = re.compile(rf"(?i:{_OF_TRAINING}|recipe_state|common|metadata|latest|extra_state)(?:[._-].*)?")

# What train/evaluate.py --out leaves: what it states, and a file of predictions of each rank.
STATEMENT, PREDICTIONS = "eval.json", re.compile(r"rank\d+\.safetensors")

# How names state a step, the surest first.
WORDS = ("global_step", "step", "iteration", "iter", "checkpoint", "ckpt", "ba", "epoch", "ep")
STEPS = [re.compile(rf"(?<![a-z]){word}[-_= ]?(\d{{1,15}})", re.IGNORECASE) for word in WORDS]


def step_in(path: str) -> int | None:
    """Return the training step that a path states; None for none."""
    stated = filter(None, (pattern.findall(path) for pattern in STEPS))
    return next((int(numbers[-1]) for numbers in stated), None)


def checkpoints_below(folder: str) -> list[str]:
    """Return the paths that look like checkpoints below a folder, run by run, the newest first."""
    runs: dict[str, list[tuple[int, float, str]]] = {}
    for path in _below(folder, DEEPEST, {identity_of(folder)}):
        inside = os.path.relpath(path, folder)
        runs.setdefault(_run_of(inside), []).append((*_age(inside, path), path))
    # Steps of two runs don't say which is newer. What states no step may be no checkpoint of a run.
    in_order = map(sorted, runs.values())
    by_age = sorted(in_order, key=lambda run: (run[0][0] == 1, min(age for _, age, _ in run)))
    return [path for run in by_age for _, _, path in run]


def _run_of(inside: str) -> str:
    """Return the folder of the run that a checkpoint is of: above the first name that states a step."""
    *folders, _ = inside.split(os.sep)
    return os.sep.join(itertools.takewhile(lambda name: step_in(name) is None, folders))


def _age(inside: str, path: str) -> tuple[int, float]:
    """Return what sorts the newest first: its step and its time, each negative."""
    step = step_in(inside)
    if step is None and os.path.basename(path).startswith("last"):  # last.pt, last.ckpt
        step = 1 << 62
    try:
        age = -os.stat(path).st_mtime
    except OSError:  # a URL, or it is gone
        age = 0.0
    return 1 if step is None else -step, age


def _below(folder: str, levels: int, seen: set[object]) -> Iterator[str]:
    names = [name for name in _but_predictions(folder) if not name.startswith(".")]
    for path in (join(folder, name) for name in names):
        if not is_folder(path) or len(seen) >= MOST_FOLDERS:
            continue
        if (identity := identity_of(path)) in seen:  # `latest` is often a link to another
            continue
        seen.add(identity)
        if looks_whole(path, _but_predictions(path)):
            yield path
        elif levels > 1:
            yield from _below(path, levels - 1, seen)
    for name in names:
        path = join(folder, name)
        is_named = name.lower().endswith(CHECKPOINT_ENDINGS) and not name.endswith(INDEX)
        if is_named and not NO_MODELS.fullmatch(name) and is_file(path) and not os.path.islink(path):
            yield path


def is_evaluation(names: Collection[str]) -> bool:
    """Return whether a folder is of an evaluation that has left predictions, by the names in it."""
    return STATEMENT in names and any(map(PREDICTIONS.fullmatch, names))


def _but_predictions(folder: str) -> list[str]:
    """Return the names in a folder, without the predictions of an evaluation."""
    names = names_in(folder)
    return [name for name in names if not PREDICTIONS.fullmatch(name)] if is_evaluation(names) else names


def nothing_known(folder: str, names: list[str], open_file: Open) -> Unreadable:
    """Return the error for a folder in which no checkpoint was found."""
    files = [join(folder, name) for name in checkpoints_among(names)]
    if files and RECORDS & {*names}:
        files.sort(key=lambda path: os.path.basename(path) != "last.pt")
        listed = first_few([*map(os.path.basename, files)])
        what = f"is the folder of a training run, in which each checkpoint is a file: {listed}"
        return SeveralCheckpoints(folder, what, hint=f"name one: ckpttool inspect {shlex.quote(files[0])}")
    if any(name.endswith(PART) for name in names):
        return _unfinished_dcp(folder, names)
    below = checkpoints_below(folder)
    if not below and is_evaluation(names):
        what = "is the folder of an evaluation, whose files are predictions"
        hint = f"ckpttool gather-metrics {shlex.quote(folder)}/rank*.safetensors"
        return Unreadable(folder, what, hint=hint)
    if below and os.path.dirname(below[0]) == folder and _kind(below[0], open_file) == "piece":
        pattern = f"{shlex.quote(folder)}/*{os.path.splitext(below[0])[1]}"
        hint = f"name all of them: ckpttool merge {pattern} OUTPUT"
        return Unreadable(folder, "holds files of ranks, whose names do not say their ranks", hint=hint)
    if below:
        newest = next((path for path in below[:MOST_TRIED] if _kind(path, open_file) == "whole"), below[0])
        first = [newest, *(path for path in below if path != newest)]
        others = first_few([*map(shlex.quote, first[1:])], MOST_NAMED - 1)
        hint = (
            "name one" + f" (others: {others})" * bool(others) + f": ckpttool inspect {shlex.quote(newest)}"
        )
        return SeveralCheckpoints(folder, "is a folder that holds checkpoints, and is none itself", hint=hint)
    hint = f"expected in it: *{INDEX} (shards), {METADATA} (DCP) or the files of all ranks"
    return Unreadable(folder, "is a folder without the index of a checkpoint", hint=hint)


def _kind(path: str, open_file: Open) -> str:
    """Return `whole`, or `piece` for one rank's pieces of tensors; "" for what can't be used."""
    try:
        with open_file(path) as checkpoint:
            if any(like.kind in SHARDED for _, like in checkpoint.special_tensors()):
                return "piece"
            lacks = lacking_parts(checkpoint) or (checkpoint.ranks and checkpoint.ranks.missing)
            return "" if lacks else "whole"
    except CkptToolError:
        return ""


def lacking_parts(checkpoint: Checkpoint) -> str:
    """Return which files of the trainer's `--shard parts` are not beside a checkpoint; "" for none."""
    if (parts := parts_beside(checkpoint.tree)) is None:
        return ""
    folder = join(os.path.dirname(checkpoint.path), parts["folder"])
    what = f"{printable(parts['folder'])}, which holds its tensors,"
    if not is_folder(folder):
        return f"{what} is not beside it"
    names = sorted(os.path.basename(str(name)) for name in parts["files"])
    lacking = [printable(name) for name in names if not exists(join(folder, name))]
    return f"{what} lacks {first_few(lacking)}" if lacking else ""


def _unfinished_dcp(folder: str, names: list[str]) -> Unreadable:
    """Return the error for a DCP folder without `.metadata`, which torch writes last."""
    temporary, own = f"{METADATA}.tmp", shlex.quote(join(folder, METADATA))
    hint = "take the checkpoint before this one"
    if temporary in names:
        hint += f"; if every rank had finished: mv {own}.tmp {own} && ckpttool verify {shlex.quote(folder)}"
    without = f"holds DCP's {PART} files without their {METADATA}, which torch writes last"
    return Unreadable(folder, f"{without}: the save did not finish, or the file was not copied", hint=hint)


def looks_whole(folder: str, names: Collection[str]) -> bool:
    """Return whether a folder looks like one checkpoint, by the names in it."""
    if (
        alone_among(names)
        or series_in(names)
        or any(name.endswith((INDEX, METADATA, PART)) for name in names)
    ):
        return True
    return bool((ranks := find("ranks.frameworks")) and ranks.holds_a_run(folder, names))
