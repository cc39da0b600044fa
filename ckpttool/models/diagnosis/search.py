"""Find out which state of a file fits a model best, and which remedies make it fit.

Each command is tried first: a remedy is a pure change of the checkpoint, which reads no values, and it is
advised if the state fits better after it than before. What no remedy fixes is described in words.
"""

from __future__ import annotations

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.states import is_optimizer
from ...errors import NoState
from ...inert_pickle.values import walk
from ...transforms import selection
from . import misfits
from .case import Case, Rebuild
from .fit import Blueprint, Fit, compare
from .report import Diagnosis, Problem, Report
from .treatment import Accepts, Treatment, declines, treat

STATES = 8
"""How many states of one file are tried."""


def diagnose(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    spec: str,
    *,
    state: str | None = None,
    accepts: Accepts = declines,
    rebuild: Rebuild | None = None,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model.

    Args:
        checkpoint: an open file; only names, shapes and types of its tensors are read.
        blueprint: of the model.
        spec: how the commands name the model.
        state: dotted path of the model's state; the one that fits best when None.
        accepts: return whether the live model takes a state by loading rules of its own.
        rebuild: return the model in other sizes, given a state whose names fit and whose sizes do not; None
            if the model can't be built again.

    Returns:
        The diagnosis of the state that fits best after treatment.

    Raises:
        NoState: `state` is given, and the file has no state there.
    """
    try:
        cases = _cases(checkpoint, blueprint, state)
    except NoState as error:
        if state is not None:
            raise
        return _without_state(checkpoint, error)
    treatments: list[Treatment] = []
    for case in cases:
        treatments.append(treat(case, accepts=accepts))
        if not treatments[-1].case.fit.distance:
            break
    best = min(range(len(treatments)), key=lambda i: treatments[i].case.fit.distance)
    if not misfits.is_alike(treatments[best].case):  # a fit by chance is no reason for commands
        best = 0
        treatments[0] = Treatment(cases[0])
    case = cases[best]
    loads = not case.fit.distance or accepts(case.state)
    # Whoever does not know that the state has to be named does not load it.
    is_found = state is not None or best == 0
    return Report(checkpoint, case, treatments[best], spec, loads and is_found).written(rebuild)


def _cases(checkpoint: Checkpoint, blueprint: Blueprint, where: str | None) -> list[Case]:
    """Return a case for each state that could be meant, the likeliest first."""
    found = [dotted(path) for path in checkpoint.states()] or [checkpoint.state().where]
    names = found[:STATES] if where is None else [where]
    taken = checkpoint.found_state()
    return [_case(checkpoint, blueprint, name, named=taken is None or name != taken.where) for name in names]


def _case(checkpoint: Checkpoint, blueprint: Blueprint, name: str, *, named: bool) -> Case:
    """Return the case of one state; commands change the default state, so any other is taken out first."""
    found = checkpoint.state(name)
    if not named and found.module is None:
        return Case(checkpoint, found, blueprint, compare(found, blueprint), None, found)
    alone = selection.slim(checkpoint, state=name)
    state = alone.state()
    flags = ("--state", name) if named else ()
    return Case(alone, state, blueprint, compare(state, blueprint), flags, found)


def _without_state(checkpoint: Checkpoint, error: NoState) -> Diagnosis:
    """Return the diagnosis of a file that has no state."""
    if any(is_optimizer(value) for value in walk(checkpoint.tree)):
        message = "it holds only the state of an optimizer: the model's parameters are in another file"
        problem = Problem("optimizer-only", message)
    else:
        problem = Problem("no-state", error.reason)
    return Diagnosis(checkpoint.path, checkpoint.format, None, False, Fit(), (problem,), None)
