"""Train a model with DistributedDataParallel, exactly, on one process or many.

    torchrun --nproc-per-node 2 train/main.py        # two ranks: the digits, a small CNN, ten seconds
    torchrun --nproc-per-node 2 -m train.main        # the same
    python train/main.py --spawn 2                   # the same, without torchrun
    python train/main.py                             # one rank, and the same training

All flags: python train/main.py --help. `--batch-size` is the global batch on any number of ranks, so adding
ranks makes a run faster and changes nothing else. Rank 0 writes to `--out`:

    last.pt      the current state; `--resume auto` continues from it, even in the middle of an epoch
    best.pt      the state when the test accuracy was best
    log.jsonl    one object per epoch, and one per --log-every steps; train/plot.py draws them

    python train/main.py --out runs/a --save-every 100steps
    python train/main.py --out runs/a --resume auto --epochs 20    # after a power cut, or to train longer

Then, where neither this code nor torch.distributed is available:

    ckpttool strip-prefix runs/a/best.pt model.safetensors

Exit codes: 0 done, 1 a check failed (ranks differ, a rank died, weights became NaN), 2 wrong flags,
3 a file that can't be read or written, 128 + its number for a signal that ended the run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptToolError
from train import flags, launch, spawning
from train.config import TrainConfig

# torch is imported only where it is needed, so that wrong flags are refused within a tenth of a second.
if TYPE_CHECKING:
    from torch import nn

    from ckpttool.distributed.place import Place
    from ckpttool.distributed.plan import Step
    from train.agreement import Agreement
    from train.data import Data
    from train.engine import Trainer
    from train.limits import Limits
    from train.report import Report
    from train.saving import Saver
    from train.scoring import Score
    from train.task import Task


@dataclass(frozen=True)
class Job:
    """A training run that has passed all checks."""

    config: TrainConfig
    place: Place
    data: Data
    model: nn.Module
    task: Task
    remarks: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on this rank and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = flags.parse(arguments)
    except CkptToolError as fault:
        return launch.complain(fault, echo=launch.rank() != 0)
    if config.preview:
        from train import preview

        return launch.run_program(lambda: preview.run(config), lambda _: None)
    if config.spawn:
        return spawning.spawn(__file__, flags.without("--spawn", arguments), config.spawn)
    return launch.run_program(lambda: prepare(config), work)


def prepare(config: TrainConfig) -> Job:
    """Check that the training is possible, on this rank alone.

    Raises:
        UsageFault: a flag can't be satisfied: no such data or model, or they do not fit.
        FileError: a sample can't be read.
    """
    import torch._dynamo  # as DDP does; inside a process group, it would keep the group alive

    from ckpttool.distributed import randomness
    from ckpttool.distributed.place import find_place
    from train import data, init_from, models, preflight, trackers
    from train import task as tasks

    trackers.check(config)
    place = find_place(config.backend)
    if config.deterministic:
        randomness.make_deterministic()
    if config.virtual_ranks and place.device.type == "cpu":
        torch.set_num_threads(1)  # another number, as torchrun and --spawn set it, gives other last bits
    loaded = data.load(config, seed=config.seed)
    randomness.seed_all(randomness.seed_from(config.seed, "weights"))
    task = tasks.build(config, loaded)
    model = models.build(config.model, shape=loaded.shape, classes=task.outputs(loaded))
    preflight.check(config, loaded, model, place, task)
    remarks = init_from.load(model, config.init, config.init_allow_missing) if config.init else []
    return Job(config, place, loaded, model, task, remarks)


def work(job: Job) -> int:
    """Train in a process group, and return the exit code."""
    with launch.process_group(job.place, job.config):
        return train(job)


def train(job: Job) -> int:
    """Train on every rank of the process group: a new run, or the rest of an interrupted one.

    Returns:
        The exit code: 0, or 128 + the number of the signal that ended the run.
    """
    from ckpttool.distributed import collectives
    from train import data, run_folder

    config = job.config
    # Each rank has loaded its own copy: if they differed, samples would be used twice, or never.
    data.compare(job.data, "before training")
    with contextlib.ExitStack() as held:
        claimed = run_folder.claimed(config, time.strftime("%Y%m%d-%H%M%S"))
        return train_in(collectives.decide(lambda: held.enter_context(claimed)), job)


def train_in(folder: str, job: Job) -> int:
    """Train, with rank 0's files in a folder. Returns as `train`."""
    from ckpttool.distributed import collectives
    from train import attempts, proof, resuming, shares, trackers
    from train.agreement import Agreement
    from train.engine import Trainer
    from train.report import Report
    from train.saving import Saver
    from train.stopping import Stop

    trainer = Trainer(job.config, job.data, job.model, job.place, job.task)
    remarks = resuming.resume(trainer, folder)
    trainer.proof = proof.chain_of(trainer, folder)
    measured = [("shares", text) for text in shares.settle(trainer)]
    if trainer.proof:
        trainer.proof.begin(trainer.resumed)
    report = Report(trainer, folder)
    saver = Saver(trainer, folder, report.event)
    stop = Stop(job.config.grace, report.how_to_go_on if job.place.rank == 0 else lambda: "")
    began = [("resume", text) for text in remarks] or [("init", text) for text in job.remarks]
    report.begin(began + measured)
    with contextlib.ExitStack() as open_files:
        with collectives.together():
            begin = open_files.enter_context(attempts.counted(folder, job.config, job.place.rank))
            if job.place.rank == 0:
                opened = trackers.opened(job.config, folder, trainer.progress.global_step)
                trainer.log.sinks = open_files.enter_context(opened)
        open_files.enter_context(stop)
        try:
            end = run(trainer, report, saver, Agreement(stop, saver), begin)
        except BaseException:
            saver.leave()
            raise
        with collectives.together():  # what a tracker writes last may fail, on rank 0 alone
            open_files.close()
    if trainer.proof:
        trainer.proof.end(end)
    report.end(end)
    return 128 + stop.number if end and end == stop.name else 0


def run(
    trainer: Trainer, report: Report, saver: Saver, agreement: Agreement, begin: Callable[[int], None]
) -> str:
    """Train the rest of the run.

    Args:
        begin: is told of each step before it is taken.

    Returns:
        What ended it: a flag, as `--epochs`, or a signal; `""` if there was nothing left to do.
    """
    from train.limits import Limits

    limits = Limits(trainer.config, trainer.steps_per_epoch)
    trainer.before_update = agreement.begin
    trainer.scorer.before_batch = agreement.stop.raise_if_told
    end, began = "", time.monotonic()
    if trainer.progress.unscored:
        end = after_step(trainer, report, saver, agreement, limits, began)
    while not end and not limits.is_over(trainer.progress):
        began = time.monotonic()
        begin(trainer.progress.global_step + 1)
        for _ in report.bar(steps_of_epoch(trainer)):
            end = after_step(trainer, report, saver, agreement, limits, began)
            if end:
                break
            begin(trainer.progress.global_step + 1)
    saver.finish()
    report.note_signal(end, agreement.stop)
    return end


def after_step(
    trainer: Trainer, report: Report, saver: Saver, agreement: Agreement, limits: Limits, began: float
) -> str:
    """Do what is due after a step: evaluate, report and save. A collective.

    A signal ends the run without the evaluation that is due, or in the middle of it. A run that continues
    from there begins with it.

    Args:
        began: when the epoch began, by `time.monotonic`.

    Returns:
        What ends the run here; `""` if it goes on.
    """
    progress = trainer.progress
    signal = agreement.finish()
    due = limits.due(progress, signal)
    tested, trained, best = None, None, False
    if due.evaluate and not signal:
        tested, signal = evaluate(trainer, agreement)
    progress.unscored = due.evaluate and tested is None
    if not progress.unscored:
        trained = trainer.finish_epoch() if trainer.epoch_is_done() else None
        best = tested is not None and trainer.note_best(tested)
        report.scores(trained, tested, seconds=time.monotonic() - began, best=best)
    saver.save(last=due.save or bool(signal), best=best)  # after the log: a resume drops what it logs again
    return signal or due.end


def evaluate(trainer: Trainer, agreement: Agreement) -> tuple[Score | None, str]:
    """Return the score on the test set; or None, and the signal that has cut the evaluation short."""
    from ckpttool.errors import CkptToolError

    try:
        return trainer.evaluate(), ""
    except CkptToolError:
        signal = agreement.finish(now=True)  # if one rank fails in an evaluation, all do
        if not signal:
            raise
        return None, signal


def steps_of_epoch(trainer: Trainer) -> Iterator[None]:
    """Take the remaining optimizer steps of the current epoch; yield after each. A collective."""
    if trainer.proof:
        trainer.proof.epoch()
    if trainer.config.virtual_ranks:
        from train import virtual_ranks

        yield from virtual_ranks.steps_of_epoch(trainer)
        return
    for step, batches in trainer.rest_of_epoch():
        take_step(trainer, step, batches)
        yield


def take_step(trainer: Trainer, step: Step, batches: Iterator[Any]) -> None:
    """Take one optimizer step: forward, loss, backward and update, on this rank's part of the global batch.

    DDP averages gradients over the W ranks. Wanted are those of the mean loss over the samples of all ranks,
    so each rank's loss is W · Σℓ / N: exact for shares of any size, unlike the mean of each rank's mean.
    """
    from ckpttool.distributed import global_mean_loss
    from train.engine import Sums

    task, precision, log = trainer.task, trainer.precision, trainer.log
    sums = Sums()
    passes = trainer.passes(step)
    for number in range(1, passes + 1):
        with trainer.gradients(reduced=number == passes):
            if number > len(step.micro_batches):  # other ranks have samples left
                with log.phase("backward"):
                    trainer.stand_in()
                continue
            with log.phase("data"):
                batch = next(batches)
            with log.phase("forward"), precision.autocast():
                outputs = task.forward(trainer.ddp, batch)
                loss, count = task.loss(outputs, batch)
                loss_of_mean = precision.scale(global_mean_loss(loss, step.global_size))
            with log.phase("backward", loss_of_mean):
                loss_of_mean.backward()
        sums.add(loss, count, task.correct(outputs, batch), samples=len(step.micro_batches[number - 1]))
    with log.phase("reduce"):
        trainer.check_gradients()  # before the next collective: DDP may still wait for a missing gradient
        trainer.average_over_count(step, sums)
    with log.phase("update"):
        trainer.update()
    trainer.end_step(step, sums)


if __name__ == "__main__":
    launch.leave(main())
