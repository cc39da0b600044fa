"""The plan that the flags describe, and its checks."""

from __future__ import annotations

from ckpttool.distributed.plan import Plan, check
from ckpttool.errors import UsageFault
from train.config.training import TrainConfig


def make_plan(config: TrainConfig, samples: int) -> Plan:
    """Return how training samples are ordered, cut into batches and dealt to ranks."""
    return Plan(
        samples,
        config.batch_size,
        config.seed,
        config.drop_last,
        config.accumulate,
        config.sampler,
        config.set_epoch,
        config.rank_batch,
        # With "auto", shares are equal until the ranks' speeds have been measured.
        config.rank_share if isinstance(config.rank_share, tuple) else None,
    )


def check_plan(config: TrainConfig, world_size: int) -> None:
    """Check that batches can be dealt as the flags say, whatever the data."""
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
    if config.virtual_ranks is not None:
        _check_virtual_ranks(config, config.virtual_ranks, world_size)
    check(make_plan(config, config.batch_size), world_size, called=flag)


def _check_virtual_ranks(config: TrainConfig, virtual: int, world_size: int) -> None:
    given = f"--virtual-ranks {virtual}"
    if virtual % world_size:
        raise UsageFault(
            f"{given}: does not divide by {world_size} ranks",
            hint="start a number of ranks that divides it, or give a multiple of theirs",
        )
    if virtual > config.batch_size:
        raise UsageFault(
            f"{given}: more than the {config.batch_size} samples in a batch",
            hint=f"give --batch-size {virtual} or more",
        )
    shares = "virtual ranks have equal shares"
    apart = "virtual ranks compute apart, and each normalises by its own samples"
    against = (
        ("--rank-batch", config.rank_batch is not None, shares),
        ("--rank-share", config.rank_share is not None, shares),
        (f"--sampler {config.sampler}", config.sampler != "exact", "its repeats depend on the ranks"),
        (f"--batchnorm {config.batchnorm}", config.batchnorm != "plain", apart),
        ("--find-unused", config.find_unused, "every virtual rank needs the gradient of all parameters"),
        ("--compile", config.compile, "code that each rank compiles need not give the same bits"),
        ("--preview", config.preview, "it shows ranks; virtual rank v takes what rank v takes of as many"),
    )
    for other, is_given, reason in against:
        if is_given:
            raise UsageFault(f"{given} and {other}: {reason}", hint="leave out one of them")


def flag(field: str) -> str:
    """Return the flag of a field of the configuration: `--batch-size`."""
    return f"--{field.replace('_', '-')}"
