"""Reading what DeepSpeed's ranks wrote, ZeRO stages 0 to 3, as one checkpoint, without DeepSpeed and torch.

A folder has a file `latest` with the tag of the last checkpoint, and a folder for each tag. In it one file
`*_model_states.pt` has the model (in stage 3 one a rank, with empty tensors for the parameters), and one file
`*_optim_states.pt` a rank has its part of the fp32 weights and of the optimizer's momenta.

The checkpoint is that of the model states: `module` holds the fp32 weights, the frozen parameters and the
buffers under the model's names, `optimizer` the optimizer's state by parameter name; the counters, the
configuration and the client's state are rank 0's. Source: DeepSpeed's `runtime/engine.py`, to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import HINT, Ranks
from ...checkpoint.tensor_likes import shape_of
from ...errors import Damaged, Unsupported
from ...inert_pickle.values import Record, in_brief, remade, tensor_of
from ...tensors.cast import Caster
from ...tensors.dtypes import DTYPES
from ...tensors.ref import TensorRef
from .deepspeed_files import (
    OF_STAGE_3,
    OF_STAGES_1_AND_2,
    Files,
    contents,
    entry,
    is_ours,
    of_optimizer,
    same,
    sorted_out,
)
from .deepspeed_files import candidates as candidates
from .deepspeed_optimizer import merged
from .pieces import Piece, RankFile, Wholes, require_rank
from .ranked import whole_of
from .zero import Group, Layout, Slot, alone, joined, parameters_cut, vectors_cut

NAME = "deepspeed-zero"

OF_PIECES = {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
"""Entries of the model states that say how `module` was cut: it is whole now."""


def read(path: str, files: Sequence[Checkpoint], take_rank: int | None) -> Checkpoint | None:
    """Return the files of DeepSpeed's ranks as one checkpoint; None if none has a name that DeepSpeed gives.

    Args:
        path: the folder, for messages.
        files: all of them, in any order.
        take_rank: the rank whose buffers are taken without comparing them in stage 3; None compares.

    Raises:
        Damaged: as `sorted_out`; or a rank's part does not fit the parameters.
        Unsupported: the model itself was cut, or the files do not hold it.
        UsageFault: no file is of `take_rank`.
    """
    if not any(is_ours(file.path) for file in files):
        return None
    found = sorted_out(path, files)
    require_rank(path, take_rank, found.models)
    tree, unread, replicated = (
        (dict(contents(found.first)), (), 0) if not found.stage else _joined(found, take_rank)
    )
    version, step = (contents(found.first).get(name) for name in ("ds_version", "global_steps"))
    ranks = Ranks(
        f"DeepSpeed{f' {version}' if isinstance(version, str) else ''} ZeRO-{found.stage}",
        found.world_size,
        step=step if type(step) is int else None,
        held=_held(files, found),
        replicated=replicated,
        missing=found.missing,
    )
    return whole_of(path, NAME, tree, files, ranks, unread)


def _held(files: Sequence[Checkpoint], found: Files) -> dict[int, int]:
    """Return how many bytes of tensors each rank's files have."""
    ranks = {id(file.source): rank for each in (found.models, found.optims) for rank, file in each.items()}
    held: dict[int, int] = {}
    for file in files:
        storages = {id(storage): storage.nbytes for _, storage in file.storages()}
        rank = ranks[id(file.source)]
        held[rank] = held.get(rank, 0) + sum(storages.values())
    return dict(sorted(held.items()))


def _joined(files: Files, take_rank: int | None) -> tuple[dict[Any, Any], tuple[str, ...], int]:
    """Return the contents of a run in stages 1 to 3, what they lack in words, and the bytes of replicas."""
    wholes = Wholes(files.path, files.missing, files.world_size, take_rank)
    groups = _groups(files.first)
    layout = _layout(files, groups)
    optimizer, left = (
        merged(files, layout, [[*group] for group in groups], wholes) if files.optims else (None, [])
    )
    facts = contents(files.first)
    tree = {name: value for name, value in facts.items() if name not in OF_PIECES}
    tree["module"] = _module(files, layout, wholes)
    tree["optimizer"] = optimizer
    return tree, (*left, *_differing(files)), wholes.replicated


def _groups(file: RankFile) -> list[Group]:
    """Return the shapes of the trained parameters, by group."""
    listed = contents(file).get("param_shapes")
    return [_shapes(file, group) for group in listed] if isinstance(listed, list) else [_shapes(file, listed)]


def _shapes(file: RankFile, listed: object) -> Group:
    shapes = {name: shape_of(size) for name, size in listed.items()} if isinstance(listed, dict) else {}
    if (
        not isinstance(listed, dict)
        or not all(isinstance(name, str) for name in shapes)
        or None in shapes.values()
    ):
        raise Damaged(file.source.path, "has malformed shapes of parameters")
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _layout(files: Files, groups: Sequence[Group]) -> Layout:
    """Return the places of the parameters, after checking each rank's part of the weights."""
    if files.stage == 3:
        layout = parameters_cut(groups, files.world_size, [*files.optims])
    else:
        layout = vectors_cut(groups, _paddings(files, groups), files.world_size, files.optims)
    for rank, file in files.optims.items():
        parts = _parts(files.stage, file)
        if len(parts) != len(groups):
            raise Damaged(
                file.source.path, f"has {len(parts)} parameter groups, and the model {len(groups)}", hint=HINT
            )
        for group, part in enumerate(parts):
            layout.check(rank, group, part, "part of the weights")
        _check_mapping(file, rank, layout)
    return layout


def _parts(stage: int, file: RankFile) -> list[TensorRef]:
    """Return a rank's part of the weights of each group."""
    name = OF_STAGE_3 if stage == 3 else OF_STAGES_1_AND_2
    listed = of_optimizer(file).get(name)
    parts = [tensor_of(each) for each in listed] if isinstance(listed, list) else [None]
    found = [part for part in parts if part is not None]
    if len(found) != len(parts):
        raise Damaged(file.source.path, f"has no list of tensors '{name}'", hint=HINT)
    return found


def _paddings(files: Files, groups: Sequence[Group]) -> list[list[int]]:
    """Return the padding after each parameter; [] for none."""
    if not files.optims:
        return []
    file = next(iter(files.optims.values()))
    listed = of_optimizer(file).get("param_alignment_paddings")
    if listed is None:
        return []
    fits = isinstance(listed, list) and [len(each) if isinstance(each, list) else -1 for each in listed] == [
        len(group) for group in groups
    ]
    if not fits or any(type(fill) is not int or fill < 0 for each in listed for fill in each):
        raise Damaged(
            file.source.path, "has paddings that do not belong to its model's parameters", hint=HINT
        )
    return listed


def _check_mapping(file: RankFile, rank: int, layout: Layout) -> None:
    """Check the names and places that a rank states for its part, where it does: stages 1 and 2 may."""
    listed = of_optimizer(file).get("param_slice_mappings")
    if not isinstance(listed, list):
        return
    stated = [
        {name: _address(place) for name, place in each.items()} if isinstance(each, dict) else {}
        for each in listed
    ]
    if stated != layout.held_by(rank):
        raise Damaged(
            file.source.path,
            f"holds other parameters than rank {rank}'s file should ('param_slice_mappings')",
            hint="the file is of another rank or run: copy the files of all ranks once more",
        )


def _address(place: object) -> tuple[object, object]:
    fields = place.state if isinstance(place, Record) and isinstance(place.state, dict) else {}
    return fields.get("start"), fields.get("numel")


def _module(files: Files, layout: Layout, wholes: Wholes) -> dict[Any, Any]:
    """Return the model's state under the model's names, in the model's order."""
    first = files.first
    facts = contents(first)
    found = {name: tensor for name, tensor in _trained(files, layout, wholes)}
    found |= _frozen(files, wholes)
    ties = facts.get("shared_params")
    ties = ties if isinstance(ties, dict) else {}
    module = entry(first, facts, "module")
    views = {tensor.view: name for name in found if (tensor := tensor_of(module.get(name))) is not None}
    state = remade(module, ())
    for name, value in module.items():
        tensor = tensor_of(value)
        if name in found or tensor is None:
            state[name] = found.get(name, value)
        elif ties.get(name) in found or (tensor.numel and tensor.view in views):
            state[name] = found[ties[name] if ties.get(name) in found else views[tensor.view]]
        else:
            state[name] = _untrained(files, wholes, name, tensor)
    state.update((name, tensor) for name, tensor in found.items() if name not in state)
    for name, source in ties.items():  # whose other name is a frozen parameter's
        if isinstance(state.get(source), TensorRef):
            state[name] = state[source]
    return state


def _trained(files: Files, layout: Layout, wholes: Wholes) -> Iterator[tuple[str, TensorRef]]:
    parts = {rank: _parts(files.stage, file) for rank, file in files.optims.items()}
    for slot in layout.slots:
        yield slot.name, joined(wholes, slot, {rank: groups[slot.group] for rank, groups in parts.items()})


def _frozen(files: Files, wholes: Wholes) -> dict[str, TensorRef]:
    """Return the parameters that are not trained, where the files list them; stage 1 does not."""
    listed = contents(files.first).get("frozen_param_shapes")
    shapes = _shapes(files.first, listed) if listed else {}
    found: dict[str, TensorRef] = {}
    for name, shape in shapes.items():
        parts: dict[int, TensorRef] = {}
        for rank, file in files.models.items():
            part = tensor_of(entry(file, contents(file), "frozen_param_fragments").get(name))
            if part is None:
                raise Damaged(file.source.path, f"lacks the frozen parameter '{name[:80]}'", hint=HINT)
            parts[rank] = part
        if files.stage == 3:
            (slot,) = parameters_cut([{name: shape}], files.world_size, [*parts]).slots
            found[name] = joined(wholes, slot, parts)
        else:
            found[name] = alone(parts[0])
    return found


def _untrained(files: Files, wholes: Wholes, name: str, tensor: TensorRef) -> TensorRef:
    """Return a tensor of which each file with model states has the whole: a buffer, or frozen in stage 1."""
    buffers = contents(files.first).get("buffer_names")
    is_buffer = isinstance(buffers, list) and name in buffers
    if files.stage == 3:
        if tensor.shape == (0,) and not is_buffer and not files.missing:
            raise Damaged(
                files.first.source.path, f"has no values of '{name[:80]}', and no file says its shape"
            )
        pieces = []
        for rank, file in files.models.items():
            other = tensor_of(entry(file, contents(file), "module").get(name))
            if other is None or other.shape != tensor.shape:
                raise Damaged(
                    file.source.path, f"lacks '{name[:80]}' of shape {list(tensor.shape)}", hint=HINT
                )
            pieces.append(Piece(rank, (0,) * len(tensor.shape), other))
        tensor = wholes.tensor(name, tensor.dtype, tensor.shape, pieces)
    if is_buffer and tensor.dtype.name in ("float16", "bfloat16"):
        return Caster(DTYPES["float32"]).cast(tensor)
    return alone(tensor)


def _differing(files: Files) -> Iterator[str]:
    """Yield in words what the ranks keep each for itself, such as their random generators."""
    facts = contents(files.first)
    for name in facts:
        if name in OF_PIECES or name == "module":
            continue
        others = [r for r, file in files.models.items() if not same(contents(file).get(name), facts[name])]
        if others:
            listed = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if others[8:] else "")
            which = f"ranks {listed}, which differ" if others[1:] else f"rank {listed}, which differs"
            yield f"'{in_brief(name)[:80]}' of {which} from rank {files.first.rank}'s"
