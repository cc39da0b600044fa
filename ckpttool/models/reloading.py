"""Load a checkpoint's state strictly into a plain model, in one process. Imports torch when called.

The state is loaded as it is, or without wrappers' prefixes if the model does not know its names. What does
not fit is reported by name and shape before any parameter changes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import formats
from ..checkpoint.checkpoint import Checkpoint, State
from ..errors import Mismatch, Refused
from ..inert_pickle.values import is_plain
from ..tensors.ref import TensorRef
from ..tensors.to_torch import live_tensors
from .diagnosis import diagnose
from .diagnosis.case import Case
from .diagnosis.fit import Blueprint, Fit, compare
from .diagnosis.name_remedies import wrappers
from .diagnosis.shell import command_line
from .diagnosis.treatment import treat
from .diagnosis.value_remedies import ties
from .skeleton import on_meta

if TYPE_CHECKING:
    import torch


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
        other_states: dotted paths of the other states that could have been meant.
    """

    path: str
    format: str
    state: str
    prefix: str
    loaded: tuple[str, ...]
    added: tuple[str, ...]
    other_states: tuple[str, ...] = ()


def reload(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    state: str | None = None,
    assign: bool = False,
    spec: str = "SPEC",
) -> Reloaded:
    """Load a checkpoint's state into a model, as strictly as `load_state_dict(strict=True)`.

    Args:
        path: any file that `ckpttool.open` reads, saved from a DDP, compiled or plain model.
        model: a plain module; its parameters keep their device and dtype, values are copied into them.
        state: dotted path of the state in the file; found when None.
        assign: put the file's tensors in the place of the model's instead of copying them. They are mapped
            from the file, on the CPU: nothing is read until it is used, and a model built within
            `ckpttool.skeletons()` takes no memory of its own. An optimizer built before would hold
            parameters that the model no longer has.
        spec: how the hint of an error names the model.

    Returns:
        What was loaded: names, the state's place in the file, the prefix that was removed.

    Raises:
        Mismatch: names or shapes differ, or a module refuses the state; with differing names and shapes the
            model is unchanged. The hint is the next command.
        NoState: the file has no model state, or none at `state`.
        Refused: the model asks for an object that only code could create.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.
    """
    with formats.open(path) as checkpoint:
        found = checkpoint.state(state)
        blueprint = Blueprint.of(model)
        prefix, fitted = _fitting(checkpoint, found, blueprint)
        fit = compare(fitted, blueprint)
        values = _values(checkpoint.path, fitted)
        if fit.distance and not accepts(model, fitted):
            raise _mismatch(checkpoint, model, blueprint, fit, state, spec)
        try:
            if assign:
                _assign(model, values)
            else:
                model.load_state_dict(values, strict=True)
        except RuntimeError as error:
            reason = f"the model refused the state: {' '.join(str(error).split())[:300]}"
            raise Mismatch(f"{checkpoint.path}: {reason}") from error
    others = tuple(checkpoint.other_states(found.path))
    return Reloaded(checkpoint.path, checkpoint.format, found.where, prefix, tuple(values), fit.added, others)


def _fitting(checkpoint: Checkpoint, state: State, blueprint: Blueprint) -> tuple[str, State]:
    """Return the removed prefix, `""` for none, and the state without wrappers' prefixes and with its ties.

    Leave out entries that are not tensors and that the model does not ask for (an epoch beside the weights).
    """
    alone = replace(checkpoint, tree=state.container)
    treated = treat(Case(alone, state, blueprint, compare(state, blueprint), None, state), (wrappers, ties))
    fitted = treated.case.state
    prefix = "".join(remedy.command[2] for remedy in treated.remedies if remedy.kind == "prefix")
    return prefix, replace(fitted, others={n: v for n, v in fitted.others.items() if n in blueprint.places})


def accepts(model: torch.nn.Module, state: State) -> bool:
    """Return whether modules with loading rules of their own take a state whose names differ from theirs.

    Weight norm renames what older torch called `weight_g`. Load into a copy without memory to find out.
    """
    import warnings

    if not any(map(_has_own_rules, model.modules())):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a copy into meta tensors does nothing
        try:
            on_meta(model).load_state_dict(_with_versions(state, live_tensors(state.tensors)), strict=True)
        except Exception:  # any error means no; the comparison of names says what is wrong
            return False
    return True


def _has_own_rules(module: torch.nn.Module) -> bool:
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    own = type(module)._load_from_state_dict not in (
        torch.nn.Module._load_from_state_dict,
        _NormBase._load_from_state_dict,
    )
    return own or bool(module._load_state_dict_pre_hooks)


def _values(path: str, state: State) -> dict[str, Any]:
    """Return the state dict to load: the tensors, and the other plain values that the model asks for."""
    others = {name: _made(path, name, value) for name, value in state.others.items()}
    return _with_versions(state, {**live_tensors(state.tensors), **others})


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
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


def _with_versions(state: State, values: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the `_metadata` by which modules recognise states of older versions."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if state.versions is not None:
        versions = {path: dict(entry) for path, entry in state.versions.items() if isinstance(entry, dict)}
        loaded._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return loaded


def _assign(model: torch.nn.Module, values: dict[str, Any]) -> None:
    """Put values in the place of the model's, in its dtypes; a parameter with several names stays one."""
    import torch

    for name, own in model.state_dict(keep_vars=True).items():
        value = values.get(name)
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
            values[name] = value.to(own.dtype)  # as copying would do
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.load_state_dict(values, strict=True, assign=True)
    for first, *others in names.values():
        for other in others:
            module, _, last = other.rpartition(".")
            setattr(model.get_submodule(module), last, model.get_parameter(first))


def _mismatch(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    blueprint: Blueprint,
    fit: Fit,
    state: str | None,
    spec: str,
) -> Mismatch:
    """Return the error that says what does not fit; its hint is the next command."""
    found = diagnose(
        checkpoint, blueprint, spec, state=state, accepts=lambda other: accepts(model, other)
    ).problems
    wrong = [problem for problem in found if not problem.is_remark]
    commands = [problem.command for problem in wrong if problem.command]
    if len(commands) == 1:
        hint = commands[0]
    elif commands:
        hint = command_line(["ckpttool", "doctor", checkpoint.path, "--model", spec])
    elif [problem.kind for problem in wrong] == ["head"]:
        hint = wrong[0].message
    else:
        hint = command_line(["ckpttool", "inspect", checkpoint.path])
    return Mismatch(
        f"{checkpoint.path}: does not fit the model: {fit}",
        missing=fit.missing,
        unexpected=fit.unexpected,
        mismatched=fit.mismatched,
        hint=hint,
    )
