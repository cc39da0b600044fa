"""The optimizer of a checkpoint that is split: what it keeps of a parameter is cut like the parameter."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...checkpoint.dotted_names import Path, dotted
from ...checkpoint.rebuilt_tensors import plain_tensor, special_tensor
from ...errors import Refused
from ...inert_pickle.values import remade, tensor_of, walk
from ...tensors.ref import TensorRef
from .dtensor_records import Shards

Shape = tuple[int, ...]


class SplitOptimizer:
    """An optimizer's state, and which of its tensors are cut."""

    def __init__(
        self,
        file: str,
        path: Path,
        value: dict[Any, Any],
        tensors: Mapping[str, TensorRef],
        sharded: Collection[str],
        *,
        asked: bool,
    ) -> None:
        self.file, self.path, self.value = file, path, value
        if not isinstance(value["state"], dict):
            raise self._refused(f"'{dotted(path)}' has a {type(value['state']).__name__} for its `state`")
        names, cut = _names(value), {*sharded}
        self.whole: set[object] = set()
        unnamed: list[object] = []
        spare = Counter(tensors[name].shape for name in sharded)
        for key in value["state"]:
            name = key if key in tensors else names.get(str(key))
            if name not in tensors:
                unnamed.append(key)
            elif name not in cut:
                self.whole.add(key)
            else:
                self._require_shape(key, tensors[name].shape)
                spare[tensors[name].shape] -= 1
        if asked and unnamed:
            raise Refused(
                file,
                f"the optimizer does not say whether its parameter {unnamed[0]!s:.80} stays whole",
                hint="name its parameters first: ckpttool optimizer IN OUT --to names --model SPEC",
            )
        for key in unnamed:
            self._require_one_of(key, spare)
        known = set() if unnamed else {*names.values(), *map(str, value["state"])}
        views = {tensors[name].view for name in known & tensors.keys()}  # a tied parameter has two names
        self.without = tuple(name for name in sharded if views and tensors[name].view not in views)
        """Names of the model's that are cut, and that the optimizer, which names its parameters, has not."""

    def _require_shape(self, key: object, shape: Shape) -> None:
        for kept, tensor in self._shaped(key):
            if tensor.shape != shape:
                raise self._of_unknown_cut(key, kept, tensor, f", and the parameter has {list(shape)}")

    def _require_one_of(self, key: object, spare: Counter[Shape]) -> None:
        """Check what is kept of an unknown parameter: one shape, that of a parameter which is no other's."""
        first: TensorRef | None = None
        for kept, tensor in self._shaped(key):
            if first is not None and tensor.shape != first.shape:
                others = f", and something else in {list(first.shape)}"
                raise self._of_unknown_cut(key, kept, tensor, others)
            if first is None and spare[tensor.shape] < 1:
                fewer = "fewer parameters have" if tensor.shape in spare else "no parameter has"
                raise self._of_unknown_cut(key, kept, tensor, f", which {fewer}")
            first = tensor
        if first is not None:
            spare[first.shape] -= 1

    def _of_unknown_cut(self, key: object, kept: object, tensor: TensorRef, why: str) -> Refused:
        what = f"keeps '{kept!s:.80}' of parameter {key!s:.80} in shape {list(tensor.shape)}"
        return self._refused(f"{what}{why}: how ranks cut it is unknown")

    def _refused(self, why: str) -> Refused:
        hint = f"leave it out first: ckpttool convert IN OUT --drop {shlex.quote(dotted(self.path))}"
        return Refused(self.file, f"the optimizer {why}", hint=hint)

    def _shaped(self, key: object) -> Iterator[tuple[object, TensorRef]]:
        """Yield what is kept of a parameter in tensors with axes, which are cut."""
        entry = self.value["state"][key]
        for kept, value in entry.items() if isinstance(entry, dict) else [("all", entry)]:
            tensor = plain_tensor(value)
            if tensor is None or not isinstance(entry, dict):
                found = next(filter(None, map(_uncut, walk(value))), "")
                if found:
                    what = f"keeps {found} in '{kept!s:.80}' of parameter {key!s:.80}"
                    raise self._refused(f"{what}: how ranks cut it is unknown")
            elif tensor.shape:
                yield kept, tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are cut."""
        keys = (key for key in self.value["state"] if key not in self.whole)
        return sum(tensor.nbytes for key in keys for _, tensor in self._shaped(key))

    def of_rank(self, shards: Shards) -> dict[Any, Any]:
        """Return one rank's optimizer, keyed as this one."""

        def kept(key: object, entry: Any) -> object:
            if not isinstance(entry, dict) or key in self.whole:
                return entry
            pairs = ((name, moment(f"{key!s:.80}.{name}", value)) for name, value in entry.items())
            return remade(entry, pairs)

        def moment(name: str, value: object) -> object:
            tensor = plain_tensor(value)
            return shards.record(name, tensor) if tensor is not None and tensor.shape else value

        state = self.value["state"]
        new = remade(state, ((key, kept(key, entry)) for key, entry in state.items()))
        return remade(self.value, (self.value | {"state": new}).items())


def _names(optimizer: Mapping[Any, Any]) -> dict[str, str]:
    """Return the names of parameters by their keys, as the groups list them."""
    names: dict[str, str] = {}
    groups = optimizer["param_groups"]
    for group in groups if isinstance(groups, list) else ():
        keys, told = (group.get("params"), group.get("param_names")) if isinstance(group, dict) else (0, 0)
        told = keys if told is None else told  # where the state is keyed by names, so are the groups
        if isinstance(keys, list) and isinstance(told, list) and len(keys) == len(told):
            names |= zip(map(str, keys), map(str, told), strict=True)
    return names


def _uncut(value: object) -> str:
    """Return what a value is in words, if it is a tensor that is more than a number; else `""`."""
    tensor = tensor_of(value)
    if tensor is not None:
        return f"a tensor of shape {list(tensor.shape)}" if tensor.shape else ""
    like = special_tensor(value)
    return f"a tensor that is {like.kind}" if like is not None else ""
