"""BatchNorm states in files converted for synchronised layers, and back for plain ones.

`BatchNorm2d` and `SyncBatchNorm` have the same keys, so weights and statistics stay where they are. A
conversion adds the counter that files from before torch 0.4.1 and of other frameworks lack, the version that
torch's `_metadata` gives to layers with a counter, and a record of the kind (1d, 2d, 3d), which a
synchronised layer does not have.
Source: `_NormBase._load_from_state_dict` in torch's `nn/modules/batchnorm.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.module_tree import kinds_in, with_kinds
from ..core.checkpoint.prefixes import WRAPPERS
from ..core.checkpoint.state import COUNTER, MEAN, VARIANCE, State
from ..core.inert_pickle.values import OrderedDict_, remade, tensor_of
from ..core.tensors.cast import FLOATS
from ..core.tensors.ref import DTYPES, Computed, Storage, TensorRef
from ..errors import NothingToDo, Refused, UsageFault

WITHOUT_STATISTICS = {"weight", "bias"}  # the keys of a layer with `track_running_stats=False`
OF_BATCHNORM = {*WITHOUT_STATISTICS, MEAN, VARIANCE, COUNTER}

KINDS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")

KIND = "kind"  # the key of a recorded kind in `_metadata`


def find(path: str, state: State, exclude: Iterable[str] = ()) -> list[str]:
    """Return the paths of a state's BatchNorm layers that have statistics, in the state's order."""
    layers = []
    for layer, names in _members(state, exclude).items():
        if not names & {MEAN, VARIANCE}:
            continue
        if fault := _fault(state, layer, names):
            raise _refused(path, layer, f"is not BatchNorm: {fault}")
        layers.append(layer)
    return layers


def _refused(path: str, layer: str, why: str) -> Refused:
    hint = f"skip it: --exclude {shlex.quote(layer)}"
    return Refused(path, f"'{layer or 'the model itself'}' {why}", hint=hint)


def fits(layer: str, patterns: Iterable[str]) -> bool:
    """Return whether a path matches one of these shell patterns."""
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
    """Return why a layer with running statistics is not BatchNorm; None if it may be."""
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
    recorded: dict[object, object] = {**kinds_in(checkpoint.metadata)}
    for path, entry in (state.versions or {}).items():
        if isinstance(entry, dict) and KIND in entry:
            recorded[path] = entry[KIND]
    return {path: str(kind) for path, kind in recorded.items() if isinstance(path, str) and kind in KINDS}


def given_kinds(
    path: str, state: State, layers: Iterable[str], kinds: Mapping[str, str], exclude: Iterable[str] = ()
) -> dict[str, str]:
    """Return the kinds of a model's layers by their paths in a file, also of layers without statistics."""
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise UsageFault(f"'{name}' is of the kind {kind}", hint=f"one of {', '.join(KINDS)}")
    tracked, given = set(layers), {}
    for layer, names in _members(state, exclude).items():
        name = layer if layer in kinds else unwrapped(layer)
        if name in kinds and (layer in tracked or names <= WITHOUT_STATISTICS):
            given[layer] = kinds[name]
        elif layer in tracked:
            raise _refused(path, layer, "is not a BatchNorm1d, 2d or 3d in the model")
    return given


def unwrapped(layer: str, wrappers: Collection[str] = WRAPPERS.keys()) -> str:
    """Return a layer's path without the names of wrappers, of the model or of parts of it."""
    return ".".join(part for part in layer.split(".") if f"{part}." not in wrappers)


def key(layer: str, name: str) -> str:
    """Return the key of a layer's entry; the layer `""` is the model itself."""
    return f"{layer}.{name}" if layer else name


VERSION = 2  # in `_metadata`, of layers with a counter

Target = Literal["sync", "plain"]


@dataclass(frozen=True, slots=True)
class BatchNormReport:
    """What a conversion did.

    Attributes:
        layers: names of the BatchNorm layers.
        added: counters that were added, as 0.
        versioned: layers that got the version of those with a counter.
        recorded: layer -> its kind, where that was written down: `BatchNorm2d`.
        restored: layer -> its kind, where that was written down before, and is removed.
    """

    layers: tuple[str, ...]
    added: tuple[str, ...] = ()
    versioned: tuple[str, ...] = ()
    recorded: Mapping[str, str] = field(default_factory=dict)
    restored: Mapping[str, str] = field(default_factory=dict)


def convert(
    checkpoint: Checkpoint,
    to: Target,
    *,
    kinds: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
    as_text: bool | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, BatchNormReport]:
    """Convert a checkpoint's BatchNorm layers to synchronised layers, or back to plain ones."""
    if to not in ("sync", "plain"):
        raise UsageFault(f"--to {to}: not a kind of BatchNorm", hint="sync or plain")
    target, patterns = checkpoint.state(state), tuple(exclude)
    layers = find(checkpoint.path, target, patterns)
    given = {} if kinds is None else given_kinds(checkpoint.path, target, layers, kinds, patterns)
    known = recorded_kinds(checkpoint, target)
    if not (layers or given or known):
        where = f" in '{target.where}'" if target.where else ""
        reason = f"there is no BatchNorm{where}: no '{MEAN}' next to a '{VARIANCE}'"
        hint = f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}"
        raise NothingToDo(f"{checkpoint.path}: {reason}", hint=hint)
    alone = {path: kind for path, kind in known.items() if fits(path, patterns)}
    wanted = {**known, **given} if to == "sync" else alone
    if as_text is None:
        as_text = checkpoint.format.startswith("safetensors") and not checkpoint.full
    report = BatchNormReport(
        tuple(dict.fromkeys((*layers, *given, *known))),
        tuple(key(path, COUNTER) for path in layers if key(path, COUNTER) not in target.container),
        tuple(path for path in layers if _is_old(target, path)),
        {path: kind for path, kind in wanted.items() if known.get(path) != kind},
        {path: kind for path, kind in known.items() if path not in wanted},
    )
    if not (report.added or report.versioned or report.recorded or report.restored):
        same = "plain and synchronised BatchNorm have the same keys, and none is missing"
        records = "; --model SPEC records which layers are 1d, 2d and 3d" if to == "sync" else ""
        raise NothingToDo(f"{checkpoint.path}: {same}", hint=f"it can be loaded as it is{records}")
    entries = _versions(target, report, {} if as_text else wanted)
    made = _converted(target, report, entries)
    new = checkpoint.changed(target, lambda value: made if value is target.container else value)
    return replace(new, metadata=with_kinds(checkpoint.metadata, wanted if as_text else {})), report


def _is_old(state: State, layer: str) -> bool:
    """Whether `_metadata`, if it names the layer, gives it the version of layers without a counter."""
    entry = (state.versions or {}).get(layer)
    version = entry.get("version") if isinstance(entry, dict) else None
    return isinstance(version, int) and version < VERSION


def _versions(state: State, report: BatchNormReport, kinds: Mapping[str, str]) -> dict[object, object] | None:
    """Return the `_metadata` after a conversion, or None if it has none."""
    if state.versions is None and not kinds:
        return None
    old = OrderedDict_() if state.versions is None else state.versions
    new = remade(old, old.items())
    for layer in (*report.versioned, *kinds, *report.restored):
        before = new.get(layer)
        entry = dict(before) if isinstance(before, dict) else {}
        if layer in report.versioned:
            entry["version"] = VERSION
        entry.pop(KIND, None)
        if layer in kinds:
            entry[KIND] = kinds[layer]
        new[layer] = entry
        if not entry:
            del new[layer]
    return new if new or not old else None


def _converted(
    state: State, report: BatchNormReport, versions: dict[object, object] | None
) -> dict[object, object]:
    """Return the state's dict after a conversion: each new counter follows its layer's variance."""
    new = remade(state.container, _entries(state.container, set(report.added)))
    if versions is not None and not isinstance(new, OrderedDict_):
        new = OrderedDict_(new.items())  # a plain dict has no place for `_metadata`
    if isinstance(new, OrderedDict_) and (versions is not None or state.versions is not None):
        attributes = dict(new.attributes) if isinstance(new.attributes, dict) else {}
        attributes.pop("_metadata", None)
        if versions is not None:
            attributes["_metadata"] = versions
        new.attributes = attributes or None
    return new


def _entries(container: Mapping[object, object], added: set[str]) -> Iterator[tuple[object, object]]:
    for name, value in container.items():
        yield name, value
        counter = f"{str(name).removesuffix(VARIANCE)}{COUNTER}"
        tensor = tensor_of(value)
        if tensor is not None and str(name).endswith(VARIANCE) and counter in added:
            yield counter, zero(tensor.storage)


def zero(like: Storage) -> TensorRef:
    """Return an int64 scalar of 0 in its own storage, with the file and device of another storage."""
    where = {"location": like.location, "byteorder": like.byteorder}
    return TensorRef.of_bytes(Computed.in_memory(like.data.path, bytes(8)), DTYPES["int64"], (), **where)
