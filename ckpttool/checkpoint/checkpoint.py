"""A checkpoint as it was read: the tree of values, and the model's state found in it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import NamedTuple

from ..errors import Damaged, NoState, Refused, Unsupported
from ..inert_pickle.values import Global, OrderedDict_, Record, TooDeep, in_brief, rebuild, tensor_of
from ..tensors.ref import Source, Storage, TensorRef
from .dotted_names import MAX_NAMES, Entry, Path, TooManyNames, contents, dotted, named_values
from .nested_states import TwiceNamed, flattened, is_tensor, values_at
from .pickled_modules import BadModules, is_module, named, own_attributes
from .ranks import Ranks, require_all
from .rebuilt_tensors import plain_tensor, tensor_like
from .state import State, in_part, make_state, part
from .states import (
    Likelihood,
    candidates,
    equally_likely,
    follow,
    is_nested,
    is_offered,
    is_state,
    likelihood,
    path_of,
)
from .tensor_likes import TensorLike, placeholders

OF_TORCH = {"format": "pt"}
"""The metadata that transformers writes into each safetensors header. Several versions 4 of it refuse a
header that has metadata but not this entry."""


SHARDING = "DCP_SHARDING_INFO"
"""The metadata by which HuggingFaceStorageWriter says where a rank's pieces lie in their tensors."""


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
        ranks: what is known of the ranks that each wrote a part of it; None when one process wrote it.
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
    ranks: Ranks | None = None

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
        return [path for _, path in self._ranked()]

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
        path = self._only() if where is None else self._named(where)
        if path is None and where is not None and (found := self._part(where)) is not None:
            return found
        if path is None:
            raise NoState(self.path, f"holds no state named '{str(where)[:80]}'", hint=self._where_to_look())
        return self.state_at(path)

    def state_at(self, path: Path) -> State:
        """Return the state at a path, which dotted names leave open when keys contain dots.

        Args:
            path: the keys that lead to it.

        Raises:
            NoState: the path leads to no dict of tensors.
            Damaged, Refused, Unsupported: as for `state`.
        """
        self.require_whole()
        value, elsewhere = follow(self.tree, path), placeholders(self.tree)
        if isinstance(value, Record) and is_module(value):
            return make_state(path, self._of_module(value), module=value, elsewhere=elsewhere)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self._no_dict(path)
        if not is_nested(path, value) and (is_state(value) or not value):
            return make_state(path, value, elsewhere=elsewhere)
        places = self._places(value)
        entries = OrderedDict_(values_at(value, places))
        if not any(map(is_tensor, entries.values())):
            raise self._no_dict(path)
        return make_state(path, entries, nested=value, places=places, elsewhere=elsewhere)

    def require_whole(self) -> None:
        """Check that tensors are whole, not one rank's pieces whose places only the metadata tells.

        Raises:
            Refused: HuggingFaceStorageWriter wrote the file for one rank of several.
            Damaged: the file of a rank is missing.
        """
        if self.ranks is not None:
            require_all(self.path, self.ranks.missing, self.ranks.world_size)
        if SHARDING in self.metadata:
            raise Refused(
                self.path,
                f"holds one rank's pieces of tensors ({SHARDING}), and no file says how large the whole is",
                hint="the whole is only in the files of all ranks: ckpttool merge FOLDER OUTPUT",
            )

    def tensor_likes(self) -> Iterator[tuple[str, TensorLike]]:
        """Yield every tensor of the file that is not a plain one, with its dotted path.

        Raises:
            Unsupported: the dotted paths together would fill the memory.
        """
        for path, value in self.named(contents):
            like = tensor_like(value)
            if like is not None and plain_tensor(value) is None:
                yield dotted(path), like

    def found_state(self) -> State | None:
        """Return the model's state; None when there is none, a rank is missing, or it can't be said which."""
        if self.ranks is not None and self.ranks.missing:
            return None
        try:
            return self.state()
        except (NoState, Refused):
            return None

    def other_states(self, taken: Path | None) -> list[str]:
        """Return the dotted paths of the states not taken that a user may have meant, the likeliest first."""
        paths = (path for path in self.states() if path != taken)
        return [dotted(path) for path in paths if is_offered(path, follow(self.tree, path))]

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
            names += (
                f"{path}{in_brief(key)}" for key in state.part_of.container if not in_part(key, state.prefix)
            )
        of_model = [f"{path}{name}" for name, _ in own_attributes(state.module)]
        return (*of_model, *names)

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
        states = {id(each.anchor): each for each in (*also, state)}

        def at(value: object) -> object:
            found = states.get(id(value))
            if found is None:
                return change(value)
            new = change(found.container)
            return found.restored(new) if isinstance(new, dict) else new

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

    def _ranked(self) -> list[tuple[Likelihood, Path]]:
        """Return the paths of states with their likelihood, the likeliest first."""
        paths = candidates(self.tree)
        found = [(likelihood(path, partial(self._entries, path)), path) for path in paths]
        return sorted(found, key=lambda pair: pair[0])

    def _entries(self, path: Path) -> Mapping[object, object]:
        value = follow(self.tree, path)
        if isinstance(value, Record):
            return self._of_module(value)
        assert isinstance(value, dict)
        try:
            return dict(values_at(value, self._places(value))) if is_nested(path, value) else value
        except Refused:  # as soon as this state is taken; another one may be named
            return value

    def _only(self) -> Path:
        """Return the path of the one state that is likelier than all others."""
        ranked = self._ranked()
        if not ranked:
            reason = "holds no dict of tensors by name, so no model's state"
            for path, value in self.named(contents):
                if (key := _key_that_is_no_name(value)) is not None:
                    where = f"'{dotted(path)[:80]}'" if path else "the dict at the top"
                    reason += f": {where} has tensors, but its key {key} is no text"
                    break
            raise NoState(self.path, reason, hint=self._where_to_look())
        first, *rivals = equally_likely(self.tree, ranked)
        if rivals:
            names = [dotted(path) for path in (first, *rivals)]
            shown = ", ".join(f"'{name[:80]}'" for name in names[:8])
            more = f" and {len(names) - 8} more" if names[8:] else ""
            raise NoState(
                self.path,
                f"holds {len(names)} states, and nothing says which is the model's: {shown}{more}",
                hint=f"name one: --state {shlex.quote(names[0])}; or take all of them as one: --state ''",
            )
        return first

    def _named(self, where: str) -> Path | None:
        """Return the path behind a dotted name; of several that fit it, the likeliest state's."""
        # Keys may contain dots, so one dotted name may fit several paths.
        fitting = (path for path in self.states() if where == dotted(path))
        return next(fitting, None) or path_of(self.tree, where)

    def _part(self, where: str) -> State | None:
        """Return the part of a state whose keys a dotted name is a prefix of: `state_dict.ema_model`."""
        for path in self.states():
            inner = f"{dotted(path)}." if path else ""
            try:
                whole = self.state_at(path)
            except (NoState, Refused):  # whose names are ambiguous; another state may have the keys
                continue
            for name in dict.fromkeys((where.removeprefix(inner), where)):
                found = part(whole, f"{name}.") if name.strip("!") else None
                if found is not None:
                    return found
        return None

    def _places(self, value: dict[object, object]) -> dict[str, Path]:
        try:
            return flattened(value, MAX_NAMES + 64 * self.nbytes)
        except TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None
        except TwiceNamed as fault:
            reason = f"two entries of its nested dicts are named '{str(fault)[:80]}'"
            named = self.named(contents)
            dicts = (path for path, each in named if path and isinstance(each, dict) and is_state(each))
            choices = " or ".join(f"--state {shlex.quote(dotted(path))}" for path in islice(dicts, 4))
            hint = f"take one of the dicts: {choices}" if choices else None
            raise Refused(self.path, reason, hint=hint) from None

    def _of_module(self, value: Record) -> dict[object, object]:
        try:
            return OrderedDict_(named(value))
        except BadModules as fault:
            raise Damaged(self.path, str(fault)) from None

    def _no_dict(self, path: Path) -> NoState:
        reason = f"'{dotted(path)[:80]}' is not a dict of tensors by name"
        if (key := _key_that_is_no_name(follow(self.tree, path))) is not None:
            reason += f": it has the key {key}, which is no text"
        return NoState(self.path, reason, hint=self._where_to_look())

    def _where_to_look(self) -> str:
        names = [shlex.quote(dotted(path)) for path in self.states()]
        if not names:
            return f"see what is in it: ckpttool inspect {shlex.quote(self.path)}"
        if names == ["''"]:
            return "the file itself is the state: leave out --state"
        return f"there are: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")


def _key_that_is_no_name(value: object) -> str | None:
    """Return a key of a dict of tensors that is no text, as a number; None if all keys are text."""
    if not isinstance(value, dict) or not any(map(is_tensor, value.values())):
        return None
    return next((in_brief(key) for key in value if not isinstance(key, str)), None)
