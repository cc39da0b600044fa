"""Flags are fields of dataclasses: how a field is declared, how its value is read, and the help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, NoReturn, TypeVar

from ckpttool.distributed.group import given_rank
from ckpttool.errors import UsageFault, masked
from train import console

Field = dataclasses.Field[Any]

MESH = re.compile(r"[1-9]\d*x[1-9]\d*")
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
SPELLINGS = {
    "steps": ("steps", "step"),
    "epochs": ("epochs", "epoch"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
}


class Every(NamedTuple):
    """An interval: a number of steps, epochs, seconds, minutes or hours."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    @property
    def seconds(self) -> float | None:
        return self.number * SECONDS[self.unit] if self.unit in SECONDS else None

    def in_steps(self, steps_per_epoch: int) -> int:
        return self.number * (steps_per_epoch if self.unit == "epochs" else 1)


def integer(least: int) -> Callable[[str], int]:
    """Read an integer that is not less than `least`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return convert


def number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """Read a number in a range, open at `above` and `below`, closed at `least`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (above < value < below and value >= least):
            limits = {"above": above, "at least": least, "below": below}
            said = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {said or 'finite'}")
        return value

    return convert


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    return tuple(map(number(), text.split(",")))


def integers(text: str) -> tuple[int, ...]:
    """Read integers, none negative, with commas between them."""
    return tuple(map(integer(0), text.split(",")))


def integers_or_auto(text: str) -> tuple[int, ...] | str:
    """Read `auto`, or integers with commas between them."""
    return text if text == "auto" else integers(text)


def every(*units: str, least: int) -> Callable[[str], Every]:
    """Read a number with one of the units, the first of which need not be written."""

    def convert(text: str) -> Every:
        value, unit = _number_and_unit(text, units)
        return Every(integer(least)(value), unit or units[0])

    return convert


# What changes an image, in its order; of each kind one is taken.
PICTURES = {
    "crop-flip": "crop",
    "resized-crop": "crop",
    "trivial": "policy",
    "rand": "policy",
    "erase": "erase",
}


def pictures(text: str) -> str:
    """Read `none`, or names of `PICTURES` with + between them, and return them in order."""
    names = text.replace("auto", "crop-flip+trivial").split("+")
    if text == "none":
        return text
    for name in names:
        if name not in PICTURES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of none, auto, {', '.join(PICTURES)}")
        if other := [one for one in names if PICTURES[one] == PICTURES[name]][1:]:
            raise argparse.ArgumentTypeError(f"{name} and {other[0]} are two of one kind")
    return "auto" if text == "auto" else "+".join(name for name in PICTURES if name in names)


def span(text: str) -> str:
    """Check steps given as `N`, how many, or `N-M`, the first and the last."""
    first, dash, last = text.partition("-")
    if dash and integer(1)(last) < integer(1)(first):
        raise argparse.ArgumentTypeError(f"{text} ends before it begins")
    integer(1)(first)
    return text


def duration(text: str) -> float:
    """Read a time above zero, in seconds if it has no unit: `90`, `90s`, `30min`, `2h`."""
    value, unit = _number_and_unit(text, tuple(SECONDS))
    return number(above=0)(value) * SECONDS[unit or "s"]


def sharding(text: str) -> str:
    """Check `bf16`, `offload`, `parts` and `2x4`, groups and ranks in each, with commas between them."""
    words = [*filter(None, text.split(","))]
    for word in words:
        if word not in ("bf16", "offload", "parts") and not MESH.fullmatch(word):
            what = f"{word!r} is none of bf16, offload, parts, and 2x4: groups, and ranks in each"
            raise argparse.ArgumentTypeError(what)
    if len(words) > len({MESH.fullmatch(word) is not None or word for word in words}):
        raise argparse.ArgumentTypeError(f"{text!r} says one thing twice")
    return text


def sharded(text: str) -> dict[str, Any]:
    """Return the settings that `--shard` gives."""
    words = [*filter(None, text.split(","))]
    mesh = next((word for word in words if MESH.fullmatch(word)), None)
    dtype = "bf16" if "bf16" in words else None
    found = {"shard_offload": "offload" in words, "save_parts": "parts" in words}
    return {"shard": True, "shard_dtype": dtype, "mesh": mesh, **found}


def as_typed(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings by the flags that give them, as the inverse of `sharded`."""
    rest = {name: value for name, value in values.items() if name not in sharded("")}
    if "shard" not in values:
        return rest
    words = [values["mesh"], values["shard_dtype"], "offload" * values["shard_offload"]]
    how = ",".join(filter(None, [*words, "parts" * values["save_parts"]]))
    return rest | {"shard": values["shard"] and (how or True)}


def _number_and_unit(text: str, units: tuple[str, ...]) -> tuple[str, str]:
    """Return the number in a text and its unit, `""` if it has none."""
    parts = re.fullmatch(r"(.*?[\d.])? *([a-z]*)", text.strip().lower())
    if parts is None or not parts[1]:
        return text, ""  # for the caller to refuse
    unit = next((unit for unit in units if parts[2] in SPELLINGS[unit]), "")
    if parts[2] and not unit:
        raise argparse.ArgumentTypeError(f"{text!r} has none of the units {', '.join(units)}")
    return parts[1], unit


def flag(default: Any, text: str, **options: Any) -> Any:
    """Return a dataclass field that is a flag, with argparse's `options`, and its `name` if that is another.

    `text` is `heading: help`, `heading METAVAR: help` or `heading {choice,choice}: help`.
    """
    about, _, text = text.partition(": ")
    group, _, form = about.partition(" ")
    if form.startswith("{"):
        options["choices"] = tuple(form[1:-1].split(","))
    elif form:
        options["metavar"] = form
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **options})


def count(default: int | None, text: str, *, least: int = 1, **options: Any) -> Any:
    return flag(default, text, type=integer(least), metavar="N", **options)


def repeated(text: str, **options: Any) -> Any:
    return flag((), text, action="append", **options)


def switch(text: str, **options: Any) -> Any:
    return flag(False, text, **options)


def part_of(name: str, default: Any = None) -> Any:
    """Return a field for a part of what another setting's flag gives."""
    return dataclasses.field(default=default, metadata={"flag": name})


def real(default: float | None, text: str, **span: float) -> Any:
    return flag(default, text, type=number(**span), metavar="X")


# ---- sections ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sections:
    """Settings in sections: each field is one, a frozen dataclass whose fields are settings.

    The name of a setting is that of its flag, whatever its field is called: `batch_size`, of `batch.size`.
    """

    @classmethod
    def of(cls: type[S], **settings: Any) -> S:
        """Return these settings, by name, and the defaults of the others; KeyError for a name of none."""
        return cls().changed(**settings)

    def changed(self: S, **settings: Any) -> S:
        """Return a copy with other values of these settings, by name; KeyError for a name of none."""
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, field = fields_of(type(self))[name]
            by_section.setdefault(section, {})[field.name] = value
        sections = {name: replace(getattr(self, name), **values) for name, values in by_section.items()}
        return replace(self, **sections)

    def __getitem__(self, name: str) -> Any:
        """Return a setting by name."""
        section, field = fields_of(type(self))[name]
        return getattr(getattr(self, section), field.name)

    def plain(self) -> dict[str, Any]:
        """Return all settings by name, as primitives, as stored in a checkpoint; no secrets of URLs."""
        return {name: _plain(self[name]) for name in fields_of(type(self))}


def _plain(value: Any) -> Any:
    return masked(str(value), whole=True) if isinstance(value, Every | str) else value


S = TypeVar("S", bound=Sections)


def fields_of(config: type[Sections]) -> dict[str, tuple[str, Field]]:
    """Return the settings by name, each with its section and its field."""
    found: dict[str, tuple[str, Field]] = {}
    for section in dataclasses.fields(config):
        default: Any = section.default
        found |= {setting_of(field): (section.name, field) for field in dataclasses.fields(default)}
    return found


def flags_in(config: type[Sections]) -> list[Field]:
    """Return the fields that are flags, in the order of the help."""
    fields = [field for _, field in fields_of(config).values() if "help" in field.metadata]
    return sorted(fields, key=lambda field: _place(field.metadata["group"]))


def setting_of(field: Field) -> str:
    """Return the name of a field's setting."""
    return str(field.metadata.get("name", field.name))


def _place(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else -1


# ---- the parser --------------------------------------------------------------------------------------


# The headings of the help, in order; a configuration may have others, which come first.
GROUPS = ("data", "task", "scores", "model", "training", "optimizer", "saving", "log", "ranks", "settings")

# The heading of those that most people need, before all others.
FIRST = "first of all"

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


def add_flags(parser: argparse.ArgumentParser, config: type[Sections], first: Sequence[str] = ()) -> None:
    """Add the flags of a configuration: those named `first` alone, then the others under their headings."""
    fields = {setting_of(field): field for field in flags_in(config)}
    headings = {name: field.metadata["group"] for name, field in fields.items()}
    headings |= dict.fromkeys(first, FIRST)
    in_order = [*first, *(name for name in fields if name not in first)]
    for heading, names in groupby(in_order, headings.__getitem__):
        add = parser.add_argument_group(heading).add_argument
        for name in names:
            add(name_of(fields[name]), **_options(fields[name]))


def name_of(field: Field) -> str:
    """Return the flag of a field: `--batch-size`."""
    return f"--{field.metadata.get('flag', setting_of(field)).replace('_', '-')}"


def shown(field: Field, value: Any) -> str:
    """Return a setting as part of an error: `--batch-size 64`, `no --ema`."""
    name = name_of(field)
    if value is None or value == () or (isinstance(value, bool) and value == field.default):
        return f"no {name}"
    if isinstance(value, bool):
        return name
    if field.metadata.get("nargs") == 2:
        return " ".join([name, *value])
    return f"{name} {','.join(map(str, value)) if type(value) in (tuple, list) else value}"


def _options(field: Field) -> dict[str, Any]:
    default: Any = field.default
    options = {name: value for name, value in field.metadata.items() if name not in ("group", "name")}
    options |= {"dest": setting_of(field), "default": default}
    if isinstance(default, bool) and "nargs" not in options:
        options["action"] = f"store_{str(not default).lower()}"
    elif options.get("action") == "append":  # argparse appends to the default itself
        options["default"] = list(default)
    elif options.get("nargs") == 2:
        options["metavar"] = tuple(options["metavar"].split())
    return options
