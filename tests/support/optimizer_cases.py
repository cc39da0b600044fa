"""Models and optimizers that differ, for the SPECs of `ckpttool doctor --model --optimizer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

SHAPES = {"a": (4, 4), "b": (4, 4), "c": (4, 2), "d": (4, 3)}


class Net(nn.Module):
    """Linear layers of these letters, in this order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(*SHAPES[name]))


def net(order: str = "abc", frozen: str = "", tied: str = "") -> nn.Module:
    model = Net(order)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if tied:
        one, other = (model.get_submodule(name) for name in tied)
        one.weight = other.weight
    return model


def resized() -> nn.Module:
    model = Net("abc")
    model.c = nn.Linear(4, 5)
    return model


def compiled(order: str = "abc") -> Any:
    return torch.compile(net(order))


def adamw(model: nn.Module, lr: float = 0.1, **given: Any) -> Optimizer:
    return AdamW(model.parameters(), lr, **given)


def named(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return AdamW(model.named_parameters(), lr)


def trained(model: nn.Module) -> Optimizer:
    return AdamW([each for each in model.parameters() if each.requires_grad], 0.1)


def decay(model: nn.Module, named: bool = False, flip: bool = False) -> Optimizer:
    """Two groups: matrices, which decay, and the rest."""
    pairs = [*model.named_parameters()]
    groups = [[pair for pair in pairs if (pair[1].ndim > 1) is is_matrix] for is_matrix in (True, False)]
    lists = [group if named else [each for _, each in group] for group in groups]
    made = [{"params": each, "weight_decay": rate} for each, rate in zip(lists, (0.1, 0.0), strict=True)]
    return AdamW(made[::-1] if flip else made, 0.1)


def head_first(model: nn.Module, head: str = "c", named: bool = False) -> Optimizer:
    """Two groups, of which the first is a layer that the model has later."""
    pairs = [*model.named_parameters()]
    groups = [[pair for pair in pairs if (pair[0][0] == head) is first] for first in (True, False)]
    return AdamW([{"params": group if named else [each for _, each in group]} for group in groups], 0.1)


def sgd(model: nn.Module, momentum: float = 0.9, named: bool = False) -> Optimizer:
    return SGD(model.named_parameters() if named else model.parameters(), 0.1, momentum=momentum)


def adagrad(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.25)


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters())


def two(model: nn.Module) -> list[Optimizer]:
    """An optimizer of layer a, and one of the others in reverse order."""
    pairs = [*model.named_parameters()]
    groups = [[pair for pair in pairs if (pair[0][0] == "a") is first] for first in (True, False)]
    return [AdamW(groups[0], 0.1), AdamW(groups[1][::-1], 0.1)]


class Wrapped(AdamW):
    """An optimizer that keeps another, as SAM does, and refuses a state without `mine`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        self.base = SGD(self.param_groups, 0.1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "mine" not in state:
            raise KeyError("mine")
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


def wrapped(model: nn.Module) -> Optimizer:
    return Wrapped(model.parameters())


def foreign(model: nn.Module) -> Optimizer:
    return SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], 0.1)


def nothing(model: nn.Module) -> nn.Module:
    return model


def value_of(name: str, key: str) -> float:
    """The number that fills what is kept of a parameter under a key."""
    return float(sum(map(ord, f"{name} {key}")) % 251) + len(name) / 64


def stepped(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Take a step, and fill all that is kept of each parameter with a number of its own."""
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step(*([lambda: 0.0] if isinstance(optimizer, torch.optim.LBFGS) else []))
    for name, parameter in model.named_parameters():
        for key, kept in optimizer.state.get(parameter, {}).items():
            if isinstance(kept, torch.Tensor) and kept.shape == parameter.shape:
                kept.fill_(value_of(name, key))
    return optimizer
