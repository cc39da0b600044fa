"""The maps that come with the package: a rule file each in `maps/`, chosen by name."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches

from ...errors import UsageFault
from . import rule_file
from .rules import MapRules

FOLDER = os.path.join(os.path.dirname(__file__), "maps")
ENDING = ".toml"


def names() -> list[str]:
    """Return the names of the maps, sorted."""
    return sorted(each.removesuffix(ENDING) for each in os.listdir(FOLDER) if each.endswith(ENDING))


def maps() -> tuple[MapRules, ...]:
    """Return the maps that come with the package, sorted by name.

    Returns:
        The rules of each: `name`, `start` and `end` (the two architectures), `reversible`, `to_toml()`.

    Raises:
        Unreadable: a file of the package is gone.

    Example:
        >>> [rules.name for rules in ckpttool.maps()][:2]
        ['megatron-hf', 'megatron-stacked-hf']
    """
    return tuple(map(named, names()))


def path_of(name: str) -> str:
    """Return where the file of a map is. Raises UsageFault for a name that there is none of."""
    if name not in (known := names()):
        close = get_close_matches(name, known, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        hint = f"{meant}a rule file's name ends in {ENDING}; ckpttool maps lists the maps"
        raise UsageFault(f"--map {name}: there is no such map", hint=hint)
    return os.path.join(FOLDER, name + ENDING)


def named(name: str) -> MapRules:
    """Return the map of a name. Raises UsageFault for a name that there is none of."""
    return replace(rule_file.read(path_of(name)), name=name)


def rules_of(said: str) -> MapRules:
    """Return the rules that `--map` names: a rule file by its path, which ends in `.toml`, or a map."""
    return rule_file.read(said) if said.endswith(ENDING) else named(said)
