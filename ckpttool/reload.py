"""Into a plain model, strictly, with nothing distributed. Imports torch when it is called.

The state is taken as it stands, or, when the model does not know its names, without the prefixes that
wrappers put there. What does not fit is said by name and shape before a single parameter is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import formats
from .checkpoint import Checkpoint, State
from .errors import Collision, Mismatch, Refused
from .keys import found_prefixes, strip_names
from .live import live_tensors
from .tensor import TensorRef

if TYPE_CHECKING:
    import torch

COUNTER = "num_batches_tracked"
"""BatchNorm's counter: torch adds it to states from before version 2 of the module, which lack it."""

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
        added: counters that the file lacks and torch starts at zero.
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
        expected = _expected(model)
        prefix, names = fitting_names(found, expected)
        added = _check(checkpoint, found, names, expected)
        values: dict[str, Any] = dict(live_tensors({new: found.tensors[old] for old, new in names.items()}))
        values.update(_extras(checkpoint, found, prefix, expected))
        model.load_state_dict(_with_versions(found, prefix, values), strict=True)
    return Reloaded(checkpoint.path, checkpoint.format, found.where, prefix, tuple(values), added)


def _expected(model: torch.nn.Module) -> dict[str, Any]:
    return dict(model.state_dict())


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
            best = found.prefix, names
    return best


def _fit(names: Mapping[str, str], expected: Mapping[str, object]) -> int:
    return sum(new in expected for new in names.values())


def _check(
    checkpoint: Checkpoint, state: State, names: Mapping[str, str], expected: Mapping[str, Any]
) -> tuple[str, ...]:
    """Raises Mismatch unless a strict load will succeed; returns the counters that torch will add."""
    given = {new: state.tensors[old] for old, new in names.items()}
    absent = [name for name in expected if name not in given and name not in state.others]
    added = tuple(n for n in absent if n.endswith(COUNTER) and _before_counters(state))
    missing = tuple(name for name in absent if name not in added)
    unexpected = tuple(name for name in given if name not in expected)
    mismatched = tuple(
        (name, str(list(tensor.shape)), str(list(expected[name].shape)))
        for name, tensor in given.items()
        if name in expected and tensor.shape != tuple(expected[name].shape)
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


def _before_counters(state: State) -> bool:
    """Whether no module of the file is of a version that knows the counter (2, since torch 0.4.1)."""
    versions = state.versions or {}
    entries = [entry.get("version") for entry in versions.values() if isinstance(entry, dict)]
    return not any(name.endswith(COUNTER) for name in state.tensors) and 2 not in entries


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
        parts.append(f"{len(mismatched)} of another shape ({_some(tuple(shapes))})")
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
    for longer, shorter, command in ((given, expected, "strip-prefix"), (expected, given, "add-prefix")):
        prefix = _leading(longer, shorter)
        if prefix:
            output = os.path.splitext(checkpoint.path)[0] + ".fitting.pt"
            return f"ckpttool {command} {checkpoint.path} {output} --prefix {prefix}"
    others = [".".join(path) for path in checkpoint.states() if ".".join(path) != state.where]
    if others:
        return (
            f"the state was taken from '{state.where}'; there are also: --state {' , --state '.join(others)}"
        )
    return f"compare the names and shapes: ckpttool inspect {checkpoint.path}"


def _leading(longer: Mapping[str, object], shorter: Mapping[str, object]) -> str:
    """The first parts that names have more than those they should fit, or `""`."""
    parts = next(iter(longer), "").split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        carried = {name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
        if len(carried & shorter.keys()) > len(shorter) // 2:
            return prefix
    return ""


def _extras(
    checkpoint: Checkpoint, state: State, prefix: str, expected: Mapping[str, object]
) -> dict[str, object]:
    """Entries that are no tensors (`_extra_state`), where the model asks for them and they are plain."""
    extras: dict[str, object] = {}
    for old, value in state.others.items():
        name = old.removeprefix(prefix)
        if name not in expected:
            continue
        if not isinstance(value, str | int | float | bytes | type(None)):
            raise Refused(checkpoint.path, f"'{old}' is an object, and objects are not made from a file here")
        extras[name] = value
    return extras


def _with_versions(state: State, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the `_metadata` by which modules recognise states of older versions."""
    from collections import OrderedDict

    loaded: OrderedDict[str, Any] = OrderedDict(values)
    if state.versions is not None:
        versions: OrderedDict[str, Any] = OrderedDict()
        for path, entry in state.versions.items():
            if isinstance(path, str) and isinstance(entry, dict):
                versions[(path + ".").removeprefix(prefix).removesuffix(".")] = dict(entry)
        loaded._metadata = versions  # type: ignore[attr-defined]
    return loaded
