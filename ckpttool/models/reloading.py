"""Load a checkpoint's state strictly into a plain model, in one process. Imports torch when called.

The state is loaded as it is, or without wrappers' prefixes if the model does not know its names. What does
not fit is reported by name and shape before any parameter changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

from ..conforming.modules import Blueprint
from ..core.checkpoint.checksums import compared
from ..core.checkpoint.selection import Parameters, with_names
from ..core.checkpoint.special_tensors import require_plain
from ..core.checkpoint.state import State
from ..core.files.threads import Progress
from ..core.formats.reading import File, opened
from ..core.inert_pickle.values import is_plain, walk
from ..core.lazy import needing_torch, shown_by
from ..core.tensors.ref import DTYPES, Storage, TensorRef
from ..core.tensors.values import live_tensors
from ..core.words import noted
from ..errors import Mismatch, NothingToDo, Refused, UsageFault
from .factory import accepts, with_versions
from .fit import Case, command_line, compare
from .remedies import tied_apart
from .report import Diagnosis
from .treatment import as_reloaded, doctor, require_module, resized

if TYPE_CHECKING:
    import torch

# Kinds of problems that a mismatch's own message describes.
LISTED = ("architecture", "missing", "unexpected", "size")


@dataclass(frozen=True, slots=True)
class ModelCoverage:
    """How much of a model got values from a file; what has two names counts once.

    Attributes:
        parameters: elements of the parameters that got values.
        of_parameters: elements of all parameters.
        nbytes: bytes of the parameters and buffers that got values, in the model's types.
        of_nbytes: bytes of all parameters and buffers.
    """

    parameters: int = 0
    of_parameters: int = 0
    nbytes: int = 0
    of_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of loading a state into a model.

    Attributes:
        path: the file as it was named.
        format: its format, as `torch-zip`.
        state: dotted path of the state in the file, `""` for the file itself.
        prefix: the wrappers' prefix that was removed while loading, or `""`.
        loaded: names of the model that got values.
        added: BatchNorm's counters that the file lacks; they keep the model's values.
        without_values: parameters and buffers that are on the meta device afterwards, as no file holds them.
        kept: names of `allow_missing` that keep the model's values, as the file lacks them or has others.
        ignored: names of `allow_unexpected` in the file that the model does not have.
        covered: how much of the model got values.
    """

    path: str = field(metadata={"json": None})
    format: str = field(metadata={"json": None})
    state: str
    prefix: str
    loaded: tuple[str, ...] = field(metadata={"counted": True})
    without_values: tuple[str, ...] = ()
    kept: tuple[str, ...] = noted("kept as they are in the model", json="missing")
    ignored: tuple[str, ...] = noted("ignored, as the model does not have them", json="unexpected")
    added: tuple[str, ...] = noted("missing in the file, kept as they are in the model")
    covered: ModelCoverage = field(default=ModelCoverage(), metadata={"json": None})

    _repr_html_ = shown_by("reloaded_html")


@needing_torch("ckpttool.reload")
def reload(
    file: File,
    model: torch.nn.Module,
    *,
    state: str | None = None,
    assign: bool = False,
    spec: str | None = None,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    verify: bool = True,
    progress: Progress | None = None,
) -> Reloaded:
    """Load a checkpoint's state into a model, as strictly as `load_state_dict(strict=True)`.

    Args:
        file: a path that `ckpttool.open` reads, or an open checkpoint.
        model: a plain module; values are copied into its parameters, which keep their device and dtype.
        state: dotted path of the state in the file; found when None. A list of tensors without names, as an
            average's `shadow_params`, is matched with the model's parameters by position.
        assign: put the file's tensors, mapped from the file, in the place of the model's instead of copying:
            a model of `ckpttool.skeletons()` takes no memory of its own. An optimizer built before would hold
            parameters that the model no longer has.
        spec: the SPEC that built the model, for hints, and to run its factory again with other sizes.
        allow_missing: shell patterns (`fc.*`) of names of the model that keep its values if the file lacks
            them or has them in another shape, as for a new head.
        allow_unexpected: shell patterns of names of the file that are ignored if the model lacks them.
        verify: compare what is loaded with the checksums that the file states. Without it, `assign` reads
            nothing until it is used.
        progress: called with the number of bytes after each piece that is read only for its checksum.

    Returns:
        What was loaded, and by name what was not.

    Raises:
        TypeError: `model` is no module.
        Mismatch: names or shapes differ (the model is unchanged), or a module refuses the state.
        NothingToDo: a pattern matches no name of the model, or of the file.
        NoState: the file has no model state, or none at `state`.
        UsageFault: a parameter or buffer to be loaded is on the meta device, and `assign` is False.
        Refused: the model asks for an object that only code could create, or a tensor is not a plain one.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> len(ckpttool.reload("model.safetensors", model).loaded)
        7
    """
    require_module("reload", model)
    if not assign:
        _require_memory(model)
    with opened(file) as checkpoint:
        named = with_names(checkpoint, state, parameters_of(model))
        source, where = (named.checkpoint, "") if named else (checkpoint, state)
        found, blueprint, patterns = source.state(where), Blueprint.of(model), tuple(allow_missing)
        require_plain(source.path, found.likes, "can't be loaded into a model")
        _require_matches(patterns, "model", blueprint.places)
        prefix, case = as_reloaded(source, found, blueprint)
        case, ignored = _without_ignored(case, tuple(allow_unexpected))
        case, kept = _without_kept(case, patterns)
        loaded = *case.state.tensors, *case.state.others
        covered = _coverage(blueprint, {*loaded})
        with compared(_storages(case.state) if verify else (), checkpoint, progress):
            others = {name: _made(checkpoint.path, name, value) for name, value in case.state.others.items()}
            values = with_versions(case.state, {**live_tensors(case.state.tensors), **others})
        if case.fit.distance and not accepts(model, case.state):
            diagnosis = None if named else doctor(checkpoint, model, state=state, spec=spec)
            hint = _hint(case, diagnosis, state, spec)
            raise case.fit.error(f"{checkpoint.path}: does not fit the model: {case.fit}", hint)
        if apart := tied_apart(case):
            what, _, hint = apart.partition(": ")
            raise Mismatch(f"{checkpoint.path}: {what}", hint=hint)
        values.update((name, value) for name, value in model.state_dict().items() if name in kept)
        try:
            _assign(model, values) if assign else model.load_state_dict(values, strict=True)
        except RuntimeError as error:
            reason = f"the model refused the state: {' '.join(str(error).split())[:300]}"
            raise Mismatch(f"{checkpoint.path}: {reason}") from error
    on_meta = tuple(name for name, tensor in _tensors(model) if tensor.is_meta)
    where_from = str(state) if named else found.where
    result = Reloaded(source.path, source.format, where_from, prefix, loaded, kept=kept, ignored=ignored)
    return replace(result, added=case.fit.added, without_values=on_meta, covered=covered)


def parameters_of(model: torch.nn.Module) -> Parameters:
    """Return the names, shapes and trainability of a model's parameters, in its order."""
    from torch.nn.parameter import is_lazy

    named = dict(model.named_parameters())
    trainable = tuple(name for name, parameter in named.items() if parameter.requires_grad)
    shapes = {name: () if is_lazy(parameter) else tuple(parameter.shape) for name, parameter in named.items()}
    return Parameters(shapes, trainable)


def _coverage(blueprint: Blueprint, loaded: set[str]) -> ModelCoverage:
    """Return how much of a model its loaded names are."""
    untied = {name: place for name, place in blueprint.places.items() if place.first == name}
    counts = {name: prod(place.shape or ()) for name, place in untied.items()}
    parameters = {name: counts[name] for name in blueprint.parameters if name in untied}
    known = {name: DTYPES[place.dtype] for name, place in untied.items() if place.dtype in DTYPES}
    sizes = {name: counts[name] * dtype.itemsize for name, dtype in known.items()}

    def covered(of: dict[str, int]) -> int:
        return sum(number for name, number in of.items() if name in loaded)

    return ModelCoverage(covered(parameters), sum(parameters.values()), covered(sizes), sum(sizes.values()))


def _require_matches(patterns: tuple[str, ...], whose: str, names: Iterable[str]) -> None:
    for pattern in patterns:
        if not _matching(names, (pattern,)):
            hint = f"its last name is '{''.join([*names][-1:])}'"
            raise NothingToDo(f"no name of the {whose} matches '{pattern}'", hint=hint)


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _without_ignored(case: Case, patterns: tuple[str, ...]) -> tuple[Case, tuple[str, ...]]:
    """Return the case without what the model does not have and may lack, and those names."""
    _require_matches(patterns, "file", (*case.state.tensors, *case.original.tensors, *case.original.others))
    ignored = _matching(case.fit.unexpected, patterns)
    state = _without(case.state, ignored)
    return replace(case, state=state, fit=compare(state, case.blueprint)), ignored


def _without(state: State, names: tuple[str, ...]) -> State:
    tensors = {name: tensor for name, tensor in state.tensors.items() if name not in names}
    others = {name: value for name, value in state.others.items() if name not in names}
    return replace(state, tensors=tensors, others=others)


def _without_kept(case: Case, patterns: tuple[str, ...]) -> tuple[Case, tuple[str, ...]]:
    """Return the case without what may differ, and the names of the model that keep its values."""
    fit = case.fit
    differ = {*fit.missing, *(name for name, *_ in fit.mismatched)}
    kept = _matching((name for name in case.blueprint.places if name in differ), patterns)
    if not kept:
        return case, ()
    state = _without(case.state, kept)
    places = {name: place for name, place in case.blueprint.places.items() if name not in kept}
    blueprint = replace(case.blueprint, places=places)
    return replace(case, state=state, blueprint=blueprint, fit=compare(state, blueprint)), kept


def _storages(state: State) -> Iterator[tuple[str, Storage]]:
    yield from ((name, tensor.storage) for name, tensor in state.tensors.items())
    for name, value in state.others.items():
        yield from ((name, each.storage) for each in walk(value) if isinstance(each, TensorRef))


def _made(path: str, name: str, value: object) -> object:
    try:
        if is_plain(value):
            return _plain(value)
    except RecursionError:  # it contains itself
        pass
    raise Refused(path, f"'{name}' is or holds an object, and objects are never created from a file here")


def _plain(value: object) -> object:
    """Return containers, tensors, numbers and text as they were saved."""
    if isinstance(value, TensorRef):
        return live_tensors({"": value})[""]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def _assign(model: torch.nn.Module, values: dict[str, Any]) -> None:
    """Put values in the place of the model's, in its dtypes; a parameter with several names stays one."""
    import torch

    for name, old in model.state_dict(keep_vars=True).items():
        value = values.get(name)
        if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
            values[name] = value.to(old.dtype)  # as copying would do
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    model.load_state_dict(values, strict=True, assign=True)
    assigned = dict(_tensors(model))
    for first, *others in names.values():
        for other in others:
            module, _, last = other.rpartition(".")
            setattr(model.get_submodule(module), last, assigned[first])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _require_memory(model: torch.nn.Module) -> None:
    """Raise UsageFault if values would be copied to where there is no memory, which torch only warns of."""
    import torch

    values = model.state_dict(keep_vars=True).items()
    names = [name for name, value in values if isinstance(value, torch.Tensor) and value.is_meta]
    if names:
        more = f" and {len(names) - 1} more are" if names[1:] else " is"
        raise UsageFault(
            f"'{names[0]}'{more} on the meta device, where nothing can be copied to",
            hint="ckpttool.reload(…, model, assign=True) puts the file's tensors in their place",
        )


def _hint(case: Case, diagnosis: Diagnosis | None, state: str | None, spec: str | None) -> str:
    """Return everything that makes the state load: one command, several, or what no command can do."""
    if diagnosis is None:
        return "keep the model's own values: --allow-missing GLOB"
    where = [] if state is None else ["--state", state]
    if spec and (respec := resized(spec, case)):
        return command_line(["ckpttool", "reload", diagnosis.path, "--model", respec.spec, *where])
    wrong = [problem for problem in diagnosis.problems if not problem.is_remark]
    commands = [problem.command for problem in wrong if problem.command]
    if commands and diagnosis.then:
        if len(commands) == 1 or not spec:
            return " && ".join(commands)
        return command_line(["ckpttool", "doctor", diagnosis.path, "--model", spec, *where])
    words = [problem.message for problem in wrong if not problem.command and problem.kind not in LISTED]
    return "; ".join(words) or command_line(["ckpttool", "inspect", diagnosis.path])
