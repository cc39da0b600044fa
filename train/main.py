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
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

# The packages of this clone, whichever other one is installed; afterwards the user's modules come first.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from ckpttool.distributed.group import given_rank
from ckpttool.errors import CkptToolError
from train import console
from train.config import command_line
from train.config.sections import TrainConfig
from train.launch import program as launch
from train.launch.program import Starting

sys.path.append(sys.path.pop(0))

# torch is imported only where it is needed, so that wrong flags are refused within a tenth of a second.
if TYPE_CHECKING:
    from ckpttool.distributed.plan import Step
    from train.run.run import Job, Run
    from train.trainer.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on this rank and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = command_line.parse(arguments)
    except CkptToolError as fault:
        return launch.complain(fault, echo=given_rank() != 0)
    if config.preview.shown == "settings":
        text = command_line.settings_text(config.changed(preview=None))
        return launch.run_program(lambda: console.show(text * (given_rank() == 0)), lambda _: None)
    if config.preview.shown:
        from train.run import preview

        return launch.run_program(lambda: preview.run(config), lambda _: None)
    if config.ranks.spawn:
        return launch.spawn(__file__, command_line.without("--spawn", arguments), config.ranks.spawn)
    with Starting(given_rank()):
        return launch.run_program(lambda: prepare(config), work)


def prepare(config: TrainConfig) -> Job:
    """Check that the training is possible, on this rank alone; UsageFault or FileError if it isn't."""
    import torch._dynamo  # as DDP does; inside a process group, it would keep the group alive

    from ckpttool.distributed import randomness
    from ckpttool.distributed.group import find_place
    from train.checkpoint import resume
    from train.data import data_set
    from train.log import trackers
    from train.model import builtin as models
    from train.run.run import Job
    from train.tasks import builtin as tasks
    from train.trainer import preflight

    trackers.check(config)
    place = find_place(config.ranks.backend)
    if config.model.shard_offload and place.device.type == "cuda":
        # Parts lie on the CPU, and their norm is summed there.
        place = replace(place, backend="cpu:gloo,cuda:nccl")
    if place.device.type == "cpu":
        launch.keep_freed_memory()
    if config.numbers.deterministic:
        randomness.make_deterministic()
    if config.batch.virtual_ranks and place.device.type == "cpu":
        torch.set_num_threads(1)  # another number gives other last bits
    else:
        launch.set_threads()
    own = (config[name] or "" for name in ("data", "test_data", "model", "task", "optimizer", "scheduler"))
    launch.keep_importable(*own, *(config.log.every or ())[1:], *data_set.specs_of_others(config.data))
    own_task, seed = tasks.users(config.data.task), config.numbers.seed
    collate = tasks.collate_of(own_task, config.data.task)
    data = data_set.load(config.data, seed=seed, batch_size=config.batch.size, collate=collate)
    data = data_set.with_others(config.data, data, batch_size=config.batch.size, collate=collate)
    randomness.seed_all(randomness.seed_from(seed, "weights"))
    task = tasks.build(config, data, own_task)
    model = models.build(config.model.name, shape=data.shape, classes=task.outputs(data))
    changed = preflight.check(config, data, model, place, task)
    init, may_miss = config.model.init, config.model.init_allow_missing
    remarks = resume.load_weights(model, init, may_miss) if init else []
    return Job(config, place, data, model, task, remarks, changed)


def work(job: Job) -> int:
    """Train in a process group, and return the exit code."""
    with launch.process_group(job.place, job.config.ranks):
        return train(job)


def train(job: Job) -> int:
    """Train on every rank of the process group: a new run, or the rest of an interrupted one.

    Returns the exit code: 0, or 128 + the number of the signal that ended the run.
    """
    from ckpttool.distributed import collectives
    from train.data import data_set
    from train.launch import same_settings
    from train.run import folder as folders
    from train.run.run import begun

    same_settings.report(job.config)
    # Each rank has loaded its own copy: if they differed, samples would be used twice, or never.
    data_set.compare(job.data, "before training", workers=job.config.ranks.workers)
    with contextlib.ExitStack() as stack:
        claimed = folders.claimed(job.config.saving, time.strftime("%Y%m%d-%H%M%S"))
        run = begun(job, collectives.from_rank_zero(lambda: stack.enter_context(claimed)))
        with run.opened():
            end = train_epochs(run)
        return run.end(end)


def train_epochs(run: Run) -> str:
    """Train the rest of a run; return what ended it: a flag, a signal, or `""` if nothing was left to do."""
    # A signal may have cut short the evaluation after the last step: then the run goes on with that.
    end = after_step(run) if run.trainer.progress.unscored else run.begin()
    while not end and not run.is_over():
        for _ in run.report.bar(steps_of_epoch(run.trainer)):
            end = after_step(run)
            if end:
                break
    run.finish(end)
    return end


def after_step(run: Run) -> str:
    """Do what is due after a step; return what ends the run here, `""` if it goes on. A collective."""
    progress, tested = run.trainer.progress, None
    due = run.limits.due(progress)
    run.end_step(due)
    signal = run.agreement.finish(wait=due.evaluate or due.save)
    if due.evaluate and not signal:
        tested, signal = run.evaluate()
    progress.unscored = due.evaluate and tested is None
    run.report.uncounted()
    run.report.left_out()
    best, kept = run.note(tested)
    if not progress.unscored:
        run.report.scores(run.trained(), tested, best=best)
    if due.hook and not signal:
        run.hook.call()
    end = signal or due.end or run.limits.early(progress)
    # After the log: a resume drops what it logs again.
    run.saver.save(last=due.save or bool(end), best=best, kept=kept, in_haste=bool(signal))
    if not end:
        run.begin_step()
    return end


def steps_of_epoch(trainer: Trainer) -> Iterator[None]:
    """Take the remaining optimizer steps of the current epoch; yield after each. A collective."""
    trainer.recorder.epoch()
    if trainer.config.batch.virtual_ranks:
        from train.trainer import shares

        yield from shares.steps_of_virtual_ranks(trainer)
        return
    for step, batches in trainer.rest_of_epoch():
        take_step(trainer, step, batches)
        yield


def take_step(trainer: Trainer, step: Step, batches: Iterator[tuple[Any, int]]) -> None:
    """Take one optimizer step: forward, loss, backward and update, on this rank's part of the global batch.

    Wanted is the gradient of the mean loss over the samples of all ranks; train/trainer/exact.py says how.
    """
    from ckpttool.distributed import global_mean_loss
    from train.trainer.progress import Sums

    task, precision, log, exact = trainer.task, trainer.updater.precision, trainer.log, trainer.exact
    sums = Sums()
    passes = exact.passes(step)
    for number in range(1, passes + 1):
        # Sent before backward, so that the sum over ranks arrives with the gradients.
        begin_count = partial(exact.begin_count, sums) if number == passes else None
        with exact.one_pass(number, passes):
            with log.phase("data"):
                batch, samples = next(batches) if number <= len(step.micro_batches) else (None, 0)
            if batch is None:  # other ranks have samples left
                with log.phase("backward"):
                    exact.run_dummy_pass(begin_count)
                continue
            with log.phase("forward"), precision.autocast():
                outputs = task.forward(trainer.ddp, batch)
                loss, count = task.loss(outputs, batch)
                loss_of_mean = precision.scale(global_mean_loss(loss, step.global_size))
            sums.add(loss, count, samples=samples)
            if begin_count:
                begin_count()
            with log.phase("backward", loss_of_mean), exact.backward_of(loss_of_mean, outputs, count):
                loss_of_mean.backward()
        sums.add_correct(task.correct(outputs, batch))
    with log.phase("reduce"):
        exact.end_passes()  # before anything is waited for: DDP may still wait for a missing gradient
        step, counted = exact.average(step, sums)
    with log.phase("update"):
        norm = trainer.update(step, counted)
    trainer.end_step(step, sums, norm)


if __name__ == "__main__":
    launch.leave(main())
