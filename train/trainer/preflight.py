"""What would fail later, on some rank: each checks alone, before any group starts. Imports torch."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpttool.batchnorm import RunningStatistics
from ckpttool.deltas import differences
from ckpttool.distributed import collectives, randomness
from ckpttool.distributed.group import Place, given_rank
from ckpttool.distributed.plan import Plan
from ckpttool.distributed.randomness import seeded
from ckpttool.distributed.uneven import leaving_no_trace, modes_kept
from ckpttool.errors import CkptToolError, UsageFault, install
from ckpttool.models import factory
from train import console
from train.config.command_line import make_plan
from train.config.sections import ModelConfig, TrainConfig
from train.data.augment import augmented
from train.data.batches import Undamaged
from train.data.data_set import Data
from train.data.samples import count, digest_of
from train.data.stream import Stream, is_plain
from train.model import optimizer, updater, wrapping
from train.tasks.builtin import PAIR, ModelLoss, Task, UserTask, loss_in
from train.trainer import apart
from train.trainer.apart import NOTHING, Stateful
from train.trainer.feed import SEEDS
from train.trainer.progress import selection
from train.trainer.trial import Trial

TRIED = 8  # samples, of which one should have something that counts

NO_GRADIENT = "compute it from the outputs (times 0 if need be), without .item(), .detach(), torch.no_grad()"


def initialise(trial: Trial, model: nn.Module) -> None:
    """Let lazy layers take their shapes from a sample; the random numbers are the same on every rank."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        try:
            with modes_kept(model), torch.no_grad():
                trial.forward(model.eval(), 1)
        except Exception as error:
            raise trial.unfit(error) from error


def try_training(
    config: TrainConfig, trial: Trial, model: nn.Module, plan: Plan, world_size: int
) -> Stateful:
    """Run a copy of the model on the smallest batch that any rank gets, forward and backward.

    Returns what a pass changes.
    """
    # Synchronised layers see the samples of all ranks.
    settings = config.model
    together = wrapping.has_sync(model)
    sizes = plan.pass_sizes(world_size) if together else plan.micro_batch_sizes(world_size)
    # The size of a stream's last batch is not known.
    unknown = isinstance(trial.data.train, Stream) or config.data.skip_damaged
    smallest = 1 if unknown else min(sizes - {0})
    copied = factory.copy_of(model)
    if settings.batchnorm == "pooled":
        RunningStatistics(copied)
    if settings.grad_checkpoint:
        wrapping.checkpoint_blocks(copied)
    try:
        outputs, batch = trial.forward(copied, smallest)
    except Exception as error:
        if settings.batchnorm == "pooled":
            _refuse_whole_graph(settings.name, error)
        if smallest == 1 and not isinstance(error, CkptToolError) and _takes_two(trial, model):
            if unknown:
                what = f"--model {settings.name}: BatchNorm can't compute the statistics of one value"
                hint = f"a batch of --data {config.data.name} may be as small: give a model without it"
                raise UsageFault(what, hint=hint) from error
            raise wrapping.batch_of_one(settings.name, plan, world_size) from error
        raise trial.unfit(error) from error
    wrapping.check_outputs(settings, outputs)
    total, _ = trial.loss(outputs, batch, smallest)
    check_count(trial, outputs, smallest)
    if not total.requires_grad:
        what = "the sum that loss returned does not depend on the model's parameters"
        raise UsageFault(f"--task {trial.task.name}: {what}", hint=NO_GRADIENT)
    with torch.no_grad():
        trial.measure(outputs, batch)
    total.backward()
    for name, parameter in copied.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            what = f"--model {settings.name}: parameter {name} gets a sparse gradient"
            hint = "make its layer without sparse=True"
            raise UsageFault(f"{what}, and ranks average dense ones", hint=hint)
    if not settings.find_unused:
        _check_used(settings.name, copied)
    copied.zero_grad(set_to_none=True)
    changed = apart.stateful(trial, copied, model, smallest, world_size)
    _check_resumes(trial, copied, model, smallest, in_parts=world_size > 1 or plan.accumulate > 1)
    return changed


def _check_resumes(trial: Trial, trained: nn.Module, fresh: nn.Module, size: int, *, in_parts: bool) -> None:
    """Refuse extra state that can not be saved; warn of passes that depend on what no state dict has."""
    state = trained.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) and not is_plain(value):
            what = f"--model {trial.model}: {name} holds more than tensors and plain values"
            raise UsageFault(what, hint="let get_extra_state return numbers, texts, lists and dicts of these")
    twin, marks = factory.copy_of(fresh), []
    try:
        twin.load_state_dict(state)
    except Exception as error:  # of a user's set_extra_state
        what = f"--model {trial.model}: does not load its own state_dict: {factory.described(error)}"
        raise UsageFault(what, hint="a resume would fail: see its set_extra_state") from error
    for each in (trained, twin):
        with seeded("resume"), torch.no_grad():
            outputs, batch = trial.forward(each, size)
            marks.append((digest_of(outputs), digest_of(trial.loss(outputs, batch, size))))
    (one, loss), (other, again) = marks
    what = f"--task {trial.task.name}: the loss of the same outputs is another each time"
    if in_parts and one == other and loss != again:  # as one that alternates
        hint = "let it depend on outputs and batch alone: a buffer of the model may count steps"
        raise UsageFault(f"{what}, and ranks don't ask for it equally often", hint=hint)
    if given_rank() == 0 and one == other and loss != again:
        console.warn(f"{what}, so a resume will not be exact (let it depend on outputs and batch alone)")
    if given_rank() == 0 and one != other:
        what = f"--model {trial.model}: a pass depends on what earlier passes left outside of its state_dict"
        ways = "keep it in a buffer, without persistent=False, or give it get_extra_state"
        console.warn(f"{what}, so a resume will not be exact ({ways})")


def _check_used(name: str, model: nn.Module) -> None:
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        what = f"parameter {idle[0]} does not affect the output, and DDP would wait for its gradient"
        hint = "set requires_grad=False on it, remove it, or give --find-unused"
        raise UsageFault(f"--model {name}: {what}", hint=hint)


def check_sum(trial: Trial, model: nn.Module) -> None:
    """Refuse a user's loss that is a mean, or a count that does not count: two copies tell, of one sample.

    A mean would make each rank's samples count the more the fewer they are, and nothing else would show it.
    """
    if not isinstance(trial.task, UserTask):
        return
    quiet = factory.copy_of(model).eval()
    for sample in range(min(count(trial.samples), TRIED)):
        try:
            with torch.no_grad():
                losses = [trial.loss(*trial.forward(quiet, n, sample), n, sample) for n in (1, 2, 1)]
        except Exception:  # one that only a batch of this size raises, which may never come
            return
        (single, of_one), (double, of_two), again = ((float(total), counted) for total, counted in losses)
        if not single or not of_one or (single, of_one) != again:  # nothing counts, or it draws numbers
            continue
        returned = f"--task {trial.task.name}: loss returned"
        copies = "for one sample and for two copies of it"
        if _is_near(double, single) and (_is_near(of_two, of_one) or _is_near(of_two, 2 * of_one)):
            counts = f"with counts of {of_one:g} and {of_two:g}"
            raise UsageFault(f"{returned} {single:g} {copies}, {counts}: a mean, not a sum", hint=PAIR)
        if _is_near(double, 2 * single) and _is_near(of_two, of_one):
            raise UsageFault(f"{returned} a count of {of_one:g} {copies}", hint=PAIR)
        return


def check_count(trial: Trial, outputs: Any, size: int) -> None:
    """Refuse batches in which a model's mean can't be said to be of how many samples."""
    if not isinstance(trial.task, ModelLoss) or loss_in(outputs)[1] is not None:
        return
    for number in (size, size + 1):  # one may be right by chance: images have three channels
        counted = trial.task.sample_count(trial.batch(number))
        if counted != number:
            what = f"--task {trial.task.name}: finds {counted} samples in a batch of {number}"
            ways = "with its loss let the model return a count, or give --task file.py:factory with "
            raise UsageFault(f"{what}: its first tensor has no row for each", hint=f"{ways}sample_count")


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


def _takes_two(trial: Trial, model: nn.Module) -> bool:
    try:
        with torch.no_grad():
            trial.forward(factory.copy_of(model), 2)
    except Exception:
        return False
    return True


def _refuse_whole_graph(name: str, error: Exception) -> None:
    from torch._dynamo.exc import Unsupported  # imported here, because it takes a second

    if isinstance(error, Unsupported):
        but = "the samples that a BatchNorm sees are counted outside the compiled graph"
        what = f"--batchnorm pooled: {name} is compiled with fullgraph=True, but {but}"
        raise UsageFault(what, hint="leave out fullgraph, or give --batchnorm plain or sync") from error


# ---- the same pass -----------------------------------------------------------------------------------


# By which the loss of one sample may differ: the devices of ranks need not be of one kind.
MOST = 0.01


def compare_pass(settings: ModelConfig, task: Task, model: nn.Module, batch: Any) -> str:
    """Return what differs if a sample has another loss on each rank; "" if it has not. A collective.

    The ranks have the same weights and draw the same numbers, so it would depend on an attribute that a
    factory has drawn, say, or on code that is another on each machine.

    Args:
        model: as it is trained; with `--shard` the one that is divided.
        batch: of one sample, the same on all ranks.
    """
    if collectives.world_size() == 1:
        return ""
    eager = wrapping.not_compiled() if settings.compile else contextlib.nullcontext()
    model = model if settings.shard else factory.copy_of(model)  # one may count its passes
    with torch.no_grad(), leaving_no_trace(model, together=False), eager:
        randomness.seed_all(randomness.seed_from("a pass"))  # on GPUs too
        loss, _ = task.loss(task.forward(model, batch), batch)
    losses = collectives.gather(float(loss))
    other = next((rank for rank, one in enumerate(losses) if not _near(one, losses[0])), 0)
    if not other:
        return ""
    where = f"{losses[0]:.4g} on rank 0 and {losses[other]:.4g} on rank {other}"
    by = f"--model {settings.name} and --task {task.name}"
    return f"by {by} a sample has the loss {where}, with the same weights and random numbers"


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=MOST, abs_tol=1e-6) or not (one == one or other == other)


# ---- all checks --------------------------------------------------------------------------------------


def check(config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> Stateful:
    """Raise UsageFault, naming the flag to change, if plan, data, model and task don't fit.

    CheckFailed if the first sample has a label that is not one of the classes. Returns what a pass changes.
    """
    if isinstance(data.train, Stream):
        _check_stream(config, data.train, place.world_size)
    else:
        _check_by_number(config)
        data = replace(data, train=Undamaged(data.train)) if config.data.skip_damaged else data
    plan, world_size = make_plan(config, count(data.train)), config.batch.virtual_ranks or place.world_size
    if not plan.steps_of(world_size):
        what = f"--drop-last: leaves none of {plan.samples} samples with batches of {plan.batch_size}"
        raise UsageFault(what, hint=f"give --batch-size {plan.samples} or less")
    initialise(Trial(config.model.name, data, task, "training"), model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageFault(f"--model {config.model.name}: has no parameters to train")
    said = data.train.steps(plan.batch_size) if isinstance(data.train, Stream) else None
    updater.check_schedule(config, said or plan.steps_of(world_size))
    augmented(data.train, config, len(data.classes))
    if data.test is None:
        _check_unscored(config)
    else:
        wrapping.check_scored(config.model.name, model)
    selection(config.scores.best, task, tuple(data.others))
    _check_hook(config)
    if config.saving.keep_deltas and not differences.is_there():
        what = f"--keep-deltas {config.saving.keep_deltas}: deltas are packed by zstd, which is not installed"
        raise UsageFault(what, hint=f"{install('delta')}, or use Python 3.14")
    updater.check_precision(config.numbers.amp, place.device, model)
    _check_virtual_ranks(config, model)
    optimizer.check(config.optimizer, model, config.model.name)
    wrapping.check_sharding(config.model, model, config.optimizer.name)
    trained = wrapping.as_trained(config.model, model)
    wrapping.check_batchnorm(config.model, model, trained, place.device, plan, world_size)
    if wrapping.has_torchs_sync(trained):  # it works only on GPUs and in groups
        return NOTHING
    trial = Trial(config.model.name, data, task, "training")
    changed = try_training(config, trial, trained, plan, world_size)
    check_sum(trial, model)
    in_parts = world_size > 1 or plan.accumulate > 1
    if in_parts and given_rank() == 0 and (why := apart.coupled(trial, model)):
        by = f"--model {config.model.name}" if isinstance(task, ModelLoss) else f"--task {task.name}"
        what = f"{by}: {why}, and ranks and passes have parts of a batch"
        console.warn(f"{what}: another training than in one (docs/own-code.md#losses-that-couple-samples)")
    return changed


def _check_hook(config: TrainConfig) -> None:
    try:
        if config.log.every:
            factory.function(config.log.every[1])
    except UsageFault as fault:
        raise UsageFault(f"--every: {fault.message}", hint=fault.hint) from fault


def _check_stream(config: TrainConfig, stream: Stream, world_size: int) -> None:
    """Raise UsageFault for what needs to know the samples of an epoch, or the samples by their numbers."""
    given, schedule, augment = f"--data {config.data.name}: a stream", config.schedule, config.augment
    parts = {"--warmup": schedule.warmup, "--cooldown": schedule.cooldown}
    in_epochs = [name for name, part in parts.items() if part and part.number and part.unit == "epochs"]
    needs_length = schedule.name != "none" or in_epochs
    if stream.length is None and not config.training.max_steps and needs_length:
        what = f"{given} that does not say its length, which --scheduler {schedule.name} needs"
        raise UsageFault(what, hint="give --max-steps N, or --scheduler none")
    if stream.length is None and in_epochs:
        raise UsageFault(f"{given} that does not say its length", hint=f"give {in_epochs[0]} Nsteps")
    wrong = {
        "--sampler torch": config.batch.sampler != "exact",
        "--drop-last": config.batch.drop_last,
        "--augment, --mixup and --cutmix": augment.pictures != "none" or augment.mixup or augment.cutmix,
        "--rank-share auto": config.batch.rank_share == "auto",
    }
    for flag in (flag for flag, is_given in wrong.items() if is_given):
        raise UsageFault(f"{flag} needs samples by number, and {given}", hint="leave it out")
    if not stream.varies():
        return
    stream.start = (0, {})  # nothing can be compared
    if world_size * max(config.ranks.workers, 1) > 1:
        what = f"{given} that gives other samples each time it is read, and each process reads it for itself"
        raise UsageFault(what, hint=SEEDS)
    missing = "if its __iter__ continues instead of restarting, the first samples, read as a check, are lost"
    console.warn(f"{given} that gives other samples each time it is read: {missing}")


def _check_by_number(config: TrainConfig) -> None:
    """Raise UsageFault for settings of streams where samples have numbers: they would change nothing."""
    name, test_data = config.data.name, config.data.test_data
    has_tokens = any((each or "").startswith("tokens:") for each in (name, test_data))
    block_size = config.data.block_size and not has_tokens
    wrong = {"--shuffle-window": config.data.shuffle_window, "--block-size": block_size}
    for flag in (flag for flag, is_given in wrong.items() if is_given):
        hint = "leave it out, or give the data set no __getitem__: then it is a stream"
        what = f"{flag}: --data {name} has samples by index, which are taken as they are"
        raise UsageFault(what, hint=hint)


def _check_unscored(config: TrainConfig) -> None:
    """Raise UsageFault for what needs scores."""
    scores = config.scores
    given = {"--best": scores.best, "--keep-best": scores.keep_best, "--stop-early": scores.stop_early}
    for name in (name for name, value in {**given, "--also-test": config.data.also_test}.items() if value):
        what = f"{name}: --data {config.data.name} has no test samples, so nothing is scored"
        raise UsageFault(what, hint="--test-data names some")


def _check_virtual_ranks(config: TrainConfig, model: nn.Module) -> None:
    """Raise UsageFault if `--virtual-ranks` can't compute a model's gradients apart."""
    if config.batch.virtual_ranks is None:
        return
    for path, layer in model.named_modules():
        reason = None
        if isinstance(layer, nn.SyncBatchNorm) or hasattr(layer, "absent"):
            reason = "is synchronised over ranks, and virtual ranks compute apart"
        elif getattr(layer, "sparse", False) is True:
            reason = "has sparse gradients, and virtual ranks add dense ones"
        if reason:
            what = f"--virtual-ranks {config.batch.virtual_ranks}: '{path}' of {config.model.name} {reason}"
            raise UsageFault(what, hint="leave out --virtual-ranks, or give another --model")


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
