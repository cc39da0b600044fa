"""Start a run from the weights of a file: `--init FILE`. Imports torch.

Every rank that has the file loads it before any process group starts, so a file that does not fit is refused
on all of them. On several machines only rank 0's needs it: DDP sends rank 0's weights to all others.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from ckpttool import formats
from ckpttool.analysis import checks
from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checkpoint.dotted_names import dotted
from ckpttool.checkpoint.state import State
from ckpttool.distributed.group import given_rank
from ckpttool.errors import Mismatch, NoState, NothingToDo, UsageFault
from ckpttool.models.diagnosis import Diagnosis, diagnose
from ckpttool.models.diagnosis.fit import Aim, Blueprint, Case, compare
from ckpttool.models.diagnosis.script_lines import command_line
from ckpttool.models.diagnosis.treatment import treat
from ckpttool.models.reloading import Reloaded, reload
from ckpttool.models.skeleton import accepts
from ckpttool.transforms.wrappers import found_prefixes
from ckpttool.words import counted

# Names of one kind that a message shows; it counts the rest.
SHOWN = 8

# Kinds of problems that the lists of names show.
LISTED_ALREADY = ("missing", "unexpected", "size", "head")


def load(model: nn.Module, path: str, allow_missing: Sequence[str] = ()) -> list[str]:
    """Load a file's weights into a model, strictly but for names that match a pattern of `allow_missing`.

    Returns remarks for the user; none on a rank without the file, unless it is rank 0, whose weights all get.

    Raises:
        UsageFault: the weights do not fit the model, or some are NaN or infinite, or a pattern matches no
            name of the model. The hint lists names and the commands that fix the file.
        Unreadable, Damaged, Unsupported, Refused: the file can't be read, or fails its checksums.
        NoState: it holds no model's state, or several and nothing says which to take.
    """
    if given_rank() != 0 and not os.path.exists(path):
        return []
    with formats.open(path) as checkpoint:
        state = _state(checkpoint)
        try:
            loaded = reload(checkpoint, model, allow_missing=allow_missing)
        except NothingToDo as fault:
            raise UsageFault(f"--init-allow-missing: {fault.message}", hint=fault.hint) from None
        except Mismatch as fault:
            raise _misfit(checkpoint, model, fault, tuple(allow_missing)) from None
        checks.digest(checkpoint)  # compares checksums
        _require_finite(path, model)
        return list(_remarks(checkpoint, state, model, loaded, allow_missing))


def digest(path: str) -> str:
    """Return the SHA-256 of what `--init` takes from a file, the same for a copy in another format."""
    with formats.open(path) as checkpoint:
        _state(checkpoint)
        return checks.digest(checkpoint, verify=False)


def _state(checkpoint: Checkpoint) -> State:
    try:
        return checkpoint.state()
    except NoState as error:
        names = [dotted(path) for path in checkpoint.states()]
        if len(names) < 2:
            raise
        taken_out = _slim(checkpoint.path, names[0])
        hint = f"take one out, and --init that: {taken_out}"
        raise NoState(checkpoint.path, error.reason, hint=hint) from None


def _slim(path: str, where: str) -> str:
    output = f"{os.path.splitext(os.path.basename(path.rstrip('/')))[0]}.{where or 'state'}.safetensors"
    return command_line(["ckpttool", "slim", path, output, "--state", where])


def _require_finite(path: str, model: nn.Module) -> None:
    """Refuse weights from which no training recovers. Buffers may be infinite on purpose: masks are."""
    statistics = (pair for pair in model.named_buffers() if pair[0].endswith(("running_mean", "running_var")))
    values = (*model.named_parameters(), *statistics)
    bad = [name for name, value in values if not torch.isfinite(value).all()]
    if bad:
        verb = "is" if len(bad) == 1 else "are"
        what = f"--init {path}: {_listed(bad)} {verb} NaN or infinite: not a state to train from"
        raise UsageFault(what, hint=f"see where: {command_line(['ckpttool', 'verify', path])}")


# ---- remarks -------------------------------------------------------------------------------------------


def _remarks(
    checkpoint: Checkpoint, state: State, model: nn.Module, loaded: Reloaded, patterns: Sequence[str]
) -> Iterator[str]:
    where = f", of '{state.where}'" if state.where else ""
    stripped = f", without '{loaded.prefix}'" if loaded.prefix else ""
    yield f"{len(loaded.loaded)} tensors from {checkpoint.path}{where}{stripped}"
    if loaded.kept:
        yield f"newly made, not loaded: {_listed(loaded.kept)}"
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in loaded.kept):
            yield f"--init-allow-missing {shlex.quote(pattern)}: the file has all of it"
    if loaded.added:
        count = len(loaded.added)
        plural = "s" * (count > 1)
        yield f"the file lacks {count} counter{plural} of BatchNorm, which begin{'s' * (not plural)} at 0"
    yield from _casts(state, model, loaded)
    for other in checkpoint.other_states(state.path):
        yield f"it also holds '{other}'; to start from that: {_slim(checkpoint.path, other)}"
    unused = [name for name in state.others if name not in model.state_dict()]
    unused += [name for name in checkpoint.outside(state) if name not in checkpoint.other_states(state.path)]
    if unused:
        yield f"not used: {_listed(unused)}"


def _casts(state: State, model: nn.Module, loaded: Reloaded) -> Iterator[str]:
    """Yield a remark for each change of an element type."""
    casts: Counter[tuple[str, str]] = Counter()
    own = model.state_dict()
    for name in loaded.loaded:
        saved = next((state.tensors[n] for n in (name, f"{loaded.prefix}{name}") if n in state.tensors), None)
        if saved is not None:
            casts[saved.dtype.name, str(own[name].dtype).removeprefix("torch.")] += 1
    for (theirs, ours), number in casts.items():
        if theirs == ours:
            continue
        are = "is" if number == 1 else "are"
        yield f"{counted(number, 'tensor')} {are} {theirs} in the file and {ours} here"


def _listed(names: Sequence[str], shown: int = SHOWN) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# ---- advice --------------------------------------------------------------------------------------------


def _misfit(
    checkpoint: Checkpoint, model: nn.Module, fault: Mismatch, patterns: tuple[str, ...]
) -> UsageFault:
    """Return the error for weights that do not fit: names, and what to do about it."""
    mismatched = [f"{name} ({its} in the file, {ours} in the model)" for name, its, ours in fault.mismatched]
    kinds = {"missing": fault.missing, "unexpected": fault.unexpected, "of another shape": mismatched}
    said = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
    if not said:  # a module of the model refused its part
        return UsageFault(f"--init {fault.message}", hint=fault.hint)
    advice = _advice(checkpoint, model, patterns)
    lists = [line for kind, names in kinds.items() for line in _paragraph(kind, names)]
    # With several lines, the program prints a hint below the message.
    hint = "\n".join(lists + advice)
    return UsageFault(f"--init {checkpoint.path}: does not fit the model: {said}", hint=hint)


def _paragraph(kind: str, names: Sequence[str]) -> list[str]:
    text = f"{kind}: {_listed(names)}" if names else ""
    return textwrap.wrap(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _advice(checkpoint: Checkpoint, model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the commands that make the file fit and the flags that let it differ."""
    diagnosis = _diagnosis(checkpoint, model, patterns)
    fresh: tuple[str, ...] = ()
    if diagnosis.then is None:
        fresh = tuple(_patterns(_wanting(checkpoint, model), list(model.state_dict())))
        again = _diagnosis(checkpoint, model, (*patterns, *fresh))
        fresh, diagnosis = (fresh, again) if fresh and again.then else ((), diagnosis)
    if diagnosis.then is None:
        problems = [p for p in diagnosis.problems if p.kind not in LISTED_ALREADY and not p.is_remark]
        words = [problem.message.partition(";")[0] for problem in problems]  # what follows are names again
        return [*words, f"see what is in it: {command_line(['ckpttool', 'inspect', checkpoint.path])}"]
    commands = [p.command for p in diagnosis.problems if p.command and not p.is_remark]
    result, state = shlex.split(diagnosis.then)[2], checkpoint.state()
    wrappers = [["--prefix", found.prefix] for found in found_prefixes(state.tensors, state.versions)]
    if len(commands) == 1 and shlex.split(commands[0])[4:] in wrappers:
        commands, result = [], checkpoint.path  # loading takes it off too
    lines = ["rewrite the file:", *(f"  {command}" for command in commands)] if commands else []
    flags = [word for pattern in (*patterns, *fresh) for word in ("--init-allow-missing", pattern)]
    how = "start with what fits, the rest newly made:" if fresh else "start with:"
    return [*lines, how, f"  {command_line(['--init', result, *flags])}"]


def _wanting(checkpoint: Checkpoint, model: nn.Module) -> set[str]:
    """Return the names of the model for which the file has no values of their shape, whatever is renamed."""
    state, blueprint = checkpoint.state(), Blueprint.of(model)
    fit = treat(Case(checkpoint, state, blueprint, compare(state, blueprint), None, state)).case.fit
    return {*fit.missing, *(name for name, *_ in fit.mismatched)}


def _diagnosis(checkpoint: Checkpoint, model: nn.Module, patterns: tuple[str, ...]) -> Diagnosis:
    """Return why the file does not fit a model in which names that match a pattern may be missing."""
    blueprint = Blueprint.of(model)
    there = checkpoint.state().tensors
    places = {}
    for name, place in blueprint.places.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            places[name] = place
        elif any(key == name or key.endswith(f".{name}") for key in there):
            places[name] = replace(place, shape=None)  # any shape fits
    parameters = tuple(name for name in blueprint.parameters if name in places)
    reduced = replace(blueprint, places=places, parameters=parameters)
    return diagnose(checkpoint, reduced, Aim("MODEL"), accepts=partial(accepts, model))


def _patterns(wanting: Iterable[str], names: list[str]) -> Iterator[str]:
    """Yield patterns of whole layers for names; nothing if they are half of the model or more."""
    wanting = set(wanting)
    if 2 * len(wanting) >= len(names):
        return
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names if name in wanting)
    for layer in layers:
        below = [name for name in names if name.startswith(f"{layer}.")] if layer else []
        if below and wanting.issuperset(below):
            yield f"{layer}.*"
        else:
            yield from (name for name in names if name in wanting and name.rpartition(".")[0] == layer)
