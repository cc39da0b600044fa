"""Find out which state of a file fits a model best, and which remedies make it fit.

Each command is tried first: a remedy is a pure change of the checkpoint, and it is advised if the state fits
better after it than before. At the end the values that the commands read are read once: a damaged file has no
remedy. What no remedy fixes is described instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..conforming.modules import OF_ADAPTER, Blueprint
from ..core.checkpoint import selection
from ..core.checkpoint.checkpoint import SHARDING, Checkpoint
from ..core.checkpoint.checksums import compared
from ..core.checkpoint.dotted_names import dotted
from ..core.checkpoint.optimizer_view import is_optimizer
from ..core.checkpoint.state import State
from ..core.formats.reading import File, opened
from ..core.formats.reading import open as open_checkpoint
from ..core.formats.shards import piece_of
from ..core.inert_pickle.values import walk
from ..core.lazy import needing_torch
from ..core.tensors.ref import Computed
from ..core.tensors.values import stream
from ..errors import Ambiguous, CkptToolError, NoState, UsageFault
from . import dialects, factory, remedies
from .factory import accepts, skeleton
from .fit import Aim, Case, Finder, Fit, Rebuild, Remedy, Respec, Treatment, command_line, compare
from .report import CommandChain, Diagnosis, Problem, TreatmentReport, free_output

if TYPE_CHECKING:
    import torch

    from .optimizer_report import OptimizerAim

# From certain to guessed: earlier ones are tried first.
FINDERS: tuple[Finder, ...] = (
    remedies.complex_parts,
    remedies.wrappers,
    remedies.wrappers_inside,
    remedies.separators,
    dialects.mapped,
    remedies.renumbered,
    remedies.prefixes,
    remedies.renamed_parts,
    remedies.counters,
    remedies.ties,
    remedies.layouts,
    remedies.shapes,
)
# By order and shapes alone, where no other way was found
GUESSES: tuple[Finder, ...] = (remedies.same_order, remedies.extras)

MAX_REMEDIES = 12
MAX_STATES = 8  # states of one file that are tried

Accepts = Callable[[State], bool]


def declines(_: State) -> bool:
    """Return False: the model has no loading rules of its own."""
    return False


def diagnose(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    aim: Aim,
    *,
    state: str | None = None,
    accepts: Accepts = declines,
    rebuild: Rebuild | None = None,
    optimizer: OptimizerAim | None = None,
    verify: bool = True,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model."""
    more: dict[str, Any] = {"accepts": accepts, "rebuild": rebuild, "optimizer": optimizer, "verify": verify}

    def of_whole(part: PartialFile) -> Diagnosis:
        with part.opened() as whole:
            if whole is None:
                return part.diagnosis(checkpoint, None, aim)
            below = diagnose(whole, blueprint, aim, **more)
            return part.diagnosis(checkpoint, below, aim)

    if part := rank_s_pieces(checkpoint, state):
        return of_whole(part)
    try:
        cases = [replace(case, aim=aim) for case in _cases(checkpoint, blueprint, state)]
    except NoState as error:
        if state is not None:
            raise
        part = named_part(checkpoint.path)
        return of_whole(part) if part else _without_state(checkpoint, error, aim, optimizer)
    treatments: list[Treatment] = []
    for case in cases:
        treatments.append(treated(case, accepts))
        if not treatments[-1].case.fit.distance:
            break
    best = min(range(len(treatments)), key=lambda number: treatments[number].case.fit.distance)
    if treatments[best].case.fit.distance and (part := named_part(checkpoint.path)):
        return of_whole(part)
    is_asked = bool(treatments[best].open_question)  # names differ then, and the architecture need not
    if not (is_asked or treatments[best].case.is_same_architecture):
        best, treatments[0] = 0, Treatment(cases[0])  # a fit by chance is no reason for commands
    case = cases[best]
    loads = not case.fit.distance or accepts(case.state)
    # Whoever does not know that the state has to be named does not load it.
    is_default = state is not None or best == 0
    report = TreatmentReport(checkpoint, case, treatments[best], loads and is_default, optimizer)
    diagnosis = report.written(rebuild, as_reloaded(checkpoint, case.original, blueprint))
    if verify and (diagnosis.then or any(problem.command for problem in diagnosis.problems)):
        _read_values(case.checkpoint, treatments[best].case.checkpoint)
    return diagnosis


def _read_values(before: Checkpoint, after: Checkpoint) -> None:
    """Read what the commands read and make what they make; raise what they would raise."""
    there = {id(storage) for _, storage in before.storages()}
    copies = {*before.ranks.replicated} if before.ranks else set[str]()
    with compared(before.storages(), before):
        for name, tensor in after.tensors():
            is_made = isinstance(tensor.storage.data, Computed) and id(tensor.storage) not in there
            for _ in stream(tensor) if is_made or name in copies else ():
                pass


def treat(
    case: Case,
    finders: tuple[Finder, ...] = FINDERS + GUESSES,
    accepts: Accepts = declines,
    *,
    guesses: bool = True,
) -> Treatment:
    """Apply remedies as long as they bring a state nearer to its model."""
    used: list[Remedy] = []
    while case.fit.distance and len(used) < MAX_REMEDIES:
        if accepts(case.state):
            return Treatment(replace(case, fit=Fit()), tuple(used))
        step = next(filter(None, (_best(case, finder, guesses) for finder in finders)), None)
        if step is None:
            break
        remedy, case = step
        used.append(remedy)
    return Treatment(case, tuple(used))


def treated(case: Case, accepts: Accepts) -> Treatment:
    """Return the treatment by what is certain, else as another dialect of the model, else by guesses."""
    if not accepts(case.state) and (plain := _best(case, remedies.folded)):
        below = treated(plain[1], accepts)
        return replace(below, remedies=(plain[0], *below.remedies))
    if any(map(OF_ADAPTER.search, case.fit.unexpected)):  # leaving the adapter out would make another model
        return Treatment(case)
    if not accepts(case.state) and (plain := _best(case, remedies.dequantized)):
        below = treated(plain[1], accepts)  # names and shapes are those of the plain tensors
        return replace(below, remedies=(plain[0], *below.remedies))
    certain = treat(case, FINDERS, accepts)
    if not (certain.case.fit.distance or certain.is_guess):
        return certain
    try:
        step = _best(case, dialects.conforming)
        if step is not None and not step[1].fit.distance:
            is_same = not certain.case.fit.distance and _is_same(step[1].state, certain.case.state)
            return certain if is_same else Treatment(step[1], (step[0],))
        guessed = treat(case, FINDERS + GUESSES, accepts)
        if guessed.is_guess and guessed.case.is_same_architecture:  # else none is advised
            dialects.require_certain_names(case)
    except Ambiguous as error:
        return Treatment(case, open_question=dialects.question(case, error))
    left = guessed.case.fit
    if guessed.is_guess and left.missing and left.unexpected:  # another model: its shapes say nothing
        return treat(case, FINDERS, accepts, guesses=False)
    return guessed


def _is_same(one: State, other: State) -> bool:
    """Return whether each name has the same bytes of the file in both."""
    return {n: t.view for n, t in one.tensors.items()} == {n: t.view for n, t in other.tensors.items()}


def _best(case: Case, finder: Finder, guesses: bool = True) -> tuple[Remedy, Case] | None:
    """Return the remedy of one kind that helps most and the case after it, or None."""
    best: tuple[Remedy, Case] | None = None
    for remedy in finder(case):
        if remedy.is_guess and not guesses:
            continue
        after = _after(case, remedy)
        if after is not None and _far(after, remedy) < _far(best[1] if best else case, remedy):
            best = remedy, after
    return best


def _far(case: Case, remedy: Remedy) -> tuple[int, int]:
    """Return how far a state is from its model; names that meet in other sizes are nearer, unless guessed."""
    return case.fit.distance, 0 if remedy.is_guess else len(case.fit.missing)


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
    finders = remedies.wrappers, remedies.ties
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
    usual = default.where if default else None
    return [_case(checkpoint, blueprint, name, is_named=name != usual) for name in names]


def _case(checkpoint: Checkpoint, blueprint: Blueprint, name: str, *, is_named: bool) -> Case:
    """Return the case of one state; commands change the default state, so any other is taken out first."""
    original = checkpoint.state(name)
    if not is_named and original.module is None:
        return Case(checkpoint, original, blueprint, compare(original, blueprint), None, original)
    alone = selection.slim(checkpoint, state=name)
    state = alone.state()
    flags = ("--state", name) if is_named else ()
    return Case(alone, state, blueprint, compare(state, blueprint), flags, original)


def _without_state(
    checkpoint: Checkpoint, error: NoState, aim: Aim, optimizer: OptimizerAim | None
) -> Diagnosis:
    chain = CommandChain(checkpoint, aim, optimizer)
    is_only = any(is_optimizer(value) for value in walk(checkpoint.tree))
    message = "it holds only the state of an optimizer: the model's parameters are in another file"
    said = Problem("optimizer-only", message, is_remark=optimizer is not None)
    remarks = chain.add_optimizer(checkpoint) if is_only else []
    problems = (*chain.problems, said if is_only else Problem("no-state", error.reason), *remarks)
    of_optimizer = chain.optimizer_loads, chain.optimizer_python
    form = checkpoint.format
    return Diagnosis(checkpoint.path, form, None, False, Fit(), problems, None, None, *of_optimizer)


# ---- Files that hold a part of a model


ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:optim|model)_states\.pt")


@dataclass(frozen=True, slots=True)
class PartialFile:
    """A file that is a part of a whole."""

    kind: str
    message: str
    folder: str  # of the whole; "" where no command joins its parts
    way: str = ""  # to the whole, if the folder isn't one

    @contextmanager
    def opened(self) -> Iterator[Checkpoint | None]:
        """Open the whole; None where it can't be read."""
        with ExitStack() as stack:
            whole = None
            with suppress(CkptToolError):
                whole = stack.enter_context(open_checkpoint(self.folder)) if self.folder else None
            yield None if whole is None or (whole.ranks and whole.ranks.missing) else whole

    def diagnosis(self, part: Checkpoint, below: Diagnosis | None, aim: Aim) -> Diagnosis:
        """Return the diagnosis of the file, by that of the whole."""
        message, folder = self.message, self.folder
        if below is None:
            merge = command_line(["ckpttool", "merge", folder, "OUT.pt"])
            message += f"; {self.way or f'copy all of them into {folder}, then: {merge}'}"
            return Diagnosis(part.path, part.format, None, False, Fit(), (Problem(self.kind, message),), None)
        if all(problem.is_remark for problem in below.problems):
            output = free_output(folder, part)
            problem = Problem(self.kind, message, command_line(["ckpttool", "merge", folder, output]))
            then: str | None = aim.trial(output)
        else:
            problem = Problem(self.kind, f"{message}; what follows is of the whole folder")
            then = below.then
        problems = problem, *below.problems
        return Diagnosis(part.path, part.format, below.state, False, Fit(), problems, then, below.python)


def named_part(path: str) -> PartialFile | None:
    """Return what a file that does not fit is a part of, by its name and what lies next to it."""
    folder, name = os.path.dirname(path) or ".", os.path.basename(path)
    if rank := ZERO.fullmatch(name):
        message = f"the file is what rank {int(rank[1])} of a DeepSpeed run wrote"
        return PartialFile("one-rank", message, folder)
    piece = piece_of(path)
    if piece is None:
        return None
    is_shard = piece.what.startswith("shard")
    kind, message = "one-shard" if is_shard else "one-slice", f"the file is {piece.what}"
    return PartialFile(kind, message, folder if is_shard else "", piece.way)


def rank_s_pieces(checkpoint: Checkpoint, where: str | None) -> PartialFile | None:
    """Return what a file with pieces of tensors is a part of; None if its tensors are whole."""
    folder = os.path.dirname(checkpoint.path) or "."
    if SHARDING in checkpoint.metadata:
        return PartialFile("one-rank", "the file holds one rank's pieces of tensors", folder)
    state = checkpoint.found_state() if where is None else checkpoint.state(where)
    pieces = {name: like for name, like in (state.likes if state else {}).items() if like.is_piece}
    if not pieces:
        return None
    name, like = next(iter(pieces.items()))
    rank = re.search(r"rank \d+ of \d+", like.form)
    whose = f"the file is {rank[0]}" if rank else "the file is of one rank"
    count = f"{len(pieces)} of its tensors are pieces" if len(pieces) > 1 else "a tensor of it is a piece"
    return PartialFile("one-rank", f"{whose}: {count}, such as '{name[:80]}' ({like})", folder)


# ---- The diagnosis of a live model; imports torch when called


MAX_BUILDS = 16  # models that the search for sizes builds
# Names of the number of outputs, for factories that take any argument (torchvision's).
OUTPUTS = ("num_classes", "num_labels", "out_features")


@needing_torch("ckpttool.doctor with a model")
def doctor(
    file: File,
    model: torch.nn.Module | None = None,
    *,
    like: File | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None = None,
    state: str | None = None,
    spec: str | None = None,
    optimizer_spec: str | None = None,
    verify: bool = True,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model and its optimizer, and which commands fix it.

    Args:
        file: a path, or an open checkpoint.
        model: the model that it should load into; it is not changed, and may be on the meta device.
        like: in the place of a model, a checkpoint that loads into it: its header says all that is asked.
        optimizer: the model's optimizer that the file's should load into; several for a file with several,
            with None for one that is not asked about. It is not changed.
        state: dotted path of the model's state in the file; the one that fits best when None.
        spec: the SPEC that built the model, for the commands and to run its factory again with other sizes.
        optimizer_spec: the SPEC that built the optimizer, for the commands.
        verify: try the commands on the values too, with the checksums that the file states; else only on
            names and shapes.

    Returns:
        The problems, the command that fixes each, and the line of Python that loads the result.

    Raises:
        TypeError: `model` is no module, both or neither of `model` and `like` are given, or an optimizer
            without its model.
        UsageFault: the optimizer has a parameter that is none of the model's, or can't be copied.
        NoState: `state` is given, and the file has no state there.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also for a wrong checksum.
        RanksDiffer: the files of ranks hold other values where they must be equal.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> diagnosis = ckpttool.doctor("last.pt", model)
        >>> diagnosis.loads, [problem.kind for problem in diagnosis.problems]
        (False, ['prefix', 'reload'])
    """
    if optimizer is not None and model is None:
        raise TypeError("doctor() takes an optimizer with its model alone")
    if like is not None and model is None:
        with opened(file) as checkpoint, opened(like) as reference:
            blueprint = Blueprint.like(reference.path, reference.state())
            return diagnose(checkpoint, blueprint, Aim(reference.path, "--like"), state=state, verify=verify)
    if like is not None:
        raise TypeError("doctor() takes a model, or a checkpoint that loads into it as `like`, not both")
    require_module("doctor", model)
    assert model is not None
    made = optimizer if isinstance(optimizer, Sequence) or optimizer is None else [optimizer]
    optimizers = made and _aim(model, made, optimizer_spec or "SPEC")
    with opened(file) as checkpoint:
        return diagnose(
            checkpoint,
            Blueprint.of(model),
            Aim(spec or "SPEC"),
            state=state,
            accepts=partial(accepts, model),
            rebuild=partial(resized, spec) if spec else None,
            optimizer=optimizers or None,
            verify=verify,
        )


def _aim(model: torch.nn.Module, made: Sequence[torch.optim.Optimizer | None], spec: str) -> OptimizerAim:
    from .optimizer_report import OptimizerAim

    return OptimizerAim(model, made, spec)


def resized(spec: str, case: Case) -> Respec | None:
    """Find a SPEC that builds the model in a state's sizes."""
    changes: dict[str, tuple[object, int]] = {}
    fit, builds = case.fit, 0
    counts = [(there, here) for _, there, here in case.unequal_counts]
    while fit.distance and builds < MAX_BUILDS:
        for name, old, new in _candidates(spec, fit, counts):
            builds += 1
            longer = factory.respelled(spec, {name: new})
            nearer = _fit(longer, case)
            if nearer is not None and nearer.distance < fit.distance:
                changes[name] = (changes.get(name, (old, 0))[0], new)
                spec, fit = longer, nearer
                break
        else:
            break
    if fit.distance:
        return None
    sizes = (f"{name} is {new} in the file and {old} in the model" for name, (old, new) in changes.items())
    return Respec(spec, ", ".join(sizes))


def _fit(spec: str, case: Case) -> Fit | None:
    try:
        return compare(case.state, Blueprint.of(skeleton(spec)))
    except UsageFault:
        return None  # the factory does not take this argument, or not this value


def _candidates(spec: str, fit: Fit, counts: Iterable[tuple[int, int]]) -> Iterator[tuple[str, Any, int]]:
    """Yield each (argument, its value, the size or the number of layers in the file) once."""
    sizes: dict[tuple[int, int], None] = dict.fromkeys(counts)
    for _, theirs, ours in fit.mismatched:
        pairs = zip(_sizes(theirs), _sizes(ours), strict=False)
        sizes |= {(wanted, given): None for wanted, given in pairs if wanted != given}
    given, takes_anything = factory.arguments(spec)
    for wanted, had in sizes:
        sized = {name: value for name, value in given.items() if type(value) is int and value == had}
        yield from ((name, value, wanted) for name, value in sized.items())
        if takes_anything:
            yield from ((name, had, wanted) for name in OUTPUTS if name not in given)


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.strip("[]").split(", ") if size.isdigit()]


def require_module(function: str, model: object) -> None:
    """Refuse what is no module, by a TypeError that says what to pass."""
    import torch

    if isinstance(model, torch.nn.Module):
        return
    takes = f"{function}() takes a torch.nn.Module, not"
    if isinstance(model, type):
        raise TypeError(f"{takes} the class {model.__name__}: make one")
    if isinstance(model, str):
        command = f"ckpttool {function} FILE --model {model}"
        raise TypeError(f"{takes} {model!r}: build it first; the command takes such a SPEC: {command}")
    raise TypeError(f"{takes} {type(model).__name__}")
