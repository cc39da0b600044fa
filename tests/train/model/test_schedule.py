"""Schedules: the factor of the learning rate in each step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import UsageFault
from train.config.flags import Every
from train.config.sections import TrainConfig
from train.model import updater


def factors(steps: int = 10, **settings: Any) -> list[float]:
    config = TrainConfig.of(**{"lr": 1.0, "epochs": 1, **settings})
    rate = updater.rate_of(config.schedule, config.optimizer.lr, steps, steps)
    return [rate(step) for step in range(steps)]


def test_a_minimum_is_where_the_schedule_ends_and_the_warm_up_still_begins_at_zero():
    plain, raised = (
        factors(scheduler="cosine", warmup=Every(2, "steps"), **m) for m in ({}, {"min_lr": 0.1})
    )
    assert raised[:2] == plain[:2] == [0.5, 1.0]
    assert raised[2:] == [pytest.approx(0.1 + 0.9 * factor) for factor in plain[2:]]
    config = TrainConfig.of(lr=2.0, min_lr=0.5, scheduler="linear")
    assert updater.rate_of(config.schedule, config.optimizer.lr, 10, 10)(10) == 0.25


def test_wsd_warms_up_stays_and_decays():
    found = factors(scheduler="wsd", warmup=Every(2, "steps"), cooldown=Every(4, "steps"))
    assert found == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert factors(scheduler="wsd")[-3:] == [1, 1, 0.5]
    assert factors(scheduler="wsd", min_lr=0.5)[-1] == 0.75


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (37, 0), (100, 20), (3, 2)])
def test_one_cycle_is_torchs(steps, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    given = {"total_steps": steps, "pct_start": warmup / steps if warmup else 0.3, "cycle_momentum": False}
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, **given)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step() if len(expected) < steps else None
    assert factors(steps, scheduler="onecycle", warmup=Every(warmup, "steps")) == pytest.approx(
        expected, rel=1e-9
    )


def test_one_cycle_may_end_in_a_minimum():
    assert factors(scheduler="onecycle", min_lr=0.2)[-1] == pytest.approx(0.2)


OWN = """
import itertools
import torch

count = itertools.count()
def halves(steps, warmup): return lambda step: 0.5 ** (step // (steps // 2))
def constant(): return lambda step: 1
def negative(): return lambda step: 1 - step
def broken(): return lambda step: 1 / step
def restless(): return lambda step: next(count)
def counting():
    calls = itertools.count()
    return lambda step: 0.5 ** (next(calls) // 8)
def scheduler(): return torch.optim.lr_scheduler.LambdaLR
def number(): return 0.1
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_factory_returns_a_function_of_the_step(own):
    assert factors(4, scheduler=f"{own}:halves") == [1, 1, 0.5, 0.5]
    assert factors(2, scheduler=f"{own}:constant") == [1, 1]


WRONG = {
    "negative": "gives step 2 the factor -1",
    "broken": "fails in step 0: ZeroDivisionError",
    "restless": "gives step 9 another factor each time",
    "counting": "gives step 9 another factor each time",
    "scheduler": "returned a type, not a function of the step",
    "number": "returned a float, not a function of the step",
    "gone": "has no factory 'gone'",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_schedule_is_refused(own, name):
    with pytest.raises(UsageFault, match=re.escape(WRONG[name])):
        updater.check_schedule(TrainConfig.of(scheduler=f"{own}:{name}", epochs=1), 10)


def test_parts_that_are_longer_than_the_training_are_refused():
    parts = {"warmup": Every(3, "steps"), "cooldown": Every(8, "steps")}
    with pytest.raises(UsageFault, match="--cooldown 8steps: is 8 steps, and the warm-up 3"):
        updater.check_schedule(TrainConfig.of(scheduler="wsd", epochs=1, **parts), 10)
    updater.check_schedule(TrainConfig.of(scheduler="wsd", epochs=1, **parts), 11)
