"""A file of settings: TOML, under the names of the flags; and config.toml, which a run writes of its own.

    data = "folder:pictures"
    lr = 0.05
    rank-batch = [2, 10]        # 2,10 on the command line
    drop-last = true

Each value is read as the flag reads it. The table [about] is what a run says of itself, and no setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckpttool.errors import Unreadable, UsageFault
from ckpttool.files.failures import reason
from ckpttool.transforms.mapping.toml_text import lines, text

NAME = "config.toml"
# How a run's own file begins, which no other file may be overwritten by.
MARK = "# Settings of a run of train/main.py"
HEAD = f"{MARK}.\n# The names are those of its flags, and what stands behind a # is the default.\n"
ABOUT = "about"

# Flags that say where settings come from.
SOURCES = ("config", "like", "unset", "print_config")
# Settings of one start, which no other run of the kind takes over.
OF_A_START = (*SOURCES, "out", "resume", "force", "change", "preview", "json", "stop_at", "spawn")

MAX_BYTES = 1 << 16
TWICE = re.compile(r"overwrite a value \(at (?:line (\d+)|end)")

Flags = Mapping[str, argparse.Action]
Field = dataclasses.Field[Any]


class Settings(NamedTuple):
    """What a file says: as on a command line, which of these flags it turns off, and its [about]."""

    arguments: list[str]
    off: list[str]
    about: dict[str, Any]


def read(path: str, flags: Flags, meant: Callable[[str], str | None]) -> Settings:
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
        settings = Settings([], [], about if isinstance(about, dict) else {})
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


def _add(settings: Settings, key: str, value: Any, flags: Flags, meant: Callable[[str], str | None]) -> None:
    flag, arguments = f"--{key}", settings.arguments
    action = flags.get(flag)
    if isinstance(value, dict):
        hint = "settings stand above all tables, under the names of the flags"
        raise UsageFault(f"[{key}]: a table, and no setting is one", hint=hint)
    if action is None:
        suggested = (meant(flag) or "").removeprefix("--")
        known = "python train/main.py --print-config lists the settings"
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


def written(
    fields: Sequence[tuple[str, Field]],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    about: Mapping[str, Any],
) -> str:
    """Return settings as a file of them, each on a line, with the defaults as comments.

    Args:
        fields: with the names of their flags, without dashes, in order.
        values, defaults: by the names of the fields, as primitives.
        about: what else is said of a run, in the table [about].
    """
    return "\n".join([HEAD, *_settings(fields, values, defaults), *lines(f"[{ABOUT}]", about), ""])


def _settings(
    fields: Sequence[tuple[str, Field]], values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[str]:
    group = ""
    for key, field in fields:
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            yield from ("", f"# ---- {group} ----")
        value = values[field.name]
        shown = not value if field.default is True else value  # the flag is `no-...`
        if value is None or value == ():
            yield f"# {key}: not given"
        else:
            yield f"{'# ' * bool(value == defaults[field.name])}{key} = {text(shown)}"
