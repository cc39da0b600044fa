"""How a run begins from saved weights, or continues from a checkpoint. Imports torch.

Every rank that has the file loads it before any process group starts, so a file that does not fit is refused
on all of them. On several machines only rank 0's needs it: DDP sends rank 0's weights to all others.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool import errors
from ckpttool.conforming.modules import Blueprint
from ckpttool.core import formats
from ckpttool.core.checkpoint.checkpoint import Checkpoint
from ckpttool.core.checkpoint.dotted_names import dotted
from ckpttool.core.checkpoint.prefixes import found_prefixes
from ckpttool.core.checkpoint.state import SCORED, State, scored_average
from ckpttool.core.words import counted
from ckpttool.distributed import collectives
from ckpttool.distributed.group import given_rank
from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault
from ckpttool.models.factory import accepts
from ckpttool.models.fit import Aim, Case, command_line, compare
from ckpttool.models.reloading import Reloaded, reload
from ckpttool.models.report import Diagnosis
from ckpttool.models.treatment import diagnose, treat
from ckpttool.verifying import verify
from train.checkpoint import files
from train.checkpoint.files import LAST, newest_first
from train.checkpoint.format import COMPARED_BY_CONTENT, FREE, malformed, read, restore, versions
from train.config.flags import fields_of, shown
from train.config.sections import CHANGEABLE, TrainConfig, fields_of_change
from train.data.data_set import Contents, Data, flat
from train.model.updater import total_steps
from train.trainer.progress import Sums
from train.trainer.trainer import Trainer

# Names of one kind that a message shows; it counts the rest.
SHOWN = 8

# Kinds of problems that the lists of names show.
LISTED_ALREADY = ("missing", "unexpected", "size", "head")


def load_weights(model: nn.Module, path: str, allow_missing: Sequence[str] = ()) -> list[str]:
    """Load a file's weights into a model, strictly but for names that match a pattern of `allow_missing`.

    Returns remarks for the user; none on a rank without the file, unless it is rank 0, whose weights all get.

    Raises:
        UsageFault: the weights do not fit the model, or some are NaN or infinite, or a pattern matches no
            name of the model. The hint lists names and the commands that fix the file.
        Unreadable, Damaged, Unsupported, Refused: the file can't be read, or fails its checksums.
        NoState: it holds no model's state, or several and nothing says which to take.
    """
    if given_rank() != 0 and not os.path.exists(path):
        return []
    with formats.open(path) as checkpoint:
        state = _state(checkpoint)
        try:
            loaded = reload(checkpoint, model, allow_missing=allow_missing)
        except errors.NothingToDo as fault:
            raise UsageFault(f"--init-allow-missing: {fault.message}", hint=fault.hint) from None
        except errors.Mismatch as fault:
            raise _misfit(checkpoint, model, fault, allow_missing) from None
        verify.digest(checkpoint)  # compares checksums
        _require_finite(path, model)
        return list(_remarks_of_weights(checkpoint, state, model, loaded, allow_missing))


def digest_of_weights(path: str | None) -> str | None:
    """Return the SHA-256 of what `--init` takes from a file, the same for a copy in another format."""
    if not path:
        return None
    with formats.open(path) as checkpoint:
        _state(checkpoint)
        return verify.digest(checkpoint, verify=False)


def _state(checkpoint: Checkpoint) -> State:
    try:
        return checkpoint.state()
    except errors.NoState as error:
        names = [dotted(path) for path in checkpoint.states()]
        if len(names) < 2:
            raise
        taken_out = _slim(checkpoint.path, names[0])
        hint = f"take one out, and --init that: {taken_out}"
        raise errors.NoState(checkpoint.path, error.reason, hint=hint) from None


def _slim(path: str, where: str) -> str:
    output = f"{os.path.splitext(os.path.basename(path.rstrip('/')))[0]}.{where or 'state'}.safetensors"
    return command_line(["ckpttool", "slim", path, output, "--state", where])


def _require_finite(path: str, model: nn.Module) -> None:
    """Refuse weights from which no training recovers. Buffers may be infinite on purpose: masks are."""
    statistics = (pair for pair in model.named_buffers() if pair[0].endswith(("running_mean", "running_var")))
    values = (*model.named_parameters(), *statistics)
    bad = [name for name, value in values if not torch.isfinite(value).all()]
    if bad:
        verb = "is" if len(bad) == 1 else "are"
        what = f"--init {path}: {_listed(bad)} {verb} NaN or infinite: not a state to train from"
        raise UsageFault(what, hint=f"see where: {command_line(['ckpttool', 'verify', path])}")


# ---- remarks -------------------------------------------------------------------------------------------


def _remarks_of_weights(
    checkpoint: Checkpoint, state: State, model: nn.Module, loaded: Reloaded, patterns: Sequence[str]
) -> Iterator[str]:
    where = f", of '{state.where}'" if state.where else ""
    stripped = f", without '{loaded.prefix}'" if loaded.prefix else ""
    yield f"{len(loaded.loaded)} tensors from {checkpoint.path}{where}{stripped}"
    if loaded.kept:
        yield f"newly made, not loaded: {_listed(loaded.kept)}"
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in loaded.kept):
            yield f"--init-allow-missing {shlex.quote(pattern)}: the file has all of it"
    if loaded.added:
        count = len(loaded.added)
        plural = "s" * (count > 1)
        yield f"the file lacks {count} counter{plural} of BatchNorm, which begin{'s' * (not plural)} at 0"
    yield from _casts(state, model, loaded)
    for other in checkpoint.other_states(state.path):
        scored = f", {SCORED}" * (other == scored_average(checkpoint.tree))
        yield f"it also holds '{other}'{scored}; to start from that: {_slim(checkpoint.path, other)}"
    unused = [name for name in state.others if name not in model.state_dict()]
    unused += [name for name in checkpoint.outside(state) if name not in checkpoint.other_states(state.path)]
    if unused:
        yield f"not used: {_listed(unused)}"


def _casts(state: State, model: nn.Module, loaded: Reloaded) -> Iterator[str]:
    """Yield a remark for each change of an element type."""
    casts: Counter[tuple[str, str]] = Counter()
    own = model.state_dict()
    for name in loaded.loaded:
        saved = next((state.tensors[n] for n in (name, f"{loaded.prefix}{name}") if n in state.tensors), None)
        if saved is not None:
            casts[saved.dtype.name, str(own[name].dtype).removeprefix("torch.")] += 1
    for (theirs, ours), number in casts.items():
        if theirs == ours:
            continue
        are = "is" if number == 1 else "are"
        yield f"{counted(number, 'tensor')} {are} {theirs} in the file and {ours} here"


def _listed(names: Sequence[str], shown: int = SHOWN) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# ---- advice --------------------------------------------------------------------------------------------


def _misfit(
    checkpoint: Checkpoint, model: nn.Module, fault: errors.Mismatch, patterns: Sequence[str]
) -> UsageFault:
    """Return the error for weights that do not fit: names, and what to do about it."""
    mismatched = [f"{name} ({its} in the file, {ours} in the model)" for name, its, ours in fault.mismatched]
    kinds = {"missing": fault.missing, "unexpected": fault.unexpected, "of another shape": mismatched}
    said = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
    if not said:  # a module of the model refused its part
        return UsageFault(f"--init {fault.message}", hint=fault.hint)
    advice = _advice(checkpoint, model, patterns)
    lists = [line for kind, names in kinds.items() for line in _paragraph(kind, names)]
    # With several lines, the program prints a hint below the message.
    hint = "\n".join(lists + advice)
    return UsageFault(f"--init {checkpoint.path}: does not fit the model: {said}", hint=hint)


def _paragraph(kind: str, names: Sequence[str]) -> list[str]:
    text = f"{kind}: {_listed(names)}" if names else ""
    return textwrap.wrap(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _advice(checkpoint: Checkpoint, model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the commands that make the file fit and the flags that let it differ."""
    diagnosis = _diagnosis(checkpoint, model, patterns)
    fresh: tuple[str, ...] = ()
    if diagnosis.then is None:
        fresh = tuple(_patterns(_wanting(checkpoint, model), list(model.state_dict())))
        again = _diagnosis(checkpoint, model, (*patterns, *fresh))
        fresh, diagnosis = (fresh, again) if fresh and again.then else ((), diagnosis)
    if diagnosis.then is None:
        problems = [p for p in diagnosis.problems if p.kind not in LISTED_ALREADY and not p.is_remark]
        words = [problem.message.partition(";")[0] for problem in problems]  # what follows are names again
        return [*words, f"see what is in it: {command_line(['ckpttool', 'inspect', checkpoint.path])}"]
    commands = [p.command for p in diagnosis.problems if p.command and not p.is_remark]
    result, state = shlex.split(diagnosis.then)[2], checkpoint.state()
    wrappers = [["--prefix", found.prefix] for found in found_prefixes(state.tensors, state.versions)]
    if len(commands) == 1 and shlex.split(commands[0])[4:] in wrappers:
        commands, result = [], checkpoint.path  # loading takes it off too
    lines = ["rewrite the file:", *(f"  {command}" for command in commands)] if commands else []
    flags = [word for pattern in (*patterns, *fresh) for word in ("--init-allow-missing", pattern)]
    how = "start with what fits, the rest newly made:" if fresh else "start with:"
    return [*lines, how, f"  {command_line(['--init', result, *flags])}"]


def _wanting(checkpoint: Checkpoint, model: nn.Module) -> set[str]:
    """Return the names of the model for which the file has no values of their shape, whatever is renamed."""
    state, blueprint = checkpoint.state(), Blueprint.of(model)
    fit = treat(Case(checkpoint, state, blueprint, compare(state, blueprint), None, state)).case.fit
    return {*fit.missing, *(name for name, *_ in fit.mismatched)}


def _diagnosis(checkpoint: Checkpoint, model: nn.Module, patterns: Sequence[str]) -> Diagnosis:
    """Return why the file does not fit a model in which names that match a pattern may be missing."""
    blueprint = Blueprint.of(model)
    there = checkpoint.state().tensors
    places = {}
    for name, place in blueprint.places.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            places[name] = place
        elif any(key == name or key.endswith(f".{name}") for key in there):
            places[name] = replace(place, shape=None)  # any shape fits
    parameters = tuple(name for name in blueprint.parameters if name in places)
    reduced = replace(blueprint, places=places, parameters=parameters)
    return diagnose(checkpoint, reduced, Aim("MODEL"), accepts=partial(accepts, model))


def _patterns(wanting: Iterable[str], names: list[str]) -> Iterator[str]:
    """Yield patterns of whole layers for names; nothing if they are half of the model or more."""
    wanting = set(wanting)
    if 2 * len(wanting) >= len(names):
        return
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names if name in wanting)
    for layer in layers:
        below = [name for name in names if name.startswith(f"{layer}.")] if layer else []
        if below and wanting.issuperset(below):
            yield f"{layer}.*"
        else:
            yield from (name for name in names if name in wanting and name.rpartition(".")[0] == layer)


# ---- --resume ----------------------------------------------------------------------------------------


# Settings in which sums are taken in another order, though it is the same training.
DIVIDING = ("shard", "mesh")


class Resumed(NamedTuple):
    """What a run goes on from: remarks for the user, and the checkpoint's own digests (none: a new run)."""

    remarks: list[str]
    source: Mapping[str, Any] | None = None


def resume(trainer: Trainer, folder: str) -> Resumed:
    """Continue from the checkpoint that `--resume` names, if there is one. A collective.

    With `--resume auto` a damaged file is passed over if another one is whole.

    Raises:
        Unreadable, Damaged, Refused: on rank 0, as `format.read`; the other ranks raise RankFailed.
        UsageFault: likewise, if the file belongs to another training.
    """
    config = trainer.config
    opened = collectives.broadcast(lambda: _open(trainer, folder))
    if opened is None:
        trainer.init = collectives.from_rank_zero(lambda: digest_of_weights(config.model.init))
        new = config.saving.resume == "auto" or config.saving.change
        unused = ", so --change changes nothing" if config.saving.change else ""
        return Resumed([f"a new run: {folder} has no checkpoint{unused}"] if new else [])
    path, state, passed_over = opened
    with collectives.fail_together(), malformed(path):
        restore(trainer, files.joined_parts(path, state, trainer.ddp.state_dict()))
        remarks = _remarks(trainer, state, path)
    return Resumed(passed_over + remarks, {name: state.get(name) for name in ("digests", "chain")})


def _open(trainer: Trainer, folder: str) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the path of the checkpoint to continue from, its contents, and remarks; None for a new run."""
    resume = trainer.config.saving.resume
    if resume != "auto":
        return (resume, read_fitting(resume, trainer), []) if resume else None
    passed_over: list[str] = []
    first: FileError | None = None
    for path, *more in newest_first(folder):
        try:
            state = _whole(path, trainer)
        except UsageFault as fault:  # of another training, perhaps only since newer ones were passed over
            raise UsageFault("; ".join([fault.message, *passed_over]), hint=fault.hint) from fault
        if isinstance(state, dict):
            return path, state, passed_over
        also = f" (also named {', '.join(map(os.path.basename, more))})" if more else ""
        passed_over.append(f"passed over {state}{also}")
        first = first or state
    if first:
        others = f", and no other checkpoint in {folder} is whole" if len(passed_over) > 1 else ""
        hint = "move it away" if isinstance(first, Refused) else "--force starts over"
        raise Damaged(first.path, f"{first.reason}{others}", hint=hint)
    return None


def _whole(path: str, trainer: Trainer) -> dict[str, Any] | FileError:
    """Return a checkpoint that belongs to this training, or why it is not whole; else raise as `resume`."""
    try:
        return read_fitting(path, trainer)
    except (Damaged, Unreadable) as error:
        if isinstance(error.__cause__, PermissionError):  # for the user to change
            raise
        return error
    except Refused as error:  # of another program; a last.pt is the run's, or a mistake
        if os.path.basename(path) == LAST:
            raise
        return error


def read_fitting(path: str, trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint, if it is intact and belongs to this training; else raise as `resume`."""
    state = read(path)
    with malformed(path):
        files.check_parts(path, state)
        _check_same_training(path, state, trainer)
        trainer.updater.require_same_names(state["optimizer"])
        _check_position(path, state, trainer)
    return state


def _check_position(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    """Raise Damaged if the checkpoint's position is none in this training, or ranks are missing in it."""
    progress, ranks = state["progress"], state["plan"]["world_size"]
    steps = trainer.feed.steps_per_epoch
    counts = "epoch", "global_step", "samples", "uncounted", "since_best", "not_finite"
    if min(progress.get(name, 0) for name in counts) < 0:
        raise Damaged(path, "its progress is negative")
    # All of them are done only where a signal has cut short the evaluation that ends the epoch.
    if not 0 <= progress["step"] < steps + progress["unscored"]:
        raise Damaged(path, f"{progress['step']} steps of an epoch are done, which has {steps}")
    for part, of_ranks in (("rng", state["rng"]), ("progress.sums", progress["sums"])):
        if len(of_ranks) != ranks:
            raise Damaged(path, f"{part} is of {len(of_ranks)} ranks, and the run had {ranks}")
    if any(len(sums) != len(Sums.NAMES) for sums in progress["sums"]):
        raise Damaged(path, "progress.sums has another length than it was saved with")
    if any(len(one) != 2 for one in progress.get("top", ())):
        raise Damaged(path, "progress.top is not of merits and steps")
    saved, own = state["scheduler"], trainer.updater.scheduler.state_dict()
    for name, value in own.items():
        kinds = (int, float) if isinstance(value, float) else type(value)
        if not isinstance(saved.get(name, value), kinds):
            raise Damaged(path, f"scheduler.{name} is a {type(saved[name]).__name__}")
    skipped = state["scaler"].get("skipped", 0) + progress["uncounted"]
    if saved["last_epoch"] + skipped != progress["global_step"]:
        what = f"scheduler.last_epoch is {saved['last_epoch']} after {progress['global_step']} steps"
        raise Damaged(path, what)
    if len(saved["base_lrs"]) != len(own["base_lrs"]):
        raise Damaged(path, "scheduler.base_lrs has another length than it was saved with")


def _check_same_training(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    config, data, plan = trainer.config, trainer.data, state["plan"]
    fields = {name: field for name, (_, field) in fields_of(TrainConfig).items()}
    now, then = config.plain(), {**TrainConfig().plain(), **state["config"]}
    allowed = fields_of_change(config.saving.change)
    free = FREE | COMPARED_BY_CONTENT | allowed
    if other := [name for name in now if name not in free and now[name] != then.get(name)]:
        flags = " ".join(shown(fields[name], then.get(name)) for name in other)
        may = " ".join(f"--change {name.replace('_', '-')}" for name in other)
        instead = may if {*other} <= CHANGEABLE else "start another run"
        raise _other(path, f"with {flags}", f"give the same, or {instead}")
    judge = plan.get("judge", trainer.judge)
    if judge != trainer.judge and "best" not in allowed:
        what = f"whose --best {config.scores.best} is on another test set ({judge}; now {trainer.judge})"
        raise _other(path, what, "give the same --also-test, or --change best")
    same_ranks = plan["world_size"] == trainer.place.world_size
    for name in ("accumulate", *(("rank_share",) if same_ranks else ())):
        if now[name] == then[name] or name in allowed:
            continue
        if why := trainer.depends_on_passes(shares=name != "accumulate"):
            hint = f"give the same, or --change {name.replace('_', '-')}"
            raise _other(path, f"with {shown(fields[name], then[name])}, and {why}", hint)
    if config.model.init and digest_of_weights(config.model.init) != plan["init"]:
        started = f"that did not start from the weights in {config.model.init}"
        raise _other(path, started, "leave out --init, or start another run")
    if plan["data"] != data.fingerprint:
        both = f"({then['data']}: {plan['data']}; now {now['data']}: {data.fingerprint})"
        raise _other(path, f"on other samples {both}", "give the same --data, or start another run")
    _check_same_contents(path, plan["contents"], data)


def _other(path: str, what: str, hint: str) -> UsageFault:
    return UsageFault(f"{path}: belongs to a run {what}", hint=hint)


def _check_same_contents(path: str, then: Contents, data: Data) -> None:
    """Compare what both data sets describe."""
    before, now = flat(then), flat(data.contents)
    if all(before.get(name, digest) == digest for name, digest in now.items()):
        return
    now = flat(data.contents, data.redrawn())
    name = next((name for name, digest in now.items() if before.get(name, digest) != digest), None)
    if name is None:
        return
    hint = "give the same --data, seed the generators that its factory uses, or start another run"
    raise _other(path, f"on other samples: {name} of --data {data.name} is another now", hint)


def _remarks(trainer: Trainer, state: dict[str, Any], path: str) -> list[str]:
    """Return what the user should know about this resume: its position, and why bits may differ."""
    progress, steps, config = trainer.progress, trainer.feed.steps_per_epoch, trainer.config
    training = config.training
    ends = (
        ("--epochs", training.epochs, progress.epoch, "epoch"),
        ("--max-steps", training.max_steps, progress.global_step, "step"),
        ("--stop-early", config.scores.stop_early, progress.since_best, "evaluation"),
    )
    for flag, most, done, unit in ends:
        if most and done >= most:
            has = counted(done, unit) + " without a better score" * (flag == "--stop-early")
            return [f"{path} already has {has}: nothing to do ({flag} N trains longer)"]
    stream, data = trainer.feed.stream, f"--data {trainer.data.name}"
    of_steps = f" of {steps}" if stream is None else ""
    remarks = [f"continues from {path} at epoch {progress.epoch + 1}, step {progress.step}{of_steps}"]
    if stream is not None and progress.step and not stream.resumes:
        read = progress.step * config.batch.size
        remarks.append(f"{data} does not know its position: {read:,} samples are read again")
    before, after = state["plan"]["world_size"], trainer.place.world_size
    if before != after:
        but = " but for the repeats at the end of an epoch" * (trainer.feed.plan.sampler == "torch")
        but += ", and the same bits" * bool(config.batch.virtual_ranks)
        remarks.append(f"saved by {before} ranks, now {after}: the same samples in the same steps{but}")
    were, are = dict(state["versions"]), versions(trainer.place.device)
    then, now = {**TrainConfig().plain(), **state["config"]}, config.plain()
    were |= {name: then[name] for name in DIVIDING}
    are |= {name: now[name] for name in DIVIDING}
    if changed := [f"{name} {were.get(name)} -> {new}" for name, new in are.items() if were.get(name) != new]:
        remarks.append(f"the last bits may differ: {', '.join(changed)}")
    of_training, *_ = trainer.data.parts()
    if of_training.draws_itself() or (stream is not None and stream.varies()):
        why = f"{data} draws from random generators of its own"
        others = "(Python's, numpy's and torch's own are seeded for each sample)"
        remarks.append(f"{why}, so this run differs from one that never stopped {others}")
    changed = [name for name in sorted(fields_of_change(config.saving.change)) if then[name] != now[name]]
    remarks += [f"{name.replace('_', '-')} {then[name]} -> {now[name]}" for name in changed]
    before_it = replace(training, epochs=then["epochs"], max_steps=then["max_steps"])
    total = total_steps(training, steps)
    if total_steps(before_it, steps) != total and config.schedule.name != "none":
        length = f"{total} steps" if training.max_steps else f"{training.epochs} epochs"
        remarks.append(f"the learning rate now follows {length}")
    return remarks
