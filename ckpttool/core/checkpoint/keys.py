"""Checkpoints under other names: wrappers' prefixes stripped or added, and keys renamed by expressions.

A renaming covers everything that carries the names: the state and its copies, torch's `_metadata`, the kinds
of BatchNorm layers in a safetensors header, and the parameter names inside optimizers.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import CkptToolError, NothingToDo
from ..inert_pickle.values import remade
from ..words import first_key
from . import prefixes
from .checkpoint import Checkpoint, takes_checkpoint
from .optimizer_names import Owners, other_states, with_copies, with_states
from .optimizer_view import OptimizerView
from .state import State


@takes_checkpoint
def rename_keys(
    checkpoint: Checkpoint, rules: Iterable[tuple[str, str]], *, state: str | None = None
) -> tuple[Checkpoint, prefixes.Renaming]:
    """Return a checkpoint whose keys are renamed by regular expressions.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: (expression, replacement) pairs, applied to each key in order as `re.sub` does.
        state: dotted path of the model's state. When None it is found, and its copies, such as an average,
            are renamed too.

    Returns:
        The new checkpoint, whose tensors are still those of the old file, and the new name of each key.

    Raises:
        NothingToDo: no key changes.
        UsageFault: an expression or replacement is malformed, or leaves a dot too many in a key.
        Collision: two keys, or two parameters of an optimizer, would get the same name, or a key none.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     renamed, renaming = ckpttool.rename_keys(checkpoint, [(r"^0\\.", "linear.")])
        ...     sorted(renamed.state())[-2:]
        ['linear.bias', 'linear.weight']
    """
    (target, *copies), rules = with_copies(checkpoint, state), list(rules)
    renaming = prefixes.rename_names(_keys(target), rules)
    if not renaming.renamed:
        raise NothingToDo(f"{checkpoint.path}: no key would change", hint=first_key(target.container))
    return _apply(
        checkpoint, target, renaming, [(copy, prefixes.rename_names(_keys(copy), rules)) for copy in copies]
    )


@takes_checkpoint
def strip_prefix(
    checkpoint: Checkpoint,
    prefix: str | None = None,
    *,
    repeat: bool = False,
    anywhere: bool = False,
    drop: Iterable[str] = (),
    state: str | None = None,
) -> tuple[Checkpoint, prefixes.Renaming]:
    """Return a checkpoint without a wrapper's prefix on the keys that carry it.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        prefix: the prefix, with its dot; without one `module.` of DDP and `_orig_mod.` of torch.compile, in
            any order.
        repeat: strip it again until no key begins with it (`module.module.`).
        anywhere: strip it inside a key too, between whole parts (`0._orig_mod.weight`).
        drop: keys of the state to leave out, such as a wrapper's own `n_averaged`; the renaming lacks them.
        state: dotted path of the model's state. When None it is found, and every state of the file that
            carries the prefix loses it.

    Returns:
        The new checkpoint, whose tensors are still those of the old file, and the new name of each key.

    Raises:
        NothingToDo: no key carries the prefix, the hint then names the one found; or a key to drop is
            missing.
        UsageFault: the prefix is empty, or lacks its dot.
        Collision: two keys, or two parameters of an optimizer, would get the same name, or a key none.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     plain, renaming = ckpttool.strip_prefix(checkpoint)
        ...     next(iter(plain.state()))
        '0.weight'
    """
    target, doomed = checkpoint.state(state), set(drop)
    if absent := sorted(doomed - target.container.keys()):
        what = f"{checkpoint.path}: there is no key '{absent[0]}' to drop"
        raise NothingToDo(what, hint=first_key(target.container))

    def stripped(carrier: State) -> prefixes.Renaming:
        names = [name for name in _keys(carrier) if name not in doomed]
        return prefixes.strip_names(names, prefix, repeat=repeat, anywhere=anywhere)

    renaming = stripped(target)
    all_others = (
        [(other, stripped(other)) for other in other_states(checkpoint, target)] if state is None else []
    )
    others = [(other, theirs) for other, theirs in all_others if theirs.renamed]
    if not renaming.renamed:
        raise _nothing(checkpoint, target, prefix, [other for other, _ in others])
    return _apply(checkpoint, target, renaming, others)


@takes_checkpoint
def add_prefix(
    checkpoint: Checkpoint, prefix: str = "module.", *, state: str | None = None
) -> tuple[Checkpoint, prefixes.Renaming]:
    """Return a checkpoint with a prefix before every key, as a wrapper would have saved it.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        prefix: the prefix, with its dot.
        state: dotted path of the model's state. When None it is found, and its copies, such as an average,
            get the prefix too.

    Returns:
        The new checkpoint, whose tensors are still those of the old file, and the new name of each key.

    Raises:
        UsageFault: the prefix is empty.
        NothingToDo: the state is empty.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     wrapped, renaming = ckpttool.add_prefix(checkpoint)
        ...     sorted(wrapped.state())[:2]
        ['module.0.bias', 'module.0.weight']
    """
    target, *copies = with_copies(checkpoint, state)
    if not target.container:
        raise NothingToDo(f"{checkpoint.path}: no key to put '{prefix}' before", hint=first_key(()))
    # Each wrapper is an nn.Module, so torch gives it a version of its own.
    parts = prefix.removesuffix(".").split(".")
    wrappers = {".".join(parts[:count]): {"version": 1} for count in range(len(parts))}
    others = [(copy, prefixes.add_names(_keys(copy), prefix)) for copy in copies]
    return _apply(checkpoint, target, prefixes.add_names(_keys(target), prefix), others, wrappers)


def stripping(path: str, state: State, other: State) -> str | None:
    """Return a hint that strips the one prefix by which two states' names differ, or None."""
    for wrapper in prefixes.found_prefixes(state.tensors):
        try:
            plain = prefixes.strip_names(state.tensors, wrapper.prefix).names.values()
        except CkptToolError:
            continue
        if set(plain) == set(other.tensors):
            strip = f"{shlex.quote(path)} plain.safetensors --prefix {wrapper.prefix}"
            return (
                f"the names differ only in '{wrapper.prefix}'; strip it first: ckpttool strip-prefix {strip}"
            )
    return None


def _keys(state: State) -> list[str]:
    return [key for key in state.container if isinstance(key, str)]


def _nothing(checkpoint: Checkpoint, state: State, prefix: str | None, carriers: list[State]) -> NothingToDo:
    where, keys = f" of '{state.where}'" if state.where else "", _keys(state)
    hint, tree = first_key(state.container), checkpoint.tree
    of_lightning = isinstance(tree, dict) and prefixes.LIGHTNING in tree
    in_front = prefixes.found_prefixes(keys, state.versions, lightning=of_lightning)
    if carriers:
        hint = f"those of '{carriers[0].where}' do: --state {shlex.quote(carriers[0].where)}"
    elif best := next((p for p in in_front if p.prefix != prefix), None):
        hint = f"{best.keys} of {best.of} keys begin with '{best.prefix}': --prefix {best.prefix}"
    elif best := next((p for p in prefixes.inner_prefixes(keys) if p.prefix != prefix), None):
        hint = f"{best.keys} of {best.of} keys hold '{best.prefix}' inside: --prefix {best.prefix} --anywhere"
    elif common := _common_prefix(keys):
        hint = f"all keys begin with '{common}': --prefix {shlex.quote(common)}"
    which = "' or '".join(prefixes.USUAL if prefix is None else [prefix])
    return NothingToDo(f"{checkpoint.path}: no key{where} begins with '{which}'", hint=hint)


def _common_prefix(keys: list[str]) -> str:
    """Return the name, with its dot, of the one module that holds all others; `""` when there is none."""
    prefix = keys[0].partition(".")[0] + "." if keys else ""
    inside = {key[len(prefix) :].partition(".")[0] for key in keys if key.count(".") > 1}
    return prefix if len(inside) > 1 and all(key.startswith(prefix) for key in keys) else ""


def _apply(
    checkpoint: Checkpoint,
    state: State,
    renaming: prefixes.Renaming,
    others: list[tuple[State, prefixes.Renaming]],
    wrappers: Mapping[str, object] | None = None,
) -> tuple[Checkpoint, prefixes.Renaming]:
    """Rename states, their module versions, and the parameter names of every optimizer in the file."""
    changes = [(state, renaming), *others]
    names = {old: new for _, each in (changes[0], *reversed(others)) for old, new in each.names.items()}

    def follow(optimizer: dict[Any, Any], owners: Owners) -> dict[Any, Any]:
        prefix = owners.prefix(optimizer)
        full_names = {prefix + old: prefix + new for old, new in names.items()}
        return rename_parameters(optimizer, _as_listed(optimizer, full_names))

    new = [(each, _rename_state(each, theirs, wrappers or {})) for each, theirs in changes]
    changed = with_states(checkpoint, new, renaming, follow, numbers=False)
    return changed, replace(renaming, also={other.where: theirs for other, theirs in others})


def _rename_state(
    state: State, renaming: prefixes.Renaming, wrappers: Mapping[str, object]
) -> dict[object, object]:
    """Return the state's dict under its new names, without the keys that the renaming lacks."""
    names: Mapping[Any, str] = renaming.names
    pairs = state.container.items()
    stay = ((key, value) for key, value in pairs if not isinstance(key, str) or key in names)
    new = remade(state.container, ((names.get(key, key), value) for key, value in stay))
    return prefixes.with_versions(new, state.versions, renaming, wrappers)


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """Return an optimizer's state dict with its parameters renamed, in its state and its groups."""
    view = OptimizerView(optimizer)
    prefixes.checked(dict.fromkeys(view.mentioned), lambda name: names.get(name, name), prefixes.PREFIXES)
    return view.renamed(names)


def _as_listed(optimizer: Any, names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names without the state's wrapper, where the optimizer was made of the model inside it."""
    listed = [*OptimizerView(optimizer).mentioned]
    if not listed or listed[0] in names:
        return names
    for wrapper in (found.prefix for found in prefixes.found_prefixes(names)):
        if all(wrapper + name in names for name in listed):
            inside = {old: new for old, new in names.items() if old.startswith(wrapper)}
            return {old.removeprefix(wrapper): new.removeprefix(wrapper) for old, new in inside.items()}
    return names
