"""The optimizer of a ZeRO run by parameter name, joined from the momenta that each rank kept.

A rank's optimizer sees one parameter a group, the rank's part of the group's vector: its `state` is keyed by
the number of the group, and each momentum in it is cut as the fp32 weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...checkpoint.ranks import HINT
from ...errors import Damaged
from ...inert_pickle.values import Record, in_brief, tensor_of
from ...tensors.ref import TensorRef
from ..ranks.agreement import Held, Numbers, require_one, same
from ..ranks.pieces import RankFile, Wholes
from .files import OF_STAGE_3, OF_STAGES_1_AND_2, Files, contents, of_optimizer
from .zero import Layout, given_order, joined

# Where each stage keeps the state of the optimizer that it wraps.
KEPT = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}

# Entries beside it that are read here or elsewhere, or say what the configuration says too.
IN_USE = {
    *(*KEPT.values(), OF_STAGE_3, OF_STAGES_1_AND_2, "zero_stage", "partition_count", "param_slice_mappings"),
    *("group_paddings", "param_alignment_paddings", "loss_scaler", "ds_version", "ds_config", "clip_grad"),
    *("dynamic_loss_scale", "overflow"),
}

Names = Sequence[Sequence[str]]


def merged(
    files: Files, layout: Layout, names: Names, wholes: Wholes
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the optimizer's state by parameter name."""
    kept = {rank: of_optimizer(file).get(KEPT[files.stage]) for rank, file in files.optims.items()}
    held, left = [*kept.values()], [*_beside(files)]
    if not any(held):
        return None, left
    state: dict[str, dict[str, object]] = {name: {} for group in names for name in group}
    numbers = Numbers()
    lean = all(isinstance(each, list) for each in held)  # elastic_checkpoint: a list of states, no settings
    for group, listed in enumerate(names):
        entries = {rank: _entry(files.optims[rank], each, group) for rank, each in kept.items()}
        slots = [slot for slot in layout.slots if slot.group == group]
        for key in _common_keys(files, entries):
            values = {rank: found[key] for rank, found in entries.items()}
            parts = {rank: part for rank, value in values.items() if (part := tensor_of(value)) is not None}
            if key == "step" or not all(part.shape for part in parts.values()) or len(parts) < len(values):
                counted = [Held(files.optims[rank], value) for rank, value in sorted(values.items())]
                require_one(f"'{key[:80]}' of its optimizer", counted, numbers)
                for name in listed:
                    state[name][key] = _copied(values[min(values)])
                continue
            if not any(layout.fits(rank, group, part) for rank, part in parts.items()):
                left.append(f"'{key[:80]}' of the optimizer's state, of other sizes than the parameters")
                continue
            for rank, part in parts.items():
                layout.check(rank, group, part, f"momentum '{key[:80]}'")
            for slot in slots:
                state[slot.name][key] = joined(wholes, slot, parts, f"{slot.name}.{key}")
    if lean:
        left.append("the settings of the optimizer's parameter groups, which `elastic_checkpoint` leaves out")
    groups = [{"params": list(group)} for group in names] if lean else _param_groups(files, kept, names)
    return {"state": {name: entry for name, entry in state.items() if entry}, "param_groups": groups}, left


def _entry(file: RankFile, kept: object, group: int) -> dict[str, Any]:
    """Return a rank's state of a group; {} when the optimizer never made a step."""
    states = kept.get("state") if isinstance(kept, dict) else None
    if isinstance(kept, list):
        states = dict(enumerate(kept))
    found = states.get(group, {}) if isinstance(states, dict) else None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Damaged(file.source.path, f"has a malformed optimizer state of group {group}", hint=HINT)
    return found


def _common_keys(files: Files, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    first = min(entries)
    for rank, found in entries.items():
        if found.keys() != entries[first].keys():
            raise Damaged(
                files.optims[rank].source.path,
                f"keeps {_listed(found)} of a parameter, and {files.optims[first].source.path} "
                f"{_listed(entries[first])}",
                hint=HINT,
            )
    return [*entries[first]]


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(name[:80] for name in sorted(entry)[:8]) or "no state"


def _copied(value: object) -> object:
    """Return a tensor with a storage of its own: optimizers count each parameter's steps in place."""
    if isinstance(value, TensorRef):
        return replace(value, storage=replace(value.storage, origins=(value.storage,)))
    return value


def _param_groups(files: Files, kept: Mapping[int, Any], names: Names) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, which list their parameters by name."""
    first = min(kept)
    groups, file = _groups(kept[first]), files.optims[first]
    for rank, each in kept.items():
        if not same(_groups(each), groups):
            raise Damaged(
                files.optims[rank].source.path,
                f"is of another step or run: its optimizer's settings are not those in {file.source.path}",
                hint=HINT,
            )
    listed = [group.get("params") if isinstance(group, dict) else None for group in groups]
    numbers = [number for each in listed for number in (each if isinstance(each, list) else [None])]
    if numbers != [*range(len(names))]:
        reason = "has an optimizer of other parameter groups than its model"
        raise Damaged(file.source.path, reason, hint=HINT)
    ordered = [given_order(each, files.world_size) if dealt_out(files) else list(each) for each in names]
    return [
        {**group, "params": [name for number in group["params"] for name in ordered[number]]}
        for group in groups
    ]


def _groups(kept: object) -> list[Any]:
    found = kept.get("param_groups") if isinstance(kept, dict) else None
    return found if isinstance(found, list) else []


def dealt_out(files: Files) -> bool:
    """Return whether the vector has the parameters in another order than the optimizer."""
    config = contents(files.first).get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return files.stage < 3 and isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _beside(files: Files) -> Iterator[str]:
    """Yield in words what the optimizer's files hold and a merged checkpoint does not."""
    states = next(map(of_optimizer, files.optims.values()), {})
    scaler = states.get("loss_scaler")
    settings = scaler.state if isinstance(scaler, Record) and isinstance(scaler.state, dict) else {}
    if settings.get("dynamic") is not False and settings:
        scale = settings.get("cur_scale")
        yield f"the loss scaler (scale {in_brief(scale)})"
    yield from (
        f"'{in_brief(name)[:80]}' of the ranks' optimizer states" for name in states if name not in IN_USE
    )
