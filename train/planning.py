"""The plan that the flags describe, and its checks; needs no torch."""

from __future__ import annotations

from ckpttool.distributed.plan import Plan, check
from ckpttool.errors import UsageFault
from train.config import TrainConfig


def make_plan(config: TrainConfig, samples: int) -> Plan:
    """Return how `samples` training samples are ordered, cut into batches and dealt to ranks.

    With `--rank-share auto` shares are equal until the ranks' speeds have been measured.
    """
    return Plan(
        samples,
        config.batch_size,
        config.seed,
        config.drop_last,
        config.accumulate,
        config.sampler,
        config.set_epoch,
        config.rank_batch,
        config.rank_share if isinstance(config.rank_share, tuple) else None,
    )


def check_plan(config: TrainConfig, world_size: int) -> None:
    """Check that batches can be dealt as the flags say, whatever the data.

    Raises:
        UsageFault: they can't, under the conditions of `ckpttool.distributed.plan.check`, `--sampler none`
            is given without `--preview`, or `--rank-share auto` with another sampler than `exact` or with
            `--rank-batch`; names the flag.
    """
    if config.sampler == "none" and not config.preview:
        raise UsageFault(
            "--sampler none: every rank would train on all samples",
            hint="give exact or torch, or --preview to see it",
        )
    if config.rank_share == "auto" and (config.rank_batch or config.sampler != "exact"):
        other = "--rank-batch" if config.rank_batch else f"--sampler {config.sampler}"
        raise UsageFault(
            f"--rank-share auto: {other} says already how a batch is dealt", hint="give one of them"
        )
    check(make_plan(config, config.batch_size), world_size, called=flag)


def flag(field: str) -> str:
    """Return the flag of a field of the configuration: `--batch-size`."""
    return f"--{field.replace('_', '-')}"
