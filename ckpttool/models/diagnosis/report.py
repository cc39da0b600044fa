"""Diagnose why a checkpoint does not load into a model, and write the commands that fix it.

Each command is tried first: a remedy is a pure change of the checkpoint, which reads no values, and it is
advised if the state fits better after it than before. What no remedy fixes is described in words.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.state import State
from ...checkpoint.states import is_optimizer
from ...errors import CkptToolError, NoState, NothingToDo
from ...inert_pickle.values import is_plain, walk
from ...transforms import selection
from ...transforms.optimizer import to_indices
from ...transforms.optimizer_order import OrderCheck, mismatched_order
from . import misfits
from .case import Case
from .fit import Blueprint, Fit, compare, shortened
from .shell import command_line
from .treatment import Accepts, Treatment, declines, treat

STATES = 8
"""How many states of one file are tried."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or worth knowing.

    Attributes:
        kind: a stable word for scripts.
        message: what is wrong, as a sentence without a capital and a full stop.
        command: the command that fixes it, ready to paste after those of the problems before it; None if no
            command can.
        is_remark: the state loads strictly, and with the right values, all the same.
    """

    kind: str
    message: str
    command: str | None = None
    is_remark: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a checkpoint does not load into a model, and what fixes it.

    Attributes:
        path: the file as it was named.
        format: its format, as `torch-zip`.
        state: dotted path of the state that fits best, `""` for the file itself, None if there is none.
        loads: `load_state_dict(strict=True)` takes this state as it is.
        fit: the differences that keep the state from loading.
        problems: in the order in which to fix them.
        then: the command that loads the result strictly, after all the others; None if none can.
    """

    path: str
    format: str
    state: str | None
    loads: bool
    fit: Fit
    problems: tuple[Problem, ...]
    then: str | None


@dataclass(frozen=True, slots=True)
class Respec:
    """The model built with other arguments: its SPEC, and a message that says what differs."""

    spec: str
    message: str


Rebuild = Callable[[Case], Respec | None]


def _as_built(_: Case) -> None:
    return None


def diagnose(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    spec: str,
    *,
    state: str | None = None,
    accepts: Accepts = declines,
    rebuild: Rebuild = _as_built,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model.

    Args:
        checkpoint: an open file; only names, shapes and types of its tensors are read.
        blueprint: of the model.
        spec: how the commands name the model.
        state: dotted path of the model's state; the one that fits best when None.
        accepts: return whether the live model takes a state by loading rules of its own.
        rebuild: return the model in other sizes, given a state whose names fit and whose sizes do not.

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
    return _Report(case, treatments[best], spec, loads and (state is not None or best == 0)).written(rebuild)


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


class _Report:
    """Write a treatment as commands, each of which reads what the one before it wrote."""

    def __init__(self, case: Case, treatment: Treatment, spec: str, loads: bool) -> None:
        self.case = case
        self.treatment = treatment
        self.spec = spec
        self.loads = loads
        path = case.checkpoint.path
        self.file = f"./{path}" if path.startswith("-") else path  # else it would be taken for an option
        self.output = _output(self.file, case.checkpoint.format)
        self.problems: list[Problem] = []

    def written(self, rebuild: Rebuild) -> Diagnosis:
        case, after = self.case, self.treatment.case
        if case.taken_out is not None and not self.loads:
            self._add(*self._taking_out(case.original), "slim", *case.taken_out)
        for remedy in self.treatment.remedies:
            self._add(remedy.kind, remedy.message, *remedy.command)
        then: str | None = None
        if not after.fit.distance:
            self._add_optimizers()
            then = self._reload(self.spec) if not self._add_objects() else None
        elif (respec := rebuild(after)) is not None:
            then = self._reload(respec.spec)
            self.problems.append(Problem("size", respec.message, then))
        else:
            self.problems += [Problem(kind, message) for kind, message in misfits.in_words(after)]
        self.problems += self._remarks()
        path, kind = case.checkpoint.path, case.checkpoint.format
        return Diagnosis(path, kind, case.original.where, self.loads, case.fit, tuple(self.problems), then)

    def _taking_out(self, state: State) -> tuple[str, str]:
        if state.module is not None:
            return "pickled-model", f"the names are those of a pickled {state.module.type_name}"
        return "state", f"the state that fits best is '{state.where}', not the one that is taken by default"

    def _add(self, kind: str, message: str, verb: str, *flags: str) -> None:
        self.problems.append(Problem(kind, message, self._command(verb, *flags)))
        self.file = self.output

    def _command(self, verb: str, *flags: str) -> str:
        again = ["--force"] if self.file == self.output else []
        return command_line(["ckpttool", verb, self.file, self.output, *flags, *again])

    def _reload(self, spec: str) -> str:
        where = (self.case.taken_out or ()) if self.file != self.output else ()
        return command_line(["ckpttool", "reload", self.file, "--model", spec, *where])

    def _add_objects(self) -> bool:
        """Add a problem if the model asks for objects, which torch.load creates and this package does not."""
        after = self.treatment.case
        asked = ((n, v) for n, v in after.state.others.items() if n in after.blueprint.places)
        objects = tuple(name for name, value in asked if not is_plain(value))
        if objects:
            message = (
                f"the state holds objects ({shortened(objects)}), which are never created from a file here"
            )
            words = f"{message}: torch.load(weights_only=False) creates them, if you trust the file"
            self.problems.append(Problem("object", words))
        return bool(objects)

    def _add_optimizers(self) -> None:
        """Add a problem if an optimizer, which counts parameters, would give momentum to other parameters."""
        after = self.treatment.case
        places = after.blueprint.places
        if not all(name in places for name in after.blueprint.parameters):
            return  # the model leaves parameters out of its state, so their shapes are unknown
        parameters = {name: places[name].shape or () for name in after.blueprint.parameters}
        for value in walk(self.case.checkpoint.tree):
            if isinstance(value, dict) and is_optimizer(value):
                check = mismatched_order(after.state.tensors, value, parameters)
                if not check.fits:
                    self._add_order(_in_words(check), parameters)
                    return

    def _add_order(self, message: str, parameters: Mapping[str, tuple[int, ...]]) -> None:
        try:
            to_indices(self.treatment.case.checkpoint, parameters=parameters)
        except NothingToDo:
            return  # the optimizer keeps nothing per parameter
        except CkptToolError as error:
            self.problems.append(Problem("optimizer-order", f"{message}; no command can fix it: {error}"))
        else:
            self._add("optimizer-order", message, "optimizer", "--to", "indices", "--model", self.spec)

    def _remarks(self) -> Iterator[Problem]:
        case = self.case
        if case.original.module is not None and self.loads:
            name = case.original.module.type_name
            message = f"the file is a whole pickled model, and torch.load needs the code of {name}"
            yield self._remark("pickled-model", message, None if self.problems else "slim")
        elif case.state.where and not self.problems:  # `slim` of the file would undo the commands before it
            message = f"the state is under '{case.state.where}', and load_state_dict wants only that"
            yield self._remark("nested", message, "slim")
        added = self.treatment.case.fit.added
        if added:
            message = (
                f"the file lacks {len(added)} counters of BatchNorm ({shortened(added)}), which torch adds"
            )
            yield self._remark("counters", message, None)
        yield from self._precision()

    def _precision(self) -> Iterator[Problem]:
        after = self.treatment.case
        casts = Counter(
            (tensor.dtype.name, place.dtype)
            for name, tensor in after.state.tensors.items()
            if (place := after.blueprint.places.get(name)) is not None and place.dtype != tensor.dtype.name
        )
        for (theirs, ours), count in casts.items():
            message = f"{count} tensors are {theirs} in the file and {ours} in the model: loading casts them"
            known = SHORT_TYPES.get(ours) if "float" in theirs else None  # convert casts only floats
            yield self._remark("precision", message, *(["convert", "--dtype", known] if known else [None]))

    def _remark(self, kind: str, message: str, verb: str | None, *flags: str) -> Problem:
        return Problem(kind, message, self._command(verb, *flags) if verb else None, is_remark=True)


def _in_words(check: OrderCheck) -> str:
    first = (check.shapes or check.names or check.order)[0]
    whose = f"a parameter of shape {first.there}" if check.shapes else first.there
    return (
        "the optimizer's state is keyed by index, and the model has its parameters in another order: "
        f"'{first.parameter}' would get what belongs to {whose}, without an error"
    )


SHORT_TYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _output(file: str, form: str) -> str:
    """Return a free name beside the file, in a format that holds what the file holds."""
    path = file.rstrip("/")
    stem = path if os.path.isdir(path) else os.path.splitext(path)[0]
    end = ".safetensors" if form.startswith("safetensors") else ".pt"
    output, count = f"{stem}.mended{end}", 1
    while os.path.exists(output):
        count += 1
        output = f"{stem}.mended-{count}{end}"
    return output
