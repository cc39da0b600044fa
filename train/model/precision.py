"""The precision of training, `--amp`: lower in the forward pass of a training step alone. Imports torch.

Weights, gradients, the optimizer and the evaluation keep the model's own dtype, so a score is that of the
saved file.

float16 has few exponents, so small gradients would become 0. The loss is multiplied by a scale, and gradients
are divided by it (Micikevicius et al. 2018, arXiv 1710.03740; `torch.amp.GradScaler`). A step whose gradients
are infinite or NaN is skipped, and the scale is halved. Gradients are summed over ranks before that, so all
ranks skip the same steps. A skipped step has used its samples and counts as a step of the plan, but changes
nothing: not the weights, nor their average (`--ema`), nor the learning rate, as torch wants the scheduler
called after an optimizer's step. So `scheduler.last_epoch + skipped` is the number of steps.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpttool.errors import CheckFailed, UsageFault

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Scaling has found no finite gradient on the way here from 65536, so it is not the range that is missing.
SMALLEST_SCALE = 2.0**-10


def check(kind: str, device: torch.device, model: nn.Module) -> None:
    """Refuse `--amp fp16` on a CPU, and for a model with a parameter that is complex or float16."""
    if kind != "fp16":
        return
    if device.type == "cpu":
        raise UsageFault("--amp fp16: works only on a GPU", hint="give --amp bf16, or leave it out")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            what = f"--amp fp16: parameter {name} is {dtype}, whose gradients can't be scaled"
            hint = "give --amp bf16" if parameter.is_complex() else "keep the model's weights in float32"
            raise UsageFault(what, hint=hint)


class Precision:
    """The precision of training, with the state of its scaling. `none` changes nothing.

        with precision.autocast():
            loss = ...
        precision.scale(loss).backward()     # any number of times
        precision.unscale(optimizer)         # then clip
        if precision.step(optimizer):        # False: skipped
            scheduler.step()

    Attributes:
        skipped: steps that were skipped since the beginning.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.dtype, self.device = DTYPES.get(kind), device
        self.skipped = 0
        self._scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale: once in a step, after they were summed over ranks."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step unless scaled gradients are not finite; return whether it was taken."""
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        after = self._scaler.get_scale()
        if after >= before:
            return True
        self.skipped += 1
        if after < SMALLEST_SCALE:
            what = f"--amp fp16: gradients are infinite or NaN even if the loss is multiplied by {before:.2g}"
            raise CheckFailed(what, hint="give a smaller --lr, --warmup, --clip-norm, or --amp bf16")
        return False

    def state_dict(self) -> dict[str, Any]:
        return {**self._scaler.state_dict(), "skipped": self.skipped} if self._scaler.is_enabled() else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state.get("skipped", 0)
        self._scaler.load_state_dict(state)
