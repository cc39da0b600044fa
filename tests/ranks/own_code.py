"""An optimizer and a schedule of a user's, as `--optimizer` and `--scheduler` take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Smooth(Optimizer):
    """Steps along an average of the gradients, by steps that become shorter."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["steps"], state["average"] = 0, torch.zeros_like(parameter)
                state["steps"] += 1
                state["average"].lerp_(parameter.grad, 1 - group["decay"])
                parameter.add_(state["average"], alpha=-group["lr"] / state["steps"] ** 0.5)


class InGroups(Optimizer):
    """Keeps averages in its groups, and has a `zero_grad` of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            averages = group.setdefault("averages", [torch.zeros_like(each) for each in group["params"]])
            torch._foreach_lerp_(averages, [each.grad for each in group["params"]], 0.5)
            torch._foreach_add_(group["params"], averages, alpha=-group["lr"])

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def halved(steps: int, warmup: int) -> Callable[[int], float]:
    """Return a schedule that halves the learning rate in the middle."""
    return lambda step: min(1.0, (step + 1) / max(1, warmup)) * (1.0 if 2 * step < steps else 0.5)
