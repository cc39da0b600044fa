"""The flat vectors that DeepSpeed's ZeRO cuts over the ranks: where each parameter lies, and the way back.

ZeRO joins the parameters of a group into one vector. Stages 1 and 2 cut that vector: rank r holds elements
r·P to (r+1)·P, and P is even. Stage 3 cuts each parameter: every rank holds ceil(n/W) of its n elements, one
parameter after another, the last rank's filled up. The fp32 weights and each momentum are cut alike. A
rank's optimizer sees one parameter a group, its part of the vector: `state` is keyed by the group's number.
Source: DeepSpeed's `runtime/zero/stage_1_and_2.py`, `stage3.py` and `utils/zero_to_fp32.py`, to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...checkpoint.optimizer_view import OptimizerView, of_names
from ...checkpoint.special_tensors import attributes
from ...errors import Damaged
from ...inert_pickle.values import Record, has_text_keys, in_brief, tensor_of
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Storage, TensorRef, count_of
from ..ranks.agreement import Held, Numbers, require_one, same
from ..ranks.pieces import RankFile, RankPiece, Wholes
from .files import OF_STAGE_3, OF_STAGES_1_AND_2, RunFiles, of_optimizer, zero_settings

Shape = tuple[int, ...]
# The parameters of a group by name, in the order of the vector.
Group = Mapping[str, Shape]

# The vector of stages 1 and 2 is filled up to a multiple of this and the number of ranks.
ALIGNED = 2


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Consecutive elements of a parameter in one rank's part of a vector."""

    rank: int  # the rank
    begin: int  # the first element within the flattened parameter
    start: int  # the first element within the rank's part
    count: int  # how many


@dataclass(frozen=True, slots=True)
class ZeroSlot:
    """A parameter's place: its group, and its runs on the ranks; a rank without elements has none."""

    name: str
    shape: Shape
    group: int
    runs: tuple[ElementRun, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all parameters."""

    slots: tuple[ZeroSlot, ...]  # in the order of the groups, and of the vector of each
    # rank -> how many elements its part of each group may have. They differ where the end is padding, which
    # some files leave out.
    least: Mapping[int, list[int]]
    most: Mapping[int, list[int]]

    def fits(self, rank: int, group: int, part: TensorRef) -> bool:
        """Return whether a rank's part of a vector has as many elements as the parameters take."""
        return len(part.shape) == 1 and self.least[rank][group] <= part.numel <= self.most[rank][group]

    def check(self, rank: int, group: int, part: TensorRef, what: str) -> None:
        """Check the size of a rank's part of a vector."""
        if not self.fits(rank, group, part):
            least, most = self.least[rank][group], self.most[rank][group]
            padding = f", {most - least} of them padding" if most > least else ""
            here = f"its {what} of group {group} has shape {list(part.shape)}"
            should = f"rank {rank}'s part of the parameters has {most} elements{padding}"
            hint = "the parameters are listed in the files *_model_states.pt: copy the folder again"
            raise Damaged(part.storage.data.path, f"{here}, and {should}", hint=hint)

    def held_by(self, rank: int) -> list[dict[str, tuple[int, int]]]:
        """Return the runs of each group that a rank holds: name -> (start, count)."""
        runs: list[dict[str, tuple[int, int]]] = [{} for _ in self.least[rank]]
        for slot in self.slots:
            runs[slot.group].update((slot.name, (r.start, r.count)) for r in slot.runs if r.rank == rank)
        return runs


def vectors_cut(
    groups: Sequence[Group], paddings: Sequence[Sequence[int]], world_size: int, ranks: Iterable[int]
) -> Layout:
    """Return the places of parameters in stages 1 and 2."""
    slots: list[ZeroSlot] = []
    least: dict[int, list[int]] = {rank: [] for rank in ranks}
    most: dict[int, list[int]] = {rank: [] for rank in least}
    for group, listed in enumerate(groups):
        fills = paddings[group] if paddings else [0] * len(listed)
        total = sum(map(count_of, listed.values())) + sum(fills)
        size = -(-total // (ALIGNED * world_size)) * ALIGNED
        for rank in least:
            least[rank].append(min(max(total - rank * size, 0), size))
            most[rank].append(size)
        at = 0
        for (name, shape), fill in zip(listed.items(), fills, strict=True):
            slots.append(ZeroSlot(name, shape, group, tuple(_runs(at, count_of(shape), size))))
            at += count_of(shape) + fill
    return Layout(tuple(slots), least, most)


def _runs(at: int, count: int, size: int) -> Iterator[ElementRun]:
    """Yield the runs of `count` elements from number `at` of a vector that is cut every `size` elements."""
    done = 0
    while done < count:
        rank, start = divmod(at + done, size)
        length = min(size - start, count - done)
        yield ElementRun(rank, done, start, length)
        done += length


def parameters_cut(groups: Sequence[Group], world_size: int, ranks: Sequence[int]) -> Layout:
    """Return the places of parameters in stage 3."""
    slots: list[ZeroSlot] = []
    sizes: list[int] = []
    for group, listed in enumerate(groups):
        at = 0
        for name, shape in listed.items():
            slots.append(ZeroSlot(name, shape, group, tuple(_shares(count_of(shape), at, world_size, ranks))))
            at += -(-count_of(shape) // world_size)
        sizes.append(at)
    every = dict.fromkeys(ranks, sizes)
    return Layout(tuple(slots), every, every)


def _shares(count: int, start: int, world_size: int, ranks: Iterable[int]) -> Iterator[ElementRun]:
    share = -(-count // world_size)
    for rank in ranks:
        length = min(share, count - rank * share)
        if length > 0:
            yield ElementRun(rank, rank * share, start, length)


def joined(wholes: Wholes, slot: ZeroSlot, parts: Mapping[int, TensorRef], name: str = "") -> TensorRef:
    """Return a parameter, or a momentum of it, from the ranks' parts of a vector; nothing is read."""
    runs = [run for run in slot.runs if run.rank in parts]
    pieces = [RankPiece(run.rank, (run.begin,), _cut(parts[run.rank], run)) for run in runs]
    dtype = next((part.dtype for part in parts.values()), DTYPES["float32"])
    return alone(wholes.tensor(name or slot.name, dtype, slot.shape, pieces, flat=True))


def _cut(part: TensorRef, run: ElementRun) -> TensorRef:
    if len(part.shape) != 1 or part.numel < run.start + run.count:
        needed = run.start + run.count
        what = f"a part of a parameter has shape {list(part.shape)}, and needs {needed} elements"
        raise Damaged(part.storage.data.path, what)
    return replace(part, shape=(run.count,), offset=part.offset + run.start * part.stride[0])


def alone(tensor: TensorRef) -> TensorRef:
    """Return a tensor that has a storage of its own: neighbours in a vector are not views of one tensor."""
    old = tensor.storage
    if old.nbytes == tensor.nbytes:
        return tensor
    storage = Storage(tensor.data, old.kind, byteorder=old.byteorder, origins=(old,))
    return replace(tensor, storage=storage, offset=0)


def given_order(names: Sequence[str], world_size: int) -> list[str]:
    """Return the names of a group in the optimizer's order, which `round_robin_gradients` changed."""
    # DeepSpeed deals the parameters out to the ranks in turn and joins what each got.
    places = list(chain(*(range(first, len(names), world_size) for first in range(world_size))))
    return [name for _, name in sorted(zip(places, names, strict=True))]


# The optimizer.


# Where each stage keeps the state of the optimizer that it wraps.
KEPT = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}

# Other entries, that are read here or elsewhere, or say what the configuration says too.
IN_USE = {
    *(*KEPT.values(), OF_STAGE_3, OF_STAGES_1_AND_2, "zero_stage", "partition_count", "param_slice_mappings"),
    *("group_paddings", "param_alignment_paddings", "loss_scaler", "ds_version", "ds_config", "clip_grad"),
    *("dynamic_loss_scale", "overflow"),
}

Names = Sequence[Sequence[str]]


def optimizer_of(files: RunFiles, layout: Layout, names: Names, wholes: Wholes) -> dict[str, Any] | None:
    """Return the optimizer's state by parameter name; `wholes.left` gets what it lacks of the files."""
    wholes.left += _left_out(files)
    by_rank = {rank: of_optimizer(file).get(KEPT[files.stage]) for rank, file in files.optims.items()}
    if not any(by_rank.values()):
        return None
    joining = _Joining(files, layout, wholes)
    for group, listed in enumerate(names):
        entries = {rank: _entry(files.optims[rank], kept, group) for rank, kept in by_rank.items()}
        joining.add(group, listed, entries)
    state = {name: joining.state[name] for listed in names for name in listed if name in joining.state}
    if all(isinstance(kept, list) for kept in by_rank.values()):  # elastic_checkpoint keeps states alone
        missing = "the settings of the optimizer's parameter groups, which `elastic_checkpoint` leaves out"
        wholes.left.append(missing)
        return of_names(state, [{"params": list(listed)} for listed in names])
    return of_names(state, groups_by_name(files, by_rank, names))


class _Joining:
    """Joins what the ranks keep of each group into `state`, by parameter name."""

    def __init__(self, files: RunFiles, layout: Layout, wholes: Wholes) -> None:
        self.files, self.layout, self.wholes = files, layout, wholes
        self.state: dict[str, dict[str, object]] = {}
        self._numbers = Numbers()

    def add(self, group: int, names: Sequence[str], entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Add a group, of which each rank keeps an entry."""
        for key in self._common_keys(entries):
            values = {rank: entry[key] for rank, entry in entries.items()}
            parts = {rank: part for rank, value in values.items() if (part := tensor_of(value)) is not None}
            if key == "step" or len(parts) < len(values) or not all(part.shape for part in parts.values()):
                self._add_common(key, names, values)
            elif any(self.layout.fits(rank, group, part) for rank, part in parts.items()):
                self._add_momentum(key, group, parts)
            else:
                left = f"'{key[:80]}' of the optimizer's state, of other sizes than the parameters"
                self.wholes.left.append(left)

    def _common_keys(self, entries: Mapping[int, Mapping[str, Any]]) -> list[str]:
        first = min(entries)
        for rank, entry in entries.items():
            if entry.keys() != entries[first].keys():
                there = f"{self.files.optims[first].path} {_listed(entries[first])}"
                raise self.files.optims[rank].damaged(f"keeps {_listed(entry)} of a parameter, and {there}")
        return [*entries[first]]

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
    states = dict(enumerate(base)) if isinstance(base, list) else attributes(base).get("state")
    entry = states.get(group, {}) if isinstance(states, dict) else None
    if not has_text_keys(entry):
        raise file.damaged(f"has a malformed optimizer state of group {group}")
    return entry


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(name[:80] for name in sorted(entry)[:8]) or "no state"


def _copied(value: object) -> object:
    """Return a tensor with a storage of its own: optimizers count each parameter's steps in place."""
    if isinstance(value, TensorRef):
        return replace(value, storage=replace(value.storage, origins=(value.storage,)))
    return value


def groups_by_name(files: RunFiles, bases: Mapping[int, Any], names: Names) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, which list their parameters by name."""
    first, listed_by = min(bases), {rank: OptimizerView(base).all_groups for rank, base in bases.items()}
    groups, file = listed_by[first], files.optims[first]
    if other := next((files.optims[rank] for rank in bases if not same(listed_by[rank], groups)), None):
        what = f"is of another step or run: its optimizer's settings are not those in {file.path}"
        raise other.damaged(what)
    listed = [group.get("params") if isinstance(group, dict) else None for group in groups]
    numbers = [number for each in listed for number in (each if isinstance(each, list) else [None])]
    if numbers != [*range(len(names))]:
        raise file.damaged("has an optimizer of other parameter groups than its model")
    ordered = [given_order(name, files.world_size) if dealt_out(files) else list(name) for name in names]
    return [{**group, "params": [name for i in group["params"] for name in ordered[i]]} for group in groups]


def dealt_out(files: RunFiles) -> bool:
    """Return whether the vector has the parameters in another order than the optimizer."""
    return files.stage < 3 and zero_settings(files.first).get("round_robin_gradients") is True


def _left_out(files: RunFiles) -> Iterator[str]:
    """Yield in words what the optimizer's files hold and a merged checkpoint does not."""
    states = next(map(of_optimizer, files.optims.values()), {})
    scaler = states.get("loss_scaler")
    settings = attributes(scaler) if isinstance(scaler, Record) else {}
    if settings and settings.get("dynamic") is not False:
        yield f"the loss scaler (scale {in_brief(settings.get('cur_scale'))})"
    unknown = (name for name in states if name not in IN_USE)
    yield from (f"'{in_brief(name)[:80]}' of the ranks' optimizer states" for name in unknown)
