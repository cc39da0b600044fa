"""BatchNorm layers found in the states of files, and which of them are 1d, 2d and 3d.

A state's keys show which layers keep running statistics. The kind is given by a model, or by a record: beside
the layer's version, `_metadata["bn1"] = {"version": 2, "kind": "BatchNorm2d"}`, where `torch.load` and
`load_state_dict` pass over it; in a safetensors file, which has no `_metadata`, as JSON in the header's text
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
"""All that a BatchNorm layer keeps with `track_running_stats=False`."""
OF_BATCHNORM = {*WITHOUT_STATISTICS, MEAN, VARIANCE, COUNTER}
"""All that a BatchNorm layer keeps."""

KINDS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")

KIND = "kind"
TEXT = "batchnorm.kinds"
"""Where a kind is recorded: in `_metadata`, or in the text of a safetensors header."""


def find(path: str, state: State, exclude: Iterable[str] = ()) -> list[str]:
    """The paths of the BatchNorm layers of a state that keep statistics, in its order.

    A layer is BatchNorm when it holds a `running_mean` and a `running_var` of one float type and one length,
    and nothing else that BatchNorm does not have.

    Args:
        path: the file, for messages.
        exclude: shell patterns for the paths of layers to pass over.

    Raises:
        Refused: a layer has running statistics and is not BatchNorm.
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
    """Whether a path matches one of these shell patterns."""
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def _members(state: State, exclude: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the names of what it keeps itself; without those that match a pattern."""
    members: dict[str, set[str]] = {}
    for entry in state.container:
        if isinstance(entry, str):
            module, _, name = entry.rpartition(".")
            members.setdefault(module, set()).add(name)
    for path in state.versions or ():  # which names those that keep nothing, too
        members.setdefault(str(path), set())
    patterns = tuple(exclude)
    return {module: names for module, names in members.items() if not fits(module, patterns)}


def _fault(state: State, layer: str, names: Collection[str]) -> str | None:
    """Why a layer with running statistics is not BatchNorm; None when it may be."""
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
    """Layer -> kind, as a conversion has recorded it in a file; what is not one of our records is ignored."""
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
    """The kinds of a model's layers under their paths in a file, also of those that keep no statistics.

    Args:
        path: the file, for messages.
        layers: those that `find` found.
        kinds: layer -> kind, by the model's own paths; prefixes of wrappers in the file's are looked through.

    Raises:
        Refused: one of `layers` is not BatchNorm in the model.
        UsageFault: no such kind.
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
    """A layer's path as the model had it before anything, or one of these, wrapped it or parts of it."""
    return ".".join(part for part in layer.split(".") if f"{part}." not in wrappers)


def key(layer: str, name: str) -> str:
    """The key of what a layer keeps under a name."""
    return f"{layer}.{name}" if layer else name
