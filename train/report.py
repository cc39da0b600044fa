"""The report of a run: what rank 0 prints, and the log it writes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from ckpttool.distributed import collectives
from ckpttool.metrics.certificate import Certificate
from train import launch, scoring
from train.config import DataConfig, TrainConfig
from train.data import Data
from train.engine import Score, Trainer
from train.flags import arguments_of
from train.optimizers import learning_rate
from train.plan import deal
from train.run_folder import BEST, LAST, append_to_log, cut_log
from train.samples import count
from train.scoring import Score as TestScore
from train.task import Classification


class Report:
    """Lines on stdout, a progress bar on stderr if it is a terminal, and the log. Silent on other ranks.

    `begin`, `epoch` and `end` are collectives: if rank 0 can't print or log, every rank fails.
    """

    def __init__(self, trainer: Trainer, folder: str) -> None:
        self.trainer, self.folder, self.speaks = trainer, folder, trainer.place.rank == 0
        self.first_epoch = trainer.progress.epoch

    def begin(self, remarks: list[str] | None) -> None:
        """Print the header and the remarks of a resume; drop from the log what will be trained again.

        Raises:
            FileError: on rank 0, if the log can't be changed; the other ranks raise RankFailed.
            CheckFailed: likewise, if stdout can't be written.
        """
        with collectives.together():
            if self.speaks:
                cut_log(self.folder, self.trainer.progress.epoch)
                self._say_header(remarks)

    def _say_header(self, remarks: list[str] | None) -> None:
        config, data, plan = self.trainer.config, self.trainer.data, self.trainer.plan
        place = self.trainer.place
        parameters = sum(parameter.numel() for parameter in self.trainer.ddp.parameters())
        launch.say(f"model   {config.model}, {parameters:,} parameters")
        launch.say(f"data    {data.name}")
        launch.say(f"        {describe(data)}")
        launch.say(f"ranks   {place.world_size} on {place.device.type} ({place.backend})")
        launch.say(f"batch   {shares(config.batch_size, place.world_size)}, {plan.steps} steps per epoch")
        launch.say(f"train   {recipe(config)}")
        launch.say(f"out     {self.folder}")
        for remark in remarks or ():
            launch.say(f"resume  {remark}")
        if self.trainer.progress.epoch < config.epochs:
            launch.say(self._heading())

    def _heading(self) -> str:
        """Return the heading of the epochs' lines."""
        if isinstance(self.trainer.task, Classification):
            return "\n  epoch  train loss  correct   test loss  correct               seconds"
        return "\n  epoch  train loss   test loss  seconds"

    def bar(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the same steps, counted on a progress bar."""
        progress, total = self.trainer.progress, self.trainer.plan.steps
        if not (self.speaks and sys.stderr.isatty()):
            yield from steps
            return
        from tqdm import tqdm

        label = f"epoch {progress.epoch + 1}/{self.trainer.config.epochs}"
        with tqdm(
            total=total, initial=progress.step, desc=label, unit="step", leave=False, dynamic_ncols=True
        ) as bar:
            for step in steps:
                yield step
                bar.update()

    def epoch(self, trained: Score, tested: TestScore, *, seconds: float, best: bool) -> None:
        """Print one line about an epoch, and add one object to the log. Raises as `begin`.

        Args:
            trained: on the training samples, each as it was used.
            tested: on the test set, after the epoch.
            seconds: that the epoch and its evaluation took.
            best: whether `tested` is the best result so far.
        """
        with collectives.together():
            if self.speaks:
                self._log_epoch(trained, tested, seconds, best)

    def _log_epoch(self, trained: Score, tested: TestScore, seconds: float, best: bool) -> None:
        config, progress = self.trainer.config, self.trainer.progress
        epoch, epochs = progress.epoch, config.epochs
        line = f"{f'{epoch}/{epochs}':>7}  {trained.loss:10.4f}  "
        entry = {"epoch": epoch, **tested.score(), "seconds": round(seconds, 3), "train_loss": trained.loss}
        for only_in_eval in ("per_class", "ranks"):
            entry.pop(only_in_eval, None)
        if isinstance(tested, Certificate):
            right = f"({tested.correct}/{tested.samples})"
            line += f"{trained.accuracy:7.2%}  {tested.loss:10.4f}  {tested.accuracy:7.2%} {right:>12}  "
            entry["train_accuracy"] = trained.accuracy
        else:
            line += f"{tested.loss:10.4f}  "
        metrics = "" if isinstance(tested, Certificate) else scoring.metrics_in_words(tested)
        launch.say(
            f"{line}{seconds:7.1f}{'  best' if best else '      ' * bool(metrics)}  {metrics}".rstrip()
        )
        entry |= {
            "threads": tested.evaluation.threads,
            "batch_size": tested.evaluation.batch_size,
            "lr": learning_rate(config, progress.global_step - 1, self.trainer.plan.steps),
        }
        append_to_log(self.folder, entry)

    def end(self) -> None:
        """Print what was saved, and the commands to use it. Raises as `begin`."""
        with collectives.together():
            if self.speaks:
                self._say_end()

    def _say_end(self) -> None:
        last, best = (os.path.join(self.folder, name) for name in (LAST, BEST))
        saved = [path for path in (best, last) if os.path.exists(path)]
        if self.trainer.progress.epoch > self.first_epoch:
            launch.say(f"\nsaved   {last}")
            if best in saved:
                score = scoring.merit_in_words(self.trainer.task, self.trainer.progress.best)
                launch.say(f"        {best} ({score})")
        if saved:
            flags = flags_of(self.trainer.config) + flags_of_bits(self.trainer.place.device)
            launch.say("next:")
            # In the run's own folder: elsewhere another run's model may have that name.
            model = shlex.quote(os.path.join(self.folder, "model.safetensors"))
            launch.say(f"  ckpttool strip-prefix {shlex.quote(saved[0])} {model} --force")
            command = f"python {program('evaluate')} {model}"
            launch.say(f"  {in_two_lines(command, flags)}")

    def how_to_go_on(self) -> str:
        """Return the command that continues an interrupted run."""
        last, place = os.path.join(self.folder, LAST), self.trainer.place
        if not os.path.exists(last):
            return "nothing was saved yet (--save-every N[steps|epochs])"
        spawn = place.world_size if launch.started_by_spawn() else None
        resumed = replace(self.trainer.config, out=self.folder, resume="auto", force=False, spawn=spawn)
        if place.world_size != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            return f"to continue, start it as before with --out {shlex.quote(self.folder)} --resume auto"
        alone = spawn or place.world_size == 1
        start = "python" if alone else f"torchrun --nproc-per-node {place.world_size}"
        return f"to continue: {start} {program('main')} {shlex.join(arguments_of(resumed))}"


def program(name: str) -> str:
    """Return the path of a program of this package, relative to the working directory."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    below = os.path.relpath(path)
    return shlex.quote(path if below.startswith(os.pardir) else below)


def describe(data: Data) -> str:
    """Return the sizes, the shape and the number of classes of a data set, in words."""
    shape = f" of {'×'.join(map(str, data.shape))}" if data.shape else ""
    classes = f", {len(data.classes)} classes" if data.classes else ""
    return f"{count(data.train):,} training and {count(data.test):,} test samples{shape}{classes}"


def shares(batch_size: int, world_size: int) -> str:
    """Return the global batch and, if there are few ranks, each one's share: `64 = 32+32`."""
    if not 1 < world_size <= 8:
        return str(batch_size)
    return f"{batch_size} = {'+'.join(str(len(part)) for part in deal(range(batch_size), world_size))}"


def recipe(config: TrainConfig) -> str:
    """Return the main settings of a training, in brief."""
    parts = [
        f"{config.epochs} epoch{'s' * (config.epochs != 1)}",
        f"{config.optimizer} lr {config.lr:g}",
        config.scheduler,
    ]
    if config.warmup.number:
        parts.append(f"warmup {config.warmup}")
    if config.accumulate > 1:
        parts.append(f"{config.accumulate} passes per step")
    return ", ".join([*parts, f"seed {config.seed}"])


def in_two_lines(command: str, flags: str) -> str:
    """Return a command to paste, broken if it would not fit into 80 columns."""
    break_or_not = " " if len(command) + len(flags) < 78 else " \\\n      "
    return command + break_or_not + flags


def flags_of(config: TrainConfig) -> str:
    """Return the flags with which an evaluation builds the same model and takes the same samples."""
    flags = [f"--model {shlex.quote(config.model)}", f"--data {shlex.quote(config.data)}"]
    if config.task != DataConfig.task:
        flags.append(f"--task {shlex.quote(config.task)}")
    if config.eval_batch != DataConfig.eval_batch:
        flags.append(f"--eval-batch {config.eval_batch}")
    for name, values in (("mean", config.mean), ("std", config.std)):
        if values:
            flags.append(f"--{name} {','.join(map(str, values))}")
    if config.resize:
        flags.append(f"--resize {config.resize}")
    return " ".join(flags)


def flags_of_bits(device: torch.device) -> str:
    """Return the flags with which an evaluation gives the same numbers to the last digit."""
    threads = torch.get_num_threads()
    return f" --threads {threads}" if device.type == "cpu" and threads != 1 else ""
