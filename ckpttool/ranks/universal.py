"""DeepSpeed's universal folders, as `ds_to_universal.py` writes them: each parameter in files of its own.

`zero/NAME/fp32.pt`, `exp_avg.pt`, … hold a parameter's fp32 weights and momenta, `step.pt` its step, and
`zero/optimizer_state.pt` the settings of the groups; the model states are copies of the run's. In stage 3 the
tensors are flat, and the step is in `optimizer_state.pt`. A name without momenta is a buffer, a frozen or a
tied parameter, cast from the model states, which have it exactly.
Source: DeepSpeed's `checkpoint/ds_to_universal.py`, to 0.19.8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ..core.checkpoint.checkpoint import HINT, Checkpoint, Ranks
from ..core.checkpoint.optimizer_view import GROUPS, of_names
from ..core.checkpoint.special_tensors import attributes
from ..core.inert_pickle.values import in_brief, tensor_of
from ..core.remote.places import exists, names_in
from ..core.system import join
from ..core.tensors.ref import TensorRef, contiguous_stride, count_of
from ..errors import Damaged
from . import zero
from .deepspeed import NAME, buffers_of, framework, frozen_of, module_of, shapes_of_groups, without_pieces
from .merge_trees import merged
from .pieces import Candidates, RankFile, Take, Wholes, require_rank, whole_of

WEIGHTS, STEP = "fp32", "step"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Parts:
    """The files of a universal folder, told apart by their names."""

    states: dict[str, dict[str, Checkpoint]] = field(default_factory=dict)  # parameter -> fp32, exp_avg, …
    models: dict[tuple[int, int], RankFile] = field(default_factory=dict)  # (part, rank) -> its states
    settings: Checkpoint | None = None
    left: list[str] = field(default_factory=list)


def candidates(folder: str) -> Candidates:
    """Return the files of a universal folder, or of that which `latest` or `latest_universal` names."""
    if zero.is_universal(folder):
        return Candidates(_files_in(folder))
    if zero.states_in(folder):
        return Candidates([])
    for telling in (zero.LATEST, "latest_universal"):
        if (named := zero.named_by(folder, telling)) is not None:
            inside = join(folder, named[0])
            return Candidates(_files_in(inside), (named[1],)) if zero.is_universal(inside) else Candidates([])
    return Candidates([])


def _files_in(folder: str) -> list[str]:
    below = join(folder, zero.ZERO)
    folders = [join(below, name) for name in names_in(below)]
    paths = [join(inside, name) for inside in folders for name in names_in(inside)]
    states = [path for path in paths if path.endswith(".pt")]
    return [*zero.states_in(folder), *states, *filter(exists, [join(below, zero.SETTINGS)])]


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return a universal folder as one checkpoint; None if no file lies below `zero/`."""
    parts = _sorted_out(files)
    if not parts.states:
        return None
    if not parts.models:
        raise Damaged(path, zero.NO_MODELS, hint=HINT)
    of_first = {rank: file for (part, rank), file in sorted(parts.models.items()) if not part}
    run = _run(path, parts, of_first or dict(enumerate(parts.models.values())))
    require_rank(path, take.rank, run.models)
    wholes = Wholes(path, world_size=run.world_size, take_rank=take.rank, left=parts.left)
    groups = _groups(parts, run)
    for name in chain.from_iterable(groups):
        if WEIGHTS not in parts.states.get(name, ()):
            missing = join(zero.ZERO, name, f"{WEIGHTS}.pt")
            raise Damaged(path, f"has no {missing}", hint="copy the folder again, with all that is below it")
    tree = _tree(run, parts, groups, wholes)
    tree["optimizer"] = optimizer = _optimizer(run, parts, groups)
    step = zero.one_step(run, optimizer, take.step)
    nbytes = sum(tensor.nbytes for file in files for _, tensor in file.tensors())
    kind, replicated = f"{framework(run)} universal", tuple(wholes.replicated)
    ranks = Ranks(kind, None, step=step, held={0: nbytes}, replicated=replicated)
    return whole_of(path, NAME, tree, files, ranks, (*wholes.left, *_settings_left(parts)))


def _sorted_out(files: Sequence[Checkpoint]) -> _Parts:
    parts = _Parts()
    for file in files:
        folder, name = os.path.split(file.path)
        above, stem = os.path.split(folder)[0], name.removesuffix(".pt")
        if os.path.basename(above) == zero.ZERO:
            parts.states.setdefault(os.path.basename(folder), {})[stem] = file
        elif os.path.basename(folder) == zero.ZERO and name == zero.SETTINGS:
            parts.settings = file
        elif named := zero.OF_MODEL.fullmatch(stem):
            rank = int(named["rank"] or 0)
            parts.models[int(named["mp"]), rank] = RankFile(file.source, zero.contents(file), rank, None)
        # Layers of a pipeline and experts are copies of the run's, in its own precision.
        elif zero.is_ours(file.path):
            parts.left.append(f"{name} (its parameters are in {zero.ZERO}/)")
    return parts


def _run(path: str, parts: _Parts, models: Mapping[int, RankFile]) -> zero.RunFiles:
    """Return the run that the folder was made of, as if `optimizer_state.pt` were the file of rank 0."""
    world = next(iter(models.values())).tree.get("dp_world_size")
    is_stage_3 = any(os.path.basename(file.path).startswith("zero_pp_rank_") for file in models.values())
    optims = {0: RankFile(parts.settings.source, parts.settings.tree, 0, None)} if parts.settings else {}
    return zero.RunFiles(path, 3 if is_stage_3 else 1, world if type(world) is int else 1, models, optims)


def _groups(parts: _Parts, run: zero.RunFiles) -> list[dict[str, tuple[int, ...]]]:
    """Return the trained parameters by group; of a model that was cut, those of all its parts."""
    groups: list[dict[str, tuple[int, ...]]] = []
    for (_, rank), file in sorted(parts.models.items()):
        if rank == min(run.models):
            for number, group in enumerate(shapes_of_groups(file)):
                groups += [{} for _ in range(number + 1 - len(groups))]
                groups[number] |= {name: shape for name, shape in group.items() if name not in groups[number]}
    return groups


def _tree(run: zero.RunFiles, parts: _Parts, groups: Sequence[Shapes], wholes: Wholes) -> dict[Any, Any]:
    """Return the model states with the fp32 weights in the place of the run's own."""
    flat = {name: shape for group in groups for name, shape in group.items()} if run.stage == 3 else {}
    weights = {
        name: _tensor(states[WEIGHTS], flat.get(name))
        for name, states in parts.states.items()
        if WEIGHTS in states and states.keys() > {WEIGHTS}
    }
    if len({part for part, _ in parts.models}) > 1 or not isinstance(run.facts.get("module"), dict):
        return _of_cut_model(run, parts, weights)
    if foreign := [name for name in parts.states if name not in run.facts["module"]]:
        what = f"has '{foreign[0][:80]}' in {zero.ZERO}/, which its model states do not name"
        raise Damaged(run.path, what, hint=HINT)
    weights |= frozen_of(run, wholes) if run.stage == 3 else {}
    tree = merged(wholes, [without_pieces(file, run, weights) for file in run.models.values()])
    return {**tree, "module": module_of(run, tree["module"], weights)}


def _of_cut_model(run: zero.RunFiles, parts: _Parts, weights: Mapping[str, TensorRef]) -> dict[Any, Any]:
    """Return the tree of a model that ranks had parts of: only `zero/` has its parameters whole."""
    own, buffers = attributes(run.facts.get("module")), buffers_of(run)
    known = [name for name in own if name in parts.states]
    state: dict[str, object] = {}
    for name in [*known, *sorted(parts.states.keys() - own.keys(), key=_natural)]:
        if name in weights:
            state[name] = weights[name]
        elif name in buffers and tensor_of(own.get(name)) is not None:
            state[name] = own[name]  # cast to fp32 in `zero/`, integers too
        elif WEIGHTS in parts.states[name]:
            state[name] = _tensor(parts.states[name][WEIGHTS], None)
    parts.left += [f"'module.{name}' of a model that was cut" for name in own if name not in state]
    return {key: value for key, value in run.facts.items() if key != "param_shapes"} | {"module": state}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _tensor(file: Checkpoint, shape: tuple[int, ...] | None) -> TensorRef:
    """Return the tensor in a file; a flat one of stage 3 gets its shape back."""
    content = file.tree
    is_joined = isinstance(content, dict) and "param" in content  # of tensor-parallel parts, in its own shape
    tensor = tensor_of(content["param"] if is_joined else content)
    if tensor is None:
        raise Damaged(file.path, "has no tensor, as the files of a universal checkpoint do", hint=HINT)
    if shape is None or is_joined or tensor.shape == shape:
        return zero.alone(tensor)
    if len(tensor.shape) != 1 or tensor.numel != count_of(shape) or not tensor.is_stretch:
        what = f"has shape {list(tensor.shape)}, and the parameter {list(shape)}"
        raise Damaged(file.path, what, hint=HINT)
    return replace(zero.alone(tensor), shape=shape, stride=contiguous_stride(shape))


def _optimizer(run: zero.RunFiles, parts: _Parts, groups: Sequence[Shapes]) -> dict[str, Any] | None:
    """Return the optimizer's state by parameter name."""
    if parts.settings is None:
        return None
    state: dict[str, dict[str, object]] = {}
    for number, group in enumerate(groups):
        for name, shape in group.items():
            form = shape if run.stage == 3 else None
            files = {key: file for key, file in parts.states[name].items() if key != WEIGHTS}
            kept = {key: file.tree if key == STEP else _tensor(file, form) for key, file in files.items()}
            if kept and STEP not in kept and (step := _step_of_group(parts.settings, number)) is not None:
                kept[STEP] = step
            if kept:
                state[name] = kept
    return of_names(state, zero.groups_by_name(run, {0: parts.settings.tree}, [*map(list, groups)]))


def _step_of_group(settings: Checkpoint, number: int) -> object:
    inner: Any = settings.tree
    for key in ("optimizer_state_dict", "state", number, STEP):
        inner = attributes(inner).get(key)
    return inner


def _settings_left(parts: _Parts) -> Iterator[str]:
    for name in attributes(parts.settings.tree if parts.settings else None):
        if name not in zero.IN_USE and name not in (GROUPS, "optimizer_state_dict"):
            yield f"'{in_brief(name)[:80]}' of {zero.SETTINGS}"
