"""The command line, made from the fields of a configuration (train/config/training.py)."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from ckpttool.distributed.group import given_world_size
from ckpttool.errors import UsageFault
from train import console
from train.config.plan import check_plan
from train.config.training import OPTIMIZERS, OTHER_OPTIMIZERS, TrainConfig, check
from train.launch import program as launch

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 2 train/main.py
  python train/main.py --spawn 2 --epochs 3 --out runs/first
  python train/main.py --epochs 5 --out runs/first --resume auto
  python train/main.py --data fake:64 --model resnet20 --epochs 1
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageFault instead of exiting, and prints the help only on rank 0."""

    def __init__(self, **options: Any) -> None:
        # An abbreviated flag would reach torchrun's ranks under a name that is not recognised.
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Return the values of the flags; raise UsageFault with a suggestion for a flag that is none."""
        values, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self._refuse(next((one for one in unknown if one.startswith("--")), unknown[0]))
        return values

    def _refuse(self, argument: str) -> NoReturn:
        flag = argument.partition("=")[0]
        if not flag.startswith("--"):
            self.error(f"{argument}: belongs to no flag")
        meant = closest(flag, [each for each in self._option_string_actions if each.startswith("--")])
        help_lists = f"{self.prog} --help lists the flags"
        raise UsageFault(f"{flag}: no such flag", hint=f"did you mean {meant}?" if meant else help_lists)

    def error(self, message: str) -> NoReturn:
        raise UsageFault(message, hint=f"{self.prog} --help lists the flags")

    def _print_message(self, message: str, file: object = None) -> None:
        if launch.rank() == 0:
            console.say(message.rstrip())


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
"""What other trainers call a flag."""


def closest(flag: str, flags: Sequence[str]) -> str | None:
    """Return the flag that was probably meant, or None.

    Args:
        flag: as it was typed: with `_`, abbreviated, misspelt, or as other trainers call it.
        flags: those that there are.
    """
    typed = flag.lower().replace("_", "-")
    if ELSEWHERE.get(typed) in flags:
        return ELSEWHERE[typed]
    begin_so = [one for one in flags if one.startswith(typed)]
    if len(begin_so) == 1:
        return begin_so[0]
    # Dashes are often left out: they shall not count.
    plain = {one.replace("-", ""): one for one in flags}
    near = difflib.get_close_matches(typed.replace("-", ""), plain, n=1, cutoff=0.7)
    return plain[near[0]] if near else None


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Return the configuration that a command line gives.

    Raises:
        UsageFault: a value is wrong whatever the data and the model; names the flag.
    """
    values = vars(train_parser().parse_args(arguments))
    for name, usual in optimizer_defaults(values["optimizer"]).items():
        if values[name] is None:
            values[name] = usual
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
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        skip = argument == flag
    return kept


def arguments_of(config: TrainConfig) -> list[str]:
    """Return the command line that gives this configuration, without defaults."""
    usual = {**TrainConfig().plain(), **optimizer_defaults(config.optimizer)}
    found: list[str] = []
    given_values = config.plain()
    for field in dataclasses.fields(config):
        value = given_values[field.name]
        if value == usual[field.name]:
            continue
        if field.metadata.get("action") == "append":
            found += [part for item in value for part in (name_of(field), item)]
        else:
            given = ",".join(map(_written, value)) if isinstance(value, list | tuple) else _written(value)
            if given.startswith("-"):  # else it would be taken for a flag
                found.append(f"{name_of(field)}={given}")
            else:
                found += [name_of(field), *([] if isinstance(value, bool) else [given])]
    return found


def _written(value: Any) -> str:
    """Return a value as a person would type it: 3, not 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def name_of(field: dataclasses.Field[Any]) -> str:
    """Return the flag of a field: `--batch-size`, or `--no-set-epoch` for one that is on by default."""
    return f"--{'no-' * (field.default is True)}{field.name.replace('_', '-')}"


def train_parser() -> Parser:
    """Return the parser of train/main.py."""
    parser = Parser(
        prog="train/main.py",
        usage="python train/main.py [flags]",
        description="Train a model on one or many ranks, exactly.",
        epilog=EXAMPLES,
    )
    add_flags(parser, TrainConfig)
    # Their defaults depend on the optimizer and on --rank-batch.
    parser.set_defaults(**dict.fromkeys(OTHER_OPTIMIZERS), batch_size=None)
    return parser


GROUPS = ("data", "task", "model", "training", "optimizer", "saving", "ranks")
"""The headings of the help, in order; a configuration may have others, which come first."""


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add the flags of a configuration, below the headings of its groups.

    Args:
        config: a dataclass; fields without help are no flags.
    """
    fields = [field for field in dataclasses.fields(config) if "help" in field.metadata]
    groups = dict.fromkeys(field.metadata["group"] for field in fields)
    for group in sorted(groups, key=lambda name: GROUPS.index(name) if name in GROUPS else -1):
        add = parser.add_argument_group(group).add_argument
        for field in fields:
            if field.metadata["group"] == group:
                add(name_of(field), **_options(field))


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return what argparse needs for a field."""
    options = {name: value for name, value in field.metadata.items() if name != "group"}
    if isinstance(field.default, bool):
        return {**options, "dest": field.name, "action": f"store_{str(not field.default).lower()}"}
    # argparse appends to the default itself.
    default: Any = field.default
    if options.get("action") == "append":
        default = list(default)
    return {**options, "dest": field.name, "default": default}
