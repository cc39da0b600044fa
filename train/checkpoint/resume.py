"""How a run continues from a checkpoint: which file, whether it fits, and what is restored."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ckpttool.distributed import collectives, randomness
from ckpttool.errors import Damaged, FileError, Refused, Unreadable, UsageFault
from train.checkpoint import changing
from train.checkpoint import files as checkpoint_files
from train.checkpoint import format as checkpoints
from train.checkpoint.saver import versions
from train.config.training import TrainConfig
from train.data.data_set import Data
from train.data.fingerprint import Contents, flat
from train.model import optimizer as optimizers
from train.run.limits import total_steps
from train.trainer import shares
from train.trainer.trainer import Progress, Trainer

# Flags that may differ on resume; a change of any other would make it another training.
FREE = {
    *("epochs", "max_steps", "accumulate", "workers", "backend", "spawn", "deterministic"),
    *("timeout", "join_timeout", "hang_timeout", "grace", "prove_every", "stop_at"),
    *("out", "save_every", "save", "keep", "resume", "force", "change", "data_root", "download"),
    *("rank_batch", "rank_share"),  # who takes which sample of a batch, not which samples are in it
    *("zero", "grad_checkpoint"),  # the same bits
    *("max_time", "eval_every", "eval_batch", "log_every", "tensorboard", "wandb", "preview", "json"),
}

# Settings of checkpoints that are older than the flag, where they are not its default.
BEFORE = {"decay_norms": True}

# Compared by content, not by value: the same folder or file may be elsewhere now.
COMPARED_BY_CONTENT = {"data", "init", "init_allow_missing"}


def resume(trainer: Trainer, folder: str) -> list[str]:
    """Continue from the checkpoint that `--resume` names, if there is one. A collective.

    Args:
        trainer: at its start; it is then where the checkpoint was.
        folder: the run's folder, for `--resume auto`.

    Returns:
        Remarks for the user; none for a fresh start.

    Raises:
        Unreadable, Damaged, Refused: on rank 0, as `checkpoints.read`; the other ranks raise RankFailed. With
            `--resume auto` a damaged file is passed over if another one is whole.
        UsageFault: likewise, if the file belongs to another training.
    """
    config = trainer.config
    found = collectives.broadcast(lambda: _find(trainer, folder))
    if found is None:
        trainer.started_from = collectives.from_rank_zero(lambda: _weights(config))
        return ["there is no checkpoint yet: a new run, so --change changes nothing"] if config.change else []
    path, state, passed_over = found
    with collectives.fail_together(), checkpoints.malformed(path):
        restore(trainer, state)
        remarks = _remarks(trainer, state, path)
    if trainer.epoch_is_done() and not trainer.progress.unscored:  # as older versions saved it
        trainer.finish_epoch()
    return passed_over + remarks


def _weights(config: TrainConfig) -> str | None:
    """Return the digest of the weights that `--init` names."""
    from train.checkpoint import init_from

    return init_from.digest(config.init) if config.init else None


def _find(trainer: Trainer, folder: str) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the path of the checkpoint to continue from, its contents, and remarks; None for a new run."""
    resume = trainer.config.resume
    if resume != "auto":
        return (resume, read_fitting(resume, trainer), []) if resume else None
    passed_over: list[str] = []
    first: FileError | None = None
    for path, *more in checkpoint_files.newest_first(folder):
        found = _whole(path, trainer)
        if isinstance(found, dict):
            return path, found, passed_over
        also = f" (also named {', '.join(map(os.path.basename, more))})" if more else ""
        passed_over.append(f"passed over {found}{also}")
        first = first or found
    if first:
        others = f", and no other checkpoint in {folder} is whole" if len(passed_over) > 1 else ""
        hint = "move it away" if isinstance(first, Refused) else "--force starts over"
        raise Damaged(first.path, f"{first.reason}{others}", hint=hint)
    return None


def _whole(path: str, trainer: Trainer) -> dict[str, Any] | FileError:
    """Return a checkpoint that belongs to this training, or why it is not whole; else raise as `resume`.

    A numbered or best one of another program is passed over too; a last.pt is the run's, or a mistake.
    """
    try:
        return read_fitting(path, trainer)
    except (Damaged, Unreadable) as error:
        if isinstance(error.__cause__, PermissionError):  # for the user to change
            raise
        return error
    except Refused as error:
        if os.path.basename(path) == checkpoint_files.LAST:
            raise
        return error


def read_fitting(path: str, trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint, if it is intact and belongs to this training; else raise as `resume`."""
    state = checkpoints.read(path)
    with checkpoints.malformed(path):
        _count_samples(state)
        _check_same_training(path, state, trainer)
        _check_position(path, state, trainer)
    return state


def _count_samples(state: dict[str, Any]) -> None:
    """Complete the sums of an older version, which did classification alone: the count is of samples."""
    progress = state["progress"]
    progress["sums"] = [[*sums, sums[2]] if len(sums) == 3 else sums for sums in progress["sums"]]


def _check_position(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    """Raise Damaged if the checkpoint's position is none in this training, or ranks are missing in it."""
    progress, ranks = state["progress"], state["plan"]["world_size"]
    steps = trainer.steps_per_epoch
    if min(progress["epoch"], progress["global_step"], progress["samples"]) < 0:
        raise Damaged(path, "its progress is negative")
    if not 0 <= progress["step"] <= steps:  # all of them: saved before the epoch was counted
        raise Damaged(path, f"{progress['step']} steps of an epoch are done, which has {steps}")
    for part, found in (("rng", state["rng"]), ("progress.sums", progress["sums"])):
        if len(found) != ranks:
            raise Damaged(path, f"{part} is of {len(found)} ranks, and the run had {ranks}")
    if any(len(sums) != len(trainer.sums.NAMES) for sums in progress["sums"]):
        raise Damaged(path, "progress.sums has another length than it was saved with")
    saved, own = state["scheduler"], trainer.scheduler.state_dict()
    for name, value in own.items():
        kinds = (int, float) if isinstance(value, float) else type(value)
        if not isinstance(saved.get(name, value), kinds):
            raise Damaged(path, f"scheduler.{name} is a {type(saved[name]).__name__}")
    skipped = state.get("scaler", {}).get("skipped", 0)
    if saved["last_epoch"] + skipped != progress["global_step"]:
        raise Damaged(
            path, f"scheduler.last_epoch is {saved['last_epoch']} after {progress['global_step']} steps"
        )
    if len(saved["base_lrs"]) != len(own["base_lrs"]):
        raise Damaged(path, "scheduler.base_lrs has another length than it was saved with")


def _check_same_training(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    now, then = trainer.config.plain(), {**TrainConfig().plain(), **BEFORE, **state["config"]}
    allowed = changing.fields(trainer.config.change)
    free = FREE | COMPARED_BY_CONTENT | allowed
    other = [name for name in now if name not in free and now[name] != then.get(name)]
    if other:
        flags = " ".join(_flag(name, then.get(name)) for name in other)
        may = " ".join(f"--change {name.replace('_', '-')}" for name in other)
        instead = may if {*other} <= changing.CHANGEABLE else "start another run"
        raise UsageFault(f"{path}: belongs to a training with {flags}", hint=f"give the same, or {instead}")
    changing.require_same_groups(now, then, allowed)
    if trainer.config.init and _weights(trainer.config) != state["plan"].get("init"):
        raise UsageFault(
            f"{path}: belongs to a training that did not start from the weights in {trainer.config.init}",
            hint="leave out --init, or start another run",
        )
    if state["plan"]["data"] != trainer.data.fingerprint:
        raise UsageFault(
            f"{path}: belongs to a training on other samples ({then['data']}: {state['plan']['data']}; now "
            f"{now['data']}: {trainer.data.fingerprint})",
            hint="give the same --data, or start another run",
        )
    _check_same_contents(path, state["plan"].get("contents", {}), trainer.data)


def _check_same_contents(path: str, then: Contents, data: Data) -> None:
    """Compare what both data sets describe; a checkpoint of an older version describes nothing."""
    before, now = flat(then), flat(data.contents)
    if all(before.get(name, digest) == digest for name, digest in now.items()):
        return
    now = flat(data.contents, data.redrawn())
    name = next((name for name, digest in now.items() if before.get(name, digest) != digest), None)
    if name is None:
        return
    raise UsageFault(
        f"{path}: belongs to a training on other samples: {name} of --data {data.name} is another now",
        hint="give the same --data, seed the generators that its factory uses, or start another run",
    )


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or value is None:
        return flag if value else f"no {flag}"
    return f"{flag} {','.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore everything. On another number of ranks, the random numbers are drawn anew.

    Raises:
        UsageFault: the model has parameters of other names or shapes than the saved one.
    """
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    saved = state["optimizer"]
    if _parameter_names(saved) != _parameter_names({"param_groups": fresh}):
        raise UsageFault(
            f"--model {trainer.config.model}: its parameters have other names than the saved ones"
        )
    try:
        trainer.ddp.load_state_dict(state["model"], strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageFault(f"--model {trainer.config.model}: differs from the saved model: {reason}") from error
    optimizers.restore(trainer.optimizer, saved)
    trainer.scheduler.load_state_dict(state["scheduler"])
    changing.apply(trainer, fresh)
    trainer.started_from = state["plan"].get("init")
    trainer.resumed = {name: state.get(name) for name in ("digests", "chain")}
    trainer.precision.load_state_dict(state.get("scaler", {}))
    if trainer.ema:
        trainer.ema.load_state_dict(state["ema"])
    shares.restore(trainer, state["plan"], state["config"].get("rank_share"))
    if "log" in state:
        trainer.log.restore(state["log"], trainer.place.rank, trainer.place.world_size)
    progress = dict(state["progress"])
    sums, states, rank = progress.pop("sums"), state["rng"], trainer.place.rank
    trainer.progress = Progress(**progress)
    if len(states) == trainer.place.world_size:
        trainer.sums.restore(sums[rank])
        randomness.put_back(states[rank])
        return
    if rank == 0:  # a different number of ranks: one of them holds the total
        trainer.sums.restore([sum(column) for column in zip(*sums, strict=True)])
    seed = randomness.seed_from(trainer.config.seed, "rank", rank, progress["global_step"])
    randomness.seed_all(seed)


def _parameter_names(optimizer: dict[str, Any]) -> list[list[str]]:
    return [group["param_names"] for group in optimizer["param_groups"]]


def _remarks(trainer: Trainer, state: dict[str, Any], path: str) -> list[str]:
    """What the user should know about this resume: its position, and why bits may differ."""
    progress, steps, config = trainer.progress, trainer.steps_per_epoch, trainer.config
    if progress.epoch >= config.epochs:
        done = f"{progress.epoch} epoch{'s' * (progress.epoch != 1)}"
        return [f"{path} already has {done}: nothing to do (--epochs N trains longer)"]
    if config.max_steps and progress.global_step >= config.max_steps:
        done = f"{progress.global_step} step{'s' * (progress.global_step != 1)}"
        return [f"{path} already has {done}: nothing to do (--max-steps N trains longer)"]
    remarks = [f"continues from {path} at epoch {progress.epoch + 1}, step {progress.step} of {steps}"]
    before, after = state["plan"]["world_size"], trainer.place.world_size
    if before != after:
        but = " but for the repeats at the end of an epoch" * (trainer.plan.sampler == "torch")
        but += ", and the same bits" * bool(config.virtual_ranks)
        remarks.append(f"saved by {before} ranks, now {after}: the same samples in the same steps{but}")
    were, are = state["versions"], versions(trainer.place.device)
    changed = [
        f"{name} {were.get(name)} -> {value}" for name, value in are.items() if were.get(name) != value
    ]
    if changed:
        remarks.append(f"the last bits may differ: {', '.join(changed)}")
    then = {**TrainConfig().plain(), **state["config"]}
    remarks += [
        f"{name.replace('_', '-')} {then[name]} -> {now}"
        for name in sorted(changing.fields(config.change))
        if then[name] != (now := config.plain()[name])
    ]
    before_it = replace(config, epochs=then["epochs"], max_steps=then["max_steps"])
    if total_steps(before_it, steps) != total_steps(config, steps) and config.scheduler != "none":
        length = f"{total_steps(config, steps)} steps" if config.max_steps else f"{config.epochs} epochs"
        remarks.append(f"the learning rate now follows {length}")
    return remarks
