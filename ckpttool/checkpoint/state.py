"""A model's state: its tensors by name, and everything else in the dict that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from ..inert_pickle.values import OrderedDict_, Record, remade
from ..tensors.ref import TensorRef
from .dotted_names import Path, dotted
from .nested_states import Container, regrouped
from .rebuilt_tensors import plain_tensor, special_tensor
from .special_tensors import Shape, SpecialTensor, placeholder, require_plain

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

    @property
    def where(self) -> str:
        """The dotted path, with the prefix of a part; `""` when the file itself is the state."""
        return dotted((*self.path, self.prefix[:-1]) if self.prefix else self.path)

    def load(self) -> dict[str, torch.Tensor]:
        """Return the tensors as torch tensors on the CPU, mapped from the file. Imports torch.

        Values are read when they are first used. Writing to a tensor changes memory, never the file. Names
        that share memory in the file share it here.

        Raises:
            Refused: a tensor is not a plain one, but sharded, sparse, quantised or the like.
            Unsupported: the installed torch lacks the element type of a tensor.
            Unreadable: the checkpoint was closed.
        """
        from ..tensors.to_torch import live_tensors

        if self.likes:
            parts = (part for like in self.likes.values() for part in like.parts.values())
            first = next(chain(self.tensors.values(), parts), None)
            path = self.where if first is None else first.storage.data.path
            require_plain(path, self.likes, "can't be loaded as plain tensors")
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
            whole = self.part_of
            rest = {key: value for key, value in whole.container.items() if not in_part(key, self.prefix)}
            own = {_outer(key, self.prefix): value for key, value in container.items()}
            return whole.restored(remade(whole.container, (rest | own).items()))
        return container if self.nested is None else regrouped(self.nested, self.places, container)


def in_part(key: object, prefix: str) -> bool:
    """Return whether a key belongs to a part: `ema.` has the keys that begin with it, `!ema.` all others."""
    begins = isinstance(key, str) and key.startswith(prefix.removeprefix("!"))
    return begins != prefix.startswith("!")


def _outer(key: object, prefix: str) -> object:
    """Return the key in the whole state of a key in a part."""
    return key if prefix.startswith("!") else f"{prefix}{key}"


def part(whole: State, prefix: str) -> State | None:
    """Return the part of a state whose keys begin with a prefix, without it; or all others, for `!prefix`.

    Args:
        whole: the state.
        prefix: with its dot at the end.

    Returns:
        The part; None if it has no tensor, or if no key begins with what it leaves out.
    """
    cut = 0 if prefix.startswith("!") else len(prefix)
    found = {key: value for key, value in whole.container.items() if in_part(key, prefix)}
    if not cut and len(found) == len(whole.container):
        return None
    state = make_state(whole.path, OrderedDict_((str(key)[cut:], value) for key, value in found.items()))
    return replace(state, part_of=whole, prefix=prefix) if state.tensors or state.likes else None


def make_state(
    path: Path,
    container: Container,
    *,
    module: Record | None = None,
    nested: Container | None = None,
    places: Mapping[str, Path] | None = None,
    elsewhere: Mapping[str, Shape] | None = None,
) -> State:
    """Return a dict as a state, its tensors apart from its other entries.

    Args:
        path: the keys that lead to the dict.
        container: the dict.
        module: the pickled model that the dict was made from; None when the file holds the dict itself.
        nested: the outermost of the nested dicts whose entries `container` lists; None for one dict.
        places: the path of each entry in `nested`.
        elsewhere: the shapes of parameters whose values may be in other files (`placeholders`).
    """
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    likes: dict[str, SpecialTensor] = {}
    if {*map(type, container)} <= {str} and {*map(type, container.values())} == {TensorRef} and not elsewhere:
        tensors.update(container)  # type: ignore[arg-type]
    else:
        empty = _empty(container, elsewhere or {})
        for key, value in container.items():
            name = str(key)
            tensor = plain_tensor(value)
            if tensor is not None and name not in empty:
                tensors[name] = tensor
                continue
            others[name] = value
            like = empty.get(name) or special_tensor(value)
            if like is not None:
                likes[name] = like
    versions = None
    if isinstance(container, OrderedDict_) and isinstance(container.attributes, dict):
        found = container.attributes.get("_metadata")
        versions = found if isinstance(found, dict) else None
    return State(path, container, tensors, others, versions, likes, module, nested, places or {})


def _empty(container: Container, elsewhere: Mapping[str, Shape]) -> dict[str, SpecialTensor]:
    """Return the empty tensors of a state that stand for parameters in other files.

    Names that are not listed were renamed since, so when none is listed, every empty float tensor counts.
    """
    tensors = {str(key): plain_tensor(value) for key, value in container.items()} if elsewhere else {}
    empty = {name: t for name, t in tensors.items() if t is not None and t.shape == (0,)}
    listed = [name for name in tensors if name in elsewhere]
    return {
        name: placeholder(tensor, elsewhere.get(name))
        for name, tensor in empty.items()
        if name in elsewhere or (not listed and "float" in tensor.dtype.name)
    }
