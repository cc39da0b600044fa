"""Checks for what would fail on some rank later; each rank makes them alone, before any group starts."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed.place import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from train.config import TrainConfig
from train.data import Data
from train.engine import make_plan
from train.samples import Samples


def check(config: TrainConfig, data: Data, model: nn.Module, place: Place) -> None:
    """Check that the plan, the data and the model fit.

    Raises:
        UsageFault: they don't; names the flag to change.
    """
    plan, world_size = make_plan(config, data), place.world_size
    _check_plan(config, plan, world_size)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageFault(f"--model {config.model}: has no parameters to train")
    sync = config.batchnorm == "sync"
    trial = _as_trained(config, model)
    if place.device.type == "cuda" and (sync or _has_torchs_sync(model)):
        _check_passes(plan, world_size)
    if _has_torchs_sync(trial):  # can't be tried here: it works only on GPUs and in groups
        _check_on_gpu(config, place)
        return
    outputs = _try_training(config, data, trial, plan, world_size)
    _check_outputs(config.model, outputs, data)


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
    warmup, steps = config.warmup.in_steps(in_epoch), in_epoch * config.epochs
    if warmup >= steps:
        raise UsageFault(
            f"--warmup {config.warmup}: is {warmup} steps, but the whole training has only {steps}"
        )


def check_evaluation(name: str, data: Data, model: nn.Module) -> None:
    """Check that a model can be evaluated.

    Raises:
        UsageFault: it does not take the test samples, or has fewer outputs than there are classes.
    """
    try:
        outputs = _dry_run(data.test, model.eval(), 1)
    except Exception as error:
        raise _unfit(name, data, error) from error
    _check_outputs(name, outputs, data)


def _try_training(
    config: TrainConfig, data: Data, model: nn.Module, plan: Plan, world_size: int
) -> tuple[int, ...]:
    """Run a copy of the model on the smallest batch that any rank gets; return its output's shape."""
    name = config.model
    # Synchronised layers see the samples of all ranks.
    together = config.batchnorm == "sync"
    sizes = plan.pass_sizes(world_size) if together else plan.micro_batch_sizes(world_size)
    smallest = min(sizes - {0})
    copied = copy.deepcopy(model).train()
    if config.batchnorm == "pooled":
        RunningStatistics(copied)
    try:
        outputs = _dry_run(data.train, copied, smallest, backward=True)
    except Exception as error:
        if config.batchnorm == "pooled" and _can_not_be_compiled(error):
            raise _compiled_whole(name) from error
        if smallest == 1 and _takes_two(data, model):
            raise _batch_of_one(name, plan, world_size) from error
        raise _unfit(name, data, error) from error
    idle = [n for n, p in copied.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise UsageFault(
            f"--model {name}: parameter {idle[0]} does not affect the output, and DDP would wait "
            "for its gradient",
            hint="set requires_grad=False on it, or remove it",
        )
    return outputs


def _takes_two(data: Data, model: nn.Module) -> bool:
    try:
        _dry_run(data.train, copy.deepcopy(model).train(), 2)
    except Exception:
        return False
    return True


def _dry_run(
    samples: Samples, model: nn.Module, batch_size: int, *, backward: bool = False
) -> tuple[int, ...]:
    """Return the shape of the model's output, in its current mode, for a batch of copies of one sample."""
    sample, _ = default_collate([samples[0]])
    with torch.set_grad_enabled(backward):
        outputs = model(sample.expand(batch_size, *sample.shape[1:]).contiguous())
    if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != (batch_size,) or outputs.dim() != 2:
        raise TypeError("its output is not one row of class scores per sample")
    if backward:
        outputs.sum().backward()
    return tuple(outputs.shape)


def _unfit(name: str, data: Data, error: Exception) -> UsageFault:
    shape = "×".join(map(str, data.shape))
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return UsageFault(f"--model {name}: does not take the {shape} samples of {data.name}: {reason}")


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


def _check_outputs(model: str, outputs: tuple[int, ...], data: Data) -> None:
    """Refuse a model with fewer outputs than classes: a label would be out of bounds."""
    if outputs[-1] < len(data.classes):
        raise UsageFault(
            f"--model {model}: has {outputs[-1]} outputs, but {data.name} has {len(data.classes)} classes"
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
