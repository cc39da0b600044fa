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
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import HINT, Ranks
from ...errors import Damaged
from ...inert_pickle.values import in_brief, tensor_of
from ...tensors.ref import TensorRef, contiguous_stride, extent
from ..ranks.merge_trees import SideBySide
from ..ranks.pieces import Candidates, RankFile, Take, Wholes, require_rank, whole_of
from .files import (
    LATEST,
    OF_MODEL,
    SETTINGS,
    ZERO,
    Files,
    contents,
    entry,
    is_ours,
    is_universal,
    named_by,
    one_step,
    states_in,
)
from .optimizer import IN_USE, param_groups
from .reading import NAME, buffers_of, framework, frozen_of, module_of, shapes_of_groups, without_pieces
from .zero import alone

LATEST_UNIVERSAL = "latest_universal"

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
    if is_universal(folder):
        return Candidates(_files_in(folder))
    if states_in(folder):
        return Candidates([])
    for telling in (LATEST, LATEST_UNIVERSAL):
        if (named := named_by(folder, telling)) is not None:
            inside = os.path.join(folder, named[0])
            return Candidates(_files_in(inside), (named[1],)) if is_universal(inside) else Candidates([])
    return Candidates([])


def _files_in(folder: str) -> list[str]:
    zero = os.path.join(folder, ZERO)
    states = [
        os.path.join(zero, name, file)
        for name in sorted(os.listdir(zero))
        if os.path.isdir(os.path.join(zero, name))
        for file in sorted(os.listdir(os.path.join(zero, name)))
        if file.endswith(".pt")
    ]
    settings = os.path.join(zero, SETTINGS)
    return [*states_in(folder), *states, *([settings] if os.path.exists(settings) else [])]


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return a universal folder as one checkpoint; None if no file lies below `zero/`."""
    parts = _sorted_out(files)
    if not parts.states:
        return None
    if not parts.models:
        raise Damaged(path, "has no file *_model_states.pt, which names the parameters", hint=HINT)
    of_first = {rank: file for (part, rank), file in sorted(parts.models.items()) if not part}
    run = _run(path, parts, of_first or dict(enumerate(parts.models.values())))
    require_rank(path, take.rank, run.models)
    wholes = Wholes(path, world_size=run.world_size, take_rank=take.rank)
    groups = _groups(parts, run)
    _require_all(path, parts, groups)
    tree, merge_left = _tree(run, parts, groups, wholes)
    tree["optimizer"] = optimizer = _optimizer(run, parts, groups)
    step = one_step(run, optimizer, take.step)
    nbytes = sum(tensor.nbytes for file in files for _, tensor in file.tensors())
    ranks = Ranks(
        f"{framework(run)} universal", None, step=step, held={0: nbytes}, replicated=tuple(wholes.replicated)
    )
    return whole_of(path, NAME, tree, files, ranks, (*parts.left, *merge_left, *_settings_left(parts)))


def _sorted_out(files: Sequence[Checkpoint]) -> _Parts:
    parts = _Parts()
    for file in files:
        folder, name = os.path.split(file.path)
        above, stem = os.path.split(folder)[0], name.removesuffix(".pt")
        if os.path.basename(above) == ZERO:
            parts.states.setdefault(os.path.basename(folder), {})[stem] = file
        elif os.path.basename(folder) == ZERO and name == SETTINGS:
            parts.settings = file
        elif named := OF_MODEL.fullmatch(stem):
            rank = int(named["rank"] or 0)
            parts.models[int(named["mp"]), rank] = RankFile(file.source, file.tree, rank, None)
        elif is_ours(file.path):  # layers of a pipeline, experts: copies of the run's, in its own precision
            parts.left.append(f"{name} (its parameters are in {ZERO}/)")
    return parts


def _run(path: str, parts: _Parts, models: Mapping[int, RankFile]) -> Files:
    """Return the run that the folder was made of, as if `optimizer_state.pt` were the file of rank 0."""
    first = contents(next(iter(models.values())))
    world = first.get("dp_world_size")
    is_stage_3 = any(
        os.path.basename(file.source.path).startswith("zero_pp_rank_") for file in models.values()
    )
    settings = parts.settings
    optims = {0: RankFile(settings.source, settings.tree, 0, None)} if settings else {}
    return Files(path, 3 if is_stage_3 else 1, world if type(world) is int else 1, models, optims, (), ())


def _groups(parts: _Parts, run: Files) -> list[dict[str, tuple[int, ...]]]:
    """Return the trained parameters by group; of a model that was cut, those of all its parts."""
    groups: list[dict[str, tuple[int, ...]]] = []
    for (_, rank), file in sorted(parts.models.items()):
        if rank == min(run.models):
            for number, group in enumerate(shapes_of_groups(file)):
                groups += [{} for _ in range(number + 1 - len(groups))]
                groups[number].update(
                    {name: shape for name, shape in group.items() if name not in groups[number]}
                )
    return groups


def _require_all(path: str, parts: _Parts, groups: Sequence[Shapes]) -> None:
    for name in (name for group in groups for name in group):
        if WEIGHTS not in parts.states.get(name, ()):
            missing = os.path.join(ZERO, name, f"{WEIGHTS}.pt")
            raise Damaged(path, f"has no {missing}", hint="copy the folder again, with all that is below it")


def _tree(
    run: Files, parts: _Parts, groups: Sequence[Shapes], wholes: Wholes
) -> tuple[dict[Any, Any], list[str]]:
    """Return the model states with the fp32 weights in the place of the run's own, and what they lack."""
    flat = {name: shape for group in groups for name, shape in group.items()} if run.stage == 3 else {}
    weights = {
        name: _tensor(states[WEIGHTS], flat.get(name))
        for name, states in parts.states.items()
        if WEIGHTS in states and states.keys() > {WEIGHTS}
    }
    facts = contents(run.first)
    if len({part for part, _ in parts.models}) > 1 or not isinstance(facts.get("module"), dict):
        return _of_cut_model(run, parts, weights)
    module = entry(run.first, facts, "module")
    if foreign := [name for name in parts.states if name not in module]:
        raise Damaged(
            run.path, f"has '{foreign[0][:80]}' in {ZERO}/, which its model states do not name", hint=HINT
        )
    weights |= frozen_of(run, wholes) if run.stage == 3 else {}
    merging = SideBySide(wholes, [without_pieces(file, run, weights) for file in run.models.values()])
    tree = merging.merge()
    assert isinstance(tree, dict)
    return tree | {"module": module_of(run, tree["module"], weights)}, merging.left


def _of_cut_model(
    run: Files, parts: _Parts, weights: Mapping[str, TensorRef]
) -> tuple[dict[Any, Any], list[str]]:
    """Return the tree of a model that ranks had parts of: only `zero/` has its parameters whole."""
    facts, kept = contents(run.first), buffers_of(run)
    module = facts.get("module")
    own = module if isinstance(module, dict) else {}
    names = [
        *(name for name in own if name in parts.states),
        *sorted(parts.states.keys() - own.keys(), key=_natural),
    ]
    state: dict[str, object] = {}
    for name in names:
        if name in weights:
            state[name] = weights[name]
        elif name in kept and tensor_of(own.get(name)) is not None:
            state[name] = own[name]  # cast to fp32 in `zero/`, integers too
        elif WEIGHTS in parts.states[name]:
            state[name] = _tensor(parts.states[name][WEIGHTS], None)
    left = [f"'module.{name}' of a model that was cut" for name in own if name not in state]
    return {key: value for key, value in facts.items() if key != "param_shapes"} | {"module": state}, left


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _tensor(file: Checkpoint, shape: tuple[int, ...] | None) -> TensorRef:
    """Return the tensor in a file; a flat one of stage 3 gets its shape back."""
    content = file.tree
    tensor = tensor_of(content["param"] if isinstance(content, dict) and "param" in content else content)
    if tensor is None:
        raise Damaged(file.path, "has no tensor, as the files of a universal checkpoint do", hint=HINT)
    if shape is None or tensor.shape == shape:
        return alone(tensor)
    if (
        len(tensor.shape) != 1
        or tensor.numel != (0 if 0 in shape else extent(shape))
        or not tensor.is_stretch
    ):
        raise Damaged(
            file.path, f"has shape {list(tensor.shape)}, and the parameter {list(shape)}", hint=HINT
        )
    return replace(alone(tensor), shape=shape, stride=contiguous_stride(shape))


def _optimizer(run: Files, parts: _Parts, groups: Sequence[Shapes]) -> dict[str, Any] | None:
    """Return the optimizer's state by parameter name."""
    if parts.settings is None:
        return None
    state: dict[str, dict[str, object]] = {}
    for number, group in enumerate(groups):
        for name, shape in group.items():
            kept: dict[str, object] = {}
            for key, file in parts.states[name].items():
                if key == STEP:
                    kept[key] = file.tree
                elif key != WEIGHTS:
                    kept[key] = _tensor(file, shape if run.stage == 3 else None)
            if kept and STEP not in kept and (step := _step_of_group(parts.settings, number)) is not None:
                kept[STEP] = step
            if kept:
                state[name] = kept
    names = [[*group] for group in groups]
    return {"state": state, "param_groups": param_groups(run, {0: parts.settings.tree}, names)}


def _step_of_group(settings: Checkpoint, number: int) -> object:
    inner: Any = settings.tree
    for key in ("optimizer_state_dict", "state", number, STEP):
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _settings_left(parts: _Parts) -> Iterator[str]:
    tree = parts.settings.tree if parts.settings else None
    for name in tree if isinstance(tree, dict) else ():
        if name not in IN_USE and name not in ("param_groups", "optimizer_state_dict"):
            yield f"'{in_brief(name)[:80]}' of {SETTINGS}"
