"""A run in its folder: what is opened for it, and what is done after each step. Imports torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.distributed import collectives, heartbeat
from ckpttool.distributed.heartbeat import is_lost_rank, is_timeout
from train.checkpoint import resume as resuming
from train.checkpoint.saver import Saver
from train.launch.stopping import Stop
from train.log import trackers
from train.run import attempts, proof
from train.run.agreement import Agreement
from train.run.limits import Limits
from train.run.report import Report
from train.trainer import shares
from train.trainer.scoring import Score
from train.trainer.trainer import Trainer

if TYPE_CHECKING:
    from train.main import Job


class Run:
    """A training run on this rank, with rank 0's files in a folder. Every method is a collective.

    Attributes:
        trainer: the model and its position in the plan, resumed if `--resume` says so.
        report: what the user reads.
        limits: when to evaluate, save and end.
    """

    def __init__(self, job: Job, folder: str) -> None:
        """Build the trainer, continue from a checkpoint if there is one, and print the head of the report."""
        self.job, self.folder = job, folder
        self.trainer = trainer = Trainer(job.config, job.data, job.model, job.place, job.task)
        remarks = resuming.resume(trainer, folder)
        trainer.proof = proof.chain_of(trainer, folder)
        measured = [("shares", text) for text in shares.settle(trainer)]
        if trainer.proof:
            trainer.proof.begin(trainer.resumed)
        self.limits = Limits(job.config, trainer.steps_per_epoch)
        self.report = Report(trainer, folder)
        self._saver = Saver(trainer, folder, self.report.event)
        self._stop = Stop(job.config.grace, self._left_undone)
        self._agreement = Agreement(self._stop, self._saver)
        began = [("resume", text) for text in remarks] or [("init", text) for text in job.remarks]
        self.report.begin(began + measured)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the run's trackers and its count of attempts, and listen to signals."""
        job, trainer = self.job, self.trainer
        with contextlib.ExitStack() as files:
            with collectives.fail_together():
                self._begin_step = files.enter_context(
                    attempts.counted(self.folder, job.config, job.place.rank)
                )
                if job.place.rank == 0:
                    opened = trackers.opened(job.config, self.folder, trainer.progress.global_step)
                    trainer.log.sinks = files.enter_context(opened)
            files.enter_context(self._stop)
            heartbeat.excuse(partial(self._begin_step, 0))
            trainer.before_update = self._agreement.begin
            trainer.scorer.before_batch = self._stop.raise_if_told
            try:
                yield
            except BaseException:
                self._saver.leave()
                if trainer.proof:
                    trainer.proof.leave()
                raise
            with collectives.fail_together():  # what a tracker writes last may fail, on rank 0 alone
                files.close()

    def _left_undone(self) -> str:
        """Return what rank 0 says if a signal ends the process at once, which is no failure of a step."""
        self._begin_step(0)
        heartbeat.end_as_told(self._stop.name)
        return self.report.how_to_go_on() if self.job.place.rank == 0 else ""

    def begin(self) -> str:
        """Score the last step if a signal has cut that short. Return as `after_step`; also if `--stop-at` is
        behind."""
        if self.trainer.progress.unscored:
            return self.after_step(time.monotonic())
        stop_at = self.job.config.stop_at
        if stop_at and stop_at <= self.trainer.progress.global_step and not self.is_over():
            return "--stop-at"
        self._begin_step(self.trainer.progress.global_step + 1)
        return ""

    def is_over(self) -> bool:
        """Return whether no step is left to take."""
        return self.limits.is_over(self.trainer.progress)

    def after_step(self, began: float) -> str:
        """Do what is due after a step: evaluate, report and save.

        A signal ends the run without the evaluation that is due, or in the middle of it. A run that continues
        from there begins with it.

        Args:
            began: when the epoch began, by `time.monotonic`.

        Returns:
            What ends the run here; `""` if it goes on.
        """
        trainer, progress = self.trainer, self.trainer.progress
        due = self.limits.due(progress)
        signal = self._agreement.finish(wait=due.evaluate or due.save)
        tested, best = None, False
        if due.evaluate and not signal:
            tested, signal = self._evaluate()
        progress.unscored = due.evaluate and tested is None
        if not progress.unscored:
            trained = trainer.finish_epoch() if trainer.epoch_is_done() else None
            best = tested is not None and trainer.note_best(tested)
            self.report.scores(trained, tested, seconds=time.monotonic() - began, best=best)
        # After the log: a resume drops what it will log again.
        self._saver.save(last=due.save or bool(signal), best=best)
        end = signal or due.end
        if not end:
            self._begin_step(progress.global_step + 1)
        return end

    def _evaluate(self) -> tuple[Score | None, str]:
        """Return the score on the test set; or None, and the signal that has cut the evaluation short."""
        try:
            return self.trainer.evaluate(), ""
        except Exception as error:
            if is_lost_rank(error) or is_timeout(error):
                raise
            signal = self._agreement.ask()  # if one rank fails in an evaluation, all do
            if not signal:
                raise
            return None, signal

    def finish(self, end: str) -> None:
        """Wait for the last save, and say what it and a signal have come to."""
        self._saver.finish()
        self.report.note_signal(end, self._stop)

    def end(self, end: str) -> int:
        """Say how the run ended, and return the exit code."""
        if self.trainer.proof:
            self.trainer.proof.end(end)
        self.report.end(end)
        return 128 + self._stop.number if end and end == self._stop.name else 0
