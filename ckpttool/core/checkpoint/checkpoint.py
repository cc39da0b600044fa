"""A checkpoint as it was read: the tree of values, the files behind it, and the ranks that wrote them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ...errors import Damaged, NoState, Refused
from ..inert_pickle.values import Global, TooDeep, in_brief, rebuild, tensor_of
from ..lazy import shown_by
from ..tensors.ref import Computed, DType, Source, Storage, TensorRef, extent
from ..words import first_few
from .dotted_names import MAX_NAMES, Entry, Path, contents, dotted, follow
from .optimizer_view import is_optimizer
from .pickled_modules import own_attributes
from .special_tensors import SpecialTensor, index_fault, plain_tensor, special_tensor
from .state import State, StateSearch, in_part, is_offered, places_of

HINT = "each rank wrote its own: copy the files of all ranks into one folder"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that wrote a checkpoint, each a part of it.

    Attributes:
        framework: what wrote the files, as users call it: `FSDP2 (DTensor)`, `DeepSpeed ZeRO-3`.
        world_size: how many ranks there were; None when no file says.
        mesh: the axes of the device mesh with their sizes, as `fsdp 2 x tp 2`; empty when there was none.
        step: the training step that the files state; None when they do not.
        held: rank -> bytes of the tensors that its files hold, whoever else holds them too.
        replicated: the dotted names of the tensors that several ranks hold; they are compared when the values
            are read.
        missing: ranks whose files are not there. The checkpoint can be looked at, but not used.
        lacking: the names of these files, the first few, where those of the others tell them.
    """

    framework: str
    world_size: int | None = None
    mesh: str = ""
    step: int | None = None
    held: Mapping[int, int] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    lacking: tuple[str, ...] = ()
    device: str = ""  # the type of the devices in the mesh

    @property
    def axes(self) -> str:
        """The mesh as `mesh fsdp 2 x tp 2`; empty when it is one axis without a name, of all ranks."""
        return f"mesh {self.mesh}" if self.mesh and self.mesh != str(self.world_size) else ""


def require_all(
    path: str, missing: Sequence[int], world_size: int | None, lacking: Sequence[str] = ()
) -> None:
    """Check that no rank's file is missing."""
    if missing:
        of = "" if world_size is None else f" of {world_size}"
        files, are = ("file of rank", "is") if len(missing) == 1 else ("files of ranks", "are")
        names = f": {', '.join(lacking[:4])}{' …' if lacking[4:] else ''}" if lacking else ""
        raise Damaged(path, f"the {files} {first_few(missing, 8)}{of} {are} missing{names}", hint=HINT)


# ---- The checkpoint.

# The metadata that transformers writes into each safetensors header. Several versions 4 of it refuse a
# header that has metadata but not this entry.
OF_TORCH = {"format": "pt"}


# The metadata entry in which HuggingFaceStorageWriter states where a rank's pieces lie in their tensors.
SHARDING = "DCP_SHARDING_INFO"


class Remark(NamedTuple):
    """Something in a file that its format does not allow."""

    name: str  # the record, tensor or storage
    message: str  # what is wrong with it, to be read after the name


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
        ranks: what is known of the ranks that each wrote a part of it; None when one process wrote it.
        packed: how many tensors the file holds in each of its own types, if it packs some, as `Q4_K`: their
            values are computed, and `dtype` is that of the values.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     checkpoint.format, checkpoint.tree["epoch"], checkpoint.state().where
        ('torch-zip', 3, 'model')
    """

    source: Source
    format: str
    tree: Any  # object would refuse a user's `tree["epoch"]`
    protocol: int = 2
    metadata: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Source, ...] = ()
    unread: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    full: bool = False
    names: frozenset[Global] = frozenset()
    remarks: tuple[Remark, ...] = ()
    device: str | None = None
    ranks: Ranks | None = None
    packed: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.format}, {self.nbytes} bytes>"

    _repr_html_ = shown_by("checkpoint_html")

    @property
    def path(self) -> str:
        """The file's name as the caller gave it."""
        return self.source.path

    @property
    def sources(self) -> tuple[Source, ...]:
        """The open file, or all those of the folder."""
        return self.source, *self.shards

    @property
    def nbytes(self) -> int:
        """The size in bytes of the file, or of all files of the folder."""
        return sum(source.size for source in self.sources)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Their tensors can't be read afterwards."""
        for source in self.sources:
            source.close()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """Yield every tensor of the file with its dotted path, in the file's order.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            tensor = value if type(value) is TensorRef else tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor

    def storages(self) -> Iterator[tuple[str, Storage]]:
        """Yield every storage with the dotted path of the tensor that uses it.

        A storage that several tensors share is yielded once for each of them.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            tensor = value if type(value) is TensorRef else tensor_of(value)
            if tensor is not None:
                yield dotted(path), tensor.storage
            elif isinstance(value, Storage):
                yield dotted(path), value

    def named(
        self, inside: Callable[[object], Iterable[Entry] | None], *, again: bool = False
    ) -> Iterator[tuple[Path, object]]:
        """Yield every value with its path, as `named_values` does.

        Args:
            inside: returns the entries of a container, or None for a value not to be entered.
            again: yield a `dotted_names.Again` at each further place of a container.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        return self._search.named(inside, again=again)

    def optimizers(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the state dict of each optimizer, nested or flat, with its dotted path; as `named` does."""
        return ((dotted(path), value) for path, value in self.named(contents) if is_optimizer(value))

    def states(self) -> list[Path]:
        """Return the paths of everything that could be a model's state, the likeliest first."""
        return self._search.states()

    @property
    def _search(self) -> StateSearch:
        return StateSearch(self.path, self.tree, MAX_NAMES + 64 * self.nbytes)

    def state(self, where: str | None = None) -> State:
        """Return the model's state.

        Args:
            where: its dotted path; None takes the likeliest state of the file. A dict that holds tensors only
                in dicts inside it is one state, whose names are dotted. A prefix of a state's keys takes the
                keys that begin with it, without it; with `!` before the prefix, all the others.

        Raises:
            NoState: the file holds no dict of tensors, or none at `where`, or several that are equally
                likely; the hint lists those it has.
            Damaged: the state is a pickled model whose modules contain themselves.
            Refused: two entries of nested dicts have one dotted name; or as `require_whole`.
            Unsupported: the dotted names of nested dicts together would fill the memory.
        """
        self.require_whole()
        return self._search.only() if where is None else self._search.by_name(where)

    def state_at(self, path: Path) -> State:
        """Return the state at a path, which dotted names leave open when keys contain dots.

        Args:
            path: the keys that lead to it.

        Raises:
            NoState: the path leads to no dict of tensors.
            Damaged, Refused, Unsupported: as for `state`.
        """
        self.require_whole()
        return self._search.at(path)

    def require_whole(self) -> None:
        """Check that tensors are whole, not one rank's pieces whose places only the metadata tells.

        Raises:
            Refused: HuggingFaceStorageWriter wrote the file for one rank of several.
            Damaged: the file of a rank is missing.
        """
        if self.ranks is not None:
            require_all(self.path, self.ranks.missing, self.ranks.world_size, self.ranks.lacking)
        if SHARDING in self.metadata:
            pieces = f"one rank's pieces of tensors ({SHARDING})"
            hint = "the whole is only in the files of all ranks: ckpttool merge FOLDER OUTPUT"
            raise Refused(self.path, f"holds {pieces}, and no file says how large the whole is", hint=hint)

    def special_tensors(self) -> Iterator[tuple[str, SpecialTensor]]:
        """Yield every tensor of the file that is not a plain one, with its dotted path.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            like = special_tensor(value)
            if like is not None and plain_tensor(value) is None:
                yield dotted(path), like

    def index_faults(self) -> Iterator[tuple[str, str]]:
        """Yield the sparse tensors whose indices torch refuses, with what is wrong. Reads the indices."""
        faults = ((name, index_fault(name, like)) for name, like in self.special_tensors())
        return ((name, fault) for name, fault in faults if fault)

    def found_state(self) -> State | None:
        """Return the model's state; None when there is none, a rank is missing, or it can't be said which."""
        if self.ranks is not None and self.ranks.missing:
            return None
        try:
            return self.state()
        except (NoState, Refused):
            return None

    def other_states(self, taken: Path | None) -> list[str]:
        """Return the dotted paths of the states not taken that a user may have meant, the likeliest first.

        The last are other places of the one that is taken.
        """
        paths = (path for path in self.states() if path != taken)
        offered = [path for path in paths if is_offered(path, follow(self.tree, path))]
        same = places_of(self.tree, follow(self.tree, taken)) if taken else []
        return [dotted(path) for path in (*offered, *(path for path in same if path != taken))]

    def outside(self, state: State) -> tuple[str, ...]:
        """Return the names of everything outside a state, each as the shortest dotted path that covers it.

        The attributes of a pickled model come first, as its state has only its parameters and buffers.
        """
        names: list[str] = []
        value, path = self.tree, ""
        for step in state.path:
            assert isinstance(value, dict)
            names.extend(f"{path}{in_brief(key)}" for key in value if key != step)
            value, path = value[step], f"{path}{step}."
        if state.part_of is not None:
            part = state.part_of.container
            names += (f"{path}{in_brief(key)}" for key in part if not in_part(key, state.prefix))
        return (*(f"{path}{name}" for name, _ in own_attributes(state.module)), *names)

    def changed(
        self, state: State, change: Callable[[object], object], also: Iterable[State] = ()
    ) -> Checkpoint:
        """Return a checkpoint with a changed copy of the tree, in which states may have changed their dicts.

        Args:
            state: a state of this checkpoint.
            change: called once for each container, and for the dict of each state; returns it or its
                replacement. When the state belongs to a pickled model, its dict takes the model's place, and
                `opened` says so. Nested dicts stay nested while the names stay.
            also: other states of this checkpoint.

        Raises:
            Refused: the tree is nested too deeply to be copied.
        """
        states = {id(changed.anchor): changed for changed in (*also, state)}

        def at(value: object) -> object:
            changed = states.get(id(value))
            if changed is None:
                return change(value)
            new = change(changed.container)
            return changed.restored(new) if isinstance(new, dict) else new

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


P = ParamSpec("P")
R = TypeVar("R")


def takes_checkpoint(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse a `checkpoint` that is not an open one, by a TypeError that says what to pass."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = args[:1] or ([kwargs["checkpoint"]] if "checkpoint" in kwargs else [])
        if given:
            require_checkpoint(function.__name__, given[0])
        return function(*args, **kwargs)

    return checked


def require_checkpoint(name: str, given: object) -> None:
    """Raise TypeError for what is no checkpoint; it says what to pass to the function of this name."""
    if not isinstance(given, Checkpoint):
        raise TypeError(_what_to_pass(name, given))


def _what_to_pass(name: str, given: object) -> str:
    if isinstance(given, str | os.PathLike):
        how = f"with ckpttool.open({os.fspath(given)!r}) as checkpoint: ckpttool.{name}(checkpoint, …)"
        return f"{name}() takes an open checkpoint, not a path: {how}"
    if isinstance(given, tuple) and given and isinstance(given[0], Checkpoint):
        what = "takes a checkpoint, not the pair that a function returned"
        return f"{name}() {what}: pass the first of the two"
    return f"{name}() takes a checkpoint that ckpttool.open returned, not {type(given).__name__}"


def with_gaps(
    path: str,
    dtype: DType,
    shape: tuple[int, ...],
    missing: Sequence[int],
    world_size: int | None,
    *lacking: str,
) -> TensorRef:
    """Return a tensor of which some values are in the files of missing ranks; reading it raises Damaged."""

    def fill(start: int, out: memoryview) -> None:
        require_all(path, missing, world_size, lacking)

    data = Computed.filling(path, extent(shape) * dtype.itemsize if 0 not in shape else 0, fill)
    return TensorRef.of_bytes(data, dtype, shape)


def not_read(name: str) -> str:
    """Return how a file that is left out is named in `Checkpoint.unread`."""
    return f"{name} (not read)"
