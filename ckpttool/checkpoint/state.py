"""A model's state: its tensors by name, the rest of the dict that holds them, and the search for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import Collision, NoState
from ..inert_pickle.values import OrderedDict_, Record, remade
from ..lazy import needing_torch, shown_by
from ..remote import reads
from ..tensors.ref import TensorRef
from . import states
from .dotted_names import Container, Path, dotted, regrouped
from .rebuilt_tensors import plain_tensor, special_tensor
from .special_tensors import Shape, SpecialTensor, require_plain

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class State:
    """A model's state as a file holds it.

    Attributes:
        path: the keys that lead from the top of the file to the state; empty when the file itself is the
            state.
        container: the dict in the checkpoint's tree; for a pickled model the dict made from its modules, for
            nested dicts their entries by dotted names.
        tensors: name -> tensor, in the file's order and under the file's names.
        others: the entries that are not plain tensors (`_extra_state`, counters kept as plain numbers, and
            those of `likes`).
        versions: torch's `_metadata`, module path -> {'version': …}; None when the file has none.
        likes: the tensors that are not plain ones (sharded, sparse, quantised, …), by name.
        module: the pickled model that holds the state; None when the state is a dict.
        nested: the outermost of the nested dicts that `container` lists; None when it is one dict.
        places: the path of each entry in `nested`, by its dotted name.
        part_of: the state whose keys these are a part of; None for a whole dict.
        prefix: the keys of that part: `ema.` for those that begin with it, here without it, and `!ema.` for
            those that do not.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     state = checkpoint.state()
        ...     len(state), state["0.weight"].shape, state["0.bias"].numpy().dtype.name
        (7, (8, 4), 'float32')
    """

    path: Path
    container: Container
    tensors: dict[str, TensorRef]
    others: dict[str, object]
    versions: dict[object, object] | None
    likes: Mapping[str, SpecialTensor] = field(default_factory=dict)
    module: Record | None = None
    nested: Container | None = None
    places: Mapping[str, Path] = field(default_factory=dict)
    part_of: State | None = None
    prefix: str = ""

    def __repr__(self) -> str:
        return f"<State '{self.where}': {len(self.tensors)} tensors>"

    _repr_html_ = shown_by("state_html")

    def __getitem__(self, name: str) -> TensorRef:
        """Return a tensor by its name; `.numpy()` has its values, without torch."""
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.tensors)

    def __bool__(self) -> bool:
        return True  # an empty state is one, too

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors."""
        return self.tensors.keys()

    def items(self) -> ItemsView[str, TensorRef]:
        """Return names and tensors."""
        return self.tensors.items()

    @property
    def where(self) -> str:
        """The dotted path, with the prefix of a part; `""` when the file itself is the state."""
        return dotted((*self.path, self.prefix[:-1]) if self.prefix else self.path)

    @needing_torch("State.load")
    def load(self) -> dict[str, torch.Tensor]:
        """Return the tensors as torch tensors on the CPU, mapped from the file. Imports torch.

        Values are read when they are first used. Writing to a tensor changes memory, never the file. Names
        that share memory in the file share it here.

        Raises:
            Refused: a tensor is not a plain one, but sharded, sparse, quantised or the like.
            Unsupported: the installed torch lacks the element type of a tensor.
            Unreadable: the checkpoint was closed.
            NeedsTorch: torch is not installed.
        """
        from ..tensors.to_torch import live_tensors

        parts = (part for like in self.likes.values() for part in like.parts.values())
        paths = (tensor.storage.data.path for tensor in chain(self.tensors.values(), parts))
        require_plain(next(paths, self.where), self.likes, "can't be loaded as plain tensors")
        reads.expect(tensor.storage for tensor in self.tensors.values())
        return live_tensors(self.tensors)

    @property
    def anchor(self) -> object:
        """The object in the checkpoint's tree that holds the state: a dict, or the pickled model."""
        if self.part_of is not None:
            return self.part_of.anchor
        if self.module is not None:
            return self.module
        return self.container if self.nested is None else self.nested

    def restored(self, container: Container) -> Container:
        """Return a changed `container` in the form that the tree has: nested dicts when names stayed."""
        if self.part_of is not None:
            outer = self.part_of
            begin = "" if self.prefix.startswith("!") else self.prefix
            changed = {f"{begin}{key}": value for key, value in container.items()}
            is_own = {key: in_part(key, self.prefix) for key in outer.container}
            first = [*is_own.values()].index(True)  # where the whole part stands, before what follows it
            rest = [(key, value) for key, value in outer.container.items() if not is_own[key]]
            if both := [key for key, _ in rest if key in changed]:
                what = f"two keys would be named '{both[0]}'"
                raise Collision(what, hint=f"'{both[0]}' is there already, outside '{self.where}'")
            return outer.restored(remade(outer.container, [*rest[:first], *changed.items(), *rest[first:]]))
        return container if self.nested is None else regrouped(self.nested, self.places, container)


def in_part(key: object, prefix: str) -> bool:
    """Return whether a key belongs to a part: `ema.` has the keys that begin with it, `!ema.` all others."""
    return (isinstance(key, str) and key.startswith(prefix.removeprefix("!"))) != prefix.startswith("!")


def part(state: State, prefix: str) -> State | None:
    """Return the part of a state whose keys begin with a prefix, without it; or all others, for `!prefix`."""
    cut = 0 if prefix.startswith("!") else len(prefix)
    entries = {key: value for key, value in state.container.items() if in_part(key, prefix)}
    if not cut and len(entries) == len(state.container):
        return None
    inner = make_state(state.path, OrderedDict_((str(key)[cut:], value) for key, value in entries.items()))
    return replace(inner, part_of=state, prefix=prefix) if inner.tensors or inner.likes else None


def make_state(
    path: Path,
    container: Container,
    *,
    module: Record | None = None,
    nested: Container | None = None,
    places: Mapping[str, Path] | None = None,
    elsewhere: Mapping[str, Shape] | None = None,
) -> State:
    """Return a dict as a state, its tensors apart from its other entries."""
    # `elsewhere` has the shapes of parameters whose values may be in other files (`placeholders`).
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    likes: dict[str, SpecialTensor] = {}
    if {*map(type, container)} <= {str} and {*map(type, container.values())} == {TensorRef} and not elsewhere:
        tensors.update(container)  # type: ignore[arg-type]
    else:
        empty = states.stand_ins(container, elsewhere or {})
        for key, value in container.items():
            name = str(key)
            tensor = plain_tensor(value)
            if tensor is not None and name not in empty:
                tensors[name] = tensor
                continue
            others[name] = value
            if like := empty.get(name) or special_tensor(value):
                likes[name] = like
    attributes = container.attributes if isinstance(container, OrderedDict_) else None
    metadata = attributes.get("_metadata") if isinstance(attributes, dict) else None
    versions = metadata if isinstance(metadata, dict) else None
    return State(path, container, tensors, others, versions, likes, module, nested, places or {})


def parts_beside(tree: object) -> Mapping[str, Any] | None:
    """Return what the trainer's `--save-parts` says of the folder that holds its tensors; None if it doesn't.

    Its `folder` is a name, and its `files` are names there and the SHA-256 of each.
    """
    parts = tree.get("parts") if isinstance(tree, dict) else None
    if not isinstance(parts, dict) or not isinstance(folder := parts.get("folder"), str):
        return None
    is_name = folder == os.path.basename(folder) and folder not in ("", ".", "..")
    return parts if is_name and isinstance(parts.get("files"), dict) else None


def elsewhere(path: str, tree: object) -> NoState | None:
    """Return the error for a file whose tensors `--save-parts` wrote beside it; None for any other."""
    if (parts := parts_beside(tree)) is None:
        return None
    there = os.path.join(os.path.dirname(path), parts["folder"])
    reason = f"holds no tensors: they are in {parts['folder']}, beside it"
    return NoState(path, reason, hint=f"name that: {shlex.quote(there)}")
