"""Every setting of a training run once, with its default, its help and how its flag is read.

The flags of the command line are made from these fields; a field's name is its flag's name. The checks here
need no torch, so wrong flags are refused within a tenth of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageFault
from train.config import optimizing, shared
from train.config.shared import Every, count, every, flag, mesh, real, span

EACH_EPOCH = Every(1, "epochs")

# A whole checkpoint, and the deltas in a row that are read (LONGEST of ckpttool/formats/delta/reading.py).
LONGEST_CHAIN = 65

# Settings that a resumed run may change if --change names them. The others are another training.
CHANGEABLE = {
    *optimizing.CHANGEABLE,
    *("label_smoothing", "augment", "mixup", "cutmix"),
    *("accumulate", "rank_batch", "rank_share"),
    "best",
}


@dataclass(frozen=True)
class WatchConfig:
    """What changes no step of a training."""

    best: str | None = flag(
        None,
        "scores METRIC: what best.pt is best by: accuracy, loss or a metric of the task, as mae or "
        "mae:min, and of another test set as NAME/loss (accuracy, or else loss)",
    )
    keep_best: int = count(0, "scores K: also keep the K best of them, as best-<number>.pt (0)", least=0)
    stop_early: int | None = count(
        None, "scores: end after this many evaluations in a row that were not the best so far"
    )
    tracker: tuple[str, ...] = flag(
        (),
        "log {tensorboard,wandb,mlflow,trackio}: also log there; may be repeated. Training goes on while its "
        "server is away",
        action="append",
    )
    every: tuple[str, str] | None = flag(
        None,
        "log N[steps|epochs] FILE.py:FUNCTION: call function(model, step, folder) on rank 0 after every N "
        "steps, with a copy of the model",
        nargs=2,
    )
    profile: str | None = flag(
        None,
        "log N|N-M: record these steps with torch's profiler, for N the N after the tenth, in "
        "profile/trace.json.gz",
        type=span,
    )
    config: str | None = flag(
        None, "settings FILE.toml: take settings from a file, under the names of the flags, which win"
    )
    like: str | None = flag(
        None, "settings RUN: take the settings of a run, from its config.toml, and name what differs"
    )
    unset: tuple[str, ...] = flag(
        (),
        "settings NAME: with --config or --like: leave out this setting of the file; may be repeated",
        action="append",
    )
    print_config: bool = flag(False, "settings: print the settings as such a file, and train nothing")


def hook_interval(given: tuple[str, str]) -> Every:
    """Return how often the function of `--every` is called."""
    try:
        return every("steps", "epochs", least=1)(given[0])
    except argparse.ArgumentTypeError as error:
        raise UsageFault(f"--every: {error}", hint="for example: --every 100steps own.py:sample") from None


@dataclass(frozen=True)
class TrainConfig(shared.RanksConfig, shared.DataConfig, optimizing.OptimizerConfig, WatchConfig):
    """The whole configuration of a run."""

    augment: str = flag(
        "none",
        "data {none,crop-flip,auto}: change training images at random, by (seed, epoch, sample): crop-flip "
        "or auto (none)",
    )
    mixup: float = real(0.0, "data: mix pairs of samples, with Beta(X, X) as their weights (0)", least=0)
    cutmix: float = real(
        0.0, "data: replace a rectangle by another sample's, of an area from Beta(X, X) (0)", least=0
    )
    label_smoothing: float = real(
        0.0, "task: the part of a label that is spread over all classes (0)", least=0, below=1
    )
    class_weights: tuple[float, ...] | None = flag(
        None,
        "task X,X,...: how much a sample of each class counts in the training loss, as the weight of "
        "torch's cross entropy",
        type=shared.numbers,
    )
    eval_every: Every = flag(
        EACH_EPOCH,
        "task N[steps|epochs]: how often to evaluate; in epochs by default (1)",
        type=every("epochs", "steps", least=1),
    )
    model: str = flag(
        "simple-cnn", "model MODEL: simple-cnn (the default), resnet20, torchvision:NAME, or file.py:factory"
    )
    init: str | None = flag(None, "model FILE: start from the weights of any checkpoint that ckpttool reads")
    init_allow_missing: tuple[str, ...] = flag(
        (),
        "model GLOB: leave parameters that match this pattern as they are made, if --init lacks them or has "
        "others; may be repeated",
        action="append",
    )
    batchnorm: str = flag(
        "plain",
        "model {plain,sync,pooled}: plain (the default): normalise by each rank's samples, keep rank 0's "
        "statistics; sync: by all ranks' samples; pooled: as plain, but with the running statistics of all "
        "ranks' samples",
    )
    compile: bool = flag(False, "model: compile the model with torch.compile")
    grad_checkpoint: bool = flag(
        False, "model: compute activations again in the backward pass: less memory, more time"
    )
    find_unused: bool = flag(False, "model: let a forward pass leave parameters out, at the cost of a search")
    shard: bool = flag(
        False,
        "model: divide parameters, gradients and the optimizer's state among the ranks (FSDP2 for DDP)",
    )
    shard_blocks: tuple[str, ...] = flag(
        (),
        "model CLASS: with --shard: modules of this class are put together one at a time (the blocks that "
        "--grad-checkpoint takes); may be repeated",
        action="append",
    )
    shard_dtype: str | None = flag(
        None, "model {bf16}: with --shard: send and use parameters in this type, and sum gradients in float32"
    )
    shard_offload: bool = flag(
        False, "model: with --shard: keep parameters and the optimizer's state in the memory of the CPU"
    )
    mesh: str | None = flag(
        None,
        "model GROUPSxRANKS: with --shard: hold the model once in each group of ranks, as 2x4 (one group)",
        type=mesh,
    )
    epochs: int = count(10, "training: passes over the training samples (10)")
    max_steps: int | None = count(None, "training: end after this many optimizer steps")
    max_time: float | None = flag(
        None, "training TIME: end after this time, in seconds, or as 30min or 2h", type=shared.duration
    )
    batch_size: int = count(64, "training: samples per optimizer step over all ranks (64)")
    rank_batch: tuple[int, ...] | None = flag(
        None,
        "training N,N,...: samples per optimizer step of each rank, in place of --batch-size",
        type=shared.integers,
    )
    rank_share: tuple[int, ...] | str | None = flag(
        None,
        "training N,N,...|auto: divide each batch in these proportions; auto: by the measured speed of the "
        "ranks",
        type=shared.integers_or_auto,
    )
    virtual_ranks: int | None = count(
        None,
        "training: the same bits on any number of ranks that divides N: each computes for its part of N "
        "virtual ranks",
    )
    accumulate: int = count(
        1,
        "training: take each rank's share of the batch in N passes, in less memory; without BatchNorm and "
        "dropout it is the same training (1)",
    )
    sampler: str = flag(
        "exact",
        "training {exact,torch,none}: exact (the default): every sample once in an epoch; torch: as "
        "DistributedSampler, which repeats samples or drops them; none: as without one, for --preview only",
    )
    drop_last: bool = flag(False, "training: leave out the short batch that ends an epoch")
    set_epoch: bool = flag(True, "training: give every epoch the same order, as without set_epoch")
    amp: str = flag(
        "none",
        "training {none,bf16,fp16}: compute in lower precision where it is safe: bf16, or fp16 on a GPU "
        "(none)",
    )
    seed: int = count(0, "training: seeds weights, dropout and the order of samples (0)", least=0)
    deterministic: bool = flag(False, "training: use only algorithms that give the same bits each time")
    preview: bool = flag(
        False, "training: show which rank takes which samples in which step, and train nothing"
    )
    json: bool = flag(False, "training: with --preview: print JSON")
    out: str | None = flag(None, "saving DIR: for last.pt, best.pt and log.jsonl (runs/<time>)")
    save_every: Every = flag(
        EACH_EPOCH,
        "saving N[steps|epochs|s|min|h]: how often to write last.pt; in epochs by default (1)",
        type=every("epochs", "steps", "s", "min", "h", least=1),
    )
    save: str = flag(
        "async",
        "saving {sync,async}: async (the default): train on while a copy of the state is written; sync: "
        "wait, without a copy",
    )
    save_parts: bool = flag(
        False,
        "saving: with --shard: let each rank write its part, into a folder that torch.distributed.checkpoint "
        "and ckpttool merge read; last.pt names it",
    )
    grace: float = real(
        25.0,
        "saving SECONDS: seconds from a SIGTERM, SIGINT or SIGUSR1 to the end of the run, with a checkpoint "
        "(25)",
        above=0,
    )
    keep: int = count(0, "saving K: also keep the last K of them, as step-<number>.pt (0)", least=0)
    keep_deltas: int = count(
        0,
        "saving K: keep every save: each K-th whole, as step-<number>.pt, the rest as deltas, "
        "step-<number>.delta.safetensors (0: none)",
        least=0,
    )
    resume: str | None = flag(
        None,
        "saving auto|PATH: continue from this checkpoint; auto: from the newest in --out that is whole, if "
        "there is any",
        nargs="?",
        const="auto",
    )
    change: tuple[str, ...] = flag(
        (),
        "saving NAME: with --resume: let this setting differ from the saved run's; may be repeated. One of "
        + ", ".join(sorted(CHANGEABLE)).replace("_", "-"),
        action="append",
    )
    force: bool = flag(False, "saving: start over in a folder that holds a run, and overwrite it")
    prove_every: int | None = count(
        None,
        "saving: chain digests of samples, checkpoints and, each N steps, weights in run.jsonl, for "
        "ckpttool prove",
    )
    stop_at: int | None = count(None, "saving STEP: end after this optimizer step, as --max-time does")
    log_every: int = count(50, "log: steps between two entries of log.jsonl (50)")

    def plain(self) -> dict[str, Any]:
        """Return the fields as primitives, as stored in a checkpoint."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: str(value) if isinstance(value, Every) else value for name, value in values.items()}


def check(config: TrainConfig) -> None:
    """Refuse values that are wrong whatever the data and the model."""
    optimizing.check(config)
    if config.resume == "auto" and config.out is None:
        raise UsageFault("--resume auto: needs a folder", hint="give it as --out")
    if config.resume and config.force:
        raise UsageFault("--force starts over and --resume continues", hint="give one of them")
    if config.change and not config.resume:
        raise UsageFault("--change: says what may differ on a resume", hint="give --resume, or leave it out")
    fields(config.change)
    if config.init_allow_missing and not config.init:
        raise UsageFault("--init-allow-missing: needs --init", hint="give --init FILE, or leave it out")
    if config.json and not config.preview:
        raise UsageFault("--json: needs --preview", hint="leave it out; log.jsonl holds a run's numbers")
    if config.keep_deltas and config.save_parts:
        what = "--keep-deltas and --save-parts: the tensors are in folders, of which there are no deltas"
        raise UsageFault(what, hint="leave out one of them")
    if config.keep_deltas > LONGEST_CHAIN:
        what = f"--keep-deltas {config.keep_deltas}: not more than {LONGEST_CHAIN - 1} in a row are read"
        raise UsageFault(what, hint=f"give {LONGEST_CHAIN} or less")
    if config.every:
        hook_interval(config.every)
    if config.accumulate > config.batch_size:
        passes = f"--accumulate {config.accumulate}"
        raise UsageFault(f"{passes}: more passes than the {config.batch_size} samples in a batch")
    shared.check_shared(config)


def fields(names: tuple[str, ...]) -> set[str]:
    """Return the fields that `--change` names, as `weight-decay` or `weight_decay`."""
    field_of = {name: name.removeprefix("--").replace("-", "_") for name in names}
    for name, field in field_of.items():
        if field not in CHANGEABLE:
            known = ", ".join(changeable.replace("_", "-") for changeable in sorted(CHANGEABLE))
            hint = f"{known} can; --init starts another run from a checkpoint's weights"
            raise UsageFault(f"--change {name}: can't differ from the saved run's", hint=hint)
    return set(field_of.values())
