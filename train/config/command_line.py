"""Settings as a command line and as a file: read, checked, and written again.

    data = "folder:pictures"
    lr = 0.05
    rank-share = [2, 10]        # 2,10 on the command line
    drop-last = true

Each value is read as the flag reads it. The table [about] is what a run says of itself, and no setting.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.core.files.commit import reason
from ckpttool.core.words import counted
from ckpttool.distributed.group import given_world_size, started_by_launcher
from ckpttool.distributed.plan import ENDLESS, Plan
from ckpttool.distributed.plan import check as check_dealt
from ckpttool.errors import Unreadable, UsageFault
from ckpttool.mapping.verbs import lines, text
from train.config import sections
from train.config.flags import (
    Parser,
    add_flags,
    as_typed,
    closest,
    fields_of,
    flags_in,
    name_of,
    setting_of,
    sharded,
)
from train.config.sections import TrainConfig, check, check_shared

CONFIG_FILE = "config.toml"
# How a run's own file begins, which no other file may be overwritten by.
MARK = "# Settings of a run of train/main.py"
HEAD = f"{MARK}.\n# The names are those of its flags, and what stands behind a # is the default.\n"
ABOUT = "about"

# Flags that say where settings come from.
SOURCES = ("config", "like")
# Settings of one start, which no other run of the kind takes over.
OF_A_START = (*SOURCES, "out", "resume", "force", "change", "preview", "stop_at", "spawn")

MAX_BYTES = 1 << 16
TWICE = re.compile(r"overwrite a value \(at (?:line (\d+)|end)")

Flags = Mapping[str, argparse.Action]
Meant = Callable[[str], str | None]


class FileSettings(NamedTuple):
    """What a file says: as on a command line, which of these flags it turns off, and its [about]."""

    arguments: list[str]
    off: list[str]
    about: dict[str, Any]


def read_settings(path: str, flags: Flags, meant: Meant) -> FileSettings:
    """Return the settings in a file.

    Args:
        flags: by name, with its dashes.
        meant: flag -> the one that it may be a slip for.

    Raises:
        Unreadable: there is no such file.
        UsageFault: it is not TOML, or names what is no flag, twice, or with a value of another kind.
    """
    try:
        table = _table(_contents(path))
        about = table.pop(ABOUT, {})
        settings = FileSettings([], [], about if isinstance(about, dict) else {})
        for key, value in table.items():
            _add(settings, key, value, flags, meant)
    except UsageFault as fault:
        raise UsageFault(f"{path}: {fault.message}", hint=fault.hint) from None
    return settings


def _contents(path: str) -> str:
    try:
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable(path, "is not a regular file")
            contents = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    if len(contents) > MAX_BYTES:
        raise UsageFault(f"is longer than {MAX_BYTES >> 10} KiB, and holds settings alone")
    try:
        return contents.decode()
    except UnicodeDecodeError:
        raise UsageFault("is no text in UTF-8") from None


def _table(contents: str) -> dict[str, Any]:
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table: dict[str, Any] = tomllib.loads(contents)
    except (ValueError, RecursionError) as error:
        if twice := TWICE.search(str(error)):
            given = contents.rstrip().splitlines()
            number = int(twice[1] or len(given))
            key = given[number - 1].partition("=")[0].strip()
            raise UsageFault(f"line {number}: {key} is given twice", hint="give it once") from None
        raise UsageFault(f"is not TOML: {str(error)[:200]}") from None
    return table


def _add(settings: FileSettings, key: str, value: Any, flags: Flags, meant: Meant) -> None:
    flag, arguments = f"--{key}", settings.arguments
    action = flags.get(flag)
    if isinstance(value, dict):
        hint = "settings stand above all tables, under the names of the flags"
        raise UsageFault(f"[{key}]: a table, and no setting is one", hint=hint)
    if action is None:
        suggested = (meant(flag) or "").removeprefix("--")
        known = "python train/main.py --preview settings lists the settings"
        raise UsageFault(f"{key}: no such setting", hint=f"did you mean {suggested}?" if suggested else known)
    if action.dest in (*SOURCES, "help"):
        raise UsageFault(f"{key}: belongs on the command line")
    if action.nargs != "?" and isinstance(value, bool) != (action.nargs == 0):
        what = "takes a value, not" if isinstance(value, bool) else "is true or false, not"
        raise UsageFault(f"{key}: {what} {text(value)[:80]}")
    if isinstance(value, bool):
        # In both cases: then it is known that the flag takes no value.
        arguments.append(flag)
        settings.off.extend([action.dest] * (not value))
    elif isinstance(value, list) and (isinstance(action, argparse._AppendAction) or action.nargs == 2):
        words = [_word(key, each) for each in value]
        if action.nargs == 2 and len(words) != 2:  # others would be read as flags
            raise UsageFault(f"{key}: takes 2 values, not {len(words)}")
        arguments += [flag, *words] if action.nargs == 2 else [f"{flag}={word}" for word in words]
    else:
        each = value if isinstance(value, list) else [value]
        arguments.append(f"{flag}={','.join(_word(key, one) for one in each)}")


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageFault(f"{key}: {text(value)[:80]} is no value of a flag")
    return str(value)


# ---- a run's own ---------------------------------------------------------------------------------------


def is_of_a_run(path: str) -> bool:
    """Return whether a run has written a file, and may write it anew."""
    try:
        return os.path.isfile(path) and not os.path.islink(path) and _contents(path).startswith(MARK)
    except (UsageFault, Unreadable):
        return False


def _setting_lines(config: TrainConfig, left_out: Sequence[str]) -> Iterator[str]:
    """Yield the settings, each on a line, with the defaults as comments."""
    group, values, defaults = "", as_typed(config.plain()), _defaults(config)
    for field in (field for field in flags_in(type(config)) if setting_of(field) not in left_out):
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            yield from ("", f"# ---- {group} ----")
        key, value = name_of(field).removeprefix("--"), values[setting_of(field)]
        if value is None or value == ():
            yield f"# {key}: not given"
        else:
            yield f"{'# ' * bool(value == defaults[setting_of(field)])}{key} = {text(value)}"


# ---- the command line --------------------------------------------------------------------------------


# What the help shows first.
FIRST = (
    *("data", "task", "model", "init", "epochs", "batch_size", "optimizer", "lr", "weight_decay"),
    *("amp", "seed", "workers", "spawn", "out", "resume"),
)

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 2 train/main.py
  python train/main.py --spawn 2 --epochs 3 --out runs/first
  python train/main.py --epochs 5 --out runs/first --resume auto
  python train/main.py --data fake:64 --model resnet20 --epochs 1
  python train/main.py --like runs/first --lr 0.05 --out runs/second
"""


def train_parser() -> Parser:
    """Return the parser of train/main.py."""
    about = "Train a model on one or many ranks, exactly."
    parser = Parser("train/main.py", "[flags]", about, EXAMPLES)
    add_flags(parser, TrainConfig, FIRST)
    # What is given, and not by a default, takes the place of what a file says.
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Return the configuration that a command line gives, with the file of settings that it names.

    It is checked as far as it needs no data and no model.
    """
    parser = train_parser()
    given = vars(parser.parse_args(arguments))
    config = _complete({**_of_file(parser, given), **given})
    check(config)
    check_shared(config.data, config.ranks)
    check_plan(config, config.ranks.spawn or given_world_size())
    return config


def _complete(values: dict[str, Any]) -> TrainConfig:
    """Return the configuration of what is given; some defaults depend on the optimizer."""
    usual = TrainConfig()
    optimizer = values.get("optimizer", usual.optimizer.name)
    if "shard" in values:
        values = {**values, **sharded(values["shard"])}
    values = {**sections.defaults_of(optimizer), **values}
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return usual.changed(**settings)


def _of_file(parser: Parser, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the file of `--config` or `--like`."""
    named = {name: given[name] for name in ("config", "like") if name in given}
    for name in (name for name, path in named.items() if not path):
        raise UsageFault(f"--{name}: names nothing", hint="leave it out")
    paths = [path if name == "config" else own_path(path) for name, path in named.items()]
    if len(paths) > 1:
        raise UsageFault("--config and --like: settings come from one file", hint="give one of them")
    if not paths:
        return {}
    values, _ = _read(parser, paths[0])
    if started_by_launcher():  # which has started the ranks, as many as it was told
        values.pop("spawn", None)
    return values


def _read(parser: Parser, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in a file, by field, and its [about]."""
    flags = parser._option_string_actions
    read = read_settings(path, flags, lambda flag: closest(flag, [*flags]))
    try:
        values = vars(parser.parse_args(read.arguments))
    except UsageFault as fault:
        raise UsageFault(f"{path}: {fault.message.removeprefix('argument ')}") from None
    return {name: value for name, value in values.items() if name not in read.off}, read.about


def own_path(run: str) -> str:
    """Return the file of settings in the folder of a run."""
    return os.path.join(run, CONFIG_FILE)


def of_run(run: str) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the settings that a run has written into its folder, and what it says of itself."""
    values, about = _read(train_parser(), own_path(run))
    return _complete(values), about


def settings_text(config: TrainConfig, *, about: Mapping[str, Any] | None = None) -> str:
    """Return a configuration as a file of settings; with `about`, as that of a run."""
    settings = _setting_lines(config, SOURCES if about is None else OF_A_START)
    return "\n".join([HEAD, *settings, *lines(f"[{ABOUT}]", about or {}), ""])


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without one flag that takes a value."""
    rest, skip = [], False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            rest.append(argument)
        skip = argument == flag
    return rest


def _defaults(config: TrainConfig) -> dict[str, Any]:
    """Return what a setting is where no flag is given, as primitives."""
    return {**TrainConfig().plain(), **sections.defaults_of(config.optimizer.name)}


def arguments_of(config: TrainConfig) -> list[str]:
    """Return the command line that gives this configuration, without defaults and files of settings."""
    defaults, values = _defaults(config), as_typed(config.plain())
    fields = {name: field for name, (_, field) in fields_of(type(config)).items() if name in values}
    arguments: list[str] = []
    for name, field in fields.items():
        value, flag = values[name], name_of(field)
        if value == defaults[name] or name in SOURCES:
            continue
        if field.metadata.get("action") == "append":
            arguments += [part for item in value for part in (flag, item)]
        elif isinstance(value, bool):
            arguments.append(flag)
        elif field.metadata.get("nargs") == 2:
            arguments += [flag, *value]
        else:
            text = ",".join(map(_typed, value)) if isinstance(value, list | tuple) else _typed(value)
            # A value like -1 would be taken for a flag.
            arguments += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return arguments


def _typed(value: Any) -> str:
    """Return a value as a person would type it: 3, not 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def program(name: str) -> str:
    """Return the path of a program of this package, relative to the working directory."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), f"{name}.py")
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else below


def to_paste(words: Sequence[str]) -> str:
    """Return a command for a shell, indented, broken between its paths and flags where a line is too long."""
    width = min(shutil.get_terminal_size().columns, 80) - 2
    parts = [" ".join(map(shlex.quote, words[:2]))]
    for before, word in pairwise(words[1:]):
        if before.startswith("-") and not word.startswith("-"):  # its value
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > width:
            lines.append("     ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def flags_of(config: TrainConfig) -> list[str]:
    """Return the flags with which an evaluation builds the same model and takes the same samples."""
    names = ("task", "test_data", "block_size", "eval_batch", "mean", "std", "resize", "also_test")
    usual = TrainConfig.of(**{name: config[name] for name in names})
    return ["--model", config.model.name, "--data", config.data.name, *arguments_of(usual)]


def recipe(config: TrainConfig) -> str:
    """Return the main settings of a run, in brief."""
    plain = TrainConfig()
    length = counted(config.training.epochs, "epoch")
    length += f" or {config.training.max_steps} steps" * bool(config.training.max_steps)
    rate = "" if config.optimizer.lr is None else f" lr {config.optimizer.lr:g}"
    parts = [length, f"{config.optimizer.name}{rate}", config.schedule.name]
    if config.schedule.warmup.number:
        parts.append(f"warmup {config.schedule.warmup}")
    if config.batch.accumulate > 1:
        parts.append(f"{config.batch.accumulate} passes per step")
    for name in ("amp", "clip_norm", "ema", "augment", "mixup", "cutmix", "label_smoothing"):
        value = config[name]
        if value != plain[name]:
            parts.append(f"{name.replace('_', '-')} {value}")
    return ", ".join([*parts, f"seed {config.numbers.seed}"])


# ---- the plan that the flags describe ------------------------------------------------------------------


def make_plan(config: TrainConfig, samples: int) -> Plan:
    """Return how training samples are ordered, cut into batches and dealt to ranks.

    `ENDLESS` samples are a stream's, whose last batch nobody knows.
    """
    is_stream = samples >= ENDLESS
    samples -= samples % config.batch.size * is_stream
    # With "auto", shares are equal until the ranks' speeds have been measured.
    shares = config.batch.rank_share if isinstance(config.batch.rank_share, tuple) else None
    names = ("batch_size", "seed", "drop_last", "accumulate", "sampler")
    settings = {name: config[name] for name in names}
    return Plan(samples, **settings, rank_share=shares, in_order=is_stream)


def check_plan(config: TrainConfig, world_size: int) -> None:
    """Check that batches can be dealt as the flags say, whatever the data."""
    if config.batch.rank_share == "auto" and config.batch.sampler != "exact":
        what = f"--rank-share auto: --sampler {config.batch.sampler} says already how a batch is dealt"
        raise UsageFault(what, hint="give one of them")
    _check_sharding(config, world_size)
    if config.batch.virtual_ranks is not None:
        _check_virtual_ranks(config, config.batch.virtual_ranks, world_size)
    check_dealt(make_plan(config, config.batch.size), world_size, called=flag)


def mesh_sizes(mesh: str | None, world_size: int) -> tuple[int, int]:
    """Return the number of groups that hold the whole model each, and of the ranks in each."""
    groups, ranks = mesh.split("x") if mesh else (1, world_size)
    return int(groups), int(ranks)


def _check_sharding(config: TrainConfig, world_size: int) -> None:
    """Refuse flags that need `--shard`, and those that can't be combined with it; UsageFault names both."""
    batch, model = config.batch, config.model
    if not model.shard:
        if model.shard_blocks:
            raise UsageFault("--shard-blocks: needs --shard", hint="give it, or leave this out")
        return
    against = (
        ("--zero", config.optimizer.zero, "the optimizer's state is divided already"),
        (f"--virtual-ranks {batch.virtual_ranks}", batch.virtual_ranks, "they add whole gradients"),
        ("--find-unused", model.find_unused, "gradients of a unit are sent as one, and all ranks need each"),
        ("--rank-share auto", batch.rank_share == "auto", "ranks wait for each other in every pass"),
        ("--every", config.log.every, "its function gets a copy of the model, of which a rank has a part"),
    )
    if config.saving.save_parts and config.saving.prove_every:
        what = "--shard parts and --prove-every: the record names digests of whole tensors"
        raise UsageFault(what, hint="leave out one of them")
    _refuse_beside("--shard", against)
    groups, ranks = mesh_sizes(model.mesh, world_size)
    if groups * ranks != world_size:
        what = f"--shard {model.mesh}: is {groups * ranks} ranks, and there are {world_size}"
        raise UsageFault(what, hint="give as many groups and ranks in each as there are ranks")


def _check_virtual_ranks(config: TrainConfig, virtual: int, world_size: int) -> None:
    batch, model = config.batch, config.model
    given = f"--virtual-ranks {virtual}"
    if virtual % world_size:
        hint = "start a number of ranks that divides it, or give a multiple of theirs"
        raise UsageFault(f"{given}: does not divide by {world_size} ranks", hint=hint)
    if virtual > batch.size:
        hint = f"give --batch-size {virtual} or more"
        raise UsageFault(f"{given}: more than the {batch.size} samples in a batch", hint=hint)
    same = "virtual rank v takes what rank v takes of as many"
    shares = "virtual ranks have equal shares"
    apart = "virtual ranks compute apart, and each normalises by its own samples"
    against = (
        ("--rank-share", batch.rank_share is not None, shares),
        (f"--sampler {batch.sampler}", batch.sampler != "exact", "its repeats depend on the ranks"),
        (f"--batchnorm {model.batchnorm}", model.batchnorm != "plain", apart),
        ("--find-unused", model.find_unused, "every virtual rank needs the gradient of all parameters"),
        ("--compile", model.compile, "code that each rank compiles need not give the same bits"),
        ("--preview", config.preview.shown, f"it shows ranks; {same}"),
    )
    _refuse_beside(given, against)


def _refuse_beside(given: str, against: Sequence[tuple[str, object, str]]) -> None:
    """Refuse the first other flag that is given, with the reason why it can't be combined."""
    for other, is_given, why in against:
        if is_given:
            raise UsageFault(f"{given} and {other}: {why}", hint="leave out one of them")


def flag(field: str) -> str:
    """Return the flag of a field of the configuration: `--batch-size`."""
    return f"--{field.replace('_', '-')}"
