"""The files of a DeepSpeed run: which rank wrote which, and whether they are of one run and one step."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..core.checkpoint.checkpoint import HINT, Checkpoint
from ..core.checkpoint.optimizer_view import OptimizerView, of_names
from ..core.checkpoint.special_tensors import attributes
from ..core.formats.pytorch import zip as torch_zip
from ..core.formats.pytorch.archive import Archive
from ..core.inert_pickle.values import Record, has_text_keys, in_brief, tensor_of
from ..core.remote.places import exists, folders_in, is_folder, names_in, open_source_at
from ..core.system import join
from ..core.tensors.ref import DTYPES, Source, Storage, TensorRef, count_of
from ..errors import Damaged, Unreadable, Unsupported, UsageFault
from .merge_trees import Held, Numbers, require_one, same
from .pieces import Candidates, RankFile, RankPiece, Wholes, in_order

LATEST = "latest"

# A universal folder has one for each parameter below this, and a file of settings.
ZERO, SETTINGS = "zero", "optimizer_state.pt"

TAG = re.compile(r"global_step(\d{1,15})")

OF_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states")
OF_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states")
OURS = re.compile(r".*(?:mp_rank_\d+|layer_\d+(?:-model_\d+)?)[-_]?(?:model|optim)_states\.pt")

MAX_RANKS = 1 << 16

# DeepSpeed's own program, which knows the rules of the model.
TO_UNIVERSAL = (
    "make a universal folder of it, which is read here: "
    "ds_to_universal.py --input_folder FOLDER --output_folder UNIVERSAL"
)

NO_MODELS = "has no file *_model_states.pt, which names the parameters"

OF_STAGE_3, OF_STAGES_1_AND_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one checkpoint of one run."""

    path: str  # the folder
    stage: int  # of ZeRO, 0 to 3
    world_size: int  # how many ranks there were
    # rank -> its file with model states, and with optimizer states, in the order of the ranks.
    models: Mapping[int, RankFile]
    optims: Mapping[int, RankFile]
    missing: tuple[int, ...] = ()  # ranks of which a file is not there
    lacking: tuple[str, ...] = ()  # the names of these files, where those of the others tell them

    @property
    def first(self) -> RankFile:
        """The model states of the first rank whose file is there."""
        return next(iter(self.models.values()))

    @property
    def facts(self) -> dict[Any, Any]:
        """What that file holds: the counters, the configuration and the client's state."""
        return contents(self.first)


def candidates(folder: str) -> Candidates:
    """Return the files of DeepSpeed's ranks in a folder, or in that which `latest` names there."""
    if here := states_in(folder):
        return Candidates(here)
    below = [name for name in folders_in(folder) if not is_universal(join(folder, name))]
    tags = {name: states for name in below if (states := states_in(join(folder, name)))}
    if not tags:
        return Candidates([])
    hint = f"name one: {', '.join(shlex.quote(join(folder, tag)) for tag in [*tags][:4])}"
    named = named_by(folder, LATEST)
    if named is None:
        if len(tags) > 1:
            raise Unreadable(folder, f"has no file '{LATEST}' that names one of its checkpoints", hint=hint)
        return Candidates(tags.popitem()[1])
    tag, source = named
    if tag not in tags:
        if is_universal(join(folder, tag)):
            return Candidates([])
        raise Damaged(source.path, f"names the checkpoint {tag[:80]!r}, which is not next to it", hint=hint)
    return Candidates(tags[tag], (source,))


def named_by(folder: str, telling: str) -> tuple[str, Source] | None:
    """Return the folder that a file such as `latest` names, with the open file; None if there is none."""
    path = join(folder, telling)
    if not exists(path) or is_folder(path):  # OLMo's `latest` is a link to a folder
        return None
    source = open_source_at(path)
    return source.read(0, min(source.size, 4096)).decode(errors="replace").strip(), source


def is_universal(folder: str) -> bool:
    """Return whether `ds_to_universal.py` wrote a folder."""
    zero = join(folder, ZERO)
    if "\0" in folder or os.path.basename(folder) in ("", ".", "..") or not is_folder(zero):
        return False
    telling = (SETTINGS, *(join(name, "fp32.pt") for name in names_in(zero)))
    return any(exists(join(zero, name)) for name in telling)


def states_in(folder: str) -> list[str]:
    return [join(folder, name) for name in names_in(folder) if OURS.fullmatch(name)]


def is_ours(path: str) -> bool:
    """Return whether a file has the name that DeepSpeed gives a rank's file."""
    return OURS.fullmatch(os.path.basename(path)) is not None


def sorted_out(path: str, files: Sequence[Checkpoint]) -> RunFiles:
    """Return the files of a run, told apart by their names and checked against each other."""
    kinds: dict[bool, list[RankFile]] = {True: [], False: []}
    ranked: set[bool] = set()
    for file in files:
        named, is_model = _named(file)
        tree = contents(file)
        world = _world_size(file.path, tree, is_model)
        kinds[is_model].append(RankFile(file.source, tree, int(named["rank"] or 0), world))
        if is_model:
            ranked.add(named["rank"] is not None)
    if not kinds[True]:
        raise Damaged(path, NO_MODELS, hint=HINT)
    models, optims = in_order(kinds[True]), in_order(kinds[False])
    first = models.files[0]
    for other in kinds[False]:
        other.require_world_of(first)
    world_size, stage = first.world_size or 1, _stage(first, kinds[False])
    if ranked != {stage == 3}:
        raise first.damaged(f"does not belong to the other files here, of ZeRO stage {stage}")
    cut = [kind for kind, is_cut in ((models, stage == 3), (optims, stage > 0)) if is_cut]
    missing = {rank for kind in cut for rank in kind.missing}
    if stage and not optims.files:
        missing = {*range(world_size)}
    lacking = tuple(name for kind in cut for name in kind.lacking)
    return RunFiles(path, stage, world_size, models.by_rank, optims.by_rank, tuple(sorted(missing)), lacking)


def _named(file: Checkpoint) -> tuple[re.Match[str], bool]:
    """Return what the name of a file says, and whether it has model states."""
    if not is_ours(file.path):
        raise Damaged(file.path, "is no file of DeepSpeed's ranks, as the others are", hint="leave it out")
    name = os.path.basename(file.path).removesuffix(".pt")
    of_model = OF_MODEL.fullmatch(name)
    named = of_model or OF_OPTIMIZER.fullmatch(name)
    if named is None:
        what = "has a name that is none of a model's or an optimizer's states: no file says what it is of"
        raise Unsupported(file.path, what, hint=TO_UNIVERSAL)
    _check_not_renamed(file, name)
    return named, of_model is not None


def part_of(file: Checkpoint) -> int:
    """Return the number of the part of the model that a file is of."""
    return int(_named(file)[0]["mp"])


def _check_not_renamed(file: Checkpoint, name: str) -> None:
    """Refuse a file that is another rank's under a new name: torch.save keeps the first name inside."""
    # Only a file that was written through a buffer says nothing.
    if file.format == torch_zip.NAME:
        written = Archive(file.source).root
        if written != name and (OF_MODEL.fullmatch(written) or OF_OPTIMIZER.fullmatch(written)):
            what = f"was saved as '{written[:80]}.pt', so it is another rank's file under this name"
            hint = "give it its own name again, or copy the files of all ranks once more"
            raise Damaged(file.path, what, hint=hint)


def contents(file: Checkpoint | RankFile) -> dict[Any, Any]:
    """Return the dict in a file. Raises Damaged when there is something else in it."""
    if not isinstance(file.tree, dict):
        raise Damaged(file.path, "holds no dict, as the files of DeepSpeed's ranks do")
    return file.tree


def of_optimizer(file: RankFile) -> dict[Any, Any]:
    """Return the optimizer's states in a rank's file. Raises Damaged when they are not there."""
    return entry(file, "optimizer_state_dict")


def entry(file: RankFile, name: str) -> dict[Any, Any]:
    """Return a dict in a file. Raises Damaged when there is none of this name."""
    inner = file.tree.get(name)
    if not isinstance(inner, dict):
        raise file.damaged(f"has no dict '{name}'")
    return inner


def _world_size(path: str, tree: Mapping[Any, Any], is_model: bool) -> int:
    name = "dp_world_size" if is_model else "partition_count"
    stated = (tree if is_model else attributes(tree.get("optimizer_state_dict"))).get(name)
    counts: list[Any] = stated if isinstance(stated, list) and stated else [stated]
    if any(type(count) is not int or not 0 < count <= MAX_RANKS for count in counts):
        raise Damaged(path, f"does not say how many ranks there were ('{name}')")
    if any(max(counts) % count for count in counts):
        raise Unsupported(path, "cuts its parameter groups over numbers of ranks that no experts divide")
    return int(max(counts))


def zero_settings(file: RankFile) -> Mapping[str, Any]:
    """Return the settings of ZeRO that a file with model states has."""
    return attributes(attributes(file.tree.get("ds_config")).get("zero_optimization"))


def _stage(first: RankFile, optims: Sequence[RankFile]) -> int:
    """Return the stage of ZeRO; each file of an optimizer must say the same."""
    if not optims:
        stage = zero_settings(first).get("stage")
        return 0 if not first.tree.get("param_shapes") else stage if stage in (1, 2, 3) else 1
    stages = [_stage_of(file) for file in optims]
    for file, stage in zip(optims, stages, strict=True):
        if stage != stages[0]:
            raise file.damaged(f"is of ZeRO stage {stage}, and {optims[0].path} of stage {stages[0]}")
    return stages[0]


def _stage_of(file: RankFile) -> int:
    states = of_optimizer(file)
    stage = states.get("zero_stage")
    if isinstance(stage, Record) and isinstance(stage.args, tuple) and len(stage.args) == 1:
        stage = stage.args[0]
    if stage is None and OF_STAGES_1_AND_2 in states:
        return 1  # BF16_Optimizer does not say it
    if type(stage) is not int or stage not in (1, 2, 3):
        raise Damaged(file.path, "does not say its stage of ZeRO ('zero_stage')")
    return stage


# The training step.


def one_step(files: RunFiles, optimizer: object, take_step: int | None) -> int | None:
    """Return the step that a run's files state; Damaged where they state several and none is taken."""
    # Weights and momenta are the optimizer's files', counters and buffers those of the model states: of two
    # steps they would be a checkpoint that never was.
    stated = dict(_steps(files, optimizer))
    if take_step is not None and take_step not in stated.values():
        known = ", ".join(f"{step} ({where})" for where, step in stated.items()) or "none"
        raise UsageFault(f"{files.path}: is of no step {take_step}; its files state {known}")
    if take_step is None and len({*stated.values()}) > 1:
        told = ", ".join(f"{where} states {step}" for where, step in stated.items())
        hint = "copy the files of one step; if you know that they belong together, "
        hint += "as after a restart of the optimizer: "
        command = f"ckpttool merge {shlex.quote(files.path)} OUTPUT --take-step {max(stated.values())}"
        raise files.first.damaged(f"is of another step than what it lies with: {told}", hint + command)
    return take_step if take_step is not None else next(iter(stated.values()), None)


def _steps(files: RunFiles, optimizer: object) -> Iterator[tuple[str, int]]:
    """Yield each place that states the step, with it."""
    step, skipped = files.facts.get("global_steps"), files.facts.get("skipped_steps")
    skipped = skipped if type(skipped) is int else 0
    if type(step) is int:
        yield "'global_steps'", step
    numbers, state = Numbers(), attributes(attributes(optimizer).get("state"))
    counts = [numbers.of(kept.get("step")) for kept in state.values()]
    if made := [count for count in counts if count is not None and count == count]:
        yield "the optimizer", int(max(made)) + skipped  # it counts no step whose gradients overflowed
    if tag := TAG.fullmatch(os.path.basename(os.path.dirname(files.first.path))):
        yield "the folder's name", int(tag[1])


# ---- The flat vectors that DeepSpeed's ZeRO cuts over the ranks: where each parameter lies, and the way
# back.
#
# ZeRO joins the parameters of a group into one vector. Stages 1 and 2 cut that vector: rank r holds
# elements r·P to (r+1)·P, and P is even. Stage 3 cuts each parameter: every rank holds ceil(n/W) of its n
# elements, one parameter after another, the last rank's filled up. The fp32 weights and each momentum are
# cut alike. A rank's optimizer sees one parameter a group, its part of the vector: `state` is keyed by
# the group's number. Source: DeepSpeed's `runtime/zero/stage_1_and_2.py`, `stage3.py` and
# `utils/zero_to_fp32.py`, to 0.19.8.


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
