"""Flags, made from the fields of a configuration: their names and help, and how a command line is parsed."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from ckpttool.distributed.group import given_rank
from ckpttool.errors import UsageFault
from train import console

# The headings of the help, in order; a configuration may have others, which come first.
GROUPS = ("data", "task", "scores", "model", "training", "optimizer", "saving", "log", "ranks", "settings")

# Columns of a terminal from which on a flag and its help stand side by side.
NARROW = 70

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
    "--tensorboard": "--tracker",
    "--wandb": "--tracker",
    "--report-to": "--tracker",
    "--early-stopping-patience": "--stop-early",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Texts broken between words alone; in a narrow terminal they stand below their flags."""

    def __init__(self, prog: str) -> None:
        width = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=24 if width >= NARROW else 8, width=width - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageFault instead of exiting, and prints the help on rank 0 alone."""

    def __init__(self, program: str, usage: str, about: str, examples: str) -> None:
        options: dict[str, Any] = {"formatter_class": HelpFormatter}
        options |= {"prog": program, "usage": f"python {program} {usage}"}
        # An abbreviated flag would reach torchrun's ranks under a name that is not recognised.
        super().__init__(**options, description=about, epilog=examples, allow_abbrev=False)

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Return the values of the flags; for an unknown flag, raise UsageFault with a suggestion."""
        values, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            first = next((argument for argument in unknown if argument.startswith("--")), unknown[0])
            self._refuse(first, sys.argv[1:] if arguments is None else arguments)
        return values

    def _refuse(self, argument: str, given: Sequence[str]) -> NoReturn:
        flag, known = argument.partition("=")[0], self._option_string_actions
        if not flag.startswith("--"):
            # The first value of `--mean 0.5 0.4 0.3` belongs to the flag, the second is the argument.
            before = [name for name, word in zip(given, given[2:], strict=False) if word == argument]
            lists = [name for name in before if name in known and "," in str(known[name].metavar)]
            takes = [f"{name} takes {known[name].metavar}: with commas, without blanks" for name in lists]
            self.error(f"{argument}: belongs to no flag", hint=next(iter(takes), None))
        meant = closest(flag, [each for each in known if each.startswith("--")])
        help_lists = f"{self.prog} --help lists the flags"
        raise UsageFault(f"{flag}: no such flag", hint=f"did you mean {meant}?" if meant else help_lists)

    def error(self, message: str, hint: str | None = None) -> NoReturn:
        raise UsageFault(message, hint=hint or f"{self.prog} --help lists the flags")

    def _print_message(self, message: str, file: object = None) -> None:
        if given_rank() == 0:
            console.show(message.rstrip())


def closest(flag: str, flags: Sequence[str]) -> str | None:
    """Return the flag that was meant: typed with `_`, abbreviated, misspelt, or as other trainers call it."""
    typed = flag.lower().replace("_", "-")
    if (elsewhere := ELSEWHERE.get(typed)) in flags:
        return elsewhere
    for begin in (f"{typed}-", typed):  # --batch-size, before --batchnorm
        if len(completions := [known for known in flags if known.startswith(begin)]) == 1:
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
    if field.metadata.get("nargs") == 2:
        return " ".join([name, *value])
    return f"{name} {','.join(map(str, value)) if type(value) in (tuple, list) else value}"


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    default: Any = field.default
    options = {name: value for name, value in field.metadata.items() if name != "group"}
    options |= {"dest": field.name, "default": default}
    if isinstance(default, bool):
        options["action"] = f"store_{str(not default).lower()}"
    elif options.get("action") == "append":  # argparse appends to the default itself
        options["default"] = list(default)
    elif options.get("nargs") == 2:
        options["metavar"] = tuple(options["metavar"].split())
    return options
