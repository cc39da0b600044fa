"""A run in its folder: its parts, when it evaluates and saves, and how it ends. Imports torch."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ckpttool.distributed import collectives, heartbeat
from ckpttool.distributed.group import Place
from ckpttool.distributed.heartbeat import is_lost_rank, is_timeout
from train import console
from train.checkpoint.resume import resume
from train.checkpoint.saver import Saver
from train.config.sections import TrainConfig, hook_interval
from train.data.data_set import Data
from train.launch.program import Stop
from train.log import trackers
from train.log.step_log import Profile
from train.run import folder as folders
from train.run import proof
from train.run.hook import Hook
from train.run.report import Report
from train.tasks.builtin import Task
from train.trainer import shares
from train.trainer.apart import NOTHING, Stateful
from train.trainer.progress import Progress, Scores, TrainScore
from train.trainer.trainer import Trainer

# Seconds between two messages. Where steps are shorter, there is none in some of them.
SPACING = 0.25

# Steps between two messages at most.
MOST = 10

# Seconds from which on a step is long: what is sent in it is read at its end, not at that of the next.
LONG = 1.0

# Seconds that are told of a step at most.
LONGEST = 1e6


class Agreement:
    """Tells all ranks that one was told to end, and how far the save has come on each.

        agreement.begin()     # in each step, before the optimizer's
        agreement.finish()    # after it

    To read a message in its own step is to wait once more for the slowest rank, which costs some per cent of
    a short step. By the next one it has arrived: the gradients have made the ranks wait for each other.
    """

    def __init__(self, stop: Stop, saver: Saver) -> None:
        self.stop, self.saver = stop, saver
        self._is_alone = collectives.world_size() == 1
        self._group: dist.ProcessGroup | None = None
        if not self._is_alone and dist.get_backend() != "gloo":
            group = dist.new_group(backend="gloo")  # over NCCL the CPU would wait for the GPU
            assert isinstance(group, dist.ProcessGroup)  # of all ranks, and this is one
            self._group = group
        # In which step, this rank's values, and the work after which they are the largest of all ranks'.
        self._sent: deque[tuple[int, torch.Tensor, dist.Work | None]] = deque()
        self._step = self._sent_in = 0
        self._spacing, self._waits = 1, True
        self._began, self._gap, self._seconds = time.monotonic(), math.inf, math.inf

    def begin(self) -> None:
        """Send what this rank has to tell, if it is time for that; do not wait."""
        self._step += 1
        gap, self._began = time.monotonic() - self._began, time.monotonic()
        # An evaluation or a save between two steps lengthens one gap: a step is long if two in a row are.
        self._gap, self._seconds = gap, min(gap, self._gap)
        if self._step - self._sent_in >= self._spacing and not self._is_alone:
            self._send()

    def finish(self, *, wait: bool = False) -> str:
        """Act on what the ranks have told, the same on each; return the signal by which one was told to end.

        A collective where a message was sent, and raises as `Saver.advance`. `wait` leaves nothing for later.
        """
        signal_of_any = self._act(self._word()) if self._is_alone else ""
        while self._sent and (wait or self._waits or signal_of_any or self._sent[0][0] < self._step):
            _, values, work = self._sent.popleft()
            if work is not None:
                work.wait()
            signal_of_any = self._act([int(value) for value in values.tolist()]) or signal_of_any
        return signal_of_any

    def ask(self) -> str:
        """Send a message in any case, and wait for it. A collective, as `finish`."""
        if not self._is_alone:
            self._send()
        return self.finish(wait=True)

    def _act(self, told: list[int]) -> str:
        number, milliseconds, microseconds, *of_save = told
        self._spacing = max(1, min(int(SPACING * 1e6) // max(microseconds, 1), MOST))
        self._waits = microseconds >= LONG * 1e6
        self.saver.advance(*of_save)
        if number:
            self.stop.heard(number, milliseconds / 1e3)
        return signal.Signals(number).name if number else ""

    def _send(self) -> None:
        values = torch.tensor(self._word(), dtype=torch.int64)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent.append((self._step, values, work))
        self._sent_in = self._step

    def _word(self) -> list[int]:
        """Return what this rank tells; of each number, the largest of any rank counts."""
        number = self.stop.number
        since = int(self.stop.seconds() * 1e3) if number else 0
        return [number, since, int(min(self._seconds, LONGEST) * 1e6), *self.saver.word()]


# ---- the run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training run that has passed all checks."""

    config: TrainConfig
    place: Place
    data: Data
    model: nn.Module
    task: Task
    remarks: list[str]
    changed: Stateful = NOTHING  # by each pass


class Run:
    """A training run on this rank, with rank 0's files in a folder. Every method is a collective."""

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder = trainer, folder
        self.report = Report(trainer, folder)
        feed = trainer.feed
        self.limits = Limits(trainer.config, lambda: feed.steps_per_epoch, scores=bool(trainer.scorers))
        self.saver = Saver(trainer, folder, self.report.event)
        span, start = trainer.config.log.profile, trainer.progress.global_step
        is_profiled = span and collectives.rank() == 0
        self.profile = Profile(span or "", folder, trainer.log, start) if is_profiled else None
        self.stop = Stop(trainer.config.saving.grace, self._left_undone)
        self.agreement = Agreement(self.stop, self.saver)
        self.hook = Hook(trainer, folder, self.report.event, lambda: self.stop.number)
        self._begin_step: Callable[[int], None] = lambda _: None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the run's trackers and its count of attempts, and listen to signals."""
        trainer, rank = self.trainer, collectives.rank()
        with contextlib.ExitStack() as files:
            with collectives.fail_together():
                self._begin_step = files.enter_context(folders.attempts(self.folder, trainer.config, rank))
                if rank == 0:
                    step = trainer.progress.global_step
                    opened = trackers.opened(trainer.config, self.folder, step, lambda: self.stop.number)
                    trainer.log.sinks = files.enter_context(opened)
            files.enter_context(self.stop)
            heartbeat.excuse(partial(self._begin_step, 0))
            trainer.before_update = self.agreement.begin
            for scorer in trainer.scorers.values():
                scorer.before_batch = self.stop.raise_if_told
            try:
                yield
            except BaseException:
                if self.profile is not None:
                    self.profile.leave()
                self.saver.leave()
                trainer.recorder.leave()
                raise
            with collectives.fail_together():  # what a tracker writes last may fail, on rank 0 alone
                files.close()

    def _left_undone(self) -> str:
        """Return what rank 0 says if a signal ends the process at once, which is no failure of a step."""
        self._begin_step(0)
        heartbeat.end_as_told(self.stop.name)
        return self.report.how_to_go_on() if collectives.rank() == 0 else ""

    def is_over(self) -> bool:
        """Return whether no step is left to take."""
        return self.limits.is_over(self.trainer.progress)

    def begin(self) -> str:
        """Begin with the next step; return `--stop-at` if that is behind."""
        step, stop_at = self.trainer.progress.global_step, self.trainer.config.saving.stop_at
        if stop_at and stop_at <= step and not self.is_over():
            return "--stop-at"
        self.begin_step()
        return ""

    def begin_step(self) -> None:
        """Note in which step the run is, so that one that fails again and again is not tried for ever."""
        step, name = self.trainer.progress.global_step + 1, self.trainer.config.schedule.name
        self._begin_step(step)
        if self.profile is not None:
            self.profile.begin_step(step)
        if step == self.trainer.updater.total_steps + 1 and name != "none":
            # Of a stream that is longer than it says, or whose lanes have very different lengths.
            ends = f"--scheduler {name} ends with step {step - 1}, by what --data says"
            text = f"{ends}, and the stream goes on: --max-steps says its length"
            self.report.event("schedule ended", text, step - 1)

    def end_step(self, due: Due) -> None:
        """End the record of `--profile` where it ends. On one rank; not a collective."""
        if self.profile is not None:
            step = self.trainer.progress.global_step
            self.report.profiled(self.profile.end_step(step, last=bool(due.end)))

    def evaluate(self) -> tuple[Scores | None, str]:
        """Return the scores on the test sets; or None, and the signal that has cut the evaluation short."""
        try:
            with self.report.evaluating():
                return self.trainer.scores(), ""
        except Exception as error:
            if is_lost_rank(error) or is_timeout(error):
                raise
            signal = self.agreement.ask()  # if one rank fails in an evaluation, all do
            if not signal:  # a resume begins with it
                self.trainer.progress.unscored = True
                self.saver.save(last=True, best=False, in_haste=True)
                self.saver.finish()
                raise
            return None, signal

    def trained(self) -> TrainScore | None:
        """End the epoch if it is done; return its score, or that of its part in which the run ends."""
        if self.trainer.epoch_is_done():
            return self.trainer.finish_epoch()
        return self.trainer.score_so_far() if self.is_over() else None

    def note(self, tested: Scores | None) -> tuple[bool, bool]:
        """Return whether scores are the best so far, and among the best of `--keep-best`."""
        if tested is None:
            return False, False
        merit = self.trainer.selection.merit(tested)
        return self.trainer.progress.note(merit, self.trainer.config.scores.keep_best)

    def finish(self, end: str) -> None:
        """Wait for the last save, and say what it and a signal have come to."""
        if self.profile is not None:
            self.report.profiled(self.profile.end_step(self.trainer.progress.global_step, last=True))
            if not self.profile.done:
                span = self.trainer.config.log.profile
                console.warn(f"--profile {span}: the run has taken none of these steps")
        self.saver.finish()
        self.report.note_signal(end, self.stop)

    def end(self, end: str) -> int:
        """Say how the run ended, and return the exit code."""
        self.trainer.recorder.end(end)
        self.report.end(end)
        return 128 + self.stop.number if end and end == self.stop.name else 0


def begun(job: Job, folder: str) -> Run:
    """Build the trainer, continue from a checkpoint if there is one, and print the head of the report."""
    trainer = Trainer(job.config, job.data, job.model, job.place, job.task, job.changed)
    if job.config.data.skip_damaged:  # which leaves out training samples alone
        for scorer in trainer.scorers.values():
            scorer.look()
    resumed = resume(trainer, folder)
    if trainer.differing and collectives.rank() == 0:
        console.warn(f"ranks differ: {trainer.differing}")
    trainer.feed.recorder = proof.recorder_of(trainer, folder)
    measured = shares.settle(trainer)
    trainer.recorder.begin(resumed.source)
    like = collectives.from_rank_zero(lambda: folders.write_settings(trainer, folder))
    is_new = resumed.source is None
    remarks = [("start" if is_new else "resume", text) for text in resumed.remarks]
    remarks += [("init", text) for text in job.remarks if is_new]
    remarks += [("like", text) for text in like] + [("shares", text) for text in measured]
    run = Run(trainer, folder)
    run.report.begin(remarks)
    return run


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    evaluate: bool = False
    save: bool = False  # last.pt
    hook: bool = False  # of --every
    end: str = ""  # what ends the run here, as `--max-time`


class Limits:
    """Says after each step what is due, the same on every rank."""

    def __init__(
        self,
        config: TrainConfig,
        steps_per_epoch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        scores: bool = True,
    ) -> None:
        # `--max-time` and the times of `--save-every` count from here; only rank 0's clock is read.
        self.config, self.steps_per_epoch, self.clock, self.scores = config, steps_per_epoch, clock, scores
        self.began = self.saved = clock()

    def is_over(self, position: Progress) -> bool:
        """Return whether the training has all its steps."""
        (epochs, _), training = self._epochs(position), self.config.training
        steps = training.max_steps
        is_done = epochs >= training.epochs or (steps is not None and position.global_step >= steps)
        return is_done or bool(self.early(position))

    def early(self, position: Progress) -> str:
        """Return `--stop-early` if its evaluations are over without a better score."""
        most = self.config.scores.stop_early
        return "--stop-early" if most is not None and position.since_best >= most else ""

    def due(self, position: Progress) -> Due:
        """Return what is to be done after a step. A collective if a time is among the limits.

        The end of a training is evaluated and saved. `--max-time` saves but does not evaluate: the run goes
        on from there as if it had not been interrupted. The epoch that ends with the step may be counted as
        finished or not.
        """
        config, is_over = self.config, self.is_over(position)
        time_to_save, time_is_up = self._times()
        end = "--max-time" if time_is_up else ""
        if config.saving.stop_at and position.global_step >= config.saving.stop_at:
            end = "--stop-at"
        if is_over:
            epochs, _ = self._epochs(position)
            end = self.early(position) or ("--epochs" if epochs >= config.training.epochs else "--max-steps")
        save = bool(end) or time_to_save or self._is_due(config.saving.save_every, position)
        hook = config.log.every is not None and self._is_due(hook_interval(config.log.every), position)
        evaluate = self.scores and (is_over or self._is_due(config.task.eval_every, position))
        return Due(evaluate, save, hook, end)

    def _epochs(self, position: Progress) -> tuple[int, bool]:
        """Return the number of finished epochs, and whether the last one has just ended."""
        if position.step == 0:
            return position.epoch, position.global_step > 0
        ends = position.step >= self.steps_per_epoch()
        return position.epoch + ends, ends

    def _is_due(self, every: tuple[int, str], position: Progress) -> bool:
        number, unit = every
        if unit == "steps":
            return position.global_step % number == 0
        epochs, ends = self._epochs(position)
        return unit == "epochs" and ends and epochs % number == 0

    def _times(self) -> tuple[bool, bool]:
        """Return whether it is time to save, and whether the time is up, by rank 0's clock. A collective."""
        interval, limit = self.config.saving.save_every.seconds, self.config.training.max_time
        if interval is None and limit is None:
            return False, False
        now = self.clock()
        is_time = interval is not None and now - self.saved >= interval
        is_over = limit is not None and now - self.began >= limit
        answer = torch.tensor([is_time, is_over])
        collectives.broadcast_into([answer])
        to_save, is_up = answer.tolist()
        if to_save or is_up:
            self.saved = now
        return to_save, is_up
