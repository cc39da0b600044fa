"""Reading what DeepSpeed's ranks wrote, ZeRO stages 0 to 3, as one checkpoint, without DeepSpeed and torch.

A folder has a file `latest` with the tag of the last checkpoint, and a folder for each tag. In it one file
`*_model_states.pt` has the model (in stage 3 one a rank, with empty tensors for the parameters), and one file
`*_optim_states.pt` a rank has its part of the fp32 weights and of the optimizer's momenta.

The checkpoint is that of the model states: `module` holds the fp32 weights, the frozen parameters and the
buffers under the model's names, `optimizer` the optimizer's state by parameter name; the counters, the
configuration and the client's state are rank 0's. Source: DeepSpeed's `runtime/engine.py`, to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, Ranks
from ..core.checkpoint.special_tensors import attributes, shape_of
from ..core.inert_pickle.values import has_text_keys, remade, tensor_of, walk
from ..core.tensors.cast import Caster
from ..core.tensors.ref import DTYPES, TensorRef
from ..errors import UsageFault
from . import deepspeed_parts, tensor_parallel, zero
from .deepspeed_parts import ModelParts
from .merge_trees import merged, same
from .pieces import RankFile, Take, Wholes, require_rank, whole_of
from .zero import candidates as candidates

NAME = "deepspeed-zero"

# Entries of the model states that say how `module` was cut: it is whole now.
OF_PIECES = {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of DeepSpeed's ranks as one checkpoint; None if none is named like theirs."""
    if not any(zero.is_ours(file.path) for file in files):
        return None
    parts = deepspeed_parts.told_apart(path, files)
    runs = [zero.sorted_out(path, of_part) for of_part in parts.ranked]
    first, copies = runs[0], runs[0].world_size
    part, copy = _taken(path, take.rank, parts, runs)
    world = copies * len(runs)
    missing = tuple(sorted(parts.rank(n, rank, copies) for n, run in enumerate(runs) for rank in run.missing))
    wholes = Wholes(path, missing, world, copy)
    if parts.is_cut:
        joint = Wholes(
            path, missing, world, None if part is None else parts.rank(part, 0, copies), left=wholes.left
        )
        tree = _of_parts(parts, runs, wholes, joint, take.step)
        wholes.replicated += joint.replicated
    else:
        tree = _joined(first, wholes) if first.stage else first.facts
    step = zero.one_step(first, tree.get("optimizer"), take.step)
    if take.step is not None and "global_steps" in tree:
        tree = tree | {"global_steps": step}
    kind, held = f"{framework(first)} ZeRO-{first.stage}", _held(files, parts, runs)
    lacking = tuple(name for run in runs for name in run.lacking)
    ranks = Ranks(kind, world, parts.kind, step, held, tuple(wholes.replicated), missing, lacking)
    return whole_of(path, NAME, tree, files, ranks, wholes.left)


def _of_parts(
    parts: ModelParts, runs: Sequence[zero.RunFiles], wholes: Wholes, joint: Wholes, take_step: int | None
) -> dict[Any, Any]:
    """Return the contents of a run that cut its model; `joint` compares what its parts share."""
    first = runs[0]
    step = zero.one_step(first, None, take_step)
    for run in runs:
        if (run.stage, run.world_size) != (first.stage, first.world_size):
            there = f"{first.first.path}: their ZeRO stages or ranks differ"
            raise run.first.damaged(f"is of another run than {there}")
        if (other := zero.one_step(run, None, take_step)) != step:
            raise run.first.damaged(f"is of step {other}, and {first.first.path} of {step}")
    slices = []
    for tensor_part in range(parts.tp):
        trees = [
            (parts.rank(number, 0, run.world_size), groups, _tree(sub, wholes))
            for number, run in enumerate(runs)
            if number % parts.tp == tensor_part
            for groups, sub in deepspeed_parts.divided(parts, number, run)
        ]
        slices.append(deepspeed_parts.slice_of(parts, tensor_part, runs, trees, joint))
    numbered = [*parts.optimizers, *([] if first.facts.get("optimizer") is None else ["mp_rank_…"])]
    if numbered:
        wholes.left.append(f"the optimizer of {', '.join(numbered[:4])}: it {deepspeed_parts.NUMBERED}")
    whole = tensor_parallel.whole(parts.path, slices, first.facts, joint)
    return first.facts | {key: whole[key] for key in ("module", "optimizer")}


def _tree(run: zero.RunFiles, wholes: Wholes) -> dict[Any, Any]:
    """Return the module and the optimizer of a part; without ZeRO the optimizer has no names."""
    return _joined(run, wholes) if run.stage else {"module": zero.entry(run.first, "module")}


def framework(files: zero.RunFiles) -> str:
    version = files.facts.get("ds_version")
    return f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"


def _taken(
    path: str, rank: int | None, parts: ModelParts, runs: Sequence[zero.RunFiles]
) -> tuple[int | None, int | None]:
    """Return the part of the rank whose values are to be taken, and which copy of it; None for no rank."""
    if rank is None:
        return None, None
    copies = runs[0].world_size
    ranked = {n: {*run.models, *run.optims} for n, run in enumerate(runs)}
    require_rank(path, rank, (parts.rank(n, copy, copies) for n, held in ranked.items() for copy in held))
    part, copy = parts.place(rank, copies)
    if copy not in runs[part].models:  # only in stage 3 each rank has buffers
        holding = [parts.rank(part, each, copies) for each in runs[part].models]
        there = f"only rank {', '.join(map(str, holding))} holds model states"
        what = f"{there}, and rank {rank} parts of the optimizer"
        raise UsageFault(f"{path}: {what}", hint=f"leave out --take-rank, or take rank {min(holding)}")
    return part, copy


def _held(files: Sequence[Checkpoint], parts: ModelParts, runs: Sequence[zero.RunFiles]) -> dict[int, int]:
    """Return how many bytes of tensors each rank's files have; rank 0 those of layers and experts."""
    ranks = {
        id(file.source): parts.rank(number, rank, run.world_size)
        for number, run in enumerate(runs)
        for kind in (run.models, run.optims)
        for rank, file in kind.items()
    }
    nbytes = dict.fromkeys(sorted(set(ranks.values())), 0)
    for file in files:
        tensors = (value for value in walk(file.tree) if isinstance(value, TensorRef))
        storages = {id(tensor.storage): tensor.storage.nbytes for tensor in tensors}
        nbytes[ranks.get(id(file.source), min(nbytes))] += sum(storages.values())
    return nbytes


def _joined(files: zero.RunFiles, wholes: Wholes) -> dict[Any, Any]:
    """Return a run's contents in stages 1 to 3."""
    groups = _groups(files)
    layout = _layout(files, groups)
    parts = {rank: _parts(files.stage, file) for rank, file in files.optims.items()}
    of_group = [{rank: listed[group] for rank, listed in parts.items()} for group in range(len(groups))]
    cut = {slot.name: zero.joined(wholes, slot, of_group[slot.group]) for slot in layout.slots}
    cut |= frozen_of(files, wholes)
    optimizer = zero.optimizer_of(files, layout, [[*group] for group in groups], wholes)
    tree = merged(wholes, [without_pieces(file, files, cut) for file in files.models.values()])
    return {**tree, "module": module_of(files, tree["module"], cut), "optimizer": optimizer}


# Where the parameters lie.


def _groups(files: zero.RunFiles) -> list[zero.Group]:
    """Return the shapes of the trained parameters, by group."""
    for file in files.models.values():
        if not same(file.tree.get("param_shapes"), files.facts.get("param_shapes")):
            raise file.damaged(f"is of another model than {files.first.path}: their 'param_shapes' differ")
    return shapes_of_groups(files.first)


def shapes_of_groups(file: RankFile) -> list[zero.Group]:
    listed = file.tree.get("param_shapes")
    return [_shapes(file, group) for group in (listed if isinstance(listed, list) else [listed])]


def _shapes(file: RankFile, listed: object) -> zero.Group:
    sizes = listed if isinstance(listed, dict) else {"": None}
    shapes = {name: shape for name, size in sizes.items() if (shape := shape_of(size)) is not None}
    if len(shapes) < len(sizes) or not has_text_keys(shapes):
        raise file.damaged("has malformed shapes of parameters")
    return shapes


def _layout(files: zero.RunFiles, groups: Sequence[zero.Group]) -> zero.Layout:
    """Return the places of the parameters, after checking each rank's part of the weights."""
    if files.stage == 3:
        layout = zero.parameters_cut(groups, files.world_size, [*files.optims])
    else:
        layout = zero.vectors_cut(groups, _paddings(files, groups), files.world_size, files.optims)
    stated = layout
    if zero.dealt_out(files):  # DeepSpeed 0.19.8 states the places that the parameters would have otherwise
        orders = [zero.given_order([*group], files.world_size) for group in groups]
        given = [{name: group[name] for name in order} for order, group in zip(orders, groups, strict=True)]
        stated = zero.vectors_cut(given, [], files.world_size, files.optims)
    for rank, file in files.optims.items():
        parts = _parts(files.stage, file)
        if len(parts) != len(groups):
            raise file.damaged(f"has {len(parts)} parameter groups, and {files.first.path} {len(groups)}")
        for group, part in enumerate(parts):
            layout.check(rank, group, part, "part of the weights")
        _check_mapping(file, layout, stated)
    return layout


def _parts(stage: int, file: RankFile) -> list[TensorRef]:
    """Return a rank's part of the weights of each group."""
    name = zero.OF_STAGE_3 if stage == 3 else zero.OF_STAGES_1_AND_2
    listed = zero.of_optimizer(file).get(name)
    parts = [part for each in listed if (part := tensor_of(each))] if isinstance(listed, list) else []
    if not isinstance(listed, list) or len(parts) < len(listed):
        raise file.damaged(f"has no list of tensors '{name}'")
    return parts


def _paddings(files: zero.RunFiles, groups: Sequence[zero.Group]) -> list[list[int]]:
    """Return the padding after each parameter; [] for none."""
    for file in files.optims.values():
        listed = zero.of_optimizer(file).get("param_alignment_paddings")
        if listed is None:
            return []
        lengths = [len(each) for each in listed if isinstance(each, list)] if isinstance(listed, list) else []
        fits = lengths == [*map(len, groups)] and len(listed) == len(groups)
        paddings: list[list[int]] = listed if fits else [[-1]]
        if any(type(fill) is not int or fill < 0 for each in paddings for fill in each):
            what = "has paddings ('param_alignment_paddings') that do not fit its model's parameters"
            raise file.damaged(what)
        return paddings
    return []


def _check_mapping(file: RankFile, *layouts: zero.Layout) -> None:
    """Check that a rank states the places of one of the layouts; only stages 1 and 2 state any."""
    listed = zero.of_optimizer(file).get("param_slice_mappings")
    if not isinstance(listed, list):
        return
    places = [{name: attributes(place) for name, place in attributes(each).items()} for each in listed]
    stated = [{name: (at.get("start"), at.get("numel")) for name, at in each.items()} for each in places]
    if all(stated != layout.held_by(file.rank) for layout in layouts):
        what = f"holds other parameters than rank {file.rank}'s file should ('param_slice_mappings')"
        raise file.damaged(what, "the file is of another rank or run: copy the files of all ranks once more")


# The model's state.


def frozen_of(files: zero.RunFiles, wholes: Wholes) -> dict[str, TensorRef]:
    """Return the parameters that are not trained, where the files list them; stage 1 does not."""
    listed = files.facts.get("frozen_param_shapes")
    frozen: dict[str, TensorRef] = {}
    for name, shape in (_shapes(files.first, listed) if listed else {}).items():
        parts: dict[int, TensorRef] = {}
        for rank, file in files.models.items():
            part = tensor_of(zero.entry(file, "frozen_param_fragments").get(name))
            if part is None:
                raise file.damaged(f"lacks the frozen parameter '{name[:80]}'")
            parts[rank] = part
        if files.stage == 3:
            (slot,) = zero.parameters_cut([{name: shape}], files.world_size, [*parts]).slots
            frozen[name] = zero.joined(wholes, slot, parts)
        elif parts[0].shape == shape:
            frozen[name] = zero.alone(parts[0])
        else:
            what = f"holds '{name[:80]}' in another shape than {list(shape)}, which it states"
            raise files.first.damaged(what)
    return frozen


def without_pieces(file: RankFile, files: zero.RunFiles, cut: Mapping[str, TensorRef]) -> RankFile:
    """Return a file with model states without what describes pieces, or stands in the place of them."""
    buffers = buffers_of(files)

    def stays(name: str, value: object) -> bool:
        tensor = tensor_of(value)
        is_placeholder = files.stage == 3 and tensor is not None and tensor.shape == (0,)
        return name not in cut and (name in buffers or not is_placeholder)

    module = zero.entry(file, "module")
    kept = remade(module, ((name, value) for name, value in module.items() if stays(name, value)))
    return replace(file, tree={k: v for k, v in file.tree.items() if k not in OF_PIECES} | {"module": kept})


def buffers_of(files: zero.RunFiles) -> set[str]:
    listed = files.facts.get("buffer_names")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def module_of(
    files: zero.RunFiles, untouched: Mapping[Any, Any], cut: Mapping[str, TensorRef]
) -> dict[Any, Any]:
    """Return the model's state under the model's names, in the model's order."""
    module, buffers = files.facts["module"], buffers_of(files)
    ties = attributes(files.facts.get("shared_params"))
    names = {t.view: n for n, value in module.items() if n in cut and (t := tensor_of(value)) and t.numel}
    caster, copies = Caster(DTYPES["float32"]), dict[object, TensorRef]()
    stands_for = (0,) if files.stage == 3 else None
    state = remade(module, ())
    for name, value in module.items():
        tensor = tensor_of(value)
        sources = [name, ties.get(name), names.get(tensor.view) if tensor is not None else None]
        whole = next((cut[source] for source in sources if isinstance(source, str) and source in cut), None)
        if whole is not None and (tensor is None or tensor.shape in (whole.shape, stands_for)):
            state[name] = whole
        elif isinstance(plain := untouched.get(name), TensorRef):
            half = name in buffers and plain.dtype.name in ("float16", "bfloat16")
            state[name] = copies.setdefault(plain.view, caster.cast(plain) if half else zero.alone(plain))
        elif name in untouched:
            state[name] = untouched[name]
        elif not files.missing:
            raise files.first.damaged(f"has no values of '{name[:80]}' in the shape that it states")
    state.update((name, tensor) for name, tensor in cut.items() if name not in state)
    return state
