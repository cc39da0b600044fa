"""When a run evaluates, saves and ends: counted in steps, epochs and by rank 0's clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ckpttool.distributed import collectives
from train.config.flags import Every
from train.config.sections import TrainConfig, TrainingConfig
from train.model.updater import total_steps
from train.run.run import Due, Limits
from train.trainer.progress import Progress

STEPS = 4


def clock(speed: float = 1.0) -> Callable[[], float]:
    """Return a clock that goes on by some seconds whenever it is read."""
    return itertools.count(speed, speed).__next__


def position(global_step: int) -> Progress:
    """Return the position after a step, in which an epoch that ends is not counted yet."""
    epoch = (global_step - 1) // STEPS
    return Progress(epoch=epoch, step=global_step - epoch * STEPS, global_step=global_step)


FAR = {"epochs": 9}
COURSES: dict[str, tuple[dict[str, Any], float, list[int], list[int], str]] = {
    "each epoch, and the last one ends it": ({"epochs": 3}, 1, [4, 8, 12], [4, 8, 12], "--epochs"),
    "counted from the beginning of the training": (
        {**FAR, "eval_every": Every(3, "steps"), "save_every": Every(2, "epochs")}, 1, [3, 6, 9, 12], [8], ""
    ),
    "the end is evaluated and saved whatever the intervals": (
        {"epochs": 2, "eval_every": Every(5, "epochs"), "save_every": Every(1, "h")}, 1, [8], [8], "--epochs"
    ),
    "--max-steps in the middle of an epoch": ({**FAR, "max_steps": 6}, 1, [4, 6], [4, 6], "--max-steps"),
    "--max-time saves and does not evaluate": ({**FAR, "max_time": 4.5}, 1, [4], [4, 5], "--max-time"),
    "a time since the last save": ({**FAR, "save_every": Every(3, "s")}, 1, [4, 8, 12], [3, 6, 9, 12], ""),
    "a time in minutes": ({**FAR, "save_every": Every(1, "min")}, 40, [4, 8], [2, 4, 6, 8], ""),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES)
def test_what_is_due_after_each_step(course):
    settings, speed, evaluated, saved, end = COURSES[course]
    limits = Limits(TrainConfig.of(**settings), lambda: STEPS, clock(speed))
    last = max(evaluated + saved)
    found = {step: limits.due(position(step)) for step in range(1, last + 1)}
    assert [step for step, due in found.items() if due.evaluate] == evaluated
    assert [step for step, due in found.items() if due.save] == saved
    assert {step: due.end for step, due in found.items() if due.end} == ({last: end} if end else {})


def test_a_training_that_has_all_its_steps_is_over_before_it_begins():
    limits = Limits(TrainConfig.of(epochs=2, max_steps=6), lambda: STEPS)
    assert not limits.is_over(position(5))
    assert limits.is_over(position(6))
    assert limits.is_over(Progress(epoch=2, step=0, global_step=5))
    assert not limits.is_over(Progress())


@pytest.mark.parametrize("counted", [False, True])
def test_the_end_of_an_epoch_is_seen_whether_it_is_counted_or_not(counted):
    limits = Limits(TrainConfig.of(epochs=3), lambda: STEPS)
    at = Progress(epoch=1, step=0, global_step=4) if counted else position(4)
    assert limits.due(at) == Due(evaluate=True, save=True)


def test_the_schedule_is_as_long_as_the_training():
    assert total_steps(TrainingConfig(epochs=3), STEPS) == 12
    assert total_steps(TrainingConfig(epochs=3, max_steps=7), STEPS) == 7
    assert total_steps(TrainingConfig(epochs=3, max_steps=70), STEPS) == 12
    assert total_steps(TrainingConfig(epochs=3, max_time=1.0), STEPS) == 12


def on_rank(rank: int, world_size: int) -> list[Due]:
    config = TrainConfig.of(epochs=99, max_time=9.5, save_every=Every(4, "s"))
    limits = Limits(config, lambda: STEPS, clock(1.0 + 50 * rank))
    return [limits.due(position(step)) for step in range(1, 12)]


def test_rank_0_s_clock_decides_for_all_ranks(run_ranks):
    first, *others = run_ranks(3, on_rank)
    assert [due.save for due in first[:8]] == [False, False, False, True] * 2
    assert [due.end for due in first].index("--max-time") == 9
    assert all(other == first for other in others)


def never_asked(rank: int, world_size: int) -> bool:
    if rank == 0:  # alone: a collective would wait for the others
        Limits(TrainConfig.of(epochs=3), lambda: STEPS).due(position(1))
    return collectives.world_size() == world_size


def test_nothing_is_sent_without_a_time(run_ranks):
    assert run_ranks(2, never_asked) == [True, True]
