"""What the head of a run's report says of it: data, shares of the ranks, main settings. Imports torch."""

from __future__ import annotations

import shutil
import textwrap

from ckpttool.distributed.plan import Plan, dealt_sizes
from ckpttool.words import counted
from train.config.training import TrainConfig
from train.data.data_set import Data
from train.data.packing import Packed
from train.data.samples import count
from train.data.stream import Stream
from train.model.sharding import Sharded
from train.trainer.trainer import Trainer


def header(trainer: Trainer, folder: str) -> dict[str, str]:
    """Return the lines of the head, each a word and what it says."""
    config, data, place = trainer.config, trainer.data, trainer.place
    parameters = sum(parameter.numel() for parameter in trainer.ddp.parameters())
    virtual = " on virtual ranks" if config.virtual_ranks else ""
    plan = trainer.feed.plan
    dealt = shares(plan, config.virtual_ranks or place.world_size)
    tests = {name: other.parts()[-1].samples for name, other in data.others.items()}
    others = "".join(f"\n{'':8}{name}: {count(samples):,} samples" for name, samples in tests.items())
    return {
        "model": f"{config.model}, {parameters:,} parameters",
        "data": f"{data.name}\n{'':8}{describe(data)}{others}",
        "ranks": f"{place.world_size} on {place.device.type} ({place.backend}){_divided(trainer)}",
        "batch": f"{dealt}{virtual}, {_steps(trainer)}",
        "train": in_lines(recipe(config)),
        "out": folder,
    }


def _divided(trainer: Trainer) -> str:
    model = trainer.ddp
    return f",\n{'':8}{model.about}" if isinstance(model, Sharded) else ""


def describe(data: Data) -> str:
    """Return the sizes, the shape and the number of classes of a data set, as a sentence."""
    # A user's function may make batches of samples of any shapes.
    has_one = data.shape and not data.collation("training").is_own
    shape = f" of {'×'.join(map(str, data.shape))}" if has_one else ""
    tests = "no test samples" if data.test is None else f"{count(data.test):,} test samples"
    if isinstance(data.train, Stream):
        position = " that does not know its position" * (not data.train.resumes)
        said = [f"{_kind(data.train, shape)}{position}", tests]
    elif data.test is None:
        said = [f"{count(data.train):,} training samples{shape}", tests]
    else:
        said = [f"{count(data.train):,} training and {tests}{shape}"]
    return ", ".join([*said, *([f"{len(data.classes)} classes"] if data.classes else [])])


def _kind(stream: Stream, shape: str) -> str:
    """Return what a stream consists of."""
    source = stream.shards[0].source
    if isinstance(source, Packed):
        return f"a stream of packed blocks of {source.block} tokens"
    length = "" if stream.length is None else f"{stream.length:,} "
    return f"a stream of {length}samples{shape}"


def _steps(trainer: Trainer) -> str:
    steps = trainer.feed.known_steps
    if steps is None:
        return "until the stream ends"
    return f"{steps} steps per epoch{', as it says' * (trainer.feed.stream is not None)}"


def shares(plan: Plan, world_size: int) -> str:
    """Return the global batch and, if there are few ranks, each one's share: `64 = 32+32`."""
    if not 1 < world_size <= 8:
        return str(plan.batch_size)
    return f"{plan.batch_size} = {'+'.join(map(str, dealt_sizes(plan.batch_size, plan.weights(world_size))))}"


def recipe(config: TrainConfig) -> str:
    """Return the main settings of a run, in brief."""
    plain = TrainConfig()
    length = counted(config.epochs, "epoch")
    length += f" or {config.max_steps} steps" * bool(config.max_steps)
    rate = "" if config.lr is None else f" lr {config.lr:g}"
    parts = [length, f"{config.optimizer}{rate}", config.scheduler]
    if config.warmup.number:
        parts.append(f"warmup {config.warmup}")
    if config.accumulate > 1:
        parts.append(f"{config.accumulate} passes per step")
    for name in ("amp", "clip_norm", "ema", "augment", "mixup", "cutmix", "label_smoothing"):
        value = getattr(config, name)
        if value != getattr(plain, name):
            parts.append(f"{name.replace('_', '-')} {value}")
    return ", ".join([*parts, f"seed {config.seed}"])


def in_lines(recipe: str) -> str:
    """Return a recipe broken between its parts, for at most 80 columns with eight before each line."""
    width = min(shutil.get_terminal_size().columns, 80) - 8
    unbreakable = recipe.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    lines = textwrap.wrap(unbreakable, width=max(width, 16), break_long_words=False, break_on_hyphens=False)
    return f"\n{'':8}".join(lines).replace("\N{NO-BREAK SPACE}", " ")
