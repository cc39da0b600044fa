"""The files of a DeepSpeed run: which rank wrote which, and whether they are of one run and one step."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import HINT
from ...checkpoint.special_tensors import attributes
from ...errors import Damaged, Unreadable, Unsupported, UsageFault
from ...inert_pickle.values import Record
from ...remote.places import exists, folders_in, is_folder, names_in, open_source_at
from ...system import join
from ...tensors.source import Source
from ..pytorch import zip as torch_zip
from ..pytorch.archive import Archive
from ..ranks.agreement import Numbers
from ..ranks.pieces import Candidates, RankFile, in_order

LATEST = "latest"

# A universal folder has one for each parameter below this, and a file of settings.
ZERO, SETTINGS = "zero", "optimizer_state.pt"

TAG = re.compile(r"global_step(\d{1,15})")

OF_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states")
OF_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states")
OURS = re.compile(r".*(?:mp_rank_\d+|layer_\d+-model_\d+)[-_]?(?:model|optim)_states\.pt")

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
    if layer := re.match(r"layer_(\d{1,7})-model_(\d{1,7})", name):
        what = f"is layer {int(layer[1])} of a pipeline, part {int(layer[2])} of it"
        what += ": no file says what the model calls its layers"
        raise Unsupported(file.path, what, hint=TO_UNIVERSAL)
    of_model = OF_MODEL.fullmatch(name)
    named = of_model or OF_OPTIMIZER.fullmatch(name)
    if named is None or int(named["mp"]) or contents(file).get("mp_world_size") not in (None, 1):
        cut = "is of a run that cut the model itself (tensor or pipeline parallel, experts): no file says how"
        raise Unsupported(file.path, cut, hint=TO_UNIVERSAL)
    _check_not_renamed(file, name)
    return named, of_model is not None


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
    if any(count != counts[0] for count in counts):
        raise Unsupported(path, "cuts its parameter groups over different numbers of ranks, as experts are")
    return int(counts[0])


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
