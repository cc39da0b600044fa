"""Names in a checkpoint changed: wrappers' prefixes removed and added, and other renamings.

A renaming is applied to all that carries the names: the state and its copies, torch's `_metadata`, and the
parameter names inside optimizers.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..checkpoint.checkpoint import Checkpoint, State, make_state
from ..checkpoint.states import follow, is_optimizer
from ..errors import NothingToDo
from ..inert_pickle.values import OrderedDict_, remade
from .optimizer import rename_parameters
from .renaming import PREFIXES, checked, parent
from .renaming import Renaming as Renaming
from .renaming import add_names as add_names
from .renaming import rename_names as rename_names
from .renaming import strip_names as strip_names
from .wrappers import WRAPPERS as WRAPPERS
from .wrappers import FoundPrefix as FoundPrefix
from .wrappers import found_prefixes as found_prefixes
from .wrappers import inner_prefixes as inner_prefixes


def rename_keys(
    checkpoint: Checkpoint, rules: Iterable[tuple[str, str]], *, state: str | None = None
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint whose keys are renamed by regular expressions.

    Where no state is named, the state's copies (an average of it) are renamed with it.

    Raises:
        NothingToDo: no key changes.
        UsageFault, Collision, NoState.
    """
    found, rules = checkpoint.state(state), list(rules)
    renaming = rename_names(_keys(found), rules)
    if not renaming.renamed:
        first = next(iter(found.container), "")
        raise NothingToDo(f"{checkpoint.path}: no key would change", hint=f"the first key is '{first}'")
    copies = _copies(checkpoint, found) if state is None else []
    return _apply(checkpoint, found, renaming, [(copy, rename_names(_keys(copy), rules)) for copy in copies])


def strip_prefix(
    checkpoint: Checkpoint,
    prefix: str = "module.",
    *,
    repeat: bool = False,
    anywhere: bool = False,
    drop: Iterable[str] = (),
    state: str | None = None,
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint without a wrapper's prefix on the keys that carry it.

    Where no state is named, all states of the file that carry the prefix lose it.

    Args:
        prefix, repeat, anywhere: as for `strip_names`.
        drop: keys of the state to leave out, as a wrapper's own `n_averaged`; they are not in the renaming.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, whose tensors are still those of the old file, and what was renamed.

    Raises:
        NothingToDo: no key carries it; the hint names the prefix that was found.
        Collision, NoState.
    """
    found, doomed = checkpoint.state(state), set(drop)
    absent = sorted(doomed - found.container.keys())
    if absent:
        raise NothingToDo(f"{checkpoint.path}: there is no key '{absent[0]}' to drop", hint=_first_key(found))

    def stripped(each: State) -> Renaming:
        names = [name for name in _keys(each) if name not in doomed]
        return strip_names(names, prefix, repeat=repeat, anywhere=anywhere)

    renaming = stripped(found)
    others = [(other, stripped(other)) for other in _others(checkpoint, found)] if state is None else []
    others = [(other, theirs) for other, theirs in others if theirs.renamed]
    if not renaming.renamed:
        raise _nothing(checkpoint, found, prefix, [other for other, _ in others])
    return _apply(checkpoint, found, renaming, others)


def add_prefix(
    checkpoint: Checkpoint, prefix: str = "module.", *, state: str | None = None
) -> tuple[Checkpoint, Renaming]:
    """A checkpoint with a prefix before every key, as a wrapper would have saved it.

    Where no state is named, the state's copies (an average of it) get the prefix with it.

    Raises:
        NoState.
    """
    found = checkpoint.state(state)
    copies = _copies(checkpoint, found) if state is None else []
    others = [(copy, add_names(_keys(copy), prefix)) for copy in copies]
    # The wrappers' own entries, as every nn.Module has one.
    parts = prefix.removesuffix(".").split(".")
    wrappers = {".".join(parts[:count]): {"version": 1} for count in range(len(parts))}
    return _apply(checkpoint, found, add_names(_keys(found), prefix), others, wrappers)


def _keys(state: State) -> list[str]:
    return [key for key in state.container if isinstance(key, str)]


def _first_key(state: State) -> str:
    return f"the first key is '{next(iter(state.container), '')}'"


def _others(checkpoint: Checkpoint, state: State) -> list[State]:
    """The other states of a file, pickled models aside: their keys can't be changed inside them."""
    found: dict[int, State] = {}
    for path in checkpoint.states():
        container = follow(checkpoint.tree, path)
        if isinstance(container, dict) and container is not state.container:
            found.setdefault(id(container), make_state(path, container))
    return list(found.values())


def _copies(checkpoint: Checkpoint, state: State) -> list[State]:
    """The other states most of whose names are those of this one, and the other way round: its averages."""
    mine = state.tensors.keys()
    return [
        other
        for other in _others(checkpoint, state)
        if 2 * len(mine & other.tensors.keys()) > max(len(mine), len(other.tensors))
    ]


def _nothing(checkpoint: Checkpoint, state: State, prefix: str, carriers: list[State]) -> NothingToDo:
    where = f" of '{state.where}'" if state.where else ""
    others = [p for p in found_prefixes(_keys(state), state.versions) if p.prefix != prefix]
    inner = [p for p in inner_prefixes(_keys(state)) if p.prefix != prefix]
    if carriers:
        hint = f"those of '{carriers[0].where}' do: --state {shlex.quote(carriers[0].where)}"
    elif others:
        best = others[0]
        hint = f"{best.keys} of {best.of} keys begin with '{best.prefix}': --prefix {best.prefix}"
    elif inner:
        best = inner[0]
        hint = f"{best.keys} of {best.of} keys hold '{best.prefix}' inside: --prefix {best.prefix} --anywhere"
    elif common := _common_prefix(_keys(state)):
        hint = f"all keys begin with '{common}': --prefix {shlex.quote(common)}"
    else:
        hint = _first_key(state)
    return NothingToDo(f"{checkpoint.path}: no key{where} begins with '{prefix}'", hint=hint)


def _common_prefix(keys: list[str]) -> str:
    """The name, with its dot, of the one module that all others are in; `""` where there is none."""
    prefix = keys[0].partition(".")[0] + "." if keys else ""
    inside = {key[len(prefix) :].partition(".")[0] for key in keys if key.count(".") > 1}
    return prefix if len(inside) > 1 and all(key.startswith(prefix) for key in keys) else ""


def _apply(
    checkpoint: Checkpoint,
    state: State,
    renaming: Renaming,
    others: list[tuple[State, Renaming]],
    wrappers: Mapping[str, object] | None = None,
) -> tuple[Checkpoint, Renaming]:
    """Renames states, their module versions, and the parameter names of every optimizer in the file.

    Args:
        others: the states that are renamed with the first.
        wrappers: entries to put first among the module versions.

    Raises:
        Collision: two parameters of an optimizer would get the same name.
    """
    states = {id(each.container): (each, theirs) for each, theirs in [*others, (state, renaming)]}
    names = {old: new for _, theirs in reversed(states.values()) for old, new in theirs.names.items()}

    def change(value: object) -> object:
        if id(value) in states:
            return _rename_state(*states[id(value)], wrappers or {})
        if isinstance(value, dict) and is_optimizer(value):
            return _rename_optimizer(value, names)
        return value

    also = {each.where: theirs for each, theirs in others}
    return checkpoint.changed(state, change), replace(renaming, also=also)


def _rename_optimizer(optimizer: dict[object, object], names: Mapping[str, str]) -> dict[object, object]:
    listed = dict.fromkeys(name for name in _parameter_names(optimizer) if isinstance(name, str))
    checked(listed, lambda name: names.get(name, name), PREFIXES)
    return rename_parameters(optimizer, names)


def _parameter_names(optimizer: dict[object, object]) -> Iterator[object]:
    """Where an optimizer's state may name parameters: as its keys, and in its groups."""
    state, groups = optimizer["state"], optimizer["param_groups"]
    yield from state if isinstance(state, dict) else ()
    for group in groups if isinstance(groups, list) else ():
        for listed in ("params", "param_names"):
            names = group.get(listed) if isinstance(group, dict) else None
            yield from names if isinstance(names, list) else ()


def _rename_state(state: State, renaming: Renaming, wrappers: Mapping[str, object]) -> dict[object, object]:
    """The dict under its new names; keys that the renaming does not have are left out."""
    names = renaming.names
    new = remade(
        state.container,
        (
            (names[key] if isinstance(key, str) else key, value)
            for key, value in state.container.items()
            if not isinstance(key, str) or key in names
        ),
    )
    if isinstance(new, OrderedDict_) and isinstance(new.attributes, dict) and state.versions is not None:
        new.attributes = {
            **new.attributes,
            "_metadata": _renamed_versions(state.versions, renaming, wrappers),
        }
    return new


def _renamed_versions(
    versions: dict[object, object], renaming: Renaming, wrappers: Mapping[str, object]
) -> dict[object, object]:
    """`_metadata` under the new paths. What enclosed keys and encloses none any more was a wrapper's."""
    new = remade(versions, wrappers.items())
    module = renaming.modules()
    before, after = _enclosing(renaming.names), _enclosing(renaming.names.values())
    # The wrapped module comes after its wrapper and takes over the path that becomes its own.
    for path, entry in versions.items():
        moved = module(path) if isinstance(path, str) else path
        if not isinstance(moved, str) or path not in before or moved in after:
            new[moved] = entry
    return new


def _enclosing(names: Iterable[str]) -> set[str]:
    """The paths of all modules that enclose a key, the root among them."""
    paths = {""}
    for name in names:
        path = parent(name)
        while path not in paths:
            paths.add(path)
            path = parent(path)
    return paths
