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
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.distributed.collectives import digest_all
from ckpttool.errors import CheckFailed
from train import run_folder
from train.checkpoints import digest_of_run, named_optimizer
from train.engine import Trainer
from train.optimizers import consolidated

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on. A collective.

    Raises:
        RanksDiffer: on every rank, if parameters, buffers, averages or optimizer states are not equal on all
            ranks.
    """
    trainer.share_buffers()
    model, optimizer = trainer.ddp.state_dict(), consolidated(trainer.optimizer)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "progress": dataclasses.asdict(trainer.progress)
        | {"sums": collectives.gather(trainer.sums.values())},
        "plan": dataclasses.asdict(trainer.plan)
        | {"world_size": collectives.world_size(), "data": trainer.data.fingerprint}
        | {"contents": trainer.data.contents, "init": trainer.started_from},
        "rng": collectives.gather(randomness.take()),
        "config": trainer.config.plain(),
        "versions": versions(trainer.place.device),
        "log": collectives.gather(trainer.log.state()),
    }
    if trainer.ema:
        state["ema"] = trainer.ema.state_dict()
    state["digests"] = _compared(state, zero=trainer.config.zero)
    state["digests"]["run"] = digest_of_run(state)
    if trainer.proof:
        trainer.proof.checkpoint(state)
    return state


def _compared(state: dict[str, Any], *, zero: bool) -> dict[str, str]:
    """Return the digests of what must be equal on all ranks. Raises as `capture`."""
    values = {"model": state["model"]}
    if not zero:
        values["optimizer"] = named_optimizer(state["optimizer"])
    if "ema" in state:
        values["ema"] = state["ema"]["averages"]
    digests = {
        part: collectives.compare(each, "before saving", hint=ON_SOME_RANKS) for part, each in values.items()
    }
    if zero:  # each rank has a part of its own, and rank 0 the whole, so there is nothing to compare
        digests["optimizer"] = collectives.decide(lambda: digest_all(named_optimizer(state["optimizer"])))
    return digests


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
    """Writes the checkpoints of a run: last.pt, and best.pt for the best model so far."""

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder = trainer, folder

    def save(self, *, last: bool, best: bool) -> None:
        """Write what is asked for, if anything. A collective.

        Args:
            last: write last.pt, and with `--keep` a numbered checkpoint.
            best: write best.pt.

        Raises:
            CheckFailed: on the rank where a parameter or running statistic is NaN or infinite; the others
                raise RankFailed. Earlier checkpoints stay.
            RanksDiffer, FileError: as `save`.
        """
        if not last and not best:
            return
        heartbeat.phase("save")
        with collectives.together():  # before ranks are compared, NaN may be on one rank only
            self._check_finite()
        keep = self.trainer.config.keep
        numbered = [run_folder.numbered(self.trainer.progress.global_step)] if last and keep else []
        save(
            self.trainer,
            self.folder,
            [run_folder.LAST] * last + [run_folder.BEST] * best + numbered,
            keep=keep,
        )

    def _check_finite(self) -> None:
        """Raise CheckFailed if training has diverged, before an earlier checkpoint is overwritten."""
        model = self.trainer.ddp.module
        for name, tensor in (*model.named_parameters(), *_running_statistics(model)):
            if not torch.isfinite(tensor).all():
                last = os.path.join(self.folder, run_folder.LAST)
                before = f"; {last} is from before that" if os.path.exists(last) else ""
                raise CheckFailed(
                    f"after step {self.trainer.progress.global_step} {name} is NaN or infinite: "
                    "nothing can be learned from here on",
                    hint=f"give a smaller --lr than {self.trainer.config.lr:g}, or --warmup, "
                    f"or look for NaN in the samples and in the loss{before}",
                )


def _running_statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of normalisation layers, by name. Other buffers may be infinite on purpose: masks are."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            yield from layer.named_buffers(path, recurse=False)
