"""What changes the weights by their gradients: optimizer, schedule and average. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ckpttool.distributed import collectives
from ckpttool.distributed.divided import part_like
from train.config.training import TrainConfig, fields
from train.model import optimizer as optimizers
from train.model import optimizer_state, schedule
from train.model.groups import require_same
from train.model.precision import Precision

Tensor = torch.Tensor


class Ema:
    """The exponential moving average of a model: average = decay · average + (1 - decay) · value, by step.

    It starts as the weights after the first step, as `torch.optim.swa_utils.AveragedModel` does. Parameters
    and the running statistics of normalisation layers are averaged; other buffers (counters, masks) are
    those of the last step. Parameters of two bytes are averaged in float32: in their own dtype, an addend of
    a thousandth would be rounded away. A tensor with two names has one average.

    Under plain BatchNorm each rank has its own statistics, and rank 0's are used; so are their averages.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self._swapped = False
        self._averaged = {id(parameter) for parameter in model.parameters()}
        for layer in model.modules():
            if isinstance(layer, _NormBase):
                buffers = layer.named_buffers(recurse=False)
                self._averaged |= {id(buffer) for _, buffer in buffers if buffer.is_floating_point()}
        averages = {id(value): _average_of(value) for value in self._values().values()}
        self._averages = {name: averages[id(value)] for name, value in self._values().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's present values, after an optimizer's step."""
        self._require_own_weights()
        self.updates += 1
        first, done = self.updates == 1, set()
        for name, value in self._values().items():
            average = self._averages[name]
            if id(average) in done:
                continue
            done.add(id(average))
            if first or id(value) not in self._averaged:
                average.copy_(value)
            else:
                average.lerp_(value.to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the averages inside the block, and its own values, to the bit, afterwards.

        A collective: every rank has rank 0's buffers inside.
        """
        self._require_own_weights()
        self.share()
        values = self._values()
        before = {name: value.detach().clone() for name, value in values.items()}
        self._swapped = True
        try:
            _copy(self._averages, values)
            yield
        finally:
            _copy(before, values)
            self._swapped = False

    def share(self) -> None:
        """Give every rank the averages of rank 0's buffers. A collective."""
        buffers = {id(buffer) for buffer in self.model.buffers()}
        values = self._values()
        collectives.broadcast_into(self._averages[name] for name in values if id(values[name]) in buffers)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages, named as in the model's state. A collective."""
        self._require_own_weights()
        self.share()
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned; raise ValueError if it is of another model."""
        self._require_own_weights()
        saved = state["averages"]
        if saved.keys() != self._averages.keys():
            odd = sorted(saved.keys() ^ self._averages.keys())[0]
            raise ValueError(f"the averaged model has other names: {odd}")
        for name, average in self._averages.items():
            if saved[name].shape != average.shape:
                raise ValueError(f"the average of {name} has the shape {list(saved[name].shape)}")
            average.copy_(part_like(saved[name], average))
        self.updates = state["updates"]

    def _values(self) -> dict[str, Tensor]:
        # Themselves, not copies; what `get_extra_state` returns is made anew each time, and has no average.
        state = self.model.state_dict(keep_vars=True).items()
        own = (pair for pair in state if not pair[0].endswith(_EXTRA_STATE_KEY_SUFFIX))
        return {name: value for name, value in own if isinstance(value, Tensor)}

    def _require_own_weights(self) -> None:
        if self._swapped:
            raise RuntimeError("the model has its averages at present: leave `swapped` first")


def _average_of(value: Tensor) -> Tensor:
    """Return a copy, in float32 for a float dtype of two bytes or less."""
    small = value.is_floating_point() and value.element_size() <= 2
    return value.detach().to(torch.float32 if small else value.dtype, copy=True)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])


# ---- steps ------------------------------------------------------------------------------------------


# What a group says of this machine and of the flags, and settings that `--change` lets differ. Others stay as
# they were saved: a user's own optimizer may change them from step to step.
ALWAYS = {"fused", "rule"}
OF_GROUPS = {"momentum", "weight_decay", "nesterov", "betas", "eps"}


class Updater:
    """Takes the optimizer's steps. Its state is the same on every rank, but for `--zero`'s parts."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, device: torch.device, steps_per_epoch: int
    ) -> None:
        self.config = config
        # Without DDP's prefix, as the user knows the names.
        named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
        self.parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.total_steps = schedule.total_steps(config, steps_per_epoch)
        self.precision = Precision(config.amp, device)
        # The model itself knows its names as the user does; a checkpoint has them with DDP's prefix.
        bare = model.get_submodule("module")
        self.optimizer = optimizers.build_optimizer(config, bare, "module.")
        self.scheduler = schedule.build_scheduler(config, self.optimizer, self.total_steps, steps_per_epoch)
        self.ema = Ema(model, config.ema) if config.ema else None
        self._has_stepped = False

    @property
    def lr(self) -> float:
        """The learning rate of what no rule scales; of the first group of a user's own optimizer."""
        first = self.optimizer.param_groups[0]["initial_lr"]
        base = first if self.config.lr is None else self.config.lr
        return float(base * self.scheduler.lr_lambdas[0](self.scheduler.last_epoch))

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
        if self.config.shard and not self._has_stepped:
            who = f"--shard: a group of --optimizer {self.config.optimizer}"
            collectives.report_once(lambda: optimizer_state.require_of_parameters(self.optimizer, who))
        self._has_stepped = True
        self.clear_gradients()
        return lr, norm

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()  # a user's own may take no set_to_none
        for _, parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it. A collective.

        Tensors are the optimizer's own. With `--zero` its state is rank 0's alone, but for its settings.
        """
        state = {
            "optimizer": optimizer_state.consolidated(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.precision.state_dict(),
        }
        return state | ({"ema": self.ema.state_dict()} if self.ema else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, with this run's own settings where `--change` lets them differ."""
        fresh = [dict(group) for group in self.optimizer.param_groups]
        optimizer_state.restore(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._keep_own_settings(fresh)
        self.precision.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def require_same_names(self, saved: Mapping[str, Any]) -> None:
        """Raise UsageFault if a saved optimizer is of parameters with other names, or in other groups."""
        require_same(self.config, saved["param_groups"], self.optimizer.param_groups)

    def _keep_own_settings(self, fresh: list[dict[str, Any]]) -> None:
        """Give the restored groups this run's settings; no bit differs if those are the same."""
        scheduler = self.scheduler
        scheduler.base_lrs = [group["initial_lr"] for group in fresh]
        groups, changed = self.optimizer.param_groups, ALWAYS | (OF_GROUPS & fields(self.config.change))
        for group, own, rate in zip(groups, fresh, scheduler.lr_lambdas, strict=True):
            group.update({name: own[name] for name in (*changed, "initial_lr") if name in own})
            # Until it is called again, the scheduler would leave the rate of the schedule before.
            group["lr"] = own["initial_lr"] * rate(scheduler.last_epoch)
