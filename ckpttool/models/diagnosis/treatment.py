"""Find out which state of a file fits a model best, and which remedies make it fit.

Each command is tried first: a remedy is a pure change of the checkpoint, which reads no values, and it is
advised if the state fits better after it than before. What no remedy fixes is described instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.state import State
from ...checkpoint.states import is_optimizer
from ...errors import CkptToolError, NoState
from ...inert_pickle.values import walk
from ...transforms import selection
from . import name_remedies, value_remedies
from .fit import Blueprint, Case, Finder, Fit, Rebuild, Remedy, Treatment, compare, is_same_architecture
from .part_of_whole import Part, named_part, rank_s_pieces
from .report import Diagnosis, Problem, Report

# From certain to guessed: earlier ones are tried first.
FINDERS: tuple[Finder, ...] = (
    value_remedies.complex_parts,
    name_remedies.wrappers,
    name_remedies.wrappers_inside,
    name_remedies.renumbered,
    name_remedies.prefixes,
    name_remedies.renamed_parts,
    value_remedies.counters,
    value_remedies.ties,
    value_remedies.layouts,
    value_remedies.shapes,
    name_remedies.same_order,
    value_remedies.extras,
)

MAX_REMEDIES = 12
MAX_STATES = 8  # states of one file that are tried

Accepts = Callable[[State], bool]


def declines(_: State) -> bool:
    """Return False: the model has no loading rules of its own."""
    return False


def diagnose(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    spec: str,
    *,
    state: str | None = None,
    accepts: Accepts = declines,
    rebuild: Rebuild | None = None,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model."""

    def of_whole(part: Part) -> Diagnosis:
        with part.opened() as whole:
            if whole is None:
                return part.diagnosis(checkpoint, None, spec)
            below = diagnose(whole, blueprint, spec, accepts=accepts, rebuild=rebuild)
            return part.diagnosis(checkpoint, below, spec)

    if part := rank_s_pieces(checkpoint, state):
        return of_whole(part)
    try:
        cases = _cases(checkpoint, blueprint, state)
    except NoState as error:
        if state is not None:
            raise
        part = named_part(checkpoint.path)
        return of_whole(part) if part else _without_state(checkpoint, error)
    treatments: list[Treatment] = []
    for case in cases:
        treatments.append(treat(case, accepts=accepts))
        if not treatments[-1].case.fit.distance:
            break
    if treatments[-1].case.fit.distance and (part := named_part(checkpoint.path)):
        return of_whole(part)
    best = min(range(len(treatments)), key=lambda i: treatments[i].case.fit.distance)
    if not is_same_architecture(treatments[best].case):  # a fit by chance is no reason for commands
        best = 0
        treatments[0] = Treatment(cases[0])
    case = cases[best]
    loads = not case.fit.distance or accepts(case.state)
    # Whoever does not know that the state has to be named does not load it.
    is_default = state is not None or best == 0
    report = Report(checkpoint, case, treatments[best], spec, loads and is_default)
    return report.written(rebuild, as_reloaded(checkpoint, case.original, blueprint))


def treat(case: Case, finders: tuple[Finder, ...] = FINDERS, accepts: Accepts = declines) -> Treatment:
    """Apply remedies as long as they bring a state nearer to its model."""
    used: list[Remedy] = []
    while case.fit.distance and len(used) < MAX_REMEDIES:
        if accepts(case.state):
            return Treatment(replace(case, fit=Fit()), tuple(used))
        step = next(filter(None, (_best(case, finder) for finder in finders)), None)
        if step is None:
            break
        remedy, case = step
        used.append(remedy)
    return Treatment(case, tuple(used))


def _best(case: Case, finder: Finder) -> tuple[Remedy, Case] | None:
    """Return the remedy of one kind that helps most and the case after it, or None."""
    best: tuple[Remedy, Case] | None = None
    for remedy in finder(case):
        after = _after(case, remedy)
        if after is not None and after.fit.distance < (best[1] if best else case).fit.distance:
            best = remedy, after
    return best


def _after(case: Case, remedy: Remedy) -> Case | None:
    try:
        checkpoint = remedy.apply(case.checkpoint)
        state = checkpoint.state()
    except CkptToolError:
        return None  # the command would fail too
    return replace(case, checkpoint=checkpoint, state=state, fit=compare(state, case.blueprint))


def as_reloaded(checkpoint: Checkpoint, state: State, blueprint: Blueprint) -> tuple[str, Case]:
    """Return the prefix that `reload` strips, `""` for none, and the state as it loads it, with its ties."""
    alone = replace(checkpoint, tree=state.container)
    finders = name_remedies.wrappers, value_remedies.ties
    treated = treat(Case(alone, state, blueprint, compare(state, blueprint), None, state), finders)
    prefix = "".join(remedy.command[2] for remedy in treated.remedies if remedy.kind == "prefix")
    fitted = treated.case.state
    # What is no tensor and not asked for by the model (an epoch next to the weights) is not loaded.
    asked = {name: value for name, value in fitted.others.items() if name in blueprint.places}
    fitted = replace(fitted, others=asked)
    return prefix, replace(treated.case, state=fitted, fit=compare(fitted, blueprint))


def _cases(checkpoint: Checkpoint, blueprint: Blueprint, where: str | None) -> list[Case]:
    """Return a case for each state that could be meant, the likeliest first."""
    places = [dotted(path) for path in checkpoint.states()] or [checkpoint.state().where]
    names = places[:MAX_STATES] if where is None else [where]
    default = checkpoint.found_state()
    return [
        _case(checkpoint, blueprint, name, is_named=default is None or name != default.where)
        for name in names
    ]


def _case(checkpoint: Checkpoint, blueprint: Blueprint, name: str, *, is_named: bool) -> Case:
    """Return the case of one state; commands change the default state, so any other is taken out first."""
    original = checkpoint.state(name)
    if not is_named and original.module is None:
        return Case(checkpoint, original, blueprint, compare(original, blueprint), None, original)
    alone = selection.slim(checkpoint, state=name)
    state = alone.state()
    flags = ("--state", name) if is_named else ()
    return Case(alone, state, blueprint, compare(state, blueprint), flags, original)


def _without_state(checkpoint: Checkpoint, error: NoState) -> Diagnosis:
    if any(is_optimizer(value) for value in walk(checkpoint.tree)):
        message = "it holds only the state of an optimizer: the model's parameters are in another file"
        problem = Problem("optimizer-only", message)
    else:
        problem = Problem("no-state", error.reason)
    return Diagnosis(checkpoint.path, checkpoint.format, None, False, Fit(), (problem,), None)
