"""Optimizers and schedulers are recognised by the states that torch writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckpttool.analysis.other_contents import describe_optimizer, describe_scheduler, in_words

OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"


@pytest.mark.parametrize("kind", [*OPTIMIZERS.split(), "SGD with momentum"])
def test_torch_optimizers_are_recognised_by_their_states(kind: str) -> None:
    net = torch.nn.Linear(2, 2)
    given = {"momentum": 0.9} if "momentum" in kind else {}
    optimizer = getattr(torch.optim, kind.split()[0])(net.parameters(), lr=0.1, **given)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = describe_optimizer("optimizer", optimizer.state_dict())
    known = {kind, "Adam or AdamW"} if kind in ("Adam", "AdamW") else {kind}  # alike before torch 2.7
    assert found.kind in known
    assert (found.parameters, found.settings[0]["lr"]) == (2, 0.1)


def test_optimizers_are_recognised_by_their_groups_before_the_first_step() -> None:
    state = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1, momentum=0.9).state_dict()
    found = describe_optimizer("o", state)
    assert (found.kind, found.with_state) == ("SGD", 0)
    assert list(in_words(found.settings[0]))[:2] == ["lr 0.1", "momentum 0.9"]


@pytest.mark.parametrize(
    "state",
    [
        {"state": 1, "param_groups": 2},
        {"state": {0: 1}, "param_groups": [3, {"params": 4}]},
        {"state": {}, "param_groups": [{"lr": [[1]], "x": "a" * 1000, "betas": tuple(range(99))}]},
    ],
    ids=["numbers", "no dicts", "long values"],
)
def test_a_malformed_state_is_described_as_far_as_possible(state: Any) -> None:
    found = describe_optimizer("o", state)
    assert all(len(str(group)) < 100 for group in found.settings)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1, total_steps=5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "LinearLR": lr_scheduler.LinearLR,
    "ConstantLR": lr_scheduler.ConstantLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_torch_schedulers_are_recognised_by_their_states(kind: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
    found = describe_scheduler("s", SCHEDULERS[kind](optimizer).state_dict())
    assert found is not None
    assert (found.kind, found.last_epoch) == (kind, 0)


@pytest.mark.parametrize("value", [1, {}, {"last_epoch": 3}, {"epoch": 1, "gamma": 2}])
def test_other_values_are_not_schedulers(value: Any) -> None:
    assert describe_scheduler("s", value) is None
