"""Every setting of a training once, in sections, with its default, its help and how its flag is read.

The flags of the command line are made from these fields. The checks here need no torch, so wrong flags are
refused within a tenth of a second.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from ckpttool.distributed.group import started_by_launcher
from ckpttool.errors import UsageFault
from train.config import flags
from train.config.flags import Every, Sections, count, flag, number, part_of, real, repeated, switch

OWN = ""  # the name of --data's own test set, beside those of --also-test

# The defaults of each optimizer; those of another one of torch.optim are at the end.
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": SGD,
    "adamw": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 1e-2},
    "muon": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 1e-1},
}
OTHER_OPTIMIZERS = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}

COURSES = ("none", "cosine", "linear", "step", "wsd", "onecycle")
EACH_EPOCH = Every(1, "epochs")

# A whole checkpoint, and the deltas in a row that are read (LONGEST of ckpttool/deltas/reading.py).
LONGEST_CHAIN = 65

# Settings that a resumed run may change if --change names them. The others are another training.
CHANGEABLE = {
    *("lr", "momentum", "betas", "eps", "nesterov", "weight_decay", "lr_scale", "layer_decay", "clip_norm"),
    *("scheduler", "warmup", "min_lr", "cooldown"),
    *("label_smoothing", "augment", "mixup", "cutmix"),
    *("accumulate", "rank_share"),
    "best",
}


def pattern(text: str) -> str:
    """Read a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def scale(text: str) -> str:
    """Read `REGEX=0.1`."""
    name, equals, factor = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=NUMBER")
    pattern(name)
    number(above=0)(factor)
    return text


def fractions(text: str) -> tuple[float, ...]:
    """Read numbers from 0 to below 1, with commas between them."""
    return tuple(map(number(least=0, below=1), text.split(",")))


@dataclass(frozen=True)
class ScoresConfig:
    """What counts as the best, and when a training ends for want of it."""

    best: str | None = flag(
        None,
        "scores METRIC: what best.pt is best by: accuracy, loss or a metric of the task, as mae or "
        "mae:min, and of another test set as NAME/loss (accuracy, or else loss)",
    )
    keep_best: int = count(0, "scores K: also keep the K best of them, as best-<number>.pt (0)", least=0)
    stop_early: int | None = count(
        None, "scores: end after this many evaluations in a row that were not the best so far"
    )


@dataclass(frozen=True)
class LogConfig:
    """What is written down during training; none of it changes a step."""

    tracker: tuple[str, ...] = repeated(
        "log {tensorboard,wandb,mlflow,trackio}: also log there; may be repeated. Training goes on while its "
        "server is away"
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
        type=flags.span,
    )
    log_every: int = count(50, "log: steps between two entries of log.jsonl (50)")


@dataclass(frozen=True)
class SettingsConfig:
    """Where settings come from."""

    config: str | None = flag(
        None, "settings FILE.toml: take settings from a file, under the names of the flags, which win"
    )
    like: str | None = flag(
        None, "settings RUN: take the settings of a run, from its config.toml, and name what differs"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change the weights."""

    name: str = flag(
        "sgd",
        "optimizer NAME: sgd (the default), adam, adamw, muon (with adamw for the rest), another class of "
        "torch.optim, or file.py:factory, which gets what it takes of params, model, lr and the flags below",
        name="optimizer",
    )
    lr: float | None = real(SGD["lr"], "optimizer: learning rate (sgd 0.1, others 0.001)", above=0)
    momentum: float | None = real(SGD["momentum"], "optimizer: sgd 0.9, muon 0.95", least=0, below=1)
    nesterov: bool = switch("optimizer: momentum that looks ahead, of sgd; muon has it always")
    betas: tuple[float, ...] | None = flag(
        None, "optimizer X,X: decay of the averages of adam and its family (0.9,0.999)", type=fractions
    )
    eps: float | None = real(None, "optimizer: added to what adam and others divide by (1e-8)", above=0)
    fused: str = flag(
        "off",
        "optimizer {auto,on,off}: take the step in one kernel: auto: where all parameters are on a GPU and "
        "the optimizer has one (off)",
    )
    weight_decay: float | None = real(
        SGD["weight_decay"], "optimizer: sgd 0.0001, adamw 0.01, muon 0.1, others 0", least=0
    )
    decay_norms: bool = switch("optimizer: let normalisation layers and biases decay too")
    no_decay: tuple[str, ...] = repeated(
        "optimizer REGEX: let parameters in whose name this is found not decay; may be repeated", type=pattern
    )
    lr_scale: tuple[str, ...] = repeated(
        "optimizer REGEX=X: multiply the learning rate of parameters in whose name REGEX is found; may be "
        "repeated, the first that is found counts",
        type=scale,
    )
    layer_decay: float | None = real(
        None,
        "optimizer: multiply the learning rate by X for each layer below the last; layers are the blocks "
        "that --grad-checkpoint takes, and what lies before and after them",
        above=0,
        below=1,
    )
    clip_norm: float | None = real(
        None, "optimizer: scale the gradient down to this norm if it is longer", above=0
    )
    ema: float | None = real(
        None,
        "optimizer: keep an exponential average of the weights with this decay, and score it",
        above=0,
        below=1,
    )
    zero: bool = switch("optimizer: divide the optimizer's state among the ranks (ZeRO-1)")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps."""

    name: str = flag(
        "cosine",
        "optimizer SCHEDULE: learning rate schedule: cosine (the default), linear, none; step, which divides "
        "it by ten after half and after three quarters of the steps; wsd: stable, then --cooldown; onecycle: "
        "up from a 25th and down to nearly 0; or file.py:factory, which returns a function of the step, "
        "the factor of the learning rate",
        name="scheduler",
    )
    warmup: Every = flag(
        Every(0, "epochs"),
        "optimizer N[steps|epochs]: raise the learning rate from zero over this many (0; onecycle: 0.3 of "
        "all)",
        type=flags.every("epochs", "steps", least=0),
    )
    min_lr: float | None = real(
        None, "optimizer: the learning rate in which the schedule ends, instead of 0", above=0
    )
    cooldown: Every | None = flag(
        None,
        "optimizer N[steps|epochs]: with --scheduler wsd: lower the learning rate over this many at the end "
        "(0.2 of all)",
        type=flags.every("epochs", "steps", least=1),
    )


@dataclass(frozen=True)
class DataConfig:
    """Which data, how its images become numbers, and what the outputs are compared with."""

    name: str = flag(
        "digits",
        "data DATA: digits (the default), cifar10 or mnist (of ./data, or cifar10:DIR), folder:PATH "
        "(PATH/train/<class>/* and PATH/test/..., or one level of classes), fake:N, tokens:PATTERN, "
        "wds:PATTERN, hf:NAME, or file.py:factory, which returns (train, test), or train alone",
        name="data",
    )
    test_data: str | None = flag(
        None, "data DATA: where the test samples are, if elsewhere: its test samples, or else all it has"
    )
    block_size: int | None = count(
        None, "data: tokens of a sample, of tokens:PATTERN, or of a stream of documents, which are packed"
    )
    shuffle_window: int | None = count(
        None, "data: shuffle-buffer size for streams, in samples (hf:NAME 1000, others 1)"
    )
    skip_damaged: bool = switch("data: leave out samples that can't be read, and count them")
    download: bool = switch("data: download cifar10 or mnist if it is missing")
    mean: tuple[float, ...] | None = flag(
        None,
        "data M,M,M: subtracted from each channel in [0, 1] (colour images: 0.485,0.456,0.406; others: none)",
        type=flags.numbers,
    )
    std: tuple[float, ...] | None = flag(
        None, "data S,S,S: each channel is then divided by it (0.229,0.224,0.225)", type=flags.numbers
    )
    resize: int | None = count(None, "data: resize a folder's images to N by N")
    task: str = flag(
        "classification",
        "task TASK: what the outputs are compared with, and how they are scored: classification (the "
        "default), regression, language-model, model-loss (the model returns its mean loss), or "
        "file.py:factory",
    )
    eval_batch: int = count(128, "task: test samples in one forward pass (128)")
    also_test: tuple[str, ...] = repeated(
        "scores NAME=DATA: score this test set too, the test part of what --data would take; may be repeated"
    )


@dataclass(frozen=True)
class RanksConfig:
    """How the ranks start and wait for each other."""

    workers: int = count(0, "ranks: processes that load data, per rank (0: the rank itself)", least=0)
    backend: str = flag(
        "auto", "ranks {auto,gloo,nccl}: auto: nccl if each rank has a GPU, otherwise gloo on the CPU"
    )
    timeout: float = real(
        300.0,
        "ranks SECONDS: end the run, naming the rank, when others wait for one that does nothing for so "
        "long, or has not come at the start (300)",
        above=0,
    )
    spawn: int | None = count(None, "ranks: start N ranks on this machine, without torchrun")


@dataclass(frozen=True)
class AugmentConfig:
    """How training samples are changed at random."""

    pictures: str = flag(
        "none",
        "data NAME[+NAME...]: change training images at random, by (seed, epoch, sample): crop-flip or "
        "resized-crop, trivial or rand, erase; auto is crop-flip+trivial (none)",
        name="augment",
        type=flags.pictures,
    )
    mixup: float = real(0.0, "data: mix pairs of samples, with Beta(X, X) as their weights (0)", least=0)
    cutmix: float = real(
        0.0, "data: replace a rectangle by another sample's, of an area from Beta(X, X) (0)", least=0
    )


@dataclass(frozen=True)
class TaskConfig:
    """How the task computes its loss in training, and how often it is scored."""

    label_smoothing: float = real(
        0.0, "task: the part of a label that is spread over all classes (0)", least=0, below=1
    )
    class_weights: tuple[float, ...] | None = flag(
        None,
        "task X,X,...: how much a sample of each class counts in the training loss, as the weight of "
        "torch's cross entropy",
        type=flags.numbers,
    )
    eval_every: Every = flag(
        EACH_EPOCH,
        "task N[steps|epochs]: how often to evaluate; in epochs by default (1)",
        type=flags.every("epochs", "steps", least=1),
    )


@dataclass(frozen=True)
class ModelConfig:
    """The network, where its weights come from, and how it is wrapped and divided."""

    name: str = flag(
        "simple-cnn",
        "model MODEL: simple-cnn (the default), resnet20, torchvision:NAME, or file.py:factory",
        name="model",
    )
    init: str | None = flag(None, "model FILE: start from the weights of any checkpoint that ckpttool reads")
    init_allow_missing: tuple[str, ...] = repeated(
        "model GLOB: leave parameters that match this pattern as they are made, if --init lacks them or has "
        "others; may be repeated"
    )
    batchnorm: str = flag(
        "plain",
        "model {plain,sync,pooled}: plain (the default): normalise by each rank's samples, keep rank 0's "
        "statistics; sync: by all ranks' samples; pooled: as plain, but with the running statistics of all "
        "ranks' samples",
    )
    compile: bool = switch("model: compile the model with torch.compile")
    grad_checkpoint: bool = switch(
        "model: compute activations again in the backward pass: less memory, more time"
    )
    find_unused: bool = switch("model: let a forward pass leave parameters out, at the cost of a search")
    shard: bool = flag(
        False,
        "model HOW: divide parameters, gradients and the optimizer's state among the ranks (FSDP2 for DDP); "
        "bf16: send and use parameters in this type, and sum gradients in float32; offload: keep all in the "
        "memory of the CPU; 2x4: hold the model once in each of 2 groups of 4 ranks; parts: let "
        "each rank write its part, into a folder that torch.distributed.checkpoint and ckpttool merge read; "
        "several with commas",
        type=flags.sharding,
        nargs="?",
        const="",
    )
    shard_blocks: tuple[str, ...] = repeated(
        "model CLASS: with --shard: modules of this class are put together one at a time (the blocks that "
        "--grad-checkpoint takes); may be repeated"
    )
    # Words of --shard
    shard_dtype: str | None = part_of("shard")
    shard_offload: bool = part_of("shard", False)
    mesh: str | None = part_of("shard")


@dataclass(frozen=True)
class TrainingConfig:
    """How long a training takes."""

    epochs: int = count(10, "training: passes over the training samples (10)")
    max_steps: int | None = count(None, "training: end after this many optimizer steps")
    max_time: float | None = flag(
        None, "training TIME: end after this time, in seconds, or as 30min or 2h", type=flags.duration
    )


@dataclass(frozen=True)
class BatchConfig:
    """How samples are ordered, cut into batches and dealt to ranks."""

    size: int = count(64, "training: samples per optimizer step over all ranks (64)", name="batch_size")
    rank_share: tuple[int, ...] | str | None = flag(
        None,
        "training N,N,...|auto: divide each batch among the ranks in these proportions; auto: by their "
        "measured speed",
        type=flags.integers_or_auto,
    )
    virtual_ranks: int | None = count(
        None,
        "training: the same bits on any number of ranks that divides N: each computes for its part of N "
        "virtual ranks",
    )
    accumulate: int = count(
        1,
        "training: take each rank's share of the batch in N passes, in less memory; the same "
        "training without BatchNorm, dropout and what else each pass changes (1)",
    )
    sampler: str = flag(
        "exact",
        "training {exact,torch}: exact (the default): every sample once in an epoch; torch: as "
        "DistributedSampler, which repeats samples or drops them",
    )
    drop_last: bool = switch("training: leave out the short batch that ends an epoch")


@dataclass(frozen=True)
class NumbersConfig:
    """The precision of the numbers, and where random ones come from."""

    amp: str = flag(
        "none",
        "training {none,bf16,fp16}: compute in lower precision where it is safe: bf16, or fp16 on a GPU "
        "(none)",
    )
    seed: int = count(0, "training: seeds weights, dropout and the order of samples (0)", least=0)
    deterministic: bool = switch("training: use only algorithms that give the same bits each time")


@dataclass(frozen=True)
class PreviewConfig:
    """The plan is shown, and nothing is trained."""

    shown: str | None = flag(
        None,
        "settings {plan,json,settings}: train nothing, and show: plan (the default): which rank takes which "
        "samples in which step; json: the same; settings: all of them, as a file for --config",
        nargs="?",
        const="plan",
        name="preview",
    )


@dataclass(frozen=True)
class SavingConfig:
    """The folder of the run, when it is saved, and from where it continues."""

    out: str | None = flag(None, "saving DIR: for last.pt, best.pt and log.jsonl (runs/<time>)")
    save_every: Every = flag(
        EACH_EPOCH,
        "saving N[steps|epochs|s|min|h]: how often to write last.pt; in epochs by default (1)",
        type=flags.every("epochs", "steps", "s", "min", "h", least=1),
    )
    save: str = flag(
        "async",
        "saving {sync,async}: async (the default): train on while a copy of the state is written; sync: "
        "wait, without a copy",
    )
    save_parts: bool = part_of("shard", False)
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
    change: tuple[str, ...] = repeated(
        "saving NAME: with --resume: let this setting differ from the saved run's; may be repeated. One of "
        + ", ".join(sorted(CHANGEABLE)).replace("_", "-")
    )
    force: bool = switch("saving: start over in a folder that holds a run, and overwrite it")
    prove_every: int | None = count(
        None,
        "saving: chain digests of samples, checkpoints and, each N steps, weights in run.jsonl, for "
        "ckpttool prove",
    )
    stop_at: int | None = count(None, "saving STEP: end after this optimizer step, as --max-time does")


@dataclass(frozen=True)
class TrainConfig(Sections):
    """The settings of a run.

    In the order of the settings in a checkpoint, of which a digest tells one training from others.
    """

    scores: ScoresConfig = ScoresConfig()
    log: LogConfig = LogConfig()
    settings: SettingsConfig = SettingsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    ranks: RanksConfig = RanksConfig()
    augment: AugmentConfig = AugmentConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    batch: BatchConfig = BatchConfig()
    numbers: NumbersConfig = NumbersConfig()
    preview: PreviewConfig = PreviewConfig()
    saving: SavingConfig = SavingConfig()


def defaults_of(optimizer: str) -> dict[str, Any]:
    """Return the learning rate, momentum and weight decay that an optimizer gets where no flag is given.

    A user's own factory gets none: it has its own.
    """
    if ":" in optimizer:
        return dict.fromkeys(OTHER_OPTIMIZERS)
    return OPTIMIZERS.get(optimizer, OTHER_OPTIMIZERS)


# ---- checks ------------------------------------------------------------------------------------------


def check(config: TrainConfig) -> None:
    """Refuse values that are wrong whatever the data and the model."""
    _check_optimizer(config.optimizer)
    _check_schedule(config.schedule, config.optimizer.lr)
    _check_saving(config.saving)
    if config.model.init_allow_missing and not config.model.init:
        raise UsageFault("--init-allow-missing: needs --init", hint="give --init FILE, or leave it out")
    if config.log.every:
        hook_interval(config.log.every)
    if config.batch.accumulate > config.batch.size:
        passes = f"--accumulate {config.batch.accumulate}"
        raise UsageFault(f"{passes}: more passes than the {config.batch.size} samples in a batch")


def check_shared(data: DataConfig, ranks: RanksConfig) -> None:
    """Refuse what is wrong with the settings that evaluations have too, whatever the data."""
    if ranks.spawn and started_by_launcher():
        hint = "leave out --spawn"
        raise UsageFault("--spawn starts ranks, but torchrun already started this one", hint=hint)
    if data.std and not all(value > 0 for value in data.std):
        raise UsageFault(f"--std {','.join(f'{value:g}' for value in data.std)}: must be above 0")
    if data.resize and not data.name.startswith(("folder:", "wds:", "hf:")):
        raise UsageFault("--resize: needs --data folder:PATH, wds:PATTERN or hf:NAME", hint="leave it out")


def _check_optimizer(settings: OptimizerConfig) -> None:
    """Refuse what is wrong with an optimizer's settings whatever the model."""
    if settings.name in ("adam", "adamw") and settings.momentum:
        raise UsageFault(f"--momentum: {settings.name} has none", hint="leave it out")
    if settings.zero and ":" in settings.name:
        what = f"--zero: the state of {settings.name} is not divided among ranks"
        raise UsageFault(what, hint="leave it out")
    if settings.no_decay and settings.weight_decay == 0:
        raise UsageFault("--no-decay: there is no --weight-decay", hint="give one, or leave --no-decay out")
    if (settings.lr_scale or settings.layer_decay) and settings.lr is None:
        given = "--lr-scale" if settings.lr_scale else "--layer-decay"
        raise UsageFault(f"{given}: needs --lr, of which it is a part", hint="give --lr")


def _check_schedule(settings: ScheduleConfig, lr: float | None) -> None:
    course, lowest = settings.name, settings.min_lr
    if course not in COURSES and ":" not in course:
        known = ", ".join(COURSES)
        raise UsageFault(f"--scheduler {course}: no such schedule", hint=f"one of {known} or file.py:factory")
    if settings.cooldown is not None and course != "wsd":
        raise UsageFault("--cooldown: needs --scheduler wsd", hint="give it, or leave --cooldown out")
    if lowest is None:
        return
    if course == "none" or ":" in course:
        why = "stays as it is" if course == "none" else "is what the factory's function says"
        raise UsageFault(f"--min-lr: with --scheduler {course} the learning rate {why}", hint="leave it out")
    if lr is None:
        raise UsageFault("--min-lr: needs --lr, from which the schedule starts", hint="give --lr")
    if lowest >= lr:
        hint = "give a smaller one"
        raise UsageFault(f"--min-lr {lowest:g}: is not below the learning rate, {lr:g}", hint=hint)


def _check_saving(saving: SavingConfig) -> None:
    if saving.resume == "auto" and saving.out is None:
        raise UsageFault("--resume auto: needs a folder", hint="give it as --out")
    if saving.resume and saving.force:
        raise UsageFault("--force starts over and --resume continues", hint="give one of them")
    if saving.change and not saving.resume:
        raise UsageFault("--change: says what may differ on a resume", hint="give --resume, or leave it out")
    fields_of_change(saving.change)
    if saving.keep_deltas and saving.save_parts:
        what = "--keep-deltas and --shard parts: the tensors are in folders, of which there are no deltas"
        raise UsageFault(what, hint="leave out one of them")
    if saving.keep_deltas > LONGEST_CHAIN:
        what = f"--keep-deltas {saving.keep_deltas}: not more than {LONGEST_CHAIN - 1} in a row are read"
        raise UsageFault(what, hint=f"give {LONGEST_CHAIN} or less")


def hook_interval(given: tuple[str, str]) -> Every:
    """Return how often the function of `--every` is called."""
    try:
        return flags.every("steps", "epochs", least=1)(given[0])
    except argparse.ArgumentTypeError as error:
        raise UsageFault(f"--every: {error}", hint="for example: --every 100steps own.py:sample") from None


def fields_of_change(names: tuple[str, ...]) -> set[str]:
    """Return the fields that `--change` names, as `weight-decay` or `weight_decay`."""
    field_of = {name: name.removeprefix("--").replace("-", "_") for name in names}
    for name, field in field_of.items():
        if field not in CHANGEABLE:
            known = ", ".join(changeable.replace("_", "-") for changeable in sorted(CHANGEABLE))
            hint = f"{known} can; --init starts another run from a checkpoint's weights"
            raise UsageFault(f"--change {name}: can't differ from the saved run's", hint=hint)
    return set(field_of.values())
