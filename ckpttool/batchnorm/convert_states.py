"""BatchNorm states in files converted for synchronised layers, and back for plain ones.

`BatchNorm2d` and `SyncBatchNorm` have the same keys, so weights and statistics stay where they are. A
conversion adds the counter that files from before torch 0.4.1 and of other frameworks lack, the version that
torch's `_metadata` gives to layers with a counter, and a record of the kind (1d, 2d, 3d), which a
synchronised layer does not have.
Source: `_NormBase._load_from_state_dict` in torch's `nn/modules/batchnorm.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.state import State
from ..checkpoint.states import COUNTER, MEAN, VARIANCE
from ..errors import NothingToDo, UsageFault
from ..inert_pickle.values import OrderedDict_, remade, tensor_of
from ..tensors.dtypes import DTYPES
from ..tensors.ref import Computed, Storage, TensorRef
from .layers import KIND, TEXT, find, fits, given_kinds, key, recorded_kinds

VERSION = 2
"""The version in `_metadata` of layers with a counter."""

Target = Literal["sync", "plain"]


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        layers: the paths of all known BatchNorm layers of the state; `""` is the model itself.
        added: the keys of the counters that were added.
        versioned: the layers whose version was set.
        recorded: layer -> kind, of the layers whose kind was recorded.
        restored: layer -> kind, of the layers whose record was removed.
    """

    layers: tuple[str, ...]
    added: tuple[str, ...] = ()
    versioned: tuple[str, ...] = ()
    recorded: Mapping[str, str] = field(default_factory=dict)
    restored: Mapping[str, str] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """The number of changes."""
        return len(self.added) + len(self.versioned) + len(self.recorded) + len(self.restored)


def convert(
    checkpoint: Checkpoint,
    to: Target,
    *,
    kinds: Mapping[str, str] | None = None,
    exclude: Iterable[str] = (),
    as_text: bool | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Report]:
    """Convert a checkpoint's BatchNorm layers to synchronised layers, or back to plain ones.

    In both directions, a layer without a counter gets one: an int64 scalar of 0, as torch adds it when it
    loads such a state. (It matters only to layers with `momentum=None`, whose next batch then replaces their
    statistics.) A layer with an older version in `_metadata` gets version 2. With `sync`, the known kinds are
    recorded; with `plain`, the records are removed, so that the way back is exact. Weights and statistics are
    not changed. A plain dict becomes an OrderedDict if a kind is recorded.

    InstanceNorm with running statistics has exactly BatchNorm's keys, and is taken for it unless `kinds` is
    given, which names every BatchNorm of a model; then it is refused. Layers without statistics are found
    only with `kinds`.

    Args:
        checkpoint: the checkpoint, which is not changed.
        to: `sync` or `plain`.
        kinds: layer -> `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`, as from `batchnorm.kinds_of(model)`;
            prefixes of wrappers in the file's paths are ignored.
        exclude: shell patterns for the paths of layers to skip.
        as_text: record kinds in the text of a safetensors header; None to do what fits the input's format.
        state: dotted path of the model's state; None to find it.

    Returns:
        The new checkpoint, whose tensors still lie in the old file, and what was changed.

    Raises:
        NothingToDo: no layer is BatchNorm, or none would change.
        Refused: a layer with running statistics is not BatchNorm; names the layer.
        UsageFault: `to` or a kind is none of those above.
        NoState: `state` names no state, or none was found.
    """
    if to not in ("sync", "plain"):
        raise UsageFault(f"--to {to}: not a kind of BatchNorm", hint="sync or plain")
    found, patterns = checkpoint.state(state), tuple(exclude)
    layers = find(checkpoint.path, found, patterns)
    given = {} if kinds is None else given_kinds(checkpoint.path, found, layers, kinds, patterns)
    known = recorded_kinds(checkpoint, found)
    if not (layers or given or known):
        raise _none(checkpoint, found)
    alone = {path: kind for path, kind in known.items() if fits(path, patterns)}
    wanted = {**known, **given} if to == "sync" else alone
    if as_text is None:
        as_text = checkpoint.format.startswith("safetensors") and not checkpoint.full
    report = _report(found, layers, [*given, *known], known, wanted)
    if not report.changes:
        raise _fits_both(checkpoint, to)
    entries = _versions(found, report, {} if as_text else wanted)
    new = checkpoint.changed(
        found, lambda value: _converted(found, report, entries) if value is found.container else value
    )
    return replace(new, metadata=_text(checkpoint.metadata, wanted if as_text else {})), report


def _report(
    state: State, layers: list[str], named: list[str], known: Mapping[str, str], wanted: Mapping[str, str]
) -> Report:
    """Plan the conversion of a state that records the `known` kinds and should record the `wanted` ones."""
    return Report(
        tuple(dict.fromkeys((*layers, *named))),
        tuple(key(path, COUNTER) for path in layers if key(path, COUNTER) not in state.container),
        tuple(path for path in layers if _is_old(state, path)),
        {path: kind for path, kind in wanted.items() if known.get(path) != kind},
        {path: kind for path, kind in known.items() if path not in wanted},
    )


def _is_old(state: State, layer: str) -> bool:
    """Whether `_metadata`, if it names the layer, gives it the version of layers without a counter."""
    entry = (state.versions or {}).get(layer)
    version = entry.get("version") if isinstance(entry, dict) else None
    return isinstance(version, int) and version < VERSION


def _versions(state: State, report: Report, kinds: Mapping[str, str]) -> dict[object, object] | None:
    """Return the `_metadata` after a conversion, or None for none.

    An entry that becomes empty existed only for a record, and is removed with it; so is an empty `_metadata`.
    """
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


def _converted(state: State, report: Report, versions: dict[object, object] | None) -> dict[object, object]:
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


def zero(beside: Storage) -> TensorRef:
    """Return an int64 scalar of 0 in its own storage, with the file and device of another storage."""
    data = Computed(beside.data.path, 8, lambda start, count: iter([memoryview(bytes(count))]))
    storage = Storage(data, "LongStorage", beside.location, byteorder=beside.byteorder)
    return TensorRef.contiguous(storage, DTYPES["int64"], ())


def _text(metadata: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the text of a safetensors header with these kinds recorded, or with no record for none."""
    new = {name: value for name, value in metadata.items() if name != TEXT}
    return {**new, TEXT: json.dumps(dict(kinds), sort_keys=True)} if kinds else new


def _none(checkpoint: Checkpoint, state: State) -> NothingToDo:
    where = f" in '{state.where}'" if state.where else ""
    return NothingToDo(
        f"{checkpoint.path}: there is no BatchNorm{where}: no '{MEAN}' beside a '{VARIANCE}'",
        hint=f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}",
    )


def _fits_both(checkpoint: Checkpoint, to: Target) -> NothingToDo:
    hint = "it can be loaded as it is"
    if to == "sync":
        hint += "; --model SPEC records which layers are 1d, 2d and 3d"
    same = "plain and synchronised BatchNorm have the same keys, and none is missing"
    return NothingToDo(f"{checkpoint.path}: {same}", hint=hint)
