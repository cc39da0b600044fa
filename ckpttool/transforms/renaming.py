"""New names for the keys of a state, computed from names only, and refused if two would become the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import Collision, UsageFault


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names for the keys of one state: old name -> new name for every key, in order.

    `also`: the same for other states of the file that are renamed with it, by their dotted paths.
    """

    names: Mapping[str, str]
    also: Mapping[str, Renaming] = field(default_factory=dict)

    @property
    def renamed(self) -> int:
        """How many names change."""
        return sum(old != new for old, new in self.names.items())

    def modules(self) -> Callable[[str], str]:
        """Old path of a module -> new path, as the keys below it show; `""` is the root module.

        A key and its new name are compared from their ends, part by part: with `module.conv.weight` renamed
        `conv.weight`, `module.conv` becomes `conv` and `module` the root. Where the number of parts differs,
        only as far as they are alike. A module without keys goes where the nearest one above it went.
        """
        paths: dict[str, str] = {}
        for key, new_key in self.names.items():
            old, new = parent(key), parent(new_key)
            same_depth = key.count(".") == new_key.count(".")
            while old not in paths:
                paths[old] = new
                if not old or not new or not (same_depth or _last(old) == _last(new)):
                    break
                old, new = parent(old), parent(new)

        def rule(path: str) -> str:
            above, rest = path, ""
            while above and above not in paths:
                above, rest = parent(above), f".{_last(above)}{rest}"
            return (paths.get(above, above) + rest).removeprefix(".")

        return rule


def parent(path: str) -> str:
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def strip_names(
    names: Iterable[str], prefix: str = "module.", *, repeat: bool = False, anywhere: bool = False
) -> Renaming:
    """Takes a prefix off the names that carry it; other names stay as they are.

    Args:
        names: the keys of a state.
        prefix: what to take off, with its dot.
        repeat: until none is left (`module.module.`).
        anywhere: also inside a name, between whole parts (`0._orig_mod.weight`).

    Raises:
        Collision: two keys would get the same name.
        UsageFault: the prefix is empty, or lacks its dot.
    """
    _require(prefix)
    # Also inside a name, but only where a part begins, so that `submodule.` is never taken for `module.`.
    found = re.compile(rf"(^{'|[.]' if anywhere else ''})({re.escape(prefix)}){'+' if repeat else ''}")

    def rule(name: str) -> str:
        while (short := found.sub(r"\1", name)) != name and repeat:
            name = short
        return short

    return checked(names, rule, PREFIXES, prefix)


def add_names(names: Iterable[str], prefix: str = "module.") -> Renaming:
    """Puts a prefix before every name: the inverse of `strip_names`."""
    _require(prefix)
    return checked(names, lambda name: prefix + name, PREFIXES, prefix)


def _require(prefix: str) -> None:
    if not prefix:
        raise UsageFault("the prefix is empty", hint="give it with its dot: --prefix module.")


@dataclass(frozen=True, slots=True)
class Hints:
    """What to do where two keys would get the same name, or one would get none."""

    same: str
    none: str


PREFIXES = Hints(
    "the two differ only in the prefix: keep them distinct, or remove one first", "give a shorter --prefix"
)
MAPS = Hints(
    "give a --map that keeps them distinct, or remove one first", "give a --map that leaves something"
)


def checked(names: Iterable[str], rule: Callable[[str], str], hints: Hints, prefix: str = ".") -> Renaming:
    """A renaming by a rule for one name, which gives each its own. Raises Collision, UsageFault."""
    renamed: dict[str, str] = {}
    owners: dict[str, str] = {}
    for old in names:
        new = rule(old)
        if new in owners:
            raise Collision(
                f"'{owners[new]}' and '{old}' would both be named '{new}'",
                hint=hints.same,
            )
        if not new:
            raise Collision(f"'{old}' would be left without a name", hint=hints.none)
        if new.startswith(".") and new != old and not prefix.endswith("."):
            hint = f"with its dot: --prefix {prefix}."
            raise UsageFault(f"'{prefix}' leaves the dot of '{new}'", hint=hint)
        owners[new] = old
        renamed[old] = new
    return Renaming(renamed)


def rename_names(names: Iterable[str], rules: Iterable[tuple[str, str]]) -> Renaming:
    """Applies regular expressions to every name, in order, as `re.sub` does.

    Args:
        rules: (expression, replacement) pairs.

    Raises:
        UsageFault: an expression or a replacement is malformed.
        Collision: two keys would get the same name.
    """
    try:
        compiled = [(re.compile(expression), replacement) for expression, replacement in rules]

        def rule(name: str) -> str:
            for expression, replacement in compiled:
                name = expression.sub(replacement, name)
            return name

        return checked(names, rule, MAPS)
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise UsageFault(f"--map: {error}", hint="for example: --map '^backbone\\.=model.'") from None
