"""The report of a run: what rank 0 prints, and the log it writes. Imports torch."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ckpttool.core.words import counted
from ckpttool.distributed import collectives
from ckpttool.distributed.observer import started_by_spawn
from ckpttool.distributed.plan import Plan, dealt_sizes
from ckpttool.errors import CheckFailed
from ckpttool.metrics.certificate import Certificate, LossCertificate
from train import console
from train.checkpoint import files
from train.checkpoint.files import BEST, LAST
from train.config import command_line
from train.config.sections import OWN
from train.data.data_set import Data
from train.data.samples import count
from train.data.stream import Packed, Stream
from train.launch.program import Stop
from train.log import step_log
from train.log.step_log import peak_memory
from train.model.wrapping import Sharded
from train.tasks.builtin import Classification
from train.trainer.progress import Score, Scores, TrainScore, in_words
from train.trainer.trainer import Trainer

BEST_MARK = "  best"


class Column(Enum):
    """What a line has besides a task's metrics, which may have any name: name, heading, width."""

    TRAIN_LOSS = "train loss", "train loss", 10
    TRAIN_RIGHT = "train correct", "correct", 7
    TEST_LOSS = "test loss", "test loss", 10
    TEST_RIGHT = "test correct", "correct", 7
    COUNTED = "correct of all", "", 12
    SECONDS = "seconds", "seconds", 7


class ScoreTable:
    """The columns that fit into a width, behind a label such as `3/10`.

    Args:
        label: columns of the label.
        metrics: names of a task's metrics; None for classification, which has shares of correct samples.
        width: columns of the line.

    Attributes:
        hidden: the names of the columns that do not fit, in the order in which they gave way.
    """

    def __init__(self, label: int, metrics: Sequence[str] | None, width: int) -> None:
        own: list[Column | str] = [Column.TEST_RIGHT, Column.COUNTED] if metrics is None else [*metrics]
        trained = [Column.TRAIN_LOSS, Column.TRAIN_RIGHT] if metrics is None else [Column.TRAIN_LOSS]
        last = Column.SECONDS, Column.TRAIN_RIGHT, Column.TRAIN_LOSS
        ways: list[Column | str] = [Column.COUNTED, *reversed(metrics or ()), *last]  # in which they give way
        self._label = label
        self._shown = {each: _facts(each) for each in (*trained, Column.TEST_LOSS, *own, Column.SECONDS)}
        self.hidden: list[str] = []
        for each in ways:
            if label + sum(wide + 2 for _, _, wide in self._shown.values()) + len(BEST_MARK) <= width:
                break
            if facts := self._shown.pop(each, None):
                self.hidden.append(facts[0])

    def heading(self) -> str:
        heads = (f"{head:>{width}}" for _, head, width in self._shown.values())
        return "  ".join([f"{'epoch':>{self._label}}", *heads])

    def line(self, label: str, cells: Mapping[Column | str, str], *, best: bool) -> str:
        """Return a line; columns without a cell stay empty."""
        shown = (f"{cells.get(each, ''):>{width}}" for each, (_, _, width) in self._shown.items())
        return "  ".join([f"{label:>{self._label}}", *shown]) + BEST_MARK * best


def _facts(column: Column | str) -> tuple[str, str, int]:
    """Return the name, the heading and the width of a column."""
    if isinstance(column, Column):
        return column.value
    return column, column, max(len(column), len("1.234e-05"))


# ---- the progress bar --------------------------------------------------------------------------------


# Seconds between two looks at the figures behind the bar.
INTERVAL = 1.0


class Bar:
    """The steps of an epoch on a bar on stderr, if `shown`. At its end it is gone."""

    def __init__(self, trainer: Trainer, *, shown: bool) -> None:
        self.trainer, self.shown = trainer, shown
        self._bar: Any = None
        self._began, self._first, self._looked = time.monotonic(), trainer.progress.global_step, 0.0

    def over(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps, and count them."""
        if not self.shown:
            yield from steps
            return
        from tqdm import tqdm

        progress, total = self.trainer.progress, self.trainer.feed.known_steps
        label = f"epoch {progress.epoch + 1}/{self.trainer.config.training.epochs}"
        look: dict[str, Any] = {"unit": "step", "leave": False, "dynamic_ncols": True}
        with tqdm(total=total, initial=progress.step, desc=label, **look) as self._bar:
            for step in steps:
                if time.monotonic() - self._looked >= INTERVAL:
                    self._looked = time.monotonic()
                    self._bar.set_postfix_str(", ".join(self.figures()), refresh=False)
                self._bar.update()
                yield step
        self._bar = None

    def figures(self) -> list[str]:
        """Return what stands behind the bar: of the last line of the log, and of now."""
        trainer, now = self.trainer, self.trainer.log.latest
        unit = f"{trainer.log.work.unit or 'samples'}_per_second"
        rate, mfu = now.get(unit), now.get("mfu")
        found = [f"{rate:,.0f} {unit.partition('_')[0]}/s"] if rate else []
        found += [f"MFU {mfu:.0%}"] if mfu else []
        found.append(f"{peak_memory(trainer.place.device) / 1e9:.1f} GB")
        done = trainer.progress.global_step - self._first
        if done > 0 and (trainer.feed.known_steps is not None or trainer.config.training.max_steps):
            left = trainer.updater.total_steps - trainer.progress.global_step
            found.append(f"{in_hours((time.monotonic() - self._began) / done * max(left, 0))} left")
        return found

    def clear(self) -> None:
        """Make room for a line on the terminal."""
        if self._bar is not None:
            self._bar.clear()

    def refresh(self) -> None:
        """Show the bar again below a line."""
        if self._bar is not None and (self._bar.total is None or self._bar.n < self._bar.total):
            self._bar.refresh()


def in_hours(seconds: float) -> str:
    """Return a time as `2:05`, or `1:02:05` with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """The seconds of an epoch, from here on: in all, in its steps, and in its evaluations."""

    def __init__(self) -> None:
        self._began, self._training, self._evaluating = time.monotonic(), 0.0, 0.0

    def training(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps; the time that they take themselves is that of training."""
        while True:
            began = time.monotonic()
            try:
                step = next(steps)
            except StopIteration:
                return
            finally:
                self._training += time.monotonic() - began
            yield step

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of the block as that of evaluations."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._evaluating += time.monotonic() - began

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def times(self) -> dict[str, float]:
        """Return the seconds for the log."""
        parts = {"train_seconds": self._training, "evaluate_seconds": self._evaluating}
        return {name: round(value, 3) for name, value in {"seconds": self.seconds(), **parts}.items()}


# ---- the head ----------------------------------------------------------------------------------------


def header(trainer: Trainer, folder: str) -> dict[str, str]:
    """Return the lines of the head, each a word and what it says."""
    config, data, place = trainer.config, trainer.data, trainer.place
    parameters = sum(parameter.numel() for parameter in trainer.ddp.parameters())
    virtual = " on virtual ranks" if config.batch.virtual_ranks else ""
    divided = f",\n{'':8}{trainer.ddp.about}" if isinstance(trainer.ddp, Sharded) else ""
    dealt = shares(trainer.feed.plan, config.batch.virtual_ranks or place.world_size)
    tests = {name: other.parts()[-1].samples for name, other in data.others.items()}
    others = "".join(f"\n{'':8}{name}: {count(samples):,} samples" for name, samples in tests.items())
    return {
        "model": f"{config.model.name}, {parameters:,} parameters",
        "data": f"{data.name}\n{'':8}{describe(data)}{others}",
        "ranks": f"{place.world_size} on {place.device.type} ({place.backend}){divided}",
        "batch": f"{dealt}{virtual}, {_steps(trainer)}",
        "train": in_lines(command_line.recipe(config)),
        "out": folder,
    }


def describe(data: Data) -> str:
    """Return the sizes, the shape and the number of classes of a data set, as a sentence."""
    # A user's function may make batches of samples of any shapes.
    has_one = data.shape and not data.collation("training").is_own
    shape = f" of {'×'.join(map(str, data.shape))}" if has_one else ""
    tests = "no test samples" if data.test is None else f"{count(data.test):,} test samples"
    if isinstance(data.train, Stream):
        position = " that does not know its position" * (not data.train.resumes)
        said = [f"{_kind(data.train, shape)}{position}", tests]
    elif data.test is None:
        said = [f"{count(data.train):,} training samples{shape}", tests]
    else:
        said = [f"{count(data.train):,} training and {tests}{shape}"]
    return ", ".join([*said, *([f"{len(data.classes)} classes"] if data.classes else [])])


def _kind(stream: Stream, shape: str) -> str:
    """Return what a stream consists of."""
    source = stream.shards[0].source
    if isinstance(source, Packed):
        return f"a stream of packed blocks of {source.block} tokens"
    length = "" if stream.length is None else f"{stream.length:,} "
    return f"a stream of {length}samples{shape}"


def _steps(trainer: Trainer) -> str:
    steps = trainer.feed.known_steps
    if steps is None:
        return "until the stream ends"
    return f"{counted(steps, 'step')} per epoch{', as it says' * (trainer.feed.stream is not None)}"


def shares(plan: Plan, world_size: int) -> str:
    """Return the global batch and, if there are few ranks, each one's share: `64 = 32+32`."""
    if not 1 < world_size <= 8:
        return str(plan.batch_size)
    return f"{plan.batch_size} = {'+'.join(map(str, dealt_sizes(plan.batch_size, plan.weights(world_size))))}"


def in_lines(recipe: str) -> str:
    """Return a recipe broken between its parts, for at most 80 columns with eight before each line."""
    width = min(shutil.get_terminal_size().columns, 80) - 8
    unbreakable = recipe.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    lines = textwrap.wrap(unbreakable, width=max(width, 16), break_long_words=False, break_on_hyphens=False)
    return f"\n{'':8}".join(lines).replace("\N{NO-BREAK SPACE}", " ")


# ---- the report --------------------------------------------------------------------------------------


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
                step_log.cut_log(self.folder, epoch=progress.epoch, step=progress.global_step)
                self._say_header(remarks)

    def _say_header(self, remarks: list[tuple[str, str]]) -> None:
        config = self.trainer.config
        remarks = [*header(self.trainer, self.folder).items(), *remarks]
        if config.batch.accumulate > 1 and (why := self.trainer.depends_on_passes()):
            remarks = [*remarks, ("note", f"not the training of --accumulate 1: {why}")]
        ranks = 1 if config.batch.virtual_ranks else self.trainer.place.world_size
        if why := self.trainer.changed.on_ranks(self.trainer.feed.plan, ranks):
            remarks = [*remarks, ("note", f"not the training of one rank: {why}")]
        for word, remark in remarks:
            words = [f"{word:<6}", *[" " * 6] * remark.count("\n")]
            for first, line in zip(words, remark.split("\n"), strict=True):
                console.say(console.folded(f"{first}  {line.strip()}", sys.stdout, indent=8))
        if self.trainer.progress.epoch < config.training.epochs:
            if hidden := ", ".join(self._table.hidden):
                note = f"note    the terminal is too narrow for columns that the log has: {hidden}"
                console.say(console.folded(note, sys.stdout, indent=8))
            console.say(f"\n{self._table.heading()}")

    def _width(self) -> int:
        """Return the columns of `3/10`, or of `2.50/10` where scores come in the middle of epochs."""
        config = self.trainer.config
        parts = config.task.eval_every.unit == "steps" or config.training.max_steps
        return max(7, len(f"{config.training.epochs}/{config.training.epochs}") + 3 * bool(parts))

    def _done(self) -> str:
        """Return how far the run has come: `3/10`, `2.50/10`, or `step 250` in an epoch of any length."""
        progress, epochs = self.trainer.progress, self.trainer.config.training.epochs
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
                of, none = self.trainer.progress.since_best, self.trainer.progress.not_finite
                bad = f", {none} of them NaN or infinite" * (none > 0)
                console.say(f"\nended   by --stop-early: {of} scores were not better{bad}")
            elif ended_by and ended_by not in ("--epochs", "--max-steps"):
                console.say(f"\nended   by {ended_by}{self._when}\n{self.how_to_go_on()}")
            console.say("next:")
            # In the run's own folder: elsewhere another run's model may have that name.
            model = os.path.join(self.folder, "model.safetensors")
            tensors = files.parts_named_in(saved[0]) if files.parts_lie_in(self.folder) else saved[0]
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
        stop_at = config.saving.stop_at or 0
        ahead = stop_at if stop_at > self.trainer.progress.global_step else None
        if ranks != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            return f"to continue, start it as before with --out {shlex.quote(self.folder)} --resume auto"
        start = ["python"] if spawned or ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
        resumed = config.changed(out=self.folder, resume="auto", force=False, spawn=spawned, stop_at=ahead)

        flags = command_line.arguments_of(resumed)
        return f"to continue:\n{command_line.to_paste([*start, command_line.program('main'), *flags])}"


def without(score: dict[str, Any]) -> dict[str, Any]:
    """Return a score without what the log leaves out."""
    return {name: value for name, value in score.items() if name not in ("per_class", "ranks")}
