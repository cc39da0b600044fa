"""Trains a model with DistributedDataParallel, on one process or many, exactly.

    torchrun --nproc-per-node 2 train/main.py        # two ranks: the digits, a small CNN, ten seconds
    torchrun --nproc-per-node 2 -m train.main        # the same
    python train/main.py --spawn 2                   # the same, without torchrun
    python train/main.py                             # one rank, and the same training

All flags: python train/main.py --help. The global batch is what `--batch-size` says on any number of ranks,
so adding ranks makes a run faster and nothing else. Rank 0 writes into `--out`:

    last.pt      the run as it stands; `--resume auto` goes on from it, in the middle of an epoch too
    best.pt      the same, as it stood when the test accuracy was best
    log.jsonl    one object an epoch

    python train/main.py --out runs/a --save-every 100steps        # and after a power cut, or to train longer
    python train/main.py --out runs/a --resume auto --epochs 20

Then, where there is neither this code nor torch.distributed:

    ckpttool strip-prefix runs/a/best.pt model.safetensors

Exit codes: 0 done, 1 a check failed (ranks differ, a rank died, weights became NaN), 2 wrong flags,
3 unreadable input.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import UsageFault
from train import flags, launch
from train.config import TrainConfig

# torch is imported where it is needed, so that wrong flags are refused in a tenth of a second.
if TYPE_CHECKING:
    from torch import nn

    from train.checkpoints import Saver
    from train.data import Data
    from train.engine import Trainer
    from train.report import Report


@dataclass(frozen=True)
class Job:
    """A training that has been found possible."""

    config: TrainConfig
    place: launch.Place
    data: Data
    model: nn.Module


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = flags.parse(arguments)
    except UsageFault as fault:
        return launch.complain(fault, echo=launch.rank() != 0)
    if config.spawn:
        return launch.spawn(__file__, flags.without("--spawn", arguments), config.spawn)
    return launch.run_program(lambda: prepare(config), work)


def prepare(config: TrainConfig) -> Job:
    """Finds out whether the training is possible, on this rank alone."""
    import torch._dynamo  # noqa: F401  DDP does; done inside a process group, it never lets go of the group

    from train import data, models, preflight, random_state

    place = launch.find_place(config.backend)
    if config.deterministic:
        launch.make_deterministic()
    loaded = data.load(config, seed=config.seed)
    random_state.seed_all(random_state.seed_from(config.seed, "weights"))
    model = models.build(config.model, shape=loaded.shape, classes=len(loaded.classes))
    preflight.check(config, loaded, model, place)
    return Job(config, place, loaded, model)


def work(job: Job) -> None:
    with launch.process_group(job.place, job.config.timeout):
        train(job)


def train(job: Job) -> None:
    """The training itself, on every rank of the process group."""
    from ckpttool import ranks
    from train import checkpoints, data, run_folder
    from train.engine import Trainer
    from train.report import Report

    config = job.config
    # Each rank has loaded its own copy: were they different, samples would be met twice, or never.
    data.compare(job.data, "before training")
    folder = ranks.decide(lambda: run_folder.choose(config, time.strftime("%Y%m%d-%H%M%S")))
    trainer = Trainer(config, job.data, job.model, job.place)
    remarks = checkpoints.resume(trainer, folder)
    saver = checkpoints.Saver(trainer, folder)
    report = Report(trainer, folder)
    report.begin(remarks)

    try:
        run_epochs(trainer, saver, report)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(report.how_to_go_on()) from None
    report.end()


def run_epochs(trainer: Trainer, saver: Saver, report: Report) -> None:
    """Trains what is left."""
    while trainer.progress.epoch < trainer.config.epochs:
        began = time.monotonic()
        for _ in report.bar(trainer.steps()):
            saver.after_step()
        trained = trainer.finish_epoch()
        tested = trainer.evaluate()
        best = trainer.note_best(tested)
        report.epoch(trained, tested, seconds=time.monotonic() - began, best=best)
        saver.after_epoch(best=best)  # after the log: a resume forgets what it will log again


if __name__ == "__main__":
    launch.leave(main())
