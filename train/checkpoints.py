"""What is saved, when, and how a run resumes.

A checkpoint is one dict of primitives and tensors, so `torch.load(weights_only=True)` reads it. It holds
what the next step depends on and nothing else: from it a run continues as if it had never stopped, bit for
bit on the same number of ranks. Only rank 0 writes and reads; the others send and receive.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

import ckpttool
from ckpttool.distributed import collectives
from ckpttool.errors import CheckFailed, Damaged, Refused, Unreadable, UsageFault
from train import random_state, run_folder
from train.config import TrainConfig
from train.engine import Progress, Trainer

# Flags that may differ on resume; a change of any other would make it another training.
FREE = {
    *("epochs", "accumulate", "workers", "backend", "timeout", "spawn", "deterministic"),
    *("out", "save_every", "keep", "resume", "force", "data_root", "download"),
}

# Compared by content, not by value: the same folder may be elsewhere now.
COMPARED_BY_CONTENT = {"data"}

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"


def capture(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next step depends on. A collective: checks what must be equal on all ranks.

    Raises:
        RanksDiffer: on every rank, if parameters, buffers or optimizer states are not equal on all.
    """
    with trainer.one_model():
        model, optimizer = trainer.ddp.state_dict(), trainer.optimizer.state_dict()
    digests = {
        "model": collectives.compare(model, "before saving", hint=ON_SOME_RANKS),
        "optimizer": collectives.compare(_named(optimizer), "before saving", hint=ON_SOME_RANKS),
    }
    own = {"statistics": collectives.gather(trainer.statistics.take())} if trainer.statistics else {}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        "progress": dataclasses.asdict(trainer.progress)
        | {"sums": collectives.gather(trainer.sums.tolist())},
        "plan": dataclasses.asdict(trainer.plan)
        | {"world_size": collectives.world_size(), "data": trainer.data.fingerprint},
        "rng": collectives.gather(random_state.take()),
        "config": trainer.config.plain(),
        "digests": digests,
        "versions": versions(trainer.place.device),
        **own,
    }


def versions(device: torch.device) -> dict[str, Any]:
    """What the last bits of a result depend on, apart from the checkpoint."""
    return {
        "ckpttool": ckpttool.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


def _named(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state, flat: `momentum_buffer of module.conv1.weight` -> tensor."""
    flat: dict[str, Any] = {}
    for number, group in enumerate(optimizer["param_groups"]):
        names = dict(zip(group["params"], group["param_names"], strict=True))
        flat[f"the optimizer's settings of group {number}"] = sorted(group.items())
        for index, name in names.items():
            for kind, value in optimizer["state"].get(index, {}).items():
                flat[f"{kind} of {name}"] = value
    return flat


# ---- saving --------------------------------------------------------------------------------------------


def save(trainer: Trainer, folder: str, names: list[str]) -> None:
    """Writes one checkpoint under each of these names. If rank 0 can't, every rank fails.

    Raises:
        RanksDiffer: nothing is written.
        FileError: the file could not be written; the old one is unchanged.
    """
    state = capture(trainer)
    with collectives.together():
        if collectives.rank() == 0:
            run_folder.write(state, folder, names)


class Saver:
    """Decides when to save: every `--save-every`, after the last epoch, and for the best model so far."""

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder = trainer, folder

    def after_step(self) -> None:
        count, unit = self.trainer.config.save_every
        if unit == "steps" and self.trainer.progress.global_step % count == 0:
            self._save([run_folder.LAST])

    def after_epoch(self, *, best: bool) -> None:
        count, unit = self.trainer.config.save_every
        epoch = self.trainer.progress.epoch
        due = (unit == "epochs" and epoch % count == 0) or epoch == self.trainer.config.epochs
        self._save([run_folder.LAST] * due + [run_folder.BEST] * best)

    def _save(self, names: list[str]) -> None:
        with collectives.together():  # before ranks are compared, NaN may be on one rank only
            self._check_finite()
        keep = self.trainer.config.keep
        if run_folder.LAST in names and keep:
            names = [*names, run_folder.numbered(self.trainer.progress.global_step)]
        if names:
            save(self.trainer, self.folder, names)
        if keep and collectives.rank() == 0:
            run_folder.drop_old(self.folder, keep)

    def _check_finite(self) -> None:
        """Raises CheckFailed if training has diverged, before an earlier checkpoint is overwritten."""
        model = self.trainer.ddp.module
        for name, tensor in (*model.named_parameters(), *_running_statistics(model)):
            if not torch.isfinite(tensor).all():
                last = os.path.join(self.folder, run_folder.LAST)
                before = f"; {last} is from before that" if os.path.exists(last) else ""
                raise CheckFailed(
                    f"after {self.trainer.progress.global_step} steps {name} is NaN or infinite: "
                    "nothing can be learned from here on",
                    hint=f"give a smaller --lr than {self.trainer.config.lr:g}, or --warmup{before}",
                )


def _running_statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of normalisation layers, by name. Other buffers may be infinite on purpose, such as masks."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            yield from layer.named_buffers(path, recurse=False)


# ---- resuming -----------------------------------------------------------------------------------------


def resume(trainer: Trainer, folder: str) -> list[str] | None:
    """Continues from the checkpoint that `--resume` names, if there is one. A collective.

    Returns:
        Remarks for the user; None for a fresh start.
    Raises:
        CkptToolError: on every rank, if the file can't be read, or belongs to another training.
    """
    config = trainer.config
    path = collectives.decide(lambda: _find(config, folder))
    if path is None:
        return None
    state = collectives.broadcast(lambda: read_fitting(path, trainer))
    with collectives.together():
        restore(trainer, state)
    return _remarks(trainer, state, path)


def _find(config: TrainConfig, folder: str) -> str | None:
    if config.resume == "auto":
        path = os.path.join(folder, run_folder.LAST)
        return path if os.path.exists(path) else None
    return config.resume


def read_fitting(path: str, trainer: Trainer) -> dict[str, Any]:
    """The checkpoint, if it is intact and belongs to this training."""
    state = read(path)
    _check_same_training(path, state, trainer)
    return state


def read(path: str) -> dict[str, Any]:
    """A checkpoint of this trainer, compared with the digests in it, as torch checks no checksums.

    Raises:
        Unreadable, Damaged, Refused: with the path and the reason.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Unreadable(path, (error.strerror or str(error)).lower()) from error
    except Exception as error:  # torch raises all kinds of errors for damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(path, f"can't be read: {reason}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "progress", "digests"} <= state.keys():
        raise Refused(
            path, "is not a checkpoint of this trainer", hint=f"inspect it: ckpttool inspect {path}"
        )
    found = {
        "model": collectives.digest_all(state["model"]),
        "optimizer": collectives.digest_all(_named(state["optimizer"])),
    }
    for part, digest in state["digests"].items():
        if found[part] != digest:
            raise Damaged(path, f"the {part}'s values are not the saved ones")
    return state


def _check_same_training(path: str, state: dict[str, Any], trainer: Trainer) -> None:
    now, then = trainer.config.plain(), {**TrainConfig().plain(), **state["config"]}
    other = [name for name in now if name not in FREE | COMPARED_BY_CONTENT and now[name] != then.get(name)]
    if other:
        flags = " ".join(_flag(name, then.get(name)) for name in other)
        raise UsageFault(
            f"{path}: belongs to a training with {flags}", hint="give the same, or start another run"
        )
    if state["plan"]["data"] != trainer.data.fingerprint:
        raise UsageFault(
            f"{path}: belongs to a training on other samples ({then['data']}: {state['plan']['data']}; now "
            f"{now['data']}: {trainer.data.fingerprint})",
            hint="give the same --data, or start another run",
        )


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or value is None:
        return flag if value else f"no {flag}"
    return f"{flag} {','.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restores everything. Raises UsageFault if the model is not the saved one."""
    saved, own = state["optimizer"], trainer.optimizer.state_dict()
    if _parameter_names(saved) != _parameter_names(own):
        raise UsageFault(
            f"--model {trainer.config.model}: its parameters have other names than the saved ones"
        )
    try:
        trainer.ddp.load_state_dict(state["model"], strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageFault(f"--model {trainer.config.model}: differs from the saved model: {reason}") from error
    trainer.optimizer.load_state_dict(saved)
    trainer.scheduler.load_state_dict(state["scheduler"])
    progress = dict(state["progress"])
    sums, states, rank = progress.pop("sums"), state["rng"], trainer.place.rank
    trainer.progress = Progress(**progress)
    if len(states) == trainer.place.world_size:
        if trainer.statistics:
            trainer.statistics.put_back(state["statistics"][rank])
        trainer.sums.copy_(torch.tensor(sums[rank], dtype=torch.float64))
        random_state.put_back(states[rank])
        return
    if rank == 0:  # a different number of ranks: one of them holds the total
        trainer.sums.copy_(torch.tensor(sums, dtype=torch.float64).sum(dim=0))
    seed = random_state.seed_from(trainer.config.seed, "rank", rank, progress["global_step"])
    random_state.seed_all(seed)


def _parameter_names(optimizer: dict[str, Any]) -> list[list[str]]:
    return [group["param_names"] for group in optimizer["param_groups"]]


def _remarks(trainer: Trainer, state: dict[str, Any], path: str) -> list[str]:
    """What the user should know about this resume: its position, and why bits may differ."""
    progress, steps = trainer.progress, trainer.plan.steps
    if progress.epoch >= trainer.config.epochs:
        done = f"{progress.epoch} epoch{'s' * (progress.epoch != 1)}"
        return [f"{path} already has {done}: nothing to do (--epochs N trains longer)"]
    remarks = [f"continues from {path} at epoch {progress.epoch + 1}, step {progress.step} of {steps}"]
    before, after = state["plan"]["world_size"], trainer.place.world_size
    if before != after:
        remarks.append(f"saved by {before} ranks, now {after}: the same samples in the same steps")
    were, are = state["versions"], versions(trainer.place.device)
    changed = [
        f"{name} {were.get(name)} -> {value}" for name, value in are.items() if were.get(name) != value
    ]
    if changed:
        remarks.append(f"the last bits may differ: {', '.join(changed)}")
    if state["config"]["epochs"] != trainer.config.epochs and trainer.config.scheduler != "none":
        remarks.append(f"the learning rate now follows {trainer.config.epochs} epochs")
    return remarks
