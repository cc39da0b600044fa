"""The report of a run: what rank 0 prints, and the log it writes. Imports torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ckpttool.distributed import collectives
from ckpttool.distributed.processes import started_by_spawn
from ckpttool.errors import CheckFailed
from ckpttool.metrics.certificate import Certificate, LossCertificate
from ckpttool.words import counted
from train import console
from train.checkpoint import parts
from train.checkpoint.files import BEST, LAST
from train.config import command_line
from train.config.shared import OWN
from train.launch.stopping import Stop
from train.log import log_file
from train.run.bar import Bar, Clock
from train.run.header import header
from train.run.score_table import Column, ScoreTable
from train.tasks.builtin import Classification
from train.trainer.progress import Score, Scores, TrainScore, in_words
from train.trainer.trainer import Trainer

# Steps in which nothing counts that are said; the log has all.
SHOWN = 3


class Report:
    """Lines on stdout, a progress bar on stderr if it is a terminal, and the log. Silent on other ranks.

    `begin`, `scores` and `end` are collectives: if rank 0 can't log, or print the first or last lines, every
    rank fails. What it can't print in between, it leaves out.
    """

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder, self.speaks = trainer, folder, trainer.place.rank == 0
        metrics = None if isinstance(trainer.task, Classification) else [*trainer.task.metrics]
        self._table = ScoreTable(self._width(), metrics, shutil.get_terminal_size((120, 24)).columns)
        self._bar = Bar(trainer, shown=self.speaks and console.is_terminal(sys.stderr))
        self._when = ""
        self._uncounted = trainer.progress.uncounted
        self._clock = Clock()

    def begin(self, remarks: list[tuple[str, str]]) -> None:
        """Print the header and remarks (a word and a sentence); drop from the log what is trained again."""
        with collectives.fail_together():
            if self.speaks:
                progress = self.trainer.progress
                log_file.cut(self.folder, epoch=progress.epoch, step=progress.global_step)
                self._say_header(remarks)

    def _say_header(self, remarks: list[tuple[str, str]]) -> None:
        config = self.trainer.config
        remarks = [*header(self.trainer, self.folder).items(), *remarks]
        if config.accumulate > 1 and (why := self.trainer.depends_on_passes()):
            remarks = [*remarks, ("note", f"not the training of --accumulate 1: {why}")]
        for word, remark in remarks:
            words = [f"{word:<6}", *[" " * 6] * remark.count("\n")]
            for first, line in zip(words, remark.split("\n"), strict=True):
                console.say(console.folded(f"{first}  {line.strip()}", sys.stdout, indent=8))
        if self.trainer.progress.epoch < config.epochs:
            if hidden := ", ".join(self._table.hidden):
                note = f"note    the terminal is too narrow for columns that the log has: {hidden}"
                console.say(console.folded(note, sys.stdout, indent=8))
            console.say(f"\n{self._table.heading()}")

    def _width(self) -> int:
        """Return the columns of `3/10`, or of `2.50/10` where scores come in the middle of epochs."""
        config = self.trainer.config
        parts = config.eval_every.unit == "steps" or config.max_steps
        return max(7, len(f"{config.epochs}/{config.epochs}") + 3 * bool(parts))

    def _done(self) -> str:
        """Return how far the run has come: `3/10`, `2.50/10`, or `step 250` in an epoch of any length."""
        progress, epochs = self.trainer.progress, self.trainer.config.epochs
        if progress.step and self.trainer.feed.known_steps is None:
            return f"step {progress.global_step}"
        return f"{self.trainer.epochs_done():.2f}/{epochs}" if progress.step else f"{progress.epoch}/{epochs}"

    def bar(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps of an epoch, counted on a progress bar."""
        self._clock = Clock()
        yield from self._bar.over(self._clock.training(steps))

    def evaluating(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time is that of an evaluation."""
        return self._clock.evaluating()

    def _say_above_bar(self, line: str) -> None:
        """Print a line in the place of the progress bar, which then moves down.

        The log has what can't be printed, so that training goes on.
        """
        self._bar.clear()
        try:
            console.say(line)
        except CheckFailed as error:
            console.warn(f"{error.message}; training goes on")
        self._bar.refresh()

    def scores(self, trained: TrainScore | None, tested: Scores | None, *, best: bool) -> None:
        """Print one line about scores, and add one object to the log; nothing if there are none.

        `trained` is of the epoch that has just ended, or of the one in which the run ends; `tested` of the
        test sets now.
        """
        if trained is None and tested is None:
            return
        scores = dict(tested or {})
        own = scores.pop(OWN, None)
        with collectives.fail_together():
            if self.speaks:
                lines = [f"{name:>{self._width()}}  {in_words(score)}" for name, score in scores.items()]
                self._say_above_bar("\n".join([self._line(trained, own, best), *lines]))
        entry = self._entry(trained, own)
        if scores:
            entry["tests"] = {name: without(score.score()) for name, score in scores.items()}
        self.trainer.log.write(entry, self.trainer.progress.global_step)

    def _line(self, trained: TrainScore | None, tested: Score | None, best: bool) -> str:
        cells: dict[Column | str, str] = {Column.SECONDS: f"{self._clock.seconds():.1f}"}
        if trained:
            cells[Column.TRAIN_LOSS] = f"{trained.loss:.4f}"
            if trained.accuracy is not None:
                cells[Column.TRAIN_RIGHT] = f"{trained.accuracy:.2%}"
        if tested:
            cells[Column.TEST_LOSS] = f"{tested.loss:.4f}"
        if isinstance(tested, Certificate):
            cells[Column.TEST_RIGHT] = f"{tested.accuracy:.2%}"
            cells[Column.COUNTED] = f"({tested.correct}/{tested.samples})"
        if isinstance(tested, LossCertificate):
            values = tested.metrics.items()
            cells |= {name: f"{value:.4g}" for name, value in values if isinstance(value, int | float)}
        return self._table.line(self._done(), cells, best=best)

    def _entry(self, trained: TrainScore | None, tested: Score | None) -> dict[str, Any]:
        """Return the object for the log: an epoch's has `epoch`, one in the middle of an epoch `step`."""
        score = {} if tested is None else without(tested.score())
        used: dict[str, Any] = {}
        if trained is not None:
            used = {"train_loss": trained.loss, "train_samples": trained.samples}
            used |= {} if trained.accuracy is None else {"train_accuracy": trained.accuracy}
        if self.trainer.progress.step:
            epochs = round(self.trainer.epochs_done(), 6)
            entry: dict[str, Any] = {"step": self.trainer.progress.global_step, "epochs": epochs}
            return entry | {f"test_{name}": value for name, value in score.items()} | used
        entry = {"epoch": self.trainer.progress.epoch, **score, **self._clock.times(), **used}
        if tested is not None:
            entry["test_samples"] = tested.samples
            entry |= {name: getattr(tested.evaluation, name) for name in ("threads", "batch_size")}
        return entry | {"lr": self.trainer.progress.lr}

    def profiled(self, lines: list[str]) -> None:
        """Print the table of `--profile`; nothing if there is none yet."""
        if lines:
            self._say_above_bar("\n".join(["profile " + lines[0], *(f"{'':8}{line}" for line in lines[1:])]))

    def event(self, event: str, text: str, step: int, **fields: Any) -> None:
        """Print on stderr what the user should know, and log it (`event`, `fields`); the run goes on."""
        if self.speaks and text:
            self._warn(text)
        self.trainer.log.write({"step": step, "event": event, **fields}, step)

    def _warn(self, text: str) -> None:
        self._bar.clear()
        console.warn(text)

    def uncounted(self) -> None:
        """Say that nothing counted in this step, if so; after the first few times only in the log."""
        progress = self.trainer.progress
        if progress.uncounted > self._uncounted:
            self._uncounted, step = progress.uncounted, progress.global_step
            text = f"nothing counted in step {step}, whose mean loss has no value: the step was skipped"
            if self.speaks and progress.uncounted <= SHOWN:
                more = "; later ones are only in the log" if progress.uncounted == SHOWN else ""
                self._warn(text + more)
            self.trainer.log.write({"step": step, "event": "nothing counted"}, step)

    def left_out(self) -> None:
        """Say what --skip-damaged left out in this step; after the first few times only in the log."""
        feed, step = self.trainer.feed, self.trainer.progress.global_step
        for number, what in enumerate(feed.left_out, start=feed.skipped - len(feed.left_out) + 1):
            if self.speaks and number <= SHOWN:
                more = "; later ones are only in the log" if number == SHOWN else ""
                self._warn(f"--skip-damaged: left out {what}{more}")
            self.trainer.log.write({"step": step, "event": "left out", "what": what}, step)
        feed.left_out = []

    def note_signal(self, ended_by: str, stop: Stop) -> None:
        """Log how long a run took to end, if a signal has ended it. A collective."""
        if ended_by and ended_by == stop.name:
            seconds, step = stop.seconds(), self.trainer.progress.global_step
            left = stop.grace - seconds
            self._when = f" after step {step}, saved {seconds:.1f} s later, {left:.1f} s of --grace left"
            fields = {"seconds": round(seconds, 3), "grace_left": round(left, 3)}
            self.trainer.log.write({"step": step, "event": ended_by, **fields}, step)

    def end(self, ended_by: str) -> None:
        """Print what was saved, and the commands to use it; `ended_by` is `""` if there was nothing to do."""
        with collectives.fail_together():
            if self.speaks:
                self._say_end(ended_by)

    def _say_end(self, ended_by: str) -> None:
        last, best = (os.path.join(self.folder, name) for name in (LAST, BEST))
        if count := self.trainer.progress.uncounted:
            console.say(f"\nskipped {counted(count, 'step')} in which nothing counted")
        if skipped := self.trainer.feed.skipped:
            console.say(f"\nleft out {skipped} that can't be read (--skip-damaged)")
        saved = [path for path in (best, last) if os.path.exists(path)]
        if ended_by and last in saved:
            console.say(f"\nsaved   {last}")
            if best in saved:
                score = self.trainer.selection.in_words(self.trainer.progress.best)
                console.say(f"        {best} ({score})")
            elif self.trainer.scorers:
                console.say(f"        no {BEST}: no score here was the best so far")
        if saved:
            if ended_by == "--stop-early":
                console.say(
                    f"\nended   by --stop-early: {self.trainer.progress.since_best} scores were not better"
                )
            elif ended_by and ended_by not in ("--epochs", "--max-steps"):
                console.say(f"\nended   by {ended_by}{self._when}\n{self.how_to_go_on()}")
            console.say("next:")
            # In the run's own folder: elsewhere another run's model may have that name.
            model = os.path.join(self.folder, "model.safetensors")
            tensors = parts.named_in(saved[0]) if parts.lie_in(self.folder) else saved[0]
            strip = ["ckpttool", "strip-prefix", tensors, model]
            strip += ["--state", "ema.averages"] * bool(self.trainer.updater.ema)
            console.say(command_line.to_paste([*strip, *(["--force"] * os.path.exists(model))]))
            same, threads = command_line.flags_of(self.trainer.config), torch.get_num_threads()
            if self.trainer.place.device.type == "cpu" and threads != 1:
                same += ["--threads", str(threads)]  # another number has other last digits
            if self.trainer.scorers:
                console.say(command_line.to_paste(["python", command_line.program("evaluate"), model, *same]))
        elif ended_by:
            console.say(self.how_to_go_on())

    def how_to_go_on(self) -> str:
        """Return the command that continues an interrupted run."""
        if not any(os.path.exists(os.path.join(self.folder, name)) for name in (LAST, BEST)):
            return "nothing was saved yet (--save-every N[steps|epochs])"
        config, ranks = self.trainer.config, self.trainer.place.world_size
        spawned = ranks if started_by_spawn() else None
        stop_at = config.stop_at if (config.stop_at or 0) > self.trainer.progress.global_step else None
        if ranks != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            return f"to continue, start it as before with --out {shlex.quote(self.folder)} --resume auto"
        start = ["python"] if spawned or ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
        resumed = replace(config, out=self.folder, resume="auto", force=False, spawn=spawned, stop_at=stop_at)
        flags = command_line.arguments_of(resumed)
        return f"to continue:\n{command_line.to_paste([*start, command_line.program('main'), *flags])}"


def without(score: dict[str, Any]) -> dict[str, Any]:
    """Return a score without what the log leaves out."""
    return {name: value for name, value in score.items() if name not in ("per_class", "ranks")}
