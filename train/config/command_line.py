"""The command line, made from the fields of a configuration: read and written again; and its plan."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from ckpttool.distributed.group import given_rank, given_world_size
from ckpttool.distributed.plan import Plan
from ckpttool.distributed.plan import check as check_dealt
from ckpttool.errors import UsageFault
from train import console
from train.config import sharding
from train.config.training import OPTIMIZERS, OTHER_OPTIMIZERS, TrainConfig, check

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 2 train/main.py
  python train/main.py --spawn 2 --epochs 3 --out runs/first
  python train/main.py --epochs 5 --out runs/first --resume auto
  python train/main.py --data fake:64 --model resnet20 --epochs 1
"""

# The headings of the help, in order; a configuration may have others, which come first.
GROUPS = ("data", "task", "model", "training", "optimizer", "saving", "ranks")

# What other trainers call a flag.
ELSEWHERE = {
    "--learning-rate": "--lr",
    "--num-workers": "--workers",
    "--wd": "--weight-decay",
    "--output-dir": "--out",
    "--gradient-accumulation-steps": "--accumulate",
    "--max-grad-norm": "--clip-norm",
    "--mixed-precision": "--amp",
    "--pretrained": "--init",
}


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageFault instead of exiting, and prints the help on rank 0 alone."""

    def __init__(self, program: str, usage: str, about: str, examples: str) -> None:
        options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        options |= {"prog": program, "usage": f"python {program} {usage}"}
        # An abbreviated flag would reach torchrun's ranks under a name that is not recognised.
        super().__init__(**options, description=about, epilog=examples, allow_abbrev=False)

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Return the values of the flags; for an unknown flag, raise UsageFault with a suggestion."""
        values, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self._refuse(next((argument for argument in unknown if argument.startswith("--")), unknown[0]))
        return values

    def _refuse(self, argument: str) -> NoReturn:
        flag = argument.partition("=")[0]
        if not flag.startswith("--"):
            self.error(f"{argument}: belongs to no flag")
        meant = closest(flag, [known for known in self._option_string_actions if known.startswith("--")])
        help_lists = f"{self.prog} --help lists the flags"
        raise UsageFault(f"{flag}: no such flag", hint=f"did you mean {meant}?" if meant else help_lists)

    def error(self, message: str) -> NoReturn:
        raise UsageFault(message, hint=f"{self.prog} --help lists the flags")

    def _print_message(self, message: str, file: object = None) -> None:
        if given_rank() == 0:
            console.show(message.rstrip())


def closest(flag: str, flags: Sequence[str]) -> str | None:
    """Return the flag that was meant: typed with `_`, abbreviated, misspelt, or as other trainers call it."""
    typed = flag.lower().replace("_", "-")
    completions = [known for known in flags if known == ELSEWHERE.get(typed)]
    completions = completions or [known for known in flags if known.startswith(typed)]
    if len(completions) == 1:
        return completions[0]
    plain = {known.replace("-", ""): known for known in flags}  # dashes are often left out
    near = difflib.get_close_matches(typed.replace("-", ""), plain, n=1, cutoff=0.7)
    return plain[near[0]] if near else None


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add the flags of a dataclass, under the headings of its groups; fields without help are no flags."""
    fields = [field for field in dataclasses.fields(config) if "help" in field.metadata]
    groups = dict.fromkeys(field.metadata["group"] for field in fields)
    for group in sorted(groups, key=lambda name: GROUPS.index(name) if name in GROUPS else -1):
        add = parser.add_argument_group(group).add_argument
        for field in fields:
            if field.metadata["group"] == group:
                add(name_of(field), **_options(field))


def name_of(field: dataclasses.Field[Any]) -> str:
    """Return the flag of a field: `--batch-size`, or `--no-set-epoch` for one that is on by default."""
    return f"--{'no-' * (field.default is True)}{field.name.replace('_', '-')}"


def shown(field: dataclasses.Field[Any], value: Any) -> str:
    """Return a setting as part of an error: `--batch-size 64`, `no --ema`."""
    name = name_of(field)
    if value is None or value == () or (isinstance(value, bool) and value == field.default):
        return f"no {name}"
    if isinstance(value, bool):
        return name
    return f"{name} {','.join(map(str, value)) if type(value) in (tuple, list) else value}"


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    default: Any = field.default
    options = {name: value for name, value in field.metadata.items() if name != "group"}
    options |= {"dest": field.name, "default": default}
    if isinstance(default, bool):
        options["action"] = f"store_{str(not default).lower()}"
    elif options.get("action") == "append":  # argparse appends to the default itself
        options["default"] = list(default)
    return options


def train_parser() -> Parser:
    """Return the parser of train/main.py."""
    about = "Train a model on one or many ranks, exactly."
    parser = Parser("train/main.py", "[flags]", about, EXAMPLES)
    add_flags(parser, TrainConfig)
    # Their defaults depend on the optimizer and on --rank-batch.
    parser.set_defaults(**dict.fromkeys(OTHER_OPTIMIZERS), batch_size=None)
    return parser


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Return the configuration that a command line gives, checked as far as it needs no data and no model."""
    values = vars(train_parser().parse_args(arguments))
    for name, default in optimizer_defaults(values["optimizer"]).items():
        if values[name] is None:
            values[name] = default
    if values["batch_size"] is None:
        values["batch_size"] = sum(values["rank_batch"] or [TrainConfig.batch_size])
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    config = TrainConfig(**settings)
    check(config)
    check_plan(config, config.spawn or given_world_size())
    return config


def optimizer_defaults(optimizer: str) -> dict[str, float]:
    """Return the learning rate, momentum and weight decay that an optimizer gets where no flag is given."""
    return OPTIMIZERS.get(optimizer, OTHER_OPTIMIZERS)


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without one flag that takes a value."""
    rest, skip = [], False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            rest.append(argument)
        skip = argument == flag
    return rest


def arguments_of(config: TrainConfig) -> list[str]:
    """Return the command line that gives this configuration, without defaults."""
    defaults = {**TrainConfig().plain(), **optimizer_defaults(config.optimizer)}
    values = config.plain()
    arguments: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = values[field.name], name_of(field)
        if value == defaults[field.name]:
            continue
        if field.metadata.get("action") == "append":
            arguments += [part for item in value for part in (flag, item)]
        elif isinstance(value, bool):
            arguments.append(flag)
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


def to_paste(words: Sequence[str], columns: int = 80) -> str:
    """Return a command for a shell, indented, broken before a flag where a line would be too long."""
    lines = [" "]
    for number, word in enumerate(words):
        quoted = shlex.quote(word)
        after = words[number + 1] if number + 1 < len(words) else "-"
        width = len(quoted) + (0 if after.startswith("-") else 1 + len(shlex.quote(after)))
        if word.startswith("-") and len(lines[-1]) + 1 + width > columns - 2:
            lines.append("     ")
        lines[-1] += f" {quoted}"
    return " \\\n".join(lines)


def flags_of(config: TrainConfig) -> list[str]:
    """Return the flags with which an evaluation builds the same model and takes the same samples."""
    names = ("task", "eval_batch", "mean", "std", "resize")
    usual = TrainConfig(**{name: getattr(config, name) for name in names})
    return ["--model", config.model, "--data", config.data, *arguments_of(usual)]


# ---- the plan that the flags describe ------------------------------------------------------------------


def make_plan(config: TrainConfig, samples: int) -> Plan:
    """Return how training samples are ordered, cut into batches and dealt to ranks."""
    # With "auto", shares are equal until the ranks' speeds have been measured.
    shares = config.rank_share if isinstance(config.rank_share, tuple) else None
    names = ("batch_size", "seed", "drop_last", "accumulate", "sampler", "set_epoch", "rank_batch")
    return Plan(samples, **{name: getattr(config, name) for name in names}, rank_share=shares)


def check_plan(config: TrainConfig, world_size: int) -> None:
    """Check that batches can be dealt as the flags say, whatever the data."""
    if config.sampler == "none" and not config.preview:
        hint = "give exact or torch, or --preview to see it"
        raise UsageFault("--sampler none: every rank would train on all samples", hint=hint)
    if config.rank_share == "auto" and (config.rank_batch or config.sampler != "exact"):
        other = "--rank-batch" if config.rank_batch else f"--sampler {config.sampler}"
        hint = "give one of them"
        raise UsageFault(f"--rank-share auto: {other} says already how a batch is dealt", hint=hint)
    sharding.check(config, world_size)
    if config.virtual_ranks is not None:
        _check_virtual_ranks(config, config.virtual_ranks, world_size)
    check_dealt(make_plan(config, config.batch_size), world_size, called=flag)


def _check_virtual_ranks(config: TrainConfig, virtual: int, world_size: int) -> None:
    given = f"--virtual-ranks {virtual}"
    if virtual % world_size:
        hint = "start a number of ranks that divides it, or give a multiple of theirs"
        raise UsageFault(f"{given}: does not divide by {world_size} ranks", hint=hint)
    if virtual > config.batch_size:
        hint = f"give --batch-size {virtual} or more"
        raise UsageFault(f"{given}: more than the {config.batch_size} samples in a batch", hint=hint)
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
