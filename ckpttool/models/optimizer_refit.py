"""An optimizer's state put into the groups, the order and the settings of another optimizer.

torch loads a state by position: the first parameter of the first group gets what the file keeps of its first
one, whatever they are called. So each state follows its parameter by name, into the groups that the
optimizer has now. A parameter that is new has what a fresh optimizer keeps of it, which is nothing for most;
one that is gone is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.dotted_names import dotted
from ..core.checkpoint.optimizer_names import (
    VECTORS,
    Form,
    Names,
    Order,
    Parameters,
    Rekeyed,
    parameters_of,
)
from ..core.checkpoint.optimizer_view import (
    GROUPS,
    KEYS,
    LISTS,
    NAMES,
    BadOptimizer,
    OptimizerGroups,
    OptimizerParameter,
    OptimizerView,
    flattened,
)
from ..core.checkpoint.special_tensors import plain_tensor
from ..core.inert_pickle.values import in_brief, is_plain, remade
from ..core.tensors.ref import Computed, TensorRef
from ..core.words import first_few, noted
from ..errors import NothingToDo, Refused
from .optimizer_layout import Entry, LiveOptimizer, Needs, keeps, named

# Settings of how a step is computed on a machine, not of what is trained: never the file's.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
# Entries that begin as zeros, and which an option adds to those that were there: amsgrad, centered, momentum.
ZEROS = ("max_exp_avg_sq", "grad_avg", "momentum_buffer")
FEW = 64  # bytes of a setting that is a tensor, and entries of one that is a list
COUNT = {"step"}  # kept by most classes, so that it tells none from another

Source = Literal["file", "optimizer"]


@dataclass(frozen=True, slots=True)
class Refitted(Rekeyed):
    """The change made to the optimizers of a file, for those of a model.

    Attributes:
        added: parameters of which the file keeps nothing.
        dropped: names in the file of parameters that the optimizer does not have.
        reset: parameters whose state the optimizer can't go on with, and why; it begins afresh.
        padded: parameters that got an entry of zeros, and which.
        settings: how those of the groups differ, and which were taken.
    """

    added: tuple[str, ...] = noted("the file keeps nothing of them")
    dropped: tuple[str, ...] = noted("dropped, as the optimizer does not have them")
    reset: tuple[str, ...] = noted("begun afresh")
    padded: tuple[str, ...] = noted("filled with zeros")
    settings: tuple[str, ...] = noted("settings")


class Refit(NamedTuple):
    """One optimizer of a file in the form of a live one."""

    where: str
    old: dict[Any, Any]
    new: dict[Any, Any]
    places: dict[str, int]  # parameter of the live one -> its number in the file
    owners: Sequence[str]  # whose state is what the file keeps, by its number
    was_ordered: bool  # its parameters' names were taken from an order
    told: Mapping[str, list[str]]  # the fields of `Refitted`, without the numbers
    is_same: bool  # nothing changes


def refit(
    checkpoint: Checkpoint,
    to: Form,
    *,
    optimizers: Sequence[LiveOptimizer | None],
    state: str | None = None,
    order: Order | None = None,
    settings: Source = "file",
) -> tuple[Checkpoint, Refitted]:
    """Return a checkpoint whose optimizers have the groups of live ones, in the file's order of optimizers.

    None stands for one that stays as it is. `settings` says whose settings of the groups win where both have
    them; those of `IMPLEMENTATION`, and those of another class of optimizer, are never the file's. Raises
    Refused where it is not known which parameter is which, and NothingToDo.
    """
    made = [*refits(checkpoint, to, optimizers, state=state, order=order, settings=settings)]
    if all(each.is_same for each in made):
        raise NothingToDo(f"{checkpoint.path}: its optimizer has the groups of that optimizer already")
    new = {id(each.old): each.new for each in made}
    told = {
        name: tuple(text for each in made for text in each.told[name])
        for name in ("added", "dropped", "reset", "padded", "settings")
    }
    live = [each for each in optimizers if each is not None]
    held = {name for each in live for name in each.names}
    moved = sum(
        each.places.get(name, number) != number
        for each, one in zip(made, live, strict=True)
        for number, name in enumerate(one.names)
    )
    return checkpoint.rebuilt(lambda value: new.get(id(value), value)), Refitted(
        optimizers=tuple(each.where for each in made),
        parameters=sum(len(one.names) for one in live),
        moved=moved,
        absent=tuple(name for name in (live[0].shapes if live else ()) if name not in held),
        ordered=tuple(each.where for each in made if each.was_ordered),
        **told,
    )


def refits(
    checkpoint: Checkpoint,
    to: Form,
    optimizers: Sequence[LiveOptimizer | None],
    *,
    state: str | None = None,
    order: Order | None = None,
    settings: Source = "file",
) -> list[Refit]:
    """Return each optimizer of a file in the form of its live one; see `refit`."""
    found = [*checkpoint.optimizers()]
    if len(found) != len(optimizers):
        names = f" ({first_few([where or 'the file itself' for where, _ in found])})" if found else ""
        counts = f"the file has {len(found)}{names}, and there are {len(optimizers)} to load into"
        hint = "let the factory return one for each, in this order, or None for one that stays as it is"
        nothing = "it holds no optimizer's state (`state` and `param_groups`): the optimizer begins afresh"
        raise Refused(
            checkpoint.path, f"optimizers: {counts}" if found else nothing, hint=hint if found else None
        )
    where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
    states = [parameters_of(checkpoint, each) for each in where]
    made = []
    for (place, old), live in zip(found, optimizers, strict=True):
        if live is None:
            continue
        try:
            made.append(_refitted(place, old, live, states, to, order, settings))
        except BadOptimizer as fault:
            name = f" {place!r}" if place else ""
            raise Refused(checkpoint.path, f"the optimizer{name} {fault}", hint=fault.hint) from fault
    return made


def _refitted(
    where: str,
    old: dict[Any, Any],
    live: LiveOptimizer,
    states: Sequence[Parameters],
    to: Form,
    order: Order | None,
    whose: Source,
) -> Refit:
    view = OptimizerView(old)
    groups = view.parameters()
    with_names, was_ordered = named(groups, live, states, order)
    told: dict[str, list[str]] = {name: [] for name in ("added", "dropped", "reset", "padded", "settings")}
    kept: dict[str, tuple[int, int, OptimizerParameter]] = {}  # name -> number, number of its group
    listed = [(number, each) for number, group in enumerate(with_names) for each in group]
    names = live.known([each.name or "" for _, each in listed])
    held = {*live.names}
    for place, ((number, each), name) in enumerate(zip(listed, names, strict=True)):
        if name in held and name not in kept:
            kept[str(name)] = place, number, each
        elif each.name is not None:
            told["dropped"].append(each.name)
    _require_order_of_vectors(view, names, live)
    sources = [_source(names, kept, number, groups, live) for number, names in enumerate(live.groups)]
    settings = [_settings(view, *pair, whose) for pair in zip(live.settings, sources, strict=True)]
    entries = _entries(kept, live, live.needs(settings), told)
    if told["reset"] and not any(name in entries for name in kept):  # of another class of optimizer
        settings = [_settings(view, own, None, whose) for own in live.settings]
    told["settings"] += _differences(view, live, sources, settings)
    told["added"] += [name for name in live.names if name not in kept] if kept else []
    new = _written(view, live, settings, {**live.fresh, **entries}, kept, to)
    owners = [name or each.name or "?" for name, (_, each) in zip(names, listed, strict=True)]
    places = {name: place for name, (place, *_) in kept.items()}
    return Refit(where, old, new, places, owners, was_ordered, told, _is_same(view, OptimizerView(new)))


def _require_order_of_vectors(view: OptimizerView, names: Sequence[str | None], live: LiveOptimizer) -> None:
    if any(name in entry for entry in view.entries for name in VECTORS) and tuple(names) != live.names:
        what = "is LBFGS, which keeps all parameters in one vector: none can be added, dropped or moved"
        raise BadOptimizer(what, hint="ckpttool slim IN OUT leaves it out: it begins afresh")


# ---- What is kept of each


def _entries(
    kept: Mapping[str, tuple[int, int, OptimizerParameter]],
    live: LiveOptimizer,
    needs: Needs,
    told: Mapping[str, list[str]],
) -> dict[str, Any]:
    """Return what the file keeps of each parameter, as far as the live optimizer can go on with it."""
    entries: dict[str, Any] = {}
    for name, (_, _, each) in kept.items():
        entry = each.entry
        if not keeps(entry):
            if entry is not None and not live.fresh.get(name):
                entries[name] = entry
            continue
        wanted = needs.get(name)
        keys = {key for key, value in entry.items() if value is not None}
        lacks = [] if wanted is None else [key for key in wanted if key not in entry]
        if each.shape not in (None, live.shapes[name]):
            shapes = f"{list(each.shape or ())}, not {list(live.shapes[name])}"
            told["reset"].append(f"{name} (its state is of a parameter of shape {shapes})")
        elif wanted is not None and keys - COUNT and not keys & {*wanted} - COUNT:
            told["reset"].append(f"{name} ({live.kind} does not know its {_listed(keys - COUNT)})")
        elif any(key not in ZEROS for key in lacks):
            told["reset"].append(f"{name} ({live.kind} needs its {_listed(lacks)}, which the file lacks)")
        else:
            zeros = {key: _zeros(each, like) for key in lacks if (like := (wanted or {})[key]) is not None}
            told["padded"].extend(f"{name}: {key}" for key in zeros)
            entries[name] = remade(entry, (entry | zeros).items()) if zeros else entry
    return entries


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(sorted(in_brief(key) for key in keys))


def _zeros(each: OptimizerParameter, like: TensorRef) -> TensorRef:
    """Return zeros in the type of the momentum that is there."""
    tensors = filter(None, map(plain_tensor, each.entry.values()))
    dtype = next((tensor.dtype for tensor in tensors if tensor.shape == like.shape), like.dtype)

    def fill(_: int, out: memoryview) -> None:
        out[:] = bytes(len(out))

    return TensorRef.of_bytes(Computed.filling("", like.numel * dtype.itemsize, fill), dtype, like.shape)


# ---- Groups


def _source(
    names: Names,
    kept: Mapping[str, tuple[int, int, OptimizerParameter]],
    number: int,
    groups: OptimizerGroups,
    live: LiveOptimizer,
) -> int | None:
    """Return the group of the file that most parameters of a group come from; None for new ones."""
    votes = Counter(kept[name][1] for name in names if name in kept)
    if votes:
        return max(votes, key=lambda each: votes[each])
    return number if not kept and len(groups) == len(live.groups) else None


def _settings(view: OptimizerView, own: Entry, source: int | None, whose: Source) -> Entry:
    if source is None:
        return _held(own)
    theirs = {key: value for key, value in view.groups[source].items() if key not in LISTS}
    taken = [key for key in own if key in IMPLEMENTATION or whose == "optimizer" or key not in theirs]
    return {**theirs, **_held({key: own[key] for key in taken})}


def _held(own: Entry) -> Entry:
    """Return settings of a live optimizer. Raises BadOptimizer for what a file can't hold."""
    for key, value in own.items():
        if not is_plain(value):
            what = f"has the setting '{key}', a {type(value).__name__}, which a file can't hold"
            raise BadOptimizer(f"to load into {what}", hint="--settings file takes those of the file")
    return own


def _differences(
    view: OptimizerView, live: LiveOptimizer, sources: Sequence[int | None], settings: Sequence[Entry]
) -> list[str]:
    """Return, in words, where a setting of the file is not the live optimizer's, and which was taken."""
    found: dict[str, list[int]] = {}
    for number, (own, source, new) in enumerate(zip(live.settings, sources, settings, strict=True)):
        theirs = {} if source is None else view.groups[source]
        for key, value in own.items():
            if key not in theirs or _comparable(theirs[key]) == _comparable(value):
                continue
            taken = "the file's" if new[key] is theirs[key] else "the optimizer's"
            text = f"{key} {_shown(theirs[key])} in the file, {_shown(value)} in the optimizer: {taken}"
            found.setdefault(text, []).append(number)
    where = "group{} {}: " if len(live.groups) > 1 else ""
    return [where.format("s" * (len(at) > 1), first_few(at)) + text for text, at in found.items()]


def _comparable(value: object) -> object:
    """Return what two equal settings have in common; what may be large is equal to itself alone."""
    if isinstance(value, TensorRef) and value.is_plain and value.nbytes <= FEW:
        return value.dtype.name, value.data.read()
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    is_small = len(parts) <= FEW and all(
        each is None or isinstance(each, int | float | str) for each in parts
    )
    return parts if is_small else id(value)


def _is_same(old: OptimizerView, new: OptimizerView) -> bool:
    """Return whether two states have the same groups, and keep the same under the same keys."""
    if old.is_flat or new.is_flat:
        items = [[(key, id(value)) for key, value in view.value.items()] for view in (old, new)]
        return items[0] == items[1]

    def outline(view: OptimizerView) -> Any:
        groups = [
            {key: value if key in LISTS else _comparable(value) for key, value in group.items()}
            for group in view.groups
        ]
        return groups, [(repr(key), id(entry)) for key, entry in view.state.items()]

    return bool(outline(old) == outline(new))


def _shown(value: object) -> str:
    return f"a tensor of {value.dtype.name}" if isinstance(value, TensorRef) else in_brief(value)[:40]


def _written(
    view: OptimizerView,
    live: LiveOptimizer,
    settings: Sequence[Entry],
    entries: Mapping[str, Any],
    kept: Mapping[str, tuple[int, int, OptimizerParameter]],
    to: Form,
) -> dict[Any, Any]:
    """Return the state dict; names keep the prefix that they have in the file."""
    spelled = ((str(each.name), name) for name, (*_, each) in kept.items())
    prefix = next((old[: -len(name)] for old, name in spelled if old.endswith(name)), "")
    keys: dict[str, Any] = {
        name: number if to == "indices" else prefix + name for number, name in enumerate(live.names)
    }
    groups = []
    for names, given in zip(live.groups, settings, strict=True):
        # torch loads by position and carries the names along: the next change finds them.
        lists = {KEYS: [keys[name] for name in names], NAMES: [prefix + name for name in names]}
        groups.append({**given, **lists})
    new = remade(view.nested, view.nested.items())
    new["state"] = {keys[name]: entries[name] for name in live.names if name in entries}
    new[GROUPS] = groups
    return flattened(new) if to == "flat" else new
