"""Wrapper prefixes on the names of a state: `module.` of DDP, `_orig_mod.` of torch.compile, and their kind.

A renaming is worked out on names alone, refused when two keys would become one, and then applied to all
that carries the names: the state, torch's `_metadata`, and the parameter names inside optimizers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .checkpoint import Checkpoint, State
from .errors import Collision, NothingToDo, UsageFault
from .inert import OrderedDict_, remade
from .optimizer import rename_parameters
from .states import is_optimizer

WRAPPERS = {
    "module.": "DistributedDataParallel or DataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning Fabric",
}
"""The prefixes that wrappers put before every key of what they wrap."""

MAX_NESTING = 8
"""Wrappers inside wrappers that are looked for."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A wrapper's prefix at the front of keys: how many of how many carry it, and who puts it there."""

    prefix: str
    keys: int
    of: int
    wrapper: str


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names for the keys of one state: old name -> new name for every key, in order."""

    names: Mapping[str, str]

    @property
    def renamed(self) -> int:
        """How many names change."""
        return sum(old != new for old, new in self.names.items())

    def modules(self) -> Callable[[str], str]:
        """Old path of a module -> new path, as the keys below it tell; `""` is the root module.

        A key and its new name are compared from their ends, part by part: with `module.conv.weight` renamed
        `conv.weight`, `module.conv` becomes `conv` and `module` the root. Where the number of parts differs,
        only as far as they are alike. A module without keys goes where the nearest one above it went.
        """
        paths: dict[str, str] = {}
        for key, new_key in self.names.items():
            old, new = _parent(key), _parent(new_key)
            same_depth = key.count(".") == new_key.count(".")
            while old not in paths:
                paths[old] = new
                if not old or not new or not (same_depth or _last(old) == _last(new)):
                    break
                old, new = _parent(old), _parent(new)

        def rule(path: str) -> str:
            above, rest = path, ""
            while above and above not in paths:
                above, rest = _parent(above), f".{_last(above)}{rest}"
            return (paths.get(above, above) + rest).removeprefix(".")

        return rule


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def found_prefixes(names: Iterable[str]) -> list[FoundPrefix]:
    """The wrappers' prefixes that keys begin with, nested ones as a chain (`module._orig_mod.`)."""
    keys = list(names)
    counts: Counter[str] = Counter()
    makers: dict[str, str] = {}
    for name in keys:
        chain = ""
        for _ in range(MAX_NESTING):
            wrapper = next((w for w in WRAPPERS if name.startswith(w, len(chain))), None)
            if wrapper is None:
                break
            chain += wrapper
            counts[chain] += 1
            makers[chain] = WRAPPERS[wrapper]
    return [FoundPrefix(prefix, n, len(keys), makers[prefix]) for prefix, n in counts.most_common()]


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
        Collision: two keys would get one name.
        UsageFault: the prefix is empty, or lacks its dot.
    """
    _require(prefix)
    # Also inside a name, but only where a part begins, so that `submodule.` is never taken for `module.`.
    found = re.compile(rf"(^{'|[.]' if anywhere else ''})({re.escape(prefix)}){'+' if repeat else ''}")

    def rule(name: str) -> str:
        while (short := found.sub(r"\1", name)) != name and repeat:
            name = short
        return short

    return _checked(names, rule, PREFIXES, prefix)


def add_names(names: Iterable[str], prefix: str = "module.") -> Renaming:
    """Puts a prefix before every name: the inverse of `strip_names`."""
    _require(prefix)
    return _checked(names, lambda name: prefix + name, PREFIXES, prefix)


def _require(prefix: str) -> None:
    if not prefix:
        raise UsageFault("the prefix is empty", hint="name it, with its dot: --prefix module.")


@dataclass(frozen=True, slots=True)
class Hints:
    """What to do where two keys would get one name, or one would get none."""

    same: str
    none: str


PREFIXES = Hints(
    "the two differ in the prefix alone: keep them apart, or take one out first", "give a shorter --prefix"
)
MAPS = Hints(
    "give a --map that keeps them apart, or take one out first", "give a --map that leaves something"
)


def _checked(names: Iterable[str], rule: Callable[[str], str], hints: Hints, prefix: str = ".") -> Renaming:
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
        Collision: two keys would get one name.
    """
    try:
        compiled = [(re.compile(expression), replacement) for expression, replacement in rules]

        def rule(name: str) -> str:
            for expression, replacement in compiled:
                name = expression.sub(replacement, name)
            return name

        return _checked(names, rule, MAPS)
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise UsageFault(f"--map: {error}", hint="for example: --map '^backbone\\.=model.'") from None


def rename_keys(
    checkpoint: Checkpoint, rules: Iterable[tuple[str, str]], *, state: str | None = None
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint whose keys are renamed by regular expressions.

    Raises:
        NothingToDo: no key changes.
        UsageFault, Collision, NoState.
    """
    found = checkpoint.state(state)
    renaming = rename_names(_keys(found), rules)
    if not renaming.renamed:
        first = next(iter(found.container), "")
        raise NothingToDo(f"{checkpoint.path}: no key would change", hint=f"the first key is '{first}'")
    return apply(checkpoint, found, renaming), renaming


def strip_prefix(
    checkpoint: Checkpoint,
    prefix: str = "module.",
    *,
    repeat: bool = False,
    anywhere: bool = False,
    state: str | None = None,
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint without a wrapper's prefix on the keys that carry it.

    Args:
        prefix, repeat, anywhere: as for `strip_names`.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, whose tensors are still those of the old file, and what was renamed.

    Raises:
        NothingToDo: no key carries it; the hint names the prefix that was found.
        Collision, NoState.
    """
    found = checkpoint.state(state)
    renaming = strip_names(_keys(found), prefix, repeat=repeat, anywhere=anywhere)
    if not renaming.renamed:
        raise _nothing(checkpoint, found, prefix)
    return apply(checkpoint, found, renaming), renaming


def add_prefix(
    checkpoint: Checkpoint, prefix: str = "module.", *, state: str | None = None
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint with a prefix before every key, as a wrapper would have saved it.

    Raises:
        NoState.
    """
    found = checkpoint.state(state)
    renaming = add_names(_keys(found), prefix)
    root: dict[object, object] = {"": {"version": 1}}  # the wrapper's own entry, as every nn.Module has one
    return apply(checkpoint, found, renaming, new_modules=root), renaming


def _keys(state: State) -> list[str]:
    return [key for key in state.container if isinstance(key, str)]


def _nothing(checkpoint: Checkpoint, state: State, prefix: str) -> NothingToDo:
    where = f" of '{state.where}'" if state.where else ""
    others = [p for p in found_prefixes(_keys(state)) if p.prefix != prefix]
    if others:
        best = others[0]
        hint = f"{best.keys} of {best.of} keys begin with '{best.prefix}': --prefix {best.prefix}"
    else:
        hint = f"the first key is '{next(iter(state.container), '')}'"
    return NothingToDo(f"{checkpoint.path}: no key{where} begins with '{prefix}'", hint=hint)


def apply(
    checkpoint: Checkpoint,
    state: State,
    renaming: Renaming,
    new_modules: Mapping[object, object] | None = None,
) -> Checkpoint:
    """Renames a state's keys, its module versions, and the parameter names of every optimizer in the file.

    Args:
        new_modules: entries to put first among the module versions.
    """

    def change(value: object) -> object:
        if value is state.container:
            return _rename_state(state, renaming, new_modules or {})
        if is_optimizer(value):
            return rename_parameters(value, renaming.names)
        return value

    return checkpoint.changed(state, change)


def _rename_state(
    state: State, renaming: Renaming, new_modules: Mapping[object, object]
) -> dict[object, object]:
    names = renaming.names
    new = remade(
        state.container,
        ((names[key] if isinstance(key, str) else key, value) for key, value in state.container.items()),
    )
    if isinstance(new, OrderedDict_) and isinstance(new.attributes, dict) and state.versions is not None:
        versions = remade(state.versions, new_modules.items())
        module = renaming.modules()
        # The wrapped module comes after its wrapper and takes over the path that becomes its own.
        for path, entry in state.versions.items():
            versions[module(path) if isinstance(path, str) else path] = entry
        new.attributes = {**new.attributes, "_metadata": versions}
    return new
