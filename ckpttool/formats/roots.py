"""The checkpoints that a training run leaves below its folder, found by their names, the newest first.

`global_step_100/actor` (verl), `checkpoint/step-100` (torchtitan), `checkpoint-500` (transformers, axolotl),
`iter_0000100` (Megatron), `…step=100…/weights` (NeMo 2), `step1000-unsharded` (OLMo), `ep1-ba100` (Composer),
`epoch_0` (torchtune): a folder that looks like a checkpoint, or files that do, at most a few levels below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

from ..files.open_source import CHECKPOINT_ENDINGS, names_in
from .dcp.reading import ENDING, METADATA
from .deepspeed.files import is_universal, states_in
from .ranks.dtensor_files import WORLD, rank_in
from .ranks.hugging_face import FILE as PIECES
from .shards.reading import series_in
from .shards.writing import ALONE, INDEX

DEEPEST, MOST_FOLDERS = 4, 2_000

# Files of a run that are no model: its optimizer, its random numbers, its arguments.
NO_MODELS = re.compile(
    r"(?:optim|optimizer|scheduler|scaler|rng|random_states?|training_args|train(?:er)?(?:_state)?|recipe_state"
    r"|common|metadata|latest|extra_state)(?:[._-].*)?",
    re.IGNORECASE,
)

# How names state a step, the surest first.
STEPS = ("global_step", "step", "iteration", "iter", "checkpoint", "ckpt", "ba", "epoch", "ep")
STEP = {word: re.compile(rf"(?<![a-z]){word}[-_= ]?(\d{{1,15}})", re.IGNORECASE) for word in STEPS}


def step_in(path: str) -> int | None:
    """Return the training step that a path states; None for none."""
    for pattern in STEP.values():
        if numbers := pattern.findall(path):
            return int(numbers[-1])
    return None


def checkpoints_below(folder: str) -> list[str]:
    """Return the paths that look like checkpoints below a folder, the newest first."""
    facts = os.stat(folder)
    found = [*_below(folder, DEEPEST, {(facts.st_dev, facts.st_ino)})]
    return sorted(found, key=lambda path: (-_age(folder, path)[0], -_age(folder, path)[1], path))


def _age(folder: str, path: str) -> tuple[int, float]:
    step = step_in(os.path.relpath(path, folder))
    if step is None and os.path.basename(path).startswith("last"):  # last.pt, last.ckpt
        step = 1 << 62
    try:
        return -1 if step is None else step, os.stat(path).st_mtime
    except OSError:
        return -1, 0.0


def _below(folder: str, levels: int, seen: set[tuple[int, int]]) -> Iterator[str]:
    names = [name for name in names_in(folder) if not name.startswith(".")]
    for path in (os.path.join(folder, name) for name in names):
        if not os.path.isdir(path) or len(seen) >= MOST_FOLDERS:
            continue
        facts = os.stat(path)
        if (facts.st_dev, facts.st_ino) in seen:  # `latest` is often a link to another
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if looks_whole(path, names_in(path)):
            yield path
        elif levels > 1:
            yield from _below(path, levels - 1, seen)
    for name in names:
        path = os.path.join(folder, name)
        is_named = name.lower().endswith(CHECKPOINT_ENDINGS) and not name.endswith(INDEX)
        if is_named and not NO_MODELS.fullmatch(name) and os.path.isfile(path) and not os.path.islink(path):
            yield path


def looks_whole(folder: str, names: Collection[str]) -> bool:
    """Return whether a folder looks like one checkpoint, by the names in it."""
    of_ranks = {name: rank_in(name) for name in names if name.endswith(CHECKPOINT_ENDINGS)}
    ranks = {int(named[1]) for named in of_ranks.values() if named}
    is_one_of_several = any((world := WORLD.search(name)) and int(world[1]) > 1 for name in of_ranks)
    return (
        any(name in ALONE or name.endswith((INDEX, METADATA, ENDING)) for name in names)
        or bool(series_in(names))
        or any(PIECES.fullmatch(name) for name in names)
        or is_one_of_several
        or (len(ranks) > 1 and ranks == {*range(len(ranks))})
        or bool(states_in(folder))
        or is_universal(folder)
    )
