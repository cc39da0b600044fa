"""BatchNorm layers found in the states of files, and which of them are 1d, 2d and 3d.

A state's keys show which layers have running statistics. The kind is given by a model, or recorded: beside
the layer's version, `_metadata["bn1"] = {"version": 2, "kind": "BatchNorm2d"}`, where `torch.load` and
`load_state_dict` ignore it; in a safetensors file, which has no `_metadata`, as JSON in the header's text
under `batchnorm.kinds`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.state import State
from ..checkpoint.states import COUNTER, MEAN, VARIANCE
from ..errors import Refused, UsageFault
from ..tensors.cast import FLOATS
from ..transforms.wrappers import WRAPPERS

WITHOUT_STATISTICS = {"weight", "bias"}
"""The keys of a BatchNorm layer with `track_running_stats=False`."""
OF_BATCHNORM = {*WITHOUT_STATISTICS, MEAN, VARIANCE, COUNTER}
"""All keys of a BatchNorm layer."""

KINDS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")

KIND = "kind"
TEXT = "batchnorm.kinds"
"""The key of a recorded kind in a safetensors header; `KIND` is the one in `_metadata`."""


def find(path: str, state: State, exclude: Iterable[str] = ()) -> list[str]:
    """Return the paths of a state's BatchNorm layers that have statistics, in the state's order.

    A layer is BatchNorm if it has a `running_mean` and a `running_var` of one float dtype and one length, and
    no key that BatchNorm does not have.

    Args:
        path: the file, for messages.
        state: the state to look through.
        exclude: shell patterns for the paths of layers to skip.

    Raises:
        Refused: a layer has running statistics but is not BatchNorm; names the layer and why.
    """
    layers = []
    for layer, names in _members(state, exclude).items():
        if not names & {MEAN, VARIANCE}:
            continue
        fault = _fault(state, layer, names)
        if fault:
            raise Refused(
                path,
                f"'{layer or 'the model itself'}' is not BatchNorm: {fault}",
                hint=f"skip it: --exclude {shlex.quote(layer)}",
            )
        layers.append(layer)
    return layers


def fits(layer: str, patterns: Iterable[str]) -> bool:
    """Say whether a path matches one of these shell patterns."""
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def _members(state: State, exclude: Iterable[str]) -> dict[str, set[str]]:
    """Return module -> the names of its own entries, without the modules that match a pattern."""
    members: dict[str, set[str]] = {}
    for entry in state.container:
        if isinstance(entry, str):
            module, _, name = entry.rpartition(".")
            members.setdefault(module, set()).add(name)
    for path in state.versions or ():  # `_metadata` also names modules without entries
        members.setdefault(str(path), set())
    patterns = tuple(exclude)
    return {module: names for module, names in members.items() if not fits(module, patterns)}


def _fault(state: State, layer: str, names: Collection[str]) -> str | None:
    """Say why a layer with running statistics is not BatchNorm; None if it may be."""
    there = {name: state.tensors.get(key(layer, name)) for name in names}
    mean, variance = there.get(MEAN), there.get(VARIANCE)
    if mean is None or variance is None:
        return f"it has no '{VARIANCE if mean is not None else MEAN}'"
    if mean.dtype.name not in FLOATS or mean.dtype is not variance.dtype:
        return f"its statistics are {mean.dtype.name} and {variance.dtype.name}"
    if len(mean.shape) != 1:
        return f"its '{MEAN}' has the shape {list(mean.shape)}"
    for name in (VARIANCE, "weight", "bias"):
        tensor = there.get(name)
        if tensor is not None and tensor.shape != mean.shape:
            return f"its '{name}' has the shape {list(tensor.shape)}, and '{MEAN}' {list(mean.shape)}"
    more = sorted(set(names) - OF_BATCHNORM)
    return f"it also holds '{more[0]}'" if more else None


def recorded_kinds(checkpoint: Checkpoint, state: State) -> dict[str, str]:
    """Return layer -> kind, as a conversion has recorded it in a file; ignore any other values there."""
    found: dict[object, object] = {}
    try:
        text = json.loads(checkpoint.metadata.get(TEXT, "{}"))
    except (ValueError, RecursionError):
        text = None
    if isinstance(text, dict):
        found.update(text)
    for path, entry in (state.versions or {}).items():
        if isinstance(entry, dict) and KIND in entry:
            found[path] = entry[KIND]
    return {path: str(kind) for path, kind in found.items() if isinstance(path, str) and kind in KINDS}


def given_kinds(
    path: str, state: State, layers: Iterable[str], kinds: Mapping[str, str], exclude: Iterable[str] = ()
) -> dict[str, str]:
    """Return the kinds of a model's layers by their paths in a file, also of layers without statistics.

    Args:
        path: the file, for messages.
        state: the state in the file.
        layers: the layers that `find` found in it.
        kinds: layer -> kind, by the model's own paths; prefixes of wrappers in the file's paths are ignored.
        exclude: shell patterns for the paths of layers to skip.

    Raises:
        Refused: one of `layers` is not BatchNorm in the model; names the layer.
        UsageFault: a kind is not one of `KINDS`.
    """
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise UsageFault(f"'{name}' is of the kind {kind}", hint=f"one of {', '.join(KINDS)}")
    tracked, given = set(layers), {}
    for layer, names in _members(state, exclude).items():
        name = layer if layer in kinds else unwrapped(layer)
        if name in kinds and (layer in tracked or names <= WITHOUT_STATISTICS):
            given[layer] = kinds[name]
        elif layer in tracked:
            raise Refused(
                path,
                f"'{layer or 'the model itself'}' is not a BatchNorm1d, 2d or 3d in the model",
                hint=f"skip it: --exclude {shlex.quote(layer)}",
            )
    return given


def unwrapped(layer: str, wrappers: Collection[str] = WRAPPERS.keys()) -> str:
    """Return a layer's path without the names of wrappers, of the model or of parts of it."""
    return ".".join(part for part in layer.split(".") if f"{part}." not in wrappers)


def key(layer: str, name: str) -> str:
    """Return the key of a layer's entry; the layer `""` is the model itself."""
    return f"{layer}.{name}" if layer else name
