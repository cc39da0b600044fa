"""What was read from a file, and finding the model's state in it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import Damaged, NoState, Refused, Unsupported
from ..inert_pickle.values import OrderedDict_, Record, TooDeep, in_brief, rebuild, tensor_of
from ..tensors.ref import Source, Storage, TensorRef
from .dotted_names import MAX_NAMES, Entry, Path, TooManyNames, contents, named_values
from .dotted_names import dotted as dotted
from .pickled_modules import BadModules, is_module, named
from .states import all_tensors, candidates, follow, is_offered, is_state, likelihood, path_of
from .states import is_optimizer as is_optimizer

if TYPE_CHECKING:
    import torch

OF_TORCH = {"format": "pt"}
"""Metadata that transformers writes into each safetensors header. Several of its versions 4 refuse a header
with any metadata and without this."""


@dataclass(frozen=True, slots=True)
class State:
    """A model's state as a file holds it.

    Attributes:
        path: the keys that lead to the state in the file; none when the file itself is the state.
        container: the dict in the checkpoint's tree; of a pickled model, one that was made of it.
        tensors: name -> tensor, in the file's order; names as in the file.
        others: entries that are not tensors (`_extra_state`, counters kept as plain numbers).
        versions: torch's `_metadata`, module path -> {'version': …}; None where the file has none.
        module: the pickled model that the state was found in; None where it is a dict of its own.
    """

    path: Path
    container: dict[object, object]
    tensors: dict[str, TensorRef]
    others: dict[str, object]
    versions: dict[object, object] | None
    module: Record | None = None

    def __repr__(self) -> str:
        return f"<State '{self.where}': {len(self.tensors)} tensors>"

    @property
    def where(self) -> str:
        """The dotted path, `""` when the file itself is the state."""
        return dotted(self.path)

    def load(self) -> dict[str, torch.Tensor]:
        """The tensors as torch tensors on the CPU, mapped from the file: nothing is read until it is used.

        Writing to them changes memory, never the file. Names that share memory in the file share it here.
        Imports torch.

        Raises:
            Unsupported: an element type that this torch does not have.
        """
        from ..tensors.to_torch import live_tensors

        return live_tensors(self.tensors)

    @property
    def anchor(self) -> object:
        """What holds the state in the checkpoint's tree: the dict, or the pickled model."""
        return self.container if self.module is None else self.module


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file, or a folder of them, that was read: its tree of values, with each tensor as a place in a file.

    Use it as a context manager, or let it go: a file is closed with the last tensor that refers to it.

    Attributes:
        source: the open file; in a folder the one that says what is in the others.
        format: its name, as cli.md lists them: `torch-zip`, `safetensors`, …
        tree: what the file holds, in the values of `inert`.
        protocol: the pickle protocol it was read under; 2 where there was no pickle.
        metadata: the text-to-text map of a safetensors header.
        shards: the other open files of a folder.
        unread: what the file holds and the tree can't, in words: the code of a TorchScript archive.
        opened: pickled objects that a change put a dict of tensors in place of, as `model (package.Class)`: a
            format that could hold the object must not silently be given the dict.
        full: a format of tensors held a whole checkpoint (`--full`); what is made from it does so again.
    """

    source: Source
    format: str
    tree: object
    protocol: int = 2
    metadata: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Source, ...] = ()
    unread: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    full: bool = False

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.format}, {self.nbytes} bytes>"

    @property
    def path(self) -> str:
        """The file's name as it was given."""
        return self.source.path

    @property
    def nbytes(self) -> int:
        """Size of the file, or of all of a folder's that were read."""
        return self.source.size + sum(shard.size for shard in self.shards)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; their tensors can't be read after."""
        for source in (self.source, *self.shards):
            source.close()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """Every tensor of the file with its dotted path, in the file's order."""
        for path, value in self.named(contents):
            tensor = tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Every storage that the tree refers to, by the dotted path of what refers to it; some repeatedly."""
        for path, value in self.named(contents):
            tensor = tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor.storage
            elif isinstance(value, Storage):
                yield dotted(path), value

    def named(self, inside: Callable[[object], Iterable[Entry] | None]) -> Iterator[tuple[Path, object]]:
        """Every value with its path, as `named_values` gives them.

        Raises:
            Unsupported: the file repeats long names so often that they would fill the memory.
        """
        try:
            yield from named_values(self.tree, inside, MAX_NAMES + 64 * self.nbytes)
        except TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None

    def states(self) -> list[Path]:
        """The paths of everything that could be a model's state, the likeliest first."""
        found = list(candidates(self.tree))
        return sorted(found, key=self._likelihood) if len(found) > 1 else found

    def state(self, where: str | None = None) -> State:
        """The model's state.

        Args:
            where: its dotted path; found when None.

        Raises:
            NoState: there is none, or none at `where`; the hint names those there are.
        """
        found = self.states()
        if where is None and not found:
            raise NoState(
                self.path,
                "holds no dict of tensors, so no model's state",
                hint=f"see what is in it: ckpttool inspect {shlex.quote(self.path)}",
            )
        # A dotted name may fit several paths; among those that are states the likeliest is meant.
        path = next((path for path in found if where in (None, dotted(path))), None)
        if path is None:
            path = path_of(self.tree, str(where))
        value = None if path is None else follow(self.tree, path)
        container = self._container(value)
        if path is None or container is None:
            raise NoState(self.path, f"holds no state named '{where}'", hint=self._where_to_look())
        if path not in found and not is_state(container):
            raise NoState(
                self.path, f"'{where}' is not a dict of tensors by name", hint=self._where_to_look()
            )
        return make_state(path, container, value if isinstance(value, Record) else None)

    def other_states(self, taken: Path | None) -> list[str]:
        """The dotted paths of what could be meant instead of the state taken, the likeliest first."""
        paths = (path for path in self.states() if path != taken)
        return [dotted(path) for path in paths if is_offered(path, follow(self.tree, path))]

    def outside(self, state: State) -> tuple[str, ...]:
        """What there is beside a state, by the shortest dotted names that say it."""
        names: list[str] = []
        value, path = self.tree, ""
        for step in state.path:
            assert isinstance(value, dict)
            names.extend(f"{path}{in_brief(key)}" for key in value if key != step)
            value, path = value[step], f"{path}{step}."
        return tuple(names)

    def changed(self, state: State, change: Callable[[object], object]) -> Checkpoint:
        """A checkpoint whose tree is a copy as `inert.rebuild` makes it, with the state's dict in its place.

        Args:
            change: gets each container once, the state's too. Where the state was found in a pickled model
                the dict takes the model's place, and `opened` says so.

        Raises:
            Refused: nested too deeply to be copied.
        """

        def at(value: object) -> object:
            return change(state.container if value is state.anchor else value)

        opened = self.opened
        if state.module is not None:
            opened += (f"{state.where or 'the model'} ({state.module.type_name})",)
        return replace(self.rebuilt(at), opened=opened)

    def rebuilt(self, change: Callable[[object], object]) -> Checkpoint:
        """A checkpoint whose tree is a copy as `inert.rebuild` makes it. Raises Refused."""
        try:
            return replace(self, tree=rebuild(self.tree, change))
        except (TooDeep, RecursionError):
            raise Refused(self.path, "its contents are nested too deeply to be copied") from None

    def _container(self, value: object) -> dict[object, object] | None:
        """A state as a dict: itself, or made of a pickled model. Raises Damaged."""
        if isinstance(value, dict) or not is_module(value):
            return value if isinstance(value, dict) else None
        try:
            return OrderedDict_(named(value))
        except BadModules as fault:
            raise Damaged(self.path, str(fault)) from None

    def _likelihood(self, path: Path) -> tuple[int, int, int]:
        return likelihood(path, lambda: self._container(follow(self.tree, path)) or {})

    def _where_to_look(self) -> str:
        names = [shlex.quote(dotted(path)) for path in self.states()]
        if not names:
            return f"see what is in it: ckpttool inspect {shlex.quote(self.path)}"
        if names == ["''"]:
            return "the file itself is the state: leave out --state"
        return f"there are: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")


def make_state(path: Path, container: dict[object, object], module: Record | None = None) -> State:
    """A dict as a state: its tensors, and apart from them the rest."""
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    if {*map(type, container)} <= {str} and all_tensors(container.values()):
        tensors.update(container)  # type: ignore[arg-type]
    else:
        for name, value in container.items():
            tensor = tensor_of(value)
            if tensor is None:
                others[str(name)] = value
            else:
                tensors[str(name)] = tensor
    versions = None
    if isinstance(container, OrderedDict_) and isinstance(container.attributes, dict):
        found = container.attributes.get("_metadata")
        versions = found if isinstance(found, dict) else None
    return State(path, container, tensors, others, versions, module)
