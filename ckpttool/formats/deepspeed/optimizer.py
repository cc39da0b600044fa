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

# Other entries, that are read here or elsewhere, or say what the configuration says too.
IN_USE = {
    *(*KEPT.values(), OF_STAGE_3, OF_STAGES_1_AND_2, "zero_stage", "partition_count", "param_slice_mappings"),
    *("group_paddings", "param_alignment_paddings", "loss_scaler", "ds_version", "ds_config", "clip_grad"),
    *("dynamic_loss_scale", "overflow"),
}

Names = Sequence[Sequence[str]]


def merged(
    files: Files, layout: Layout, names: Names, wholes: Wholes
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the optimizer's state by parameter name, and in words what it lacks of the files."""
    by_rank = {rank: of_optimizer(file).get(KEPT[files.stage]) for rank, file in files.optims.items()}
    if not any(by_rank.values()):
        return None, [*_left_out(files)]
    joining = _Joining(files, layout, wholes)
    for group, listed in enumerate(names):
        entries = {rank: _entry(files.optims[rank], kept, group) for rank, kept in by_rank.items()}
        joining.add(group, listed, entries)
    state = {name: joining.state[name] for listed in names for name in listed if name in joining.state}
    if all(isinstance(kept, list) for kept in by_rank.values()):  # elastic_checkpoint keeps states alone
        missing = "the settings of the optimizer's parameter groups, which `elastic_checkpoint` leaves out"
        groups = [{"params": list(listed)} for listed in names]
        return {"state": state, "param_groups": groups}, [*_left_out(files), *joining.left, missing]
    groups = param_groups(files, by_rank, names)
    return {"state": state, "param_groups": groups}, [*_left_out(files), *joining.left]


class _Joining:
    """Joins what the ranks keep of each group into `state`, by parameter name."""

    def __init__(self, files: Files, layout: Layout, wholes: Wholes) -> None:
        self.files, self.layout, self.wholes = files, layout, wholes
        self.state: dict[str, dict[str, object]] = {}
        self.left: list[str] = []
        self._numbers = Numbers()

    def add(self, group: int, names: Sequence[str], entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Add a group, of which each rank keeps an entry."""
        for key in _common_keys(self.files, entries):
            values = {rank: entry[key] for rank, entry in entries.items()}
            parts = {rank: part for rank, value in values.items() if (part := tensor_of(value)) is not None}
            if key == "step" or len(parts) < len(values) or not all(part.shape for part in parts.values()):
                self._add_common(key, names, values)
            elif any(self.layout.fits(rank, group, part) for rank, part in parts.items()):
                self._add_momentum(key, group, parts)
            else:
                self.left.append(f"'{key[:80]}' of the optimizer's state, of other sizes than the parameters")

    def _add_common(self, key: str, names: Sequence[str], values: Mapping[int, object]) -> None:
        """Add what is one value for the group on all ranks, such as the step."""
        held = [Held(self.files.optims[rank], value) for rank, value in sorted(values.items())]
        require_one(f"'{key[:80]}' of its optimizer", held, self._numbers)
        for name in names:
            self.state.setdefault(name, {})[key] = _copied(held[0].value)

    def _add_momentum(self, key: str, group: int, parts: Mapping[int, TensorRef]) -> None:
        """Add what is cut as the parameters are."""
        for rank, part in parts.items():
            self.layout.check(rank, group, part, f"momentum '{key[:80]}'")
        for slot in self.layout.slots:
            if slot.group == group:
                momentum = joined(self.wholes, slot, parts, f"{slot.name}.{key}")
                self.state.setdefault(slot.name, {})[key] = momentum


def _entry(file: RankFile, base: object, group: int) -> dict[str, Any]:
    """Return a rank's state of a group; {} when the optimizer never made a step."""
    states = base.get("state") if isinstance(base, dict) else None
    if isinstance(base, list):
        states = dict(enumerate(base))
    entry = states.get(group, {}) if isinstance(states, dict) else None
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        raise Damaged(file.source.path, f"has a malformed optimizer state of group {group}", hint=HINT)
    return entry


def _common_keys(files: Files, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
    first = min(entries)
    for rank, entry in entries.items():
        if entry.keys() != entries[first].keys():
            raise Damaged(
                files.optims[rank].source.path,
                f"keeps {_listed(entry)} of a parameter, and {files.optims[first].source.path} "
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


def param_groups(files: Files, bases: Mapping[int, Any], names: Names) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, which list their parameters by name."""
    first = min(bases)
    groups, file = _groups(bases[first]), files.optims[first]
    for rank, each in bases.items():
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
    ordered = [given_order(name, files.world_size) if dealt_out(files) else list(name) for name in names]
    return [
        {**group, "params": [name for number in group["params"] for name in ordered[number]]}
        for group in groups
    ]


def _groups(base: object) -> list[Any]:
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return groups if isinstance(groups, list) else []


def dealt_out(files: Files) -> bool:
    """Return whether the vector has the parameters in another order than the optimizer."""
    config = contents(files.first).get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return files.stage < 3 and isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _left_out(files: Files) -> Iterator[str]:
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
