"""What a checkpoint holds of a trainer, and how it is put back. Imports torch.

One dict of primitives and tensors, so `torch.load(weights_only=True)` reads it. It holds what the next step
depends on and nothing else: from it a run continues as if it had never stopped, bit for bit on the same
number of ranks.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

import ckpttool
from ckpttool.distributed import collectives, randomness
from ckpttool.errors import UsageFault
from train.config.training import CHANGEABLE
from train.trainer.trainer import Trainer

# Flags that may differ on resume; a change of any other would make it another training.
FREE = {
    *("epochs", "max_steps", "accumulate", "workers", "backend", "spawn", "deterministic"),
    *("timeout", "join_timeout", "hang_timeout", "grace", "prove_every", "stop_at"),
    *("out", "save_every", "save", "keep", "resume", "force", "change", "data_root", "download"),
    "mixed_torch",
    *("rank_batch", "rank_share"),  # who takes which sample of a batch, not which samples are in it
    *("zero", "grad_checkpoint"),  # the same bits
    *("max_time", "eval_every", "eval_batch", "log_every", "tensorboard", "wandb", "preview", "json"),
}

# Compared by content, not by value: the same folder or file may be elsewhere now.
COMPARED_BY_CONTENT = {"data", "init", "init_allow_missing"}

# Settings that no checkpoint records: its bytes are the same however it was written.
HOW_TO_SAVE = {"save", "grace"}


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on, without digests. A collective.

    The tensors of the model and the optimizer are their own, not copies. With `--zero` the optimizer's state
    is rank 0's alone, and None on the others.
    """
    trainer.share_buffers()
    state = {
        "model": trainer.ddp.state_dict(),
        **trainer.updater.state(),
        "progress": trainer.progress.state(),
        "plan": trainer.feed.state() | {"init": trainer.init},
        "rng": collectives.gather(randomness.take()),
        "config": {name: value for name, value in trainer.config.plain().items() if name not in HOW_TO_SAVE},
        "versions": versions(trainer.place.device),
        "log": collectives.gather(trainer.log.state()),
        "training": training_of(trainer),
    }
    return state | ({"chain": trainer.recorder.head} if trainer.recorder.head is not None else {})


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Put everything back. On another number of ranks, random numbers are drawn from a new seed.

    Raises:
        UsageFault: the model has parameters of other names or shapes than the saved one.
    """
    trainer.updater.require_same_names(state["optimizer"])
    try:
        trainer.ddp.load_state_dict(state["model"], strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageFault(f"--model {trainer.config.model}: differs from the saved model: {reason}") from error
    trainer.updater.load(state)
    trainer.progress.load(state["progress"])
    trainer.feed.load(state["plan"], state["config"].get("rank_share"))
    trainer.init = state["plan"]["init"]
    rank, world_size = trainer.place.rank, trainer.place.world_size
    trainer.log.restore(state["log"], rank, world_size)
    if len(state["rng"]) == world_size:
        randomness.put_back(state["rng"][rank])
    else:
        step = trainer.progress.global_step
        randomness.seed_all(randomness.seed_from(trainer.config.seed, "rank", rank, step))


def training_of(trainer: Trainer) -> str:
    """Return a digest that tells this training from others: of what no resume may change."""
    settings, free = trainer.config.plain(), FREE | COMPARED_BY_CONTENT | CHANGEABLE
    fixed = {name: value for name, value in settings.items() if name not in free}
    return collectives.digest_all(fixed | {"data": trainer.data.fingerprint, "init": trainer.init})


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, apart from the checkpoint."""
    return {
        "ckpttool": ckpttool.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
