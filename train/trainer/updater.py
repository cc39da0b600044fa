"""What changes the weights by their gradients: optimizer, schedule, precision and average. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckpttool.errors import UsageFault
from train.config.training import TrainConfig
from train.model import optimizer as optimizers
from train.model.ema import Ema
from train.model.precision import Precision

# Settings that the optimizer's state holds too.
OF_GROUPS = ("momentum", "weight_decay")


class Updater:
    """Takes the optimizer's steps. Its state is the same on every rank, but for `--zero`'s parts."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, device: torch.device, steps_per_epoch: int
    ) -> None:
        self.config = config
        # Without DDP's prefix, as the user knows the names.
        self.parameters = [
            (name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad
        ]
        self.total_steps = optimizers.total_steps(config, steps_per_epoch)
        self.precision = Precision(config.amp, device)
        self.optimizer = optimizers.build_optimizer(config, model)
        self.scheduler = optimizers.build_scheduler(config, self.optimizer, self.total_steps, steps_per_epoch)
        self.ema = Ema(model, config.ema) if config.ema else None

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, *, measured: bool) -> tuple[float, torch.Tensor | None]:
        """Change the weights and clear the gradients.

        Returns the learning rate, and the gradient's norm before clipping if that is wanted (`measured`).
        """
        self.precision.unscale(self.optimizer)
        norm = None
        if self.config.clip_norm or measured:
            norm = optimizers.clip([p for _, p in self.parameters], self.config.clip_norm)
        lr = self.lr
        if self.precision.step(self.optimizer):
            self.scheduler.step()
            if self.ema:
                self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        return lr, norm

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it. A collective.

        Tensors are the optimizer's own. With `--zero` its state is rank 0's alone, and None on the others.
        """
        state = {
            "optimizer": optimizers.consolidated(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.precision.state_dict(),
        }
        return state | ({"ema": self.ema.state_dict()} if self.ema else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, with this run's own settings where `--change` lets them differ."""
        fresh = [dict(group) for group in self.optimizer.param_groups]
        optimizers.restore(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._keep_own_settings(fresh)
        self.precision.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def require_same_names(self, saved: Mapping[str, Any]) -> None:
        """Raise UsageFault if a saved optimizer is of parameters with other names."""
        if _names(saved["param_groups"]) != _names(self.optimizer.param_groups):
            raise UsageFault(
                f"--model {self.config.model}: its parameters have other names than the saved ones"
            )

    def _keep_own_settings(self, fresh: list[dict[str, Any]]) -> None:
        """Give the restored groups this run's settings; no bit differs if those are the same."""
        lr, schedule = self.config.lr, self.scheduler
        schedule.base_lrs = [lr] * len(schedule.base_lrs)
        groups = self.optimizer.param_groups
        for group, own, rate in zip(groups, fresh, schedule.lr_lambdas, strict=True):
            group.update({name: own[name] for name in OF_GROUPS if name in own})
            group["initial_lr"] = lr
            # Until it is called again, the scheduler would leave the rate of the schedule before.
            group["lr"] = lr * rate(schedule.last_epoch)


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [group["param_names"] for group in groups]
