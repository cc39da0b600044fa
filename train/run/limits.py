"""When a run evaluates, saves and ends: by its steps and epochs, or by rank 0's clock. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpttool.distributed import collectives
from train.config.training import TrainConfig
from train.trainer.progress import Progress


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    evaluate: bool = False
    save: bool = False  # last.pt
    end: str = ""  # what ends the run here, as `--max-time`


class Limits:
    """Says after each step what is due, the same on every rank."""

    def __init__(
        self, config: TrainConfig, steps_per_epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # `--max-time` and the times of `--save-every` count from here; only rank 0's clock is read.
        self.config, self.steps_per_epoch, self.clock = config, steps_per_epoch, clock
        self.began = self.saved = clock()

    def is_over(self, position: Progress) -> bool:
        """Return whether the training has all its steps."""
        epochs, _ = self._epochs(position)
        steps = self.config.max_steps
        return epochs >= self.config.epochs or (steps is not None and position.global_step >= steps)

    def due(self, position: Progress) -> Due:
        """Return what is to be done after a step. A collective if a time is among the limits.

        The end of a training is evaluated and saved. `--max-time` saves but does not evaluate: the run goes
        on from there as if it had not been interrupted. The epoch that ends with the step may be counted as
        finished or not.
        """
        config, is_over = self.config, self.is_over(position)
        time_to_save, time_is_up = self._times()
        end = "--max-time" if time_is_up else ""
        if config.stop_at and position.global_step >= config.stop_at:
            end = "--stop-at"
        if is_over:
            epochs, _ = self._epochs(position)
            end = "--epochs" if epochs >= config.epochs else "--max-steps"
        return Due(
            evaluate=is_over or self._is_due(config.eval_every, position),
            save=bool(end) or time_to_save or self._is_due(config.save_every, position),
            end=end,
        )

    def _epochs(self, position: Progress) -> tuple[int, bool]:
        """Return the number of finished epochs, and whether the last one has just ended."""
        if position.step == 0:
            return position.epoch, position.global_step > 0
        ends = position.step >= self.steps_per_epoch
        return position.epoch + ends, ends

    def _is_due(self, every: tuple[int, str], position: Progress) -> bool:
        number, unit = every
        if unit == "steps":
            return position.global_step % number == 0
        epochs, ends = self._epochs(position)
        return unit == "epochs" and ends and epochs % number == 0

    def _times(self) -> tuple[bool, bool]:
        """Return whether it is time to save, and whether the time is up, by rank 0's clock. A collective."""
        interval, limit = self.config.save_every.seconds, self.config.max_time
        if interval is None and limit is None:
            return False, False
        now = self.clock()
        answer = torch.tensor(
            [
                interval is not None and now - self.saved >= interval,
                limit is not None and now - self.began >= limit,
            ]
        )
        collectives.broadcast_into([answer])
        to_save, is_up = answer.tolist()
        if to_save or is_up:
            self.saved = now
        return to_save, is_up
