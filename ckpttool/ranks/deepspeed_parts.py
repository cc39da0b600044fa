"""DeepSpeed runs that cut the model itself: experts, stages of a pipeline, tensor parallelism.

Number XX of `mp_rank_XX` counts the parts of the model: stage · tp + tensor-parallel part. Each part is a
ZeRO run of its own. Two more kinds of files lie beside:

- `layer_L[-model_T]-model_states.pt`: the state of layer L of a pipeline, whose keys `PipelineModule` puts
  under `L.`; layers that share a module have it under `tied_modules.KEY.`, and no file says which they are.
- `layer_L_expert_E_mp_rank_XX_model_states.pt`: expert E, of all ranks, of the L-th MoE layer, under its full
  name. ZeRO counts each rank's experts from 0, and cuts their groups over the ranks with the same ones.

Source: DeepSpeed's `runtime/engine.py` and `runtime/pipe/module.py`, to 0.19.8.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.checkpoint.checkpoint import HINT, Checkpoint
from ..core.checkpoint.dotted_names import dotted
from ..core.checkpoint.optimizer_view import GROUPS, of_names
from ..core.checkpoint.special_tensors import attributes
from ..core.inert_pickle.values import tensor_of
from ..core.tensors.cast import Caster
from ..core.tensors.ref import DTYPES
from ..errors import Damaged, Unsupported
from . import zero
from .merge_trees import same
from .pieces import MAX_RANKS, RankFile, RankPiece, Wholes

OF_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})(?:-model_(?P<mp>\d{1,7}))?-model_states\.pt")
OF_EXPERT = re.compile(
    r"layer_(?P<layer>\d{1,7})_expert_(?P<expert>\d{1,7})_mp_rank_(?P<mp>\d{1,7})_model_states\.pt"
)
OF_EXPERTS = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")

NUMBER = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,7})(\..*)")

TIED = "tied_modules."

NUMBERED = "numbers its parameters, and no file says which is which"

# What an optimizer's states list by group.
BY_GROUP = (zero.OF_STAGES_1_AND_2, "param_alignment_paddings", "param_slice_mappings", "partition_count")

Values = dict[str, Any]


@dataclass(slots=True)
class ModelParts:
    """The files of a run, by the part of the model that they hold."""

    path: str
    tp: int = 1  # how many parts a stage of the pipeline has
    ranked: list[list[Checkpoint]] = field(default_factory=list)  # ZeRO's files of each part
    layers: dict[tuple[int, int], Checkpoint] = field(default_factory=dict)  # (tensor-parallel part, layer)
    experts: dict[tuple[int, int, int], Checkpoint] = field(default_factory=dict)  # (part, layer, expert)
    optimizers: list[str] = field(default_factory=list)  # files with a whole optimizer, of the experts too

    @property
    def is_cut(self) -> bool:
        return len(self.ranked) > 1 or bool(self.layers or self.experts)

    def rank(self, part: int, of_data: int, copies: int) -> int:
        """Return the rank of a copy of a part: stages are outermost, tensor-parallel parts innermost."""
        stage, tensor_part = divmod(part, self.tp)
        return (stage * copies + of_data) * self.tp + tensor_part

    def place(self, rank: int, copies: int) -> tuple[int, int]:
        """Return the part of a rank, and which copy of it."""
        above, tensor_part = divmod(rank, self.tp)
        stage, of_data = divmod(above, copies)
        return stage * self.tp + tensor_part, of_data

    @property
    def kind(self) -> str:
        """What cut the model, in words."""
        stages = len(self.ranked) // self.tp
        cuts = {"experts": bool(self.experts), f"pipeline {stages}": stages > 1 or bool(self.layers)}
        return " x ".join(word for word, is_so in {**cuts, f"tp {self.tp}": self.tp > 1}.items() if is_so)


def told_apart(path: str, files: Sequence[Checkpoint]) -> ModelParts:
    """Return the files of a run by the parts of its model. Raises Damaged when one has no file."""
    parts, by_part = ModelParts(path), dict[int, list[Checkpoint]]()
    for file in files:
        name = os.path.basename(file.path)
        if layer := OF_LAYER.fullmatch(name):
            _put(parts.layers, (int(layer["mp"] or 0), int(layer["layer"])), file)
        elif expert := OF_EXPERT.fullmatch(name):
            _put(parts.experts, (int(expert["mp"]), int(expert["layer"]), int(expert["expert"])), file)
        elif OF_EXPERTS.fullmatch(name):
            parts.optimizers.append(name)
        else:
            by_part.setdefault(zero.part_of(file), []).append(file)
    models = {part: file for part, each in by_part.items() for file in each if _has_model(file)}
    if not models:
        raise Damaged(path, zero.NO_MODELS, hint=HINT)
    if parts.optimizers and not parts.experts:
        whose = f", as {parts.optimizers[0]} is of experts"
        raise _lacks(path, "layer_L_expert_E_mp_rank_XX_model_states.pt", whose)
    size, parts.tp = _counts(models[min(models)], parts)
    for part in range(size):
        if part not in models:
            raise _lacks(path, f"mp_rank_{part:02}_model_states.pt")
    if extra := next((each for part, each in by_part.items() if part >= size), None):
        what = f"is of part {zero.part_of(extra[0])} of the model, and the run cut it into {size}"
        raise Damaged(extra[0].path, what, hint=HINT)
    parts.ranked = [by_part[part] for part in range(size)]
    if parts.layers:
        parts.ranked = [[*map(_with_module, each)] for each in parts.ranked]
    return parts


def _counts(file: Checkpoint, parts: ModelParts) -> tuple[int, int]:
    """Return into how many parts the model was cut, and into how many a stage, as its states say."""
    facts = zero.contents(file)
    if facts.get("ds_autoep_layers") or facts.get("autoep_layers"):
        what = "has layers whose experts AutoEP fused ('ds_autoep_layers'), each rank's in one tensor"
        raise Unsupported(file.path, what, hint=zero.TO_UNIVERSAL)
    stated = attributes(facts.get("checkpoint_parallel_dimensions"))
    size: Any = facts.get("mp_world_size") or 1
    told = 1 + max(part for part, _ in parts.layers) if parts.layers else size
    tp = stated.get("tp_degree", told)
    is_so = type(size) is int and type(tp) is int and 0 < tp <= size < MAX_RANKS
    if not is_so or size % tp or (parts.layers and told != tp):
        what = "says that its model was cut into other parts than there are files of ('mp_world_size')"
        raise Damaged(file.path, what, hint=HINT)
    return size, tp


def _put(found: dict[Any, Checkpoint], key: object, file: Checkpoint) -> None:
    if found.setdefault(key, file) is not file:
        raise Damaged(file.path, f"is there twice: {found[key].path} is too", hint="leave one of them out")


def _stem(file: Checkpoint) -> str:
    return os.path.basename(file.path).removesuffix(".pt")


def _has_model(file: Checkpoint) -> bool:
    return zero.OF_MODEL.fullmatch(_stem(file)) is not None


def _lacks(path: str, name: str, whose: str = "") -> Damaged:
    return Damaged(path, f"has no {name}{whose}", hint="copy the files of all ranks once more")


def _with_module(file: Checkpoint) -> Checkpoint:
    """Return a stage's model states with a module: its layers lie in files of their own."""
    tree = zero.contents(file)
    if tree.get("module") is not None:
        what = "holds a module, and files beside it are the layers of a pipeline, as of another run"
        raise Damaged(file.path, what, hint="take the files of the other run out of the folder")
    return replace(file, tree={**tree, "module": {}}) if _has_model(file) else file


# Experts: groups that are cut over fewer ranks.


def divided(
    parts: ModelParts, part: int, run: zero.RunFiles
) -> Iterator[tuple[tuple[int, ...], zero.RunFiles]]:
    """Yield the runs that a part's files are, each of the same parameters on all its ranks, and their groups.

    Raises Unsupported where groups are cut over other numbers of ranks and there are no experts.
    """
    counts = zero.of_optimizer(next(iter(run.optims.values()))).get("partition_count") if run.optims else None
    sizes = {count for count in counts if count != run.world_size} if isinstance(counts, list) else set()
    if not sizes or not isinstance(counts, list):
        yield (), run
        return
    if not parts.experts:
        what = "cuts its parameter groups over different numbers of ranks, and there are no files of experts"
        raise Unsupported(run.path, what, hint=zero.TO_UNIVERSAL)
    shared = tuple(group for group, count in enumerate(counts) if count == run.world_size)
    yield shared, _of_groups(run, shared, [*range(run.world_size)], {})
    counted = _counted(parts, part)
    settings = attributes(run.facts.get("ds_config"))
    for size in sorted(sizes):
        ways, groups = run.world_size // size, tuple(i for i, count in enumerate(counts) if count == size)
        is_data_first = settings.get("use_data_before_expert_parallelism") is True
        for way in range(ways):
            team = [way * size + j if is_data_first else way + ways * j for j in range(size)]
            first = {prefix: way * (count // ways) for prefix, count in counted.items()}
            yield groups, _of_groups(run, groups, team, first)


def _counted(parts: ModelParts, part: int) -> Counter[str]:
    """Return how many experts each layer has, by the name before their numbers."""
    matches = map(NUMBER.fullmatch, experts_of(parts, part))
    return Counter(prefix for prefix, _ in {(match[1], match[2]) for match in matches if match})


def _renamed(name: str, first: Mapping[str, int]) -> str:
    """Return an expert's name as all ranks count them."""
    match = NUMBER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + first.get(match[1], 0)}{match[3]}" if match else name


def _of_groups(
    run: zero.RunFiles, groups: Sequence[int], team: Sequence[int], first: Mapping[str, int]
) -> zero.RunFiles:
    """Return the run that some ranks made of some of the groups."""
    shapes: Any = run.facts.get("param_shapes")
    listed = shapes if isinstance(shapes, list) else []
    if any(group >= len(listed) or not isinstance(listed[group], dict) for group in groups):
        raise run.first.damaged("has other parameter groups than the optimizer cuts over the ranks")
    chosen = [{_renamed(n, first): s for n, s in shapes[group].items()} for group in groups]
    tree = {**run.facts, "param_shapes": chosen}
    if first:
        tree |= {"module": {}, "frozen_param_shapes": None}
    optims = {
        number: replace(run.optims[rank], tree=_optimizer(run.optims[rank], groups, first), rank=number)
        for number, rank in enumerate(team)
        if rank in run.optims
    }
    missing = tuple(number for number, rank in enumerate(team) if rank not in run.optims)
    models = {0: replace(run.first, tree=tree)}
    return replace(run, world_size=len(team), models=models, optims=optims, missing=missing)


def _optimizer(file: RankFile, groups: Sequence[int], first: Mapping[str, int]) -> Values:
    """Return the contents of a rank's optimizer file, of some groups alone."""
    states = dict(zero.of_optimizer(file))
    base: Any = states.get("base_optimizer_state")
    try:
        states |= {key: [states[key][group] for group in groups] for key in BY_GROUP if states.get(key)}
        if isinstance(base, list):
            states["base_optimizer_state"] = [base[group] for group in groups]
        else:
            kept = {i: base["state"][group] for i, group in enumerate(groups) if group in base["state"]}
            listed = [{**base[GROUPS][group], "params": [i]} for i, group in enumerate(groups)]
            states["base_optimizer_state"] = {"state": kept, GROUPS: listed}
        if mappings := states.get("param_slice_mappings"):
            places = [{_renamed(n, first): at for n, at in attributes(each).items()} for each in mappings]
            states["param_slice_mappings"] = places
    except (TypeError, KeyError, IndexError, AttributeError):
        raise file.damaged("has other parameter groups than it cuts over the ranks") from None
    return {**file.tree, "optimizer_state_dict": states}


def experts_of(parts: ModelParts, part: int) -> dict[str, Any]:
    """Return the experts of a part under their full names."""
    found: dict[str, Any] = {}
    for (mp, _, expert), file in sorted(parts.experts.items()):
        for name, value in zero.contents(file).items() if mp == part else ():
            match = NUMBER.fullmatch(name) if isinstance(name, str) else None
            if match is None or int(match[2]) != expert:
                what = f"holds {str(name)[:80]!r}, which is no name of expert {expert}"
                raise Damaged(file.path, what, hint=zero.TO_UNIVERSAL)
            found[name] = value
    return found


def require_experts(parts: ModelParts, part: int, facts: Mapping[Any, Any]) -> None:
    """Check that each expert that the model states count has its file."""
    there = {(layer, expert) for mp, layer, expert in parts.experts if mp == part}
    counts: Any = facts.get("num_experts")
    stated = dict(enumerate(counts if isinstance(counts, list) and there else ()))
    for layer in sorted({*stated, *(layer for layer, _ in there)}):
        last = max((expert for at, expert in there if at == layer), default=-1)
        count = stated.get(layer)
        for expert in range(max(last + 1, count if type(count) is int else 0)):
            if (layer, expert) not in there:
                raise _lacks(parts.path, f"layer_{layer}_expert_{expert}_mp_rank_{part:02}_model_states.pt")


# A pipeline: its layers, and what its stages share.


def layers_of(parts: ModelParts, tensor_part: int, names: Mapping[str, Any], left: list[str]) -> Values:
    """Return the state of the layers under the model's names, of which `names` are known.

    A layer is a tied one where its whole state is that of a tied module by keys and shapes: `left` says so.
    """
    found: Values = {}
    tied = {name.split(".", 2)[1] for name in names if name.startswith(TIED)}
    layers = {layer: file for (part, layer), file in sorted(parts.layers.items()) if part == tensor_part}
    for layer, file in layers.items():
        state = {f"{layer}.{key}": value for key, value in zero.contents(file).items()}
        own = zero.contents(file)
        shared = [key for key in tied if own and all(_fits(names, f"{TIED}{key}.{k}", own[k]) for k in own)]
        if shared and not state.keys() & names.keys():
            left.append(f"{os.path.basename(file.path)} (its parameters are those of '{TIED}{shared[0]}')")
            continue
        found |= state
    for name in names:
        number = name.split(".")[0]
        if parts.layers and number.isdecimal() and name not in found:
            if int(number) in layers:
                raise Damaged(layers[int(number)].path, f"has no '{name.split('.', 1)[1][:80]}'", hint=HINT)
            ending = f"-model_{tensor_part:02}" if parts.tp > 1 else ""
            raise _lacks(
                parts.path, f"layer_{int(number):02}{ending}-model_states.pt", f", which has '{name[:80]}'"
            )
    return found


def _fits(names: Mapping[str, Any], name: str, value: object) -> bool:
    one, other = tensor_of(names.get(name)), tensor_of(value)
    return one is not None and other is not None and one.shape == other.shape


def with_states(module: Values, states: Mapping[str, Any], buffers: set[str], path: str) -> Values:
    """Return a part's module with what files of layers and experts add to it: what is not trained."""
    caster, state = Caster(DTYPES["float32"]), dict(module)
    for name, value in states.items():
        tensor = tensor_of(value)
        if name not in module:
            is_half = tensor is not None and name in buffers and tensor.dtype.name in ("float16", "bfloat16")
            state[name] = caster.cast(tensor) if tensor is not None and is_half else value
        elif not _fits(module, name, value):
            raise Damaged(path, f"has '{name[:80]}' in another shape than its model states say", hint=HINT)
    return state


def united(wholes: Wholes, trees: Sequence[tuple[int, Sequence[int], Mapping[Any, Any]]]) -> Values:
    """Return the module and the optimizer of several parts: of trees with the rank and groups of each."""
    held: dict[tuple[str, ...], list[tuple[int, Any]]] = {}
    groups: list[tuple[int, Values, list[str]]] = []
    for rank, numbers, tree in trees:
        optimizer = tree.get("optimizer") or {"state": {}, GROUPS: []}
        for name, value in tree["module"].items():
            held.setdefault((name,), []).append((rank, value))
        for name, kept in optimizer["state"].items():
            for key, value in kept.items():
                held.setdefault((name, key), []).append((rank, value))
        for i, group in enumerate(optimizer[GROUPS]):
            settings = {key: value for key, value in group.items() if key != "params"}
            number = numbers[i] if numbers else i
            known = [each for n, others, each in groups if n == number and same(others, settings)]
            listed: list[str] = known[0] if known else []
            if not known:
                groups.append((number, settings, listed))
            listed += [name for name in group["params"] if name not in listed]
    module, state = {}, dict[str, Values]()
    for (name, *keys), values in held.items():
        whole = shared(wholes, place_of(name, *keys), values)
        if keys:
            state.setdefault(name, {})[keys[0]] = whole
        else:
            module[name] = whole
    ordered = sorted(groups, key=lambda group: group[0])
    optimizer = of_names(state, [{**settings, "params": listed} for _, settings, listed in ordered])
    return {"module": module, "optimizer": optimizer if groups else None}


def place_of(name: str, *keys: str) -> str:
    """Return the dotted name of a parameter, or of a part of its optimizer's state."""
    return dotted((*(("optimizer", "state") if keys else ("module",)), *map(str, (name, *keys))))


def shared(wholes: Wholes, name: str, held: Sequence[tuple[int, Any]]) -> Any:
    """Return what several parts hold as one value: compared when the values are read."""
    tensors = [(rank, tensor) for rank, value in held if (tensor := tensor_of(value)) is not None]
    if len(held) == 1 or len(tensors) < len(held) or not tensors[0][1].shape:
        return held[0][1]
    first = tensors[0][1]
    pieces = [RankPiece(rank, (0,) * len(first.shape), tensor) for rank, tensor in tensors]
    return zero.alone(wholes.tensor(name, first.dtype, first.shape, pieces))


def slice_of(
    parts: ModelParts,
    tensor_part: int,
    runs: Sequence[zero.RunFiles],
    trees: Sequence[tuple[int, Sequence[int], Mapping[Any, Any]]],
    wholes: Wholes,
) -> Values:
    """Return the module and the optimizer of one tensor-parallel part, of all stages."""
    tree = united(wholes, trees)
    stages = range(tensor_part, len(runs), parts.tp)
    listed = [runs[number].facts.get("buffer_names") for number in stages]
    buffers = {name for names in listed if isinstance(names, list) for name in names if isinstance(name, str)}
    states = layers_of(parts, tensor_part, tree["module"], wholes.left)
    for number in stages:
        require_experts(parts, number, runs[number].facts)
        states |= experts_of(parts, number)
    return tree | {"module": with_states(tree["module"], states, buffers, parts.path), "buffers": buffers}
