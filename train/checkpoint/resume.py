"""How a run continues from a checkpoint: which file, whether it fits, what to tell. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.distributed import collectives
from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault
from ckpttool.words import counted
from train.checkpoint import init_from, parts
from train.checkpoint.files import LAST, newest_first
from train.checkpoint.format import COMPARED_BY_CONTENT, FREE, malformed, read, restore, versions
from train.config import training
from train.config.flags import shown
from train.config.training import CHANGEABLE, TrainConfig
from train.data.data_set import Data
from train.data.fingerprint import Contents, flat
from train.model.schedule import total_steps
from train.trainer.progress import Sums
from train.trainer.trainer import Trainer

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
        trainer.init = collectives.from_rank_zero(lambda: _weights(config))
        new = config.resume == "auto" or config.change
        unused = ", so --change changes nothing" if config.change else ""
        return Resumed([f"a new run: {folder} has no checkpoint{unused}"] if new else [])
    path, state, passed_over = opened
    with collectives.fail_together(), malformed(path):
        restore(trainer, parts.joined(path, state, trainer.ddp.state_dict()))
        remarks = _remarks(trainer, state, path)
    return Resumed(passed_over + remarks, {name: state.get(name) for name in ("digests", "chain")})


def _weights(config: TrainConfig) -> str | None:
    """Return the digest of the weights that `--init` names."""
    return init_from.digest(config.init) if config.init else None


def _open(trainer: Trainer, folder: str) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the path of the checkpoint to continue from, its contents, and remarks; None for a new run."""
    resume = trainer.config.resume
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
        parts.check(path, state)
        _check_same_training(path, state, trainer)
        trainer.updater.require_same_names(state["optimizer"])
        _check_position(path, state, trainer)
    return state


def _check_position(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    """Raise Damaged if the checkpoint's position is none in this training, or ranks are missing in it."""
    progress, ranks = state["progress"], state["plan"]["world_size"]
    steps = trainer.feed.steps_per_epoch
    counts = "epoch", "global_step", "samples", "uncounted", "since_best"
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
    fields = TrainConfig.__dataclass_fields__
    now, then = config.plain(), {**TrainConfig().plain(), **state["config"]}
    allowed = training.fields(config.change)
    free = FREE | COMPARED_BY_CONTENT | allowed
    if other := [name for name in now if name not in free and now[name] != then.get(name)]:
        flags = " ".join(shown(fields[name], then.get(name)) for name in other)
        may = " ".join(f"--change {name.replace('_', '-')}" for name in other)
        instead = may if {*other} <= CHANGEABLE else "start another run"
        raise _other(path, f"with {flags}", f"give the same, or {instead}")
    judge = plan.get("judge", trainer.judge)
    if judge != trainer.judge and "best" not in allowed:
        what = f"whose --best {config.best} is on another test set ({judge}; now {trainer.judge})"
        raise _other(path, what, "give the same --also-test, or --change best")
    same_ranks = plan["world_size"] == trainer.place.world_size
    for name in ("accumulate", *(("rank_batch", "rank_share") if same_ranks else ())):
        if now[name] == then[name] or name in allowed:
            continue
        if why := trainer.depends_on_passes(shares=name != "accumulate"):
            hint = f"give the same, or --change {name.replace('_', '-')}"
            raise _other(path, f"with {shown(fields[name], then[name])}, and {why}", hint)
    if config.init and _weights(config) != plan["init"]:
        started = f"that did not start from the weights in {config.init}"
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
    ends = (
        ("--epochs", config.epochs, progress.epoch, "epoch", ""),
        ("--max-steps", config.max_steps, progress.global_step, "step", ""),
        ("--stop-early", config.stop_early, progress.since_best, "evaluation", " without a better score"),
    )
    for flag, most, done, unit, which in ends:
        if most and done >= most:
            has = f"{counted(done, unit)}{which}"
            return [f"{path} already has {has}: nothing to do ({flag} N trains longer)"]
    stream = trainer.feed.stream
    of_steps = f" of {steps}" if stream is None else ""
    remarks = [f"continues from {path} at epoch {progress.epoch + 1}, step {progress.step}{of_steps}"]
    if stream is not None and progress.step and not stream.resumes:
        read = progress.step * config.batch_size
        remarks.append(
            f"--data {trainer.data.name} does not know its position: {read:,} samples are read again"
        )
    before, after = state["plan"]["world_size"], trainer.place.world_size
    if before != after:
        but = " but for the repeats at the end of an epoch" * (trainer.feed.plan.sampler == "torch")
        but += ", and the same bits" * bool(config.virtual_ranks)
        remarks.append(f"saved by {before} ranks, now {after}: the same samples in the same steps{but}")
    were, are = dict(state["versions"]), versions(trainer.place.device)
    then, now = {**TrainConfig().plain(), **state["config"]}, config.plain()
    were |= {name: then[name] for name in DIVIDING}
    are |= {name: now[name] for name in DIVIDING}
    if changed := [f"{name} {were.get(name)} -> {new}" for name, new in are.items() if were.get(name) != new]:
        remarks.append(f"the last bits may differ: {', '.join(changed)}")
    of_training, *_ = trainer.data.parts()
    if of_training.draws_itself() or (stream is not None and stream.varies()):
        why = f"--data {trainer.data.name} draws from random generators of its own"
        others = "(Python's, numpy's and torch's own are seeded for each sample)"
        remarks.append(f"{why}, so this run differs from one that never stopped {others}")
    remarks += [
        f"{name.replace('_', '-')} {then[name]} -> {now[name]}"
        for name in sorted(training.fields(config.change))
        if then[name] != now[name]
    ]
    before_it = replace(config, epochs=then["epochs"], max_steps=then["max_steps"])
    if total_steps(before_it, steps) != total_steps(config, steps) and config.scheduler != "none":
        length = f"{total_steps(config, steps)} steps" if config.max_steps else f"{config.epochs} epochs"
        remarks.append(f"the learning rate now follows {length}")
    return remarks
