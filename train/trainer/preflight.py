"""Checks for what would fail on some rank later; each rank makes them alone, before any group starts.

Imports torch. Each part has a `check` of its own; what is left to try is the model on a sample.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed.dummy_pass import modes_kept
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.metrics.evaluating import measures, update
from ckpttool.models import factory
from train.config.command_line import make_plan
from train.config.training import TrainConfig
from train.data.augment import augmented
from train.data.data_set import Data
from train.data.samples import count
from train.model import optimizer, sharding, updater, wrapping
from train.tasks.builtin import Classification
from train.tasks.task import PAIR, Task, UserTask
from train.trainer import virtual_ranks

TRIED = 8  # samples, of which one should have something that counts


def check(config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
    """Raise UsageFault, naming the flag to change, if plan, data, model and task don't fit.

    CheckFailed if the first sample has a label that is not one of the classes.
    """
    plan, world_size = make_plan(config, count(data.train)), config.virtual_ranks or place.world_size
    in_epoch = plan.steps_of(world_size)
    if not in_epoch:
        what = f"--drop-last: leaves none of {plan.samples} samples with batches of {plan.batch_size}"
        raise UsageFault(what, hint=f"give --batch-size {plan.samples} or less")
    _initialise(Trial(config.model, data, task, "training"), model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageFault(f"--model {config.model}: has no parameters to train")
    optimizer.check_warmup(config, in_epoch)
    augmented(data.train, config, len(data.classes))
    updater.check_precision(config.amp, place.device, model)
    virtual_ranks.check(config, model)
    optimizer.check(config, model)
    sharding.check(config, model)
    trained = wrapping.as_trained(config, model)
    wrapping.check_batchnorm(config, model, trained, place, plan)
    if not wrapping.has_torchs_sync(trained):  # it works only on GPUs and in groups
        trial = Trial(config.model, data, task, "training")
        _try_training(config, trial, trained, plan, world_size)
        _check_sum(trial, model)


def check_evaluation(name: str, data: Data, model: nn.Module, task: Task) -> None:
    """Raise UsageFault if a model can't be evaluated on the test samples; CheckFailed as `check`."""
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
    """A dry run on copies of one sample."""

    model: str  # as on the command line
    data: Data
    task: Task
    part: str  # "training" or "test"

    def forward(self, model: nn.Module, size: int, sample: int = 0) -> tuple[Any, Any]:
        """Return the model's outputs for a batch of `size` copies, in its current mode; and the batch."""
        samples = self.data.train if self.part == "training" else self.data.test
        batch = default_collate([samples[sample]] * size)
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
            classes = f"{self.data.name} has {len(self.data.classes)} classes"
            raise UsageFault(f"--model {self.model}: has {outputs.shape[1]} outputs, but {classes}")

    def loss(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, float]:
        """Return the loss of a batch, as (sum, count)."""
        self.task.check(batch, [0] * self.task.sample_count(batch), self.part)
        try:
            total, count = self.task.loss(outputs, batch)
        except CkptToolError:
            raise
        except Exception as error:
            which = f"the loss of {self.part} sample 0 of {self.data.name}"
            what = f"--task {self.task.name}: {which}: {factory.described(error)}"
            raise UsageFault(what) from error
        return total, float(count)

    def measure(self, outputs: Any, batch: Any) -> None:
        """Raise UsageFault if a metric does not take the outputs."""
        try:
            for name, measure in measures(self.task.metrics).items():
                update(name, measure.make(), measure.arguments, outputs, batch)
        except CkptToolError as fault:
            raise UsageFault(f"--task {self.task.name}: {fault.message}", hint=fault.hint) from fault

    def unfit(self, error: Exception) -> CkptToolError:
        """Return the error for a model that failed."""
        if isinstance(error, CkptToolError):
            return error
        samples = " ".join(["×".join(map(str, self.data.shape)), "samples"]).strip()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return UsageFault(f"--model {self.model}: does not take the {samples} of {self.data.name}: {reason}")


def _initialise(trial: Trial, model: nn.Module) -> None:
    """Let lazy layers take their shapes from a sample; the random numbers are the same on every rank."""
    tensors = (*model.parameters(), *model.buffers())
    if any(is_lazy(tensor) for tensor in tensors):
        try:
            with modes_kept(model), torch.no_grad():
                trial.forward(model.eval(), 1)
        except Exception as error:
            raise trial.unfit(error) from error


def _try_training(config: TrainConfig, trial: Trial, model: nn.Module, plan: Plan, world_size: int) -> None:
    """Run a copy of the model on the smallest batch that any rank gets, forward and backward."""
    # Synchronised layers see the samples of all ranks.
    together = config.batchnorm == "sync"
    sizes = plan.pass_sizes(world_size) if together else plan.micro_batch_sizes(world_size)
    smallest = min(sizes - {0})
    copied = copy.deepcopy(model)
    if config.batchnorm == "pooled":
        RunningStatistics(copied)
    if config.grad_checkpoint:
        wrapping.checkpoint_blocks(copied)
    try:
        outputs, batch = trial.forward(copied, smallest)
    except Exception as error:
        if config.batchnorm == "pooled":
            _refuse_whole_graph(config.model, error)
        if smallest == 1 and not isinstance(error, CkptToolError) and _takes_two(trial, model):
            raise wrapping.batch_of_one(config.model, plan, world_size) from error
        raise trial.unfit(error) from error
    sharding.check_outputs(config, outputs)
    total, _ = trial.loss(outputs, batch)
    if not total.requires_grad:
        what = "the sum that loss returned does not depend on the model's parameters"
        hint = "compute it from the outputs, without .item(), .detach() or torch.no_grad()"
        raise UsageFault(f"--task {trial.task.name}: {what}", hint=hint)
    with torch.no_grad():
        trial.measure(outputs, batch)
    total.backward()
    for name, parameter in copied.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            what = f"parameter {name} gets a sparse gradient, and ranks average dense ones"
            raise UsageFault(f"--model {config.model}: {what}", hint="make its layer without sparse=True")
    if not config.find_unused:
        _check_used(config.model, copied)


def _check_used(name: str, model: nn.Module) -> None:
    idle = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        what = f"parameter {idle[0]} does not affect the output, and DDP would wait for its gradient"
        hint = "set requires_grad=False on it, remove it, or give --find-unused"
        raise UsageFault(f"--model {name}: {what}", hint=hint)


def _check_sum(trial: Trial, model: nn.Module) -> None:
    """Refuse a user's loss that is a mean, or a count that does not count: two copies tell, of one sample.

    A mean would make each rank's samples count the more the fewer they are, and nothing else would show it.
    """
    if not isinstance(trial.task, UserTask):
        return
    quiet = copy.deepcopy(model).eval()
    samples = trial.data.train if trial.part == "training" else trial.data.test
    for sample in range(min(count(samples), TRIED)):
        try:
            with torch.no_grad():
                losses = [trial.loss(*trial.forward(quiet, size, sample)) for size in (1, 2)]
        except Exception:  # one that only a batch of this size raises, which may never come
            return
        (single, of_one), (double, of_two) = ((float(total), counted) for total, counted in losses)
        if not single or not of_one:  # nothing counts in this sample
            continue
        returned = f"--task {trial.task.name}: loss returned"
        copies = "for one sample and for two copies of it"
        if _is_near(double, single) and (_is_near(of_two, of_one) or _is_near(of_two, 2 * of_one)):
            counts = f"with counts of {of_one:g} and {of_two:g}"
            raise UsageFault(f"{returned} {single:g} {copies}, {counts}: a mean, not a sum", hint=PAIR)
        if _is_near(double, 2 * single) and _is_near(of_two, of_one):
            raise UsageFault(f"{returned} a count of {of_one:g} {copies}", hint=PAIR)
        return


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


def _takes_two(trial: Trial, model: nn.Module) -> bool:
    try:
        with torch.no_grad():
            trial.forward(copy.deepcopy(model), 2)
    except Exception:
        return False
    return True


def _refuse_whole_graph(name: str, error: Exception) -> None:
    from torch._dynamo.exc import Unsupported  # imported here, because it takes a second

    if isinstance(error, Unsupported):
        but = "the samples that a BatchNorm sees are counted outside the compiled graph"
        what = f"--batchnorm pooled: {name} is compiled with fullgraph=True, but {but}"
        raise UsageFault(what, hint="leave out fullgraph, or give --batchnorm plain or sync") from error
