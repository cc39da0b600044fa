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


class Free(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682), with the modes of the package."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    @torch.no_grad()
    def train(self, training: bool = True) -> None:
        for group in (group for group in self.param_groups if group["train_mode"] != training):
            beta = group["beta"]
            for each in (each for each in group["params"] if "z" in self.state[each]):
                each.lerp_(self.state[each]["z"], 1 - beta if training else 1 - 1 / beta)
            group["train_mode"] = training

    def eval(self) -> None:
        self.train(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["steps"] += 1
            lr, beta, part = group["lr"], group["beta"], 1 / group["steps"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, part).add_(each.grad, alpha=lr * (beta * (1 - part) - 1))
                z.sub_(each.grad, alpha=lr)


class Averaging(Free):
    """Forgets a step in each of its evaluations."""

    def eval(self) -> None:
        super().eval()
        for group in self.param_groups:
            group["steps"] -= 1
