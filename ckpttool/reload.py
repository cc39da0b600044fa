"""Into a plain model, strictly, with nothing distributed. Imports torch when it is called.

The state is taken as it stands, or, when the model does not know its names, without the prefixes that
wrappers put there. What does not fit is said by name and shape before a single parameter is changed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import formats
from .checkpoint import Checkpoint, State
from .errors import Collision, Mismatch, Refused
from .keys import WRAPPERS, found_prefixes, strip_names
from .live import live_tensors
from .tensor import TensorRef

if TYPE_CHECKING:
    import torch

COUNTER = "num_batches_tracked"
"""BatchNorm's counter: torch adds it to states from before version 2 of the module."""

OWN = "n_averaged"
"""What AveragedModel keeps beside the model it wraps: it goes with the prefix."""

SHOWN = 3
"""Names of a kind that an error shows; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What was loaded.

    Attributes:
        path, format: the file.
        state: dotted path of the state in it.
        prefix: the wrappers' prefix that was taken off on the way, or `""`.
        loaded: names of the model that were given values.
        added: BatchNorm's counters that the file lacks; they stay as the model has them.
    """

    path: str
    format: str
    state: str
    prefix: str
    loaded: tuple[str, ...]
    added: tuple[str, ...]


def reload(path: str | os.PathLike[str], model: torch.nn.Module, *, state: str | None = None) -> Reloaded:
    """Loads a checkpoint's state into a model, as strictly as `load_state_dict(strict=True)`.

    Args:
        path: any file that `ckpttool.open` reads, saved from DDP, a compiled or a plain model.
        model: a plain module; its parameters keep their device and dtype, values are copied into them.
        state: dotted path of the state in the file; found when None.

    Raises:
        Mismatch: names or shapes differ; the model is unchanged.
        NoState, and what `ckpttool.open` raises.
    """
    with formats.open(path) as checkpoint:
        found = checkpoint.state(state)
        expected: dict[str, Any] = dict(model.state_dict())
        prefix, names = fitting_names(found, expected)
        extras = {old.removeprefix(prefix): value for old, value in found.others.items()}
        versions = _versions(found, prefix)
        values: dict[str, Any] = dict(live_tensors({new: found.tensors[old] for old, new in names.items()}))
        added: tuple[str, ...] = ()
        if not _takes_by_own_rules(model, values, versions):
            added = _check(checkpoint, found, names, extras, expected, _without_counters(model, versions))
        values.update(_plain_extras(checkpoint, extras, expected))
        try:
            model.load_state_dict(_with_versions(values, versions), strict=True)
        except RuntimeError as error:
            reason = f"the model refused the state: {' '.join(str(error).split())[:300]}"
            raise Mismatch(f"{checkpoint.path}: {reason}") from error
    return Reloaded(checkpoint.path, checkpoint.format, found.where, prefix, tuple(values), added)


def _with_versions(values: dict[str, Any], versions: dict[str, Any] | None) -> dict[str, Any]:
    """A state dict as torch makes it, with the `_metadata` that modules look at."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if versions is not None:
        loaded._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return loaded


def _takes_by_own_rules(
    model: torch.nn.Module, values: dict[str, Any], versions: dict[str, Any] | None
) -> bool:
    """Whether modules that load in a way of their own take a state whose names may not be theirs.

    Weight norms rename what older torch called `weight_g`. It is tried on a copy that has no memory.
    """
    import copy
    import warnings

    import torch

    if not any(map(_has_own_rules, model.modules())):
        return False
    without_memory = {
        id(tensor): torch.nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else tensor.to("meta")
        for tensor in (*model.parameters(), *model.buffers())
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nothing is copied to where there is no memory
        try:
            trial = copy.deepcopy(model, without_memory)
            trial.load_state_dict(_with_versions(values, versions), strict=True)
        except Exception:  # whatever it is, the check that follows says what is wrong
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


def fitting_names(state: State, expected: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """The names under which a state fits a model best: as they stand, or without a wrapper's prefixes.

    Returns:
        The prefix taken off (`""` for none), and old name -> new name for every tensor.
    """
    best = "", {name: name for name in state.tensors}
    for found in found_prefixes(state.tensors):
        try:
            names = dict(strip_names(state.tensors, found.prefix).names)
        except Collision:
            continue
        if _fit(names, expected) > _fit(best[1], expected):
            best = found.prefix, {old: new for old, new in names.items() if new in expected or new != OWN}
    return best


def _fit(names: Mapping[str, str], expected: Mapping[str, object]) -> int:
    return sum(new in expected for new in names.values())


def _check(
    checkpoint: Checkpoint,
    state: State,
    names: Mapping[str, str],
    extras: Mapping[str, object],
    expected: Mapping[str, Any],
    without_counters: set[str],
) -> tuple[str, ...]:
    """Raises Mismatch unless a strict load will succeed; returns the counters that torch will add."""
    given = {new: state.tensors[old] for old, new in names.items()}
    absent = [n for n in expected if n not in given and not (n in extras and _shape(expected[n]) is None)]
    added = tuple(name for name in absent if name in without_counters)
    missing = tuple(name for name in absent if name not in added)
    unexpected = tuple(name for name in given if name not in expected)
    mismatched = tuple(
        (name, *differs)
        for name, tensor in given.items()
        if name in expected and (differs := _differs(tensor, expected[name]))
    )
    if missing or unexpected or mismatched:
        raise Mismatch(
            _in_words(checkpoint, missing, unexpected, mismatched),
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
            hint=_hint(checkpoint, state, given, expected, mismatched if not (missing or unexpected) else ()),
        )
    return added


def _shape(value: Any) -> tuple[int, ...] | None:
    """None for what is no tensor (`_extra_state`) and for a parameter that takes its shape from the file."""
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _differs(tensor: TensorRef, target: Any) -> tuple[str, str] | None:
    """What a tensor of the file and its place in the model are, when the one can't be copied to the other."""
    shape = _shape(target)
    if shape is None:
        return None
    if tensor.shape != shape:
        return str(list(tensor.shape)), str(list(shape))
    if "complex" in tensor.dtype.name and not target.is_complex():  # torch would drop the imaginary part
        return tensor.dtype.name, str(target.dtype).removeprefix("torch.")
    return None


def _without_counters(model: torch.nn.Module, versions: Mapping[str, Any] | None) -> set[str]:
    """The counters that torch adds itself: of norms saved before version 2, or without a version."""
    from torch.nn.modules.batchnorm import _NormBase

    names = set()
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            version = (versions or {}).get(path, {}).get("version")
            if version is None or version < 2:
                names.add(f"{path}.{COUNTER}" if path else COUNTER)
    return names


def _in_words(
    checkpoint: Checkpoint,
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    mismatched: tuple[tuple[str, str, str], ...],
) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    if mismatched:
        shapes = [f"{name} {theirs} in the file, {mine} in the model" for name, theirs, mine in mismatched]
        parts.append(f"{len(mismatched)} of another shape or type ({_some(tuple(shapes))})")
    return f"{checkpoint.path}: does not fit the model: {'; '.join(parts)}"


def _some(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _hint(
    checkpoint: Checkpoint,
    state: State,
    given: Mapping[str, TensorRef],
    expected: Mapping[str, Any],
    mismatched: tuple[tuple[str, str, str], ...],
) -> str:
    """The command that would help most."""
    if mismatched:
        return (
            "the names fit, the sizes do not: build the model in the file's size, as in SPEC(num_classes=N)"
        )
    path = shlex.quote(checkpoint.path)
    output = shlex.quote(os.path.splitext(checkpoint.path)[0] + ".fitting.pt")
    for longer, shorter, command in ((given, expected, "strip-prefix"), (expected, given, "add-prefix")):
        prefix = _leading(longer, shorter)
        if prefix:
            return f"ckpttool {command} {path} {output} --prefix {shlex.quote(prefix)}"
    for wrapper in WRAPPERS:
        if any("." + wrapper in name for name in given.keys() - expected.keys()):
            return f"ckpttool strip-prefix {path} {output} --prefix {wrapper} --anywhere"
    others = [".".join(path) for path in checkpoint.states() if ".".join(path) != state.where]
    if others:
        return f"the state was taken from '{state.where}'; another one: --state {shlex.quote(others[0])}"
    return f"compare the names and shapes: ckpttool inspect {path}"


def _leading(longer: Mapping[str, object], shorter: Mapping[str, object]) -> str:
    """The first parts that names have more than those they should fit, or `""`."""
    parts = next(iter(longer), "").split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        carried = {name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
        if len(carried & shorter.keys()) > len(shorter) // 2:
            return prefix
    return ""


def _plain_extras(
    checkpoint: Checkpoint, extras: Mapping[str, object], expected: Mapping[str, object]
) -> dict[str, object]:
    """Entries that are no tensors (`_extra_state`), where the model asks for them and they are plain."""
    for name, value in extras.items():
        if name in expected and not isinstance(value, str | int | float | bytes | type(None)):
            raise Refused(
                checkpoint.path, f"'{name}' is an object, and objects are not made from a file here"
            )
    return {name: value for name, value in extras.items() if name in expected}


def _versions(state: State, prefix: str) -> dict[str, Any] | None:
    """The `_metadata` by which modules recognise states of older versions, under the model's own paths."""
    if state.versions is None:
        return None
    return {
        (path + ".").removeprefix(prefix).removesuffix("."): dict(entry)
        for path, entry in state.versions.items()
        if isinstance(path, str) and isinstance(entry, dict)
    }
