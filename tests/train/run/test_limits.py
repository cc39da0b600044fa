"""When a run evaluates, saves and ends: counted in steps, epochs and by rank 0's clock."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.distributed import collectives
from train.config.shared import Every
from train.config.training import TrainConfig
from train.model.optimizer import total_steps
from train.run.run import Due, Limits
from train.trainer.progress import Progress

STEPS = 4


class Clock:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self, speed: float = 1.0) -> None:
        self.now, self.speed = 0.0, speed

    def __call__(self) -> float:
        self.now += self.speed
        return self.now


def position(global_step: int) -> Progress:
    """Return the position after a step, in which an epoch that ends is not counted yet."""
    epoch = (global_step - 1) // STEPS
    return Progress(epoch=epoch, step=global_step - epoch * STEPS, global_step=global_step)


def course(steps: int, clock: Any = None, **settings: Any) -> dict[int, Due]:
    """Return what is due after each of the first steps."""
    limits = Limits(TrainConfig(**settings), STEPS, clock or Clock())
    return {step: limits.due(position(step)) for step in range(1, steps + 1)}


def steps_with(name: str, found: dict[int, Due]) -> list[int]:
    return [step for step, due in found.items() if getattr(due, name)]


def test_by_default_each_epoch_is_evaluated_and_saved_and_the_last_one_ends_the_run():
    found = course(12, epochs=3)
    assert steps_with("evaluate", found) == steps_with("save", found) == [4, 8, 12]
    assert {step: due.end for step, due in found.items() if due.end} == {12: "--epochs"}


def test_steps_and_epochs_count_from_the_beginning_of_the_training():
    found = course(12, epochs=9, eval_every=Every(3, "steps"), save_every=Every(2, "epochs"))
    assert steps_with("evaluate", found) == [3, 6, 9, 12]
    assert steps_with("save", found) == [8]


def test_max_steps_ends_in_the_middle_of_an_epoch_with_a_score_and_a_checkpoint():
    found = course(6, epochs=9, max_steps=6)
    assert found[6] == Due(evaluate=True, save=True, end="--max-steps")
    assert not any(found[step].end for step in range(1, 6))


def test_the_end_is_evaluated_and_saved_whatever_the_intervals():
    found = course(8, epochs=2, eval_every=Every(5, "epochs"), save_every=Every(1, "h"))
    assert steps_with("evaluate", found) == steps_with("save", found) == [8]


def test_max_time_saves_and_does_not_evaluate():
    found = course(5, epochs=9, max_time=4.5)
    assert found[5] == Due(evaluate=False, save=True, end="--max-time")
    assert found[3] == Due()


def test_a_time_between_checkpoints_counts_from_the_last_one():
    found = course(12, epochs=9, save_every=Every(3, "s"))
    assert steps_with("save", found) == [3, 6, 9, 12]
    found = course(12, Clock(speed=40.0), epochs=9, save_every=Every(1, "min"))
    assert steps_with("save", found) == [2, 4, 6, 8, 10, 12]


def test_a_training_that_has_all_its_steps_is_over_before_it_begins():
    limits = Limits(TrainConfig(epochs=2, max_steps=6), STEPS)
    assert not limits.is_over(position(5))
    assert limits.is_over(position(6))
    assert limits.is_over(Progress(epoch=2, step=0, global_step=5))
    assert not limits.is_over(Progress())


@pytest.mark.parametrize("counted", [False, True])
def test_the_end_of_an_epoch_is_seen_whether_it_is_counted_or_not(counted):
    limits = Limits(TrainConfig(epochs=3), STEPS)
    at = Progress(epoch=1, step=0, global_step=4) if counted else position(4)
    assert limits.due(at) == Due(evaluate=True, save=True)


def test_the_schedule_is_as_long_as_the_training():
    assert total_steps(TrainConfig(epochs=3), STEPS) == 12
    assert total_steps(TrainConfig(epochs=3, max_steps=7), STEPS) == 7
    assert total_steps(TrainConfig(epochs=3, max_steps=70), STEPS) == 12
    assert total_steps(TrainConfig(epochs=3, max_time=1.0), STEPS) == 12


def on_rank(rank: int, world_size: int) -> list[Due]:
    limits = Limits(
        TrainConfig(epochs=99, max_time=9.5, save_every=Every(4, "s")), STEPS, Clock(speed=1.0 + 50 * rank)
    )
    return [limits.due(position(step)) for step in range(1, 12)]


def test_rank_0_s_clock_decides_for_all_ranks(run_ranks):
    first, *others = run_ranks(3, on_rank)
    assert [due.save for due in first[:8]] == [False, False, False, True] * 2
    assert [due.end for due in first].index("--max-time") == 9
    assert all(other == first for other in others)


def never_asked(rank: int, world_size: int) -> bool:
    if rank == 0:  # alone: a collective would wait for the others
        Limits(TrainConfig(epochs=3), STEPS).due(position(1))
    return collectives.world_size() == world_size


def test_nothing_is_sent_without_a_time(run_ranks):
    assert run_ranks(2, never_asked) == [True, True]
