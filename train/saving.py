"""Checkpoints of a run: what is in them, and when they are written.

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
from ckpttool.distributed import collectives, randomness
from ckpttool.errors import CheckFailed
from train import run_folder
from train.checkpoints import digest_of_run, named_optimizer
from train.engine import Trainer

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on. A collective.

    Raises:
        RanksDiffer: on every rank, if parameters, buffers or optimizer states are not equal on all ranks.
    """
    with trainer.one_model():
        model, optimizer = trainer.ddp.state_dict(), trainer.optimizer.state_dict()
    digests = {
        "model": collectives.compare(model, "before saving", hint=ON_SOME_RANKS),
        "optimizer": collectives.compare(named_optimizer(optimizer), "before saving", hint=ON_SOME_RANKS),
    }
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        "progress": dataclasses.asdict(trainer.progress)
        | {"sums": collectives.gather(trainer.sums.tolist())},
        "plan": dataclasses.asdict(trainer.plan)
        | {"world_size": collectives.world_size(), "data": trainer.data.fingerprint}
        | {"contents": trainer.data.contents},
        "rng": collectives.gather(randomness.take()),
        "config": trainer.config.plain(),
        "digests": digests,
        "versions": versions(trainer.place.device),
    }
    digests["run"] = digest_of_run(state)
    return state


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, apart from the checkpoint."""
    return {
        "ckpttool": ckpttool.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


def save(trainer: Trainer, folder: str, names: list[str], *, keep: int = 0) -> None:
    """Write one checkpoint under several names. A collective.

    Args:
        folder: the run's folder; only rank 0 touches it.
        names: file names in it, at least one.
        keep: how many numbered checkpoints to leave there; 0 leaves all.

    Raises:
        RanksDiffer: on every rank, if ranks hold different models or optimizers; nothing is written.
        FileError: on rank 0, if a file can't be written or removed; a file that is replaced is then
            unchanged. The other ranks raise RankFailed.
    """
    state = capture(trainer)
    with collectives.together():
        if collectives.rank() == 0:
            run_folder.write(state, folder, names)
            if keep:
                run_folder.drop_old(folder, keep)


class Saver:
    """Decides when to save: every `--save-every`, after the last epoch, and for the best model so far."""

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder = trainer, folder

    def after_step(self) -> None:
        """Save if `--save-every` counts steps and this one is due. Raises as `save`, and CheckFailed."""
        count, unit = self.trainer.config.save_every
        if unit == "steps" and self.trainer.progress.global_step % count == 0:
            self._save([run_folder.LAST])

    def after_epoch(self, *, best: bool) -> None:
        """Save what is due after an epoch.

        Args:
            best: whether the model is the best so far.

        Raises:
            CheckFailed: on the rank where a parameter or running statistic is NaN or infinite; the others
                raise RankFailed. Earlier checkpoints stay.
            RanksDiffer, FileError: as `save`.
        """
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
            save(self.trainer, self.folder, names, keep=keep)

    def _check_finite(self) -> None:
        """Raise CheckFailed if training has diverged, before an earlier checkpoint is overwritten."""
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
    """Yield those of normalisation layers, by name. Other buffers may be infinite on purpose: masks are."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            yield from layer.named_buffers(path, recurse=False)
