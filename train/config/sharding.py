"""What goes with `--shard`, which divides a model among the ranks, and what does not."""

from __future__ import annotations

from ckpttool.errors import UsageFault
from train.config.training import TrainConfig


def sizes(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """Return the number of groups that hold the whole model each, and of the ranks in each."""
    groups, ranks = config.mesh.split("x") if config.mesh else (1, world_size)
    return int(groups), int(ranks)


def check(config: TrainConfig, world_size: int) -> None:
    """Refuse flags that need `--shard`, and those that can't be combined with it; UsageFault names both."""
    if not config.shard:
        for name in ("mesh", "shard_blocks", "shard_dtype", "shard_offload", "save_parts"):
            if getattr(config, name):
                raise UsageFault(
                    f"--{name.replace('_', '-')}: needs --shard", hint="give it, or leave this out"
                )
        return
    against = (
        ("--zero", config.zero, "the optimizer's state is divided already"),
        (f"--virtual-ranks {config.virtual_ranks}", config.virtual_ranks, "they add whole gradients"),
        ("--find-unused", config.find_unused, "gradients of a unit are sent as one, and all ranks need each"),
        ("--rank-share auto", config.rank_share == "auto", "ranks wait for each other in every pass"),
        ("--every", config.every, "its function gets a copy of the model, of which a rank has a part"),
    )
    if config.save_parts and config.prove_every:
        what = "--save-parts and --prove-every: the record names digests of whole tensors"
        raise UsageFault(what, hint="leave out one of them")
    for other, is_given, reason in against:
        if is_given:
            raise UsageFault(f"--shard and {other}: {reason}", hint="leave out one of them")
    groups, ranks = sizes(config, world_size)
    if groups * ranks != world_size:
        hint = "give as many groups and ranks in each as there are ranks"
        raise UsageFault(
            f"--mesh {config.mesh}: is {groups * ranks} ranks, and there are {world_size}", hint=hint
        )
