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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptToolError
from train.config import parser as flags
from train.config.training import TrainConfig
from train.launch import program as launch
from train.launch import spawn as spawning
from train.launch.stopping import Starting

# torch is imported only where it is needed, so that wrong flags are refused within a tenth of a second.
if TYPE_CHECKING:
    from torch import nn

    from ckpttool.distributed.group import Place
    from ckpttool.distributed.plan import Step
    from train.data.data_set import Data
    from train.run.run import Run
    from train.tasks.task import Task
    from train.trainer.trainer import Trainer


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
        from train.run import preview

        return launch.run_program(lambda: preview.run(config), lambda _: None)
    if config.spawn:
        return spawning.spawn(__file__, flags.without("--spawn", arguments), config.spawn)
    with Starting(launch.rank()):
        return launch.run_program(lambda: prepare(config), work)


def prepare(config: TrainConfig) -> Job:
    """Check that the training is possible, on this rank alone.

    Raises:
        UsageFault: a flag can't be satisfied: no such data or model, or they do not fit.
        FileError: a sample can't be read.
    """
    import torch._dynamo  # as DDP does; inside a process group, it would keep the group alive

    from ckpttool.distributed import randomness
    from ckpttool.distributed.group import find_place
    from train.checkpoint import init_from
    from train.data import data_set as data
    from train.log import trackers
    from train.model import builtin as models
    from train.tasks import task as tasks
    from train.trainer import preflight

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
    from train.data import data_set as data
    from train.run import folder as run_folder
    from train.run.run import Run

    # Each rank has loaded its own copy: if they differed, samples would be used twice, or never.
    data.compare(job.data, "before training")
    with contextlib.ExitStack() as held:
        claimed = run_folder.claimed(job.config, time.strftime("%Y%m%d-%H%M%S"))
        run = Run(job, collectives.from_rank_zero(lambda: held.enter_context(claimed)))
        with run.opened():
            end = train_epochs(run)
        return run.end(end)


def train_epochs(run: Run) -> str:
    """Train the rest of a run; after each step, do what is due.

    Returns:
        What ended it: a flag, as `--epochs`, or a signal; `""` if there was nothing left to do.
    """
    end = run.begin()
    while not end and not run.is_over():
        began = time.monotonic()
        for _ in run.report.bar(steps_of_epoch(run.trainer)):
            end = run.after_step(began)  # evaluates, reports and saves
            if end:
                break
    run.finish(end)
    return end


def steps_of_epoch(trainer: Trainer) -> Iterator[None]:
    """Take the remaining optimizer steps of the current epoch; yield after each. A collective."""
    if trainer.proof:
        trainer.proof.epoch()
    if trainer.config.virtual_ranks:
        from train.trainer import virtual_ranks

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
    from train.trainer.trainer import Sums

    task, precision, log = trainer.task, trainer.precision, trainer.log
    sums = Sums()
    passes = trainer.passes(step)
    for number in range(1, passes + 1):
        with trainer.gradients(reduced=number == passes):
            if number > len(step.micro_batches):  # other ranks have samples left
                with log.phase("backward"):
                    trainer.run_dummy_step()
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
