"""Checks for what would fail on some rank later; each rank makes them alone, before any group starts."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.metrics.evaluating import measures, update
from ckpttool.models import factory
from train.config.plan import make_plan
from train.config.training import TrainConfig
from train.data.augment import augmented
from train.data.data_set import Data
from train.data.samples import count
from train.model import optimizer as optimizers
from train.model import precision, wrapping
from train.run.limits import total_steps
from train.tasks.loss_pair import PAIR
from train.tasks.task import Classification, Task, UserTask
from train.trainer import virtual_ranks


def check(config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
    """Check that the plan, the data, the model and the task fit.

    Raises:
        UsageFault: they don't; names the flag to change.
        CheckFailed: the first sample has a label that is not one of the classes.
    """
    plan, world_size = make_plan(config, count(data.train)), config.virtual_ranks or place.world_size
    _check_plan(config, plan, world_size)
    augmented(data.train, config, len(data.classes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageFault(f"--model {config.model}: has no parameters to train")
    precision.check(config.amp, place.device, model)
    virtual_ranks.check(config, model)
    optimizers.check(config, model)
    sync = config.batchnorm == "sync"
    trial = _as_trained(config, model)
    if place.device.type == "cuda" and (sync or _has_torchs_sync(model)):
        _check_passes(plan, world_size)
    if _has_torchs_sync(trial):  # can't be tried here: it works only on GPUs and in groups
        _check_on_gpu(config, place)
        return
    _try_training(config, data, trial, plan, world_size, task)
    _check_sum(Trial(config.model, data, task, "training"), model)


def _as_trained(config: TrainConfig, model: nn.Module) -> nn.Module:
    """Return the model with the layers that `--batchnorm` gives it on a CPU; a copy if any is converted."""
    if config.batchnorm != "plain" and not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UsageFault(
            f"--batchnorm {config.batchnorm}: {config.model} has no BatchNorm", hint="leave out --batchnorm"
        )
    if config.batchnorm != "sync":
        return model
    try:
        return batchnorm.to_sync(copy.deepcopy(model))
    except UsageFault as fault:
        raise UsageFault(f"--batchnorm sync: {config.model}: {fault}", hint="give plain or pooled") from None


def _has_torchs_sync(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _check_on_gpu(config: TrainConfig, place: Place) -> None:
    if place.device.type == "cpu":
        raise UsageFault(
            f"--model {config.model}: torch's SyncBatchNorm works only on GPUs",
            hint="give --batchnorm sync, which works on a CPU too" if config.batchnorm != "sync" else None,
        )


def _check_plan(config: TrainConfig, plan: Plan, world_size: int) -> None:
    in_epoch = plan.steps_of(world_size)
    if not in_epoch:
        raise UsageFault(
            f"--drop-last: leaves none of {plan.samples} samples with batches of {plan.batch_size}",
            hint=f"give --batch-size {plan.samples} or less",
        )
    warmup, steps = config.warmup.in_steps(in_epoch), total_steps(config, in_epoch)
    if warmup >= steps:
        raise UsageFault(
            f"--warmup {config.warmup}: is {warmup} steps, but the whole training has only {steps}"
        )


def check_evaluation(name: str, data: Data, model: nn.Module, task: Task) -> None:
    """Check that a model can be evaluated.

    Raises:
        UsageFault: it does not take the test samples, has fewer outputs than there are classes, or its task
            can't score them.
        CheckFailed: the first test sample has a label that is not one of the classes.
    """
    trial = Trial(name, data, task, "test")
    try:
        outputs, batch = trial.forward(model.eval(), 1)
    except Exception as error:
        raise trial.unfit(error) from error
    trial.loss(outputs, batch)
    trial.measure(outputs, batch)
    _check_sum(trial, model)


@dataclass(frozen=True)
class Trial:
    """A dry run on copies of one sample.

    Attributes:
        model: as on the command line.
        part: "training" or "test".
    """

    model: str
    data: Data
    task: Task
    part: str

    def forward(self, model: nn.Module, size: int) -> tuple[Any, Any]:
        """Return the model's outputs for a batch of `size` copies, in its current mode; and the batch.

        Raises:
            UsageFault, CheckFailed: the outputs are no class scores of the data's classes, or the sample's
                label is none of these.
            Exception: what the model raised.
        """
        samples = self.data.train if self.part == "training" else self.data.test
        sample = samples[0]
        batch = default_collate([sample] * size)
        if isinstance(self.task, Classification):
            outputs = self.task.forward(model, batch)
            self._check_scores(outputs, size)
        else:
            self.task.check(batch, [0] * size, self.part)
            outputs = self.task.forward(model, batch)
        return outputs, batch

    def _check_scores(self, outputs: Any, size: int) -> None:
        """Refuse what is no row of scores per sample, and too few: a label would be out of bounds."""
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != (size,) or outputs.dim() != 2:
            raise TypeError("its output is not one row of class scores per sample")
        if outputs.shape[1] < len(self.data.classes):
            raise UsageFault(
                f"--model {self.model}: has {outputs.shape[1]} outputs, but {self.data.name} has "
                f"{len(self.data.classes)} classes"
            )

    def loss(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
        """Return the loss of a batch, as (sum, count).

        Raises:
            UsageFault: the task can't compute it, or it is something else.
            CheckFailed: a label is not one of the classes.
        """
        self.task.check(batch, [0] * self.task.sample_count(batch), self.part)
        try:
            total, count = self.task.loss(outputs, batch)
        except CkptToolError:
            raise
        except Exception as error:
            raise UsageFault(
                f"--task {self.task.name}: the loss of {self.part} sample 0 of {self.data.name}: "
                f"{factory.described(error)}"
            ) from error
        return total, int(count)

    def measure(self, outputs: Any, batch: Any) -> None:
        """Raise UsageFault if a metric does not take the outputs."""
        try:
            for name, measure in measures(self.task.metrics).items():
                update(name, measure.make(), measure.arguments, outputs, batch)
        except CkptToolError as fault:
            raise UsageFault(f"--task {self.task.name}: {fault}", hint=fault.hint) from fault

    def unfit(self, error: Exception) -> CkptToolError:
        """Return the error for a model that failed."""
        if isinstance(error, CkptToolError):
            return error
        samples = " ".join(["×".join(map(str, self.data.shape)), "samples"]).strip()
        return UsageFault(
            f"--model {self.model}: does not take the {samples} of {self.data.name}: {_reason(error)}"
        )


def _try_training(
    config: TrainConfig, data: Data, model: nn.Module, plan: Plan, world_size: int, task: Task
) -> None:
    """Run a copy of the model on the smallest batch that any rank gets, forward and backward."""
    name = config.model
    # Synchronised layers see the samples of all ranks.
    together = config.batchnorm == "sync"
    sizes = plan.pass_sizes(world_size) if together else plan.micro_batch_sizes(world_size)
    smallest = min(sizes - {0})
    trial = Trial(name, data, task, "training")
    copied = copy.deepcopy(model).train()
    if config.batchnorm == "pooled":
        RunningStatistics(copied)
    if config.grad_checkpoint:
        wrapping.checkpoint_blocks(copied)
    try:
        outputs, batch = trial.forward(copied, smallest)
    except Exception as error:
        if config.batchnorm == "pooled" and _can_not_be_compiled(error):
            raise _compiled_whole(name) from error
        if smallest == 1 and not isinstance(error, CkptToolError) and _takes_two(trial, model):
            raise _batch_of_one(name, plan, world_size) from error
        raise trial.unfit(error) from error
    total, _ = trial.loss(outputs, batch)
    if not total.requires_grad:
        raise UsageFault(
            f"--task {task.name}: the sum that loss returned does not depend on the model's parameters",
            hint="compute it from the outputs, without .item(), .detach() or torch.no_grad()",
        )
    with torch.no_grad():
        trial.measure(outputs, batch)
    total.backward()
    if not config.find_unused:
        _check_used(name, copied)


def _check_used(name: str, model: nn.Module) -> None:
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise UsageFault(
            f"--model {name}: parameter {idle[0]} does not affect the output, and DDP would wait "
            "for its gradient",
            hint="set requires_grad=False on it, remove it, or give --find-unused",
        )


def _check_sum(trial: Trial, model: nn.Module) -> None:
    """Refuse a user's loss that is a mean: it is the same for one sample and for two copies of it.

    A mean would make each rank's samples count the more the fewer they are, and nothing else would show it.
    """
    if not isinstance(trial.task, UserTask):
        return
    quiet = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            found = [trial.loss(*trial.forward(quiet, size)) for size in (1, 2)]
    except Exception:  # one that only a batch of this size raises, which may never come
        return
    (one, of_one), (two, of_two) = ((float(total), count) for total, count in found)
    if one and of_two == 2 * of_one and abs(two - one) <= 1e-3 * abs(one):
        raise UsageFault(
            f"--task {trial.task.name}: loss returned {one:g} for one sample and for two copies of it, with "
            f"counts of {of_one} and {of_two}: a mean, not a sum",
            hint=PAIR,
        )


def _takes_two(trial: Trial, model: nn.Module) -> bool:
    try:
        with torch.no_grad():
            trial.forward(copy.deepcopy(model).train(), 2)
    except Exception:
        return False
    return True


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _can_not_be_compiled(error: Exception) -> bool:
    from torch._dynamo.exc import Unsupported  # imported here, because it takes a second

    return isinstance(error, Unsupported)


def _compiled_whole(name: str) -> UsageFault:
    return UsageFault(
        f"--batchnorm pooled: {name} is compiled with fullgraph=True, but the samples that a BatchNorm "
        "sees are counted outside the compiled graph",
        hint="leave out fullgraph, or give --batchnorm plain or sync",
    )


def _batch_of_one(model: str, plan: Plan, world_size: int) -> UsageFault:
    whole = dataclasses.replace(plan, drop_last=True)
    last_only = whole.steps_of(world_size) and 1 not in whole.micro_batch_sizes(world_size)
    last = plan.steps_of(world_size) - 1 if last_only else 0
    given = f"--batch-size {plan.batch_size}"
    ways = [f"another --batch-size than {plan.batch_size}"]
    for flag, weights in (("--rank-batch", plan.rank_batch), ("--rank-share", plan.rank_share)):
        if weights:
            given = f"{flag} {','.join(map(str, weights))}"
            ways = [f"other numbers as {flag}"] + ways * (flag == "--rank-share")
    if last_only:
        ways.insert(0, "--drop-last")
    if plan.accumulate > 1:
        ways.append(f"a smaller --accumulate than {plan.accumulate}")
    return UsageFault(
        f"{given}: {'the last' if last_only else 'a'} batch of {plan.global_size(last, world_size)} gives a "
        f"rank a single sample, and BatchNorm in {model} can't compute the statistics of one value",
        hint=f"give {' or '.join(ways)}",
    )


def _check_passes(plan: Plan, world_size: int) -> None:
    """Refuse a plan in which a rank skips a pass: in torch's SyncBatchNorm the others would wait for it."""
    for sizes in plan.splits(world_size):
        size, passes = sum(sizes), {min(plan.accumulate, share) for share in sizes}
        if len(passes) == 1:
            continue
        fault = f"gives one of {world_size} ranks fewer passes than another"
        if 0 in passes:
            fault = f"leaves one of {world_size} ranks without a sample"
        of_last = size < plan.batch_size < plan.length(world_size)
        raise UsageFault(
            f"--batch-size {plan.batch_size}: {'the last' if of_last else 'a'} batch of {size} {fault}, and "
            "SyncBatchNorm on GPUs needs every rank",
            hint=f"give {'--drop-last or ' * of_last}another --batch-size"
            + " or --accumulate" * (0 not in passes),
        )
