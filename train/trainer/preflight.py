"""Checks for what would fail on some rank later; each rank makes them alone, before any group starts.

Imports torch. Each part has a `check` of its own; what is left to try is the model on a sample.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ckpttool.distributed.group import Place
from ckpttool.errors import UsageFault, install
from ckpttool.formats.delta import compression
from ckpttool.models import factory
from train import console
from train.config.command_line import make_plan
from train.config.training import TrainConfig
from train.data.augment import augmented
from train.data.batches import Undamaged
from train.data.data_set import Data
from train.data.samples import count
from train.data.stream import Stream
from train.model import optimizer, precision, schedule, sharding, wrapping
from train.tasks.task import Task
from train.trainer import virtual_ranks
from train.trainer.feed import SEEDS
from train.trainer.selection import selection
from train.trainer.trial import Trial, check_count, check_sum, initialise, try_training


def check(config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
    """Raise UsageFault, naming the flag to change, if plan, data, model and task don't fit.

    CheckFailed if the first sample has a label that is not one of the classes.
    """
    if isinstance(data.train, Stream):
        _check_stream(config, data.train, place.world_size)
    else:
        _check_by_number(config)
        data = replace(data, train=Undamaged(data.train)) if config.skip_damaged else data
    plan, world_size = make_plan(config, count(data.train)), config.virtual_ranks or place.world_size
    if not plan.steps_of(world_size):
        what = f"--drop-last: leaves none of {plan.samples} samples with batches of {plan.batch_size}"
        raise UsageFault(what, hint=f"give --batch-size {plan.samples} or less")
    initialise(Trial(config.model, data, task, "training"), model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageFault(f"--model {config.model}: has no parameters to train")
    said = data.train.steps(plan.batch_size) if isinstance(data.train, Stream) else None
    schedule.check(config, said or plan.steps_of(world_size))
    augmented(data.train, config, len(data.classes))
    if data.test is None:
        _check_unscored(config)
    else:
        wrapping.check_scored(config.model, model)
    selection(config.best, task, tuple(data.others))
    _check_hook(config)
    if config.keep_deltas and not compression.is_there():
        what = f"--keep-deltas {config.keep_deltas}: deltas are packed by zstd, which is not installed"
        raise UsageFault(what, hint=f"{install('delta')}, or use Python 3.14")
    precision.check(config.amp, place.device, model)
    virtual_ranks.check(config, model)
    optimizer.check(config, model)
    sharding.check(config, model)
    trained = wrapping.as_trained(config, model)
    wrapping.check_batchnorm(config, model, trained, place, plan)
    if not wrapping.has_torchs_sync(trained):  # it works only on GPUs and in groups
        trial = Trial(config.model, data, task, "training")
        try_training(config, trial, trained, plan, world_size)
        check_sum(trial, model)


def _check_hook(config: TrainConfig) -> None:
    try:
        if config.every:
            factory.function(config.every[1])
    except UsageFault as fault:
        raise UsageFault(f"--every: {fault.message}", hint=fault.hint) from fault


def _check_stream(config: TrainConfig, stream: Stream, world_size: int) -> None:
    """Raise UsageFault for what needs to know the samples of an epoch, or the samples by their numbers."""
    given = f"--data {config.data}: a stream"
    parts = {"--warmup": config.warmup, "--cooldown": config.cooldown}
    in_epochs = [name for name, part in parts.items() if part and part.number and part.unit == "epochs"]
    if stream.length is None and not config.max_steps and (config.scheduler != "none" or in_epochs):
        what = f"{given} that does not say its length, which --scheduler {config.scheduler} needs"
        raise UsageFault(what, hint="give --max-steps N, or --scheduler none")
    if stream.length is None and in_epochs:
        raise UsageFault(f"{given} that does not say its length", hint=f"give {in_epochs[0]} Nsteps")
    mixes = any((config.augment != "none", config.mixup, config.cutmix))
    wrong = {
        "--sampler torch": config.sampler != "exact",
        "--drop-last": config.drop_last,
        "--augment, --mixup and --cutmix": mixes,
        "--rank-share auto": config.rank_share == "auto",
    }
    for flag, is_given in wrong.items():
        if is_given:
            what = f"{flag} needs samples by number, and {given}"
            raise UsageFault(what, hint="leave it out")
    if not stream.varies():
        return
    stream.start = (0, {})  # nothing can be compared
    if world_size * max(config.workers, 1) > 1:
        what = f"{given} that gives other samples each time it is read, and each process reads it for itself"
        raise UsageFault(what, hint=SEEDS)
    missing = "if its __iter__ continues instead of restarting, the first samples, read as a check, are lost"
    console.warn(f"{given} that gives other samples each time it is read: {missing}")


def _check_by_number(config: TrainConfig) -> None:
    """Raise UsageFault for settings of streams where samples have numbers: they would change nothing."""
    has_tokens = any((name or "").startswith("tokens:") for name in (config.data, config.test_data))
    wrong = {"--shuffle-window": config.shuffle_window, "--block-size": config.block_size and not has_tokens}
    for flag, is_given in wrong.items():
        if is_given:
            what = f"{flag}: --data {config.data} has samples by index, which are taken as they are"
            raise UsageFault(
                what, hint="leave it out, or give the data set no __getitem__: then it is a stream"
            )


def _check_unscored(config: TrainConfig) -> None:
    """Raise UsageFault for what needs scores."""
    given = {
        "--best": config.best,
        "--keep-best": config.keep_best,
        "--stop-early": config.stop_early,
        "--also-test": config.also_test,
    }
    for name, value in given.items():
        if value:
            what = f"{name}: --data {config.data} has no test samples, so nothing is scored"
            raise UsageFault(what, hint="--test-data names some")


def check_evaluation(name: str, data: Data, model: nn.Module, task: Task) -> None:
    """Raise UsageFault if a model can't be evaluated on the test samples; CheckFailed as `check`."""
    wrapping.check_scored(name, model)
    trial = Trial(name, data, task, "test")
    try:
        outputs, batch = trial.forward(model.eval(), 1)
    except Exception as error:
        raise trial.unfit(error) from error
    trial.loss(outputs, batch, 1)
    check_count(trial, outputs, 1)
    trial.measure(outputs, batch)
    check_sum(trial, model)
