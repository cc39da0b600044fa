"""A checkpoint as it was read: the tree of values, and the model's state found in it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Damaged, NoState, Refused, Unsupported
from ..inert_pickle.values import Global, OrderedDict_, Record, TooDeep, in_brief, rebuild, tensor_of
from ..tensors.ref import Source, Storage, TensorRef
from .dotted_names import MAX_NAMES, Entry, Path, TooManyNames, contents, dotted, named_values
from .pickled_modules import BadModules, is_module, named
from .states import all_tensors, candidates, follow, is_offered, is_state, likelihood, path_of

if TYPE_CHECKING:
    import torch

OF_TORCH = {"format": "pt"}
"""The metadata that transformers writes into each safetensors header. Several versions 4 of it refuse a
header that has metadata but not this entry."""


@dataclass(frozen=True, slots=True)
class State:
    """A model's state as a file holds it.

    Attributes:
        path: the keys that lead from the top of the file to the state; empty when the file itself is the
            state.
        container: the dict in the checkpoint's tree; for a pickled model, the dict made from its modules.
        tensors: name -> tensor, in the file's order and under the file's names.
        others: the entries that are not tensors (`_extra_state`, counters kept as plain numbers).
        versions: torch's `_metadata`, module path -> {'version': …}; None when the file has none.
        module: the pickled model that holds the state; None when the state is a dict.
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
        """The dotted path; `""` when the file itself is the state."""
        return dotted(self.path)

    def load(self) -> dict[str, torch.Tensor]:
        """Return the tensors as torch tensors on the CPU, mapped from the file. Imports torch.

        Values are read when they are first used. Writing to a tensor changes memory, never the file. Names
        that share memory in the file share it here.

        Raises:
            Unsupported: the installed torch lacks the element type of a tensor.
            Unreadable: the checkpoint was closed.
        """
        from ..tensors.to_torch import live_tensors

        return live_tensors(self.tensors)

    @property
    def anchor(self) -> object:
        """The object in the checkpoint's tree that holds the state: the dict, or the pickled model."""
        return self.container if self.module is None else self.module


class Remark(NamedTuple):
    """Something in a file that its format does not allow.

    Attributes:
        name: the record, tensor or storage.
        message: what is wrong with it, to be read after the name.
    """

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file, or a folder of files, as it was read: a tree of values, each tensor a place in a file.

    Use it as a context manager, or drop it: a file is closed with the last tensor that refers to it.

    Attributes:
        source: the open file; of a folder, the file that lists the others.
        format: the name of the format, such as `torch-zip` or `safetensors`.
        tree: the contents, in the inert values of `inert_pickle.values`.
        protocol: the protocol of the pickle it was read from; 2 when there was no pickle.
        metadata: the text-to-text map of a safetensors header.
        shards: the other open files of a folder.
        unread: contents of the file that the tree can't hold, in words, such as the code of a TorchScript
            archive.
        opened: pickled objects that a transform replaced by a dict of tensors, as `model (package.Class)`. A
            format that could hold the object refuses to be given the dict instead.
        full: a tensor format held a whole checkpoint (`--full`); outputs made from it hold the whole again.
        names: every name that the file's pickles mention, in the tree or not: a pickle can call a function
            and drop what it returned.
        remarks: where torch refuses the file, or no writer of torch's makes such a thing.
        device: the device that storages are tagged with in a `.pt` written from this; None keeps their own.
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
    names: frozenset[Global] = frozenset()
    remarks: tuple[Remark, ...] = ()
    device: str | None = None

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.format}, {self.nbytes} bytes>"

    @property
    def path(self) -> str:
        """The file's name as the caller gave it."""
        return self.source.path

    @property
    def nbytes(self) -> int:
        """The size in bytes of the file, or of all files of the folder."""
        return self.source.size + sum(shard.size for shard in self.shards)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Their tensors can't be read afterwards."""
        for source in (self.source, *self.shards):
            source.close()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """Yield every tensor of the file with its dotted path, in the file's order.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            tensor = tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Yield every storage with the dotted path of the tensor that uses it.

        A storage that several tensors share is yielded once for each of them.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            tensor = tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor.storage
            elif isinstance(value, Storage):
                yield dotted(path), value

    def named(self, inside: Callable[[object], Iterable[Entry] | None]) -> Iterator[tuple[Path, object]]:
        """Yield every value with its path, as `named_values` does.

        Args:
            inside: returns the entries of a container, or None for a value not to be entered.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        try:
            yield from named_values(self.tree, inside, MAX_NAMES + 64 * self.nbytes)
        except TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None

    def states(self) -> list[Path]:
        """Return the paths of everything that could be a model's state, the likeliest first."""
        found = list(candidates(self.tree))
        return sorted(found, key=self._likelihood) if len(found) > 1 else found

    def state(self, where: str | None = None) -> State:
        """Return the model's state.

        Args:
            where: its dotted path; None takes the likeliest state of the file.

        Raises:
            NoState: the file holds no dict of tensors, or none at `where`; the hint lists those it has.
            Damaged: the state is a pickled model whose modules contain themselves.
        """
        found = self.states()
        if where is None and not found:
            raise NoState(
                self.path,
                "holds no dict of tensors, so no model's state",
                hint=f"see what is in it: ckpttool inspect {shlex.quote(self.path)}",
            )
        # Keys may contain dots, so one dotted name may fit several paths: take the likeliest state.
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
        """Return the dotted paths of the states not taken that a user may have meant, the likeliest first."""
        paths = (path for path in self.states() if path != taken)
        return [dotted(path) for path in paths if is_offered(path, follow(self.tree, path))]

    def outside(self, state: State) -> tuple[str, ...]:
        """Return the names of everything outside a state, each as the shortest dotted path that covers it."""
        names: list[str] = []
        value, path = self.tree, ""
        for step in state.path:
            assert isinstance(value, dict)
            names.extend(f"{path}{in_brief(key)}" for key in value if key != step)
            value, path = value[step], f"{path}{step}."
        return tuple(names)

    def changed(self, state: State, change: Callable[[object], object]) -> Checkpoint:
        """Return a checkpoint with a changed copy of the tree; `change` sees the state's dict in its place.

        Args:
            state: a state of this checkpoint.
            change: called once for each container, and for the state's dict; returns it or its replacement.
                When the state belongs to a pickled model, its dict takes the model's place, and `opened`
                says so.

        Raises:
            Refused: the tree is nested too deeply to be copied.
        """

        def at(value: object) -> object:
            return change(state.container if value is state.anchor else value)

        opened = self.opened
        if state.module is not None:
            opened += (f"{state.where or 'the model'} ({state.module.type_name})",)
        return replace(self.rebuilt(at), opened=opened)

    def rebuilt(self, change: Callable[[object], object]) -> Checkpoint:
        """Return a checkpoint with a copy of the tree as `inert_pickle.values.rebuild` makes it.

        Args:
            change: called once for each container; returns it or its replacement.

        Raises:
            Refused: the tree is nested too deeply to be copied.
        """
        try:
            return replace(self, tree=rebuild(self.tree, change))
        except (TooDeep, RecursionError):
            raise Refused(self.path, "its contents are nested too deeply to be copied") from None

    def _container(self, value: object) -> dict[object, object] | None:
        """Return a state as a dict: the value itself, or the state dict of a pickled model."""
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
    """Return a dict as a state, its tensors apart from its other entries.

    Args:
        path: the keys that lead to the dict.
        container: the dict.
        module: the pickled model that the dict was made from; None when the file holds the dict itself.
    """
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
