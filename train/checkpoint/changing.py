"""Settings that a resumed run may change, if `--change NAME` says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import UsageFault

if TYPE_CHECKING:
    from train.trainer.trainer import Trainer

OF_GROUPS = ("momentum", "weight_decay")
"""Settings that the optimizer's state holds too."""


def require_same_groups(now: dict[str, Any], then: dict[str, Any], allowed: set[str]) -> None:
    """Raise UsageFault if weight decay is turned on or off, and so the optimizer's groups become others."""
    on, was_on = bool(now["weight_decay"]), bool(then["weight_decay"])
    if "weight_decay" in allowed and on != was_on and not now["decay_norms"]:
        raise UsageFault(
            f"--change weight-decay: can't {'begin' if on else 'end'} on a resume, only differ",
            hint="norms and biases, which never decay, are then a group of the optimizer by themselves",
        )


def apply(trainer: Trainer, fresh: list[dict[str, Any]]) -> None:
    """Give a restored optimizer and schedule the run's own settings; no bit differs if those are the same.

    Args:
        trainer: restored.
        fresh: the groups that the run's own configuration gave the optimizer, before it was restored.
    """
    scheduler = trainer.scheduler
    scheduler.base_lrs = [trainer.config.lr] * len(scheduler.base_lrs)
    groups = trainer.optimizer.param_groups
    for group, own, rate in zip(groups, fresh, scheduler.lr_lambdas, strict=True):
        group.update({name: own[name] for name in OF_GROUPS if name in own})
        group["initial_lr"] = trainer.config.lr
        # Until it is called again, the scheduler would leave the rate of the schedule before.
        group["lr"] = trainer.config.lr * rate(scheduler.last_epoch)
