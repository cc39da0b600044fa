"""`--batchnorm`: the layers that a model trains with, and what they ask of the plan. Imports torch."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ckpttool import batchnorm
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from train.config.training import TrainConfig


def as_trained(config: TrainConfig, model: nn.Module) -> nn.Module:
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
        raise UsageFault(
            f"--batchnorm sync: {config.model}: {fault.message}", hint="give plain or pooled"
        ) from None


def has_torchs_sync(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check(config: TrainConfig, model: nn.Module, trained: nn.Module, place: Place, plan: Plan) -> None:
    """Raise UsageFault if synchronised layers can't work on this device, or with this plan."""
    world_size = config.virtual_ranks or place.world_size
    if place.device.type == "cuda" and (config.batchnorm == "sync" or has_torchs_sync(model)):
        _check_passes(plan, world_size)
    if place.device.type == "cpu" and has_torchs_sync(trained):
        raise UsageFault(
            f"--model {config.model}: torch's SyncBatchNorm works only on GPUs",
            hint="give --batchnorm sync, which works on a CPU too" if config.batchnorm != "sync" else None,
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


def batch_of_one(model: str, plan: Plan, world_size: int) -> UsageFault:
    """Return the error for a plan that gives a rank a single sample, whose statistics have no value."""
    without_last = dataclasses.replace(plan, drop_last=True)
    last_only = without_last.steps_of(world_size) and 1 not in without_last.micro_batch_sizes(world_size)
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
