"""What is in a checkpoint, for people and scripts; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .checkpoint import Checkpoint, State
from .errors import NoState
from .inert import MAX_DEPTH, PARAMETERS, Global, OrderedDict_, Record, tensor_of, walk
from .keys import FoundPrefix, found_prefixes
from .modules import is_module
from .naming import Entry, dotted, entries
from .tensor import DTYPES, TensorRef

MAX_ITEMS = 16
"""A list of at most so many plain values is shown as it is."""

# Names that honest files mention and that are understood, or are plain data: no reason to be wary.
UNDERSTOOD = {
    *(str(name) for name in PARAMETERS),
    *(f"torch.{name}" for name in DTYPES),
    "_codecs.encode",
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    *(
        f"{module}.{name}"
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "complex", "bytes", "bytearray", "slice", "range")
    ),
}

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""BatchNorm's statistics: in the state, but no parameters."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor by its dotted path in the file. `shared_with`: the first name that looks at the same bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shared_with: str | None


@dataclass(frozen=True, slots=True)
class OtherRow:
    """Something that is no tensor. `value` is set when it is plain and short; `size` counts what is in it."""

    name: str
    type: str
    value: object = None
    has_value: bool = False
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A file at a glance.

    Attributes:
        state: dotted path of the model's state, `""` for the file itself, None when there is none.
        other_states: further dicts of tensors that could be meant.
        keys: number of tensors in the state.
        parameters: number of elements in the state's tensors, without BatchNorm's statistics.
        unknown: names that the file's pickle mentions and that are not understood here; never imported.
    """

    path: str
    format: str
    nbytes: int
    state: str | None
    other_states: tuple[str, ...]
    keys: int
    parameters: int
    prefixes: tuple[FoundPrefix, ...]
    tensors: tuple[TensorRow, ...]
    other: tuple[OtherRow, ...]
    unknown: tuple[str, ...]
    metadata: dict[str, str]


def summarize(checkpoint: Checkpoint, state: str | None = None) -> Summary:
    """Describes a checkpoint.

    Args:
        state: dotted path of the model's state; found when None.

    Raises:
        NoState: `state` was given and is not there.
    """
    try:
        found = checkpoint.state(state)
    except NoState:
        if state is not None:
            raise
        found = None
    others = [dotted(path) for path in checkpoint.states()]
    return Summary(
        path=checkpoint.path,
        format=checkpoint.format,
        nbytes=checkpoint.nbytes,
        state=found.where if found else None,
        other_states=tuple(name for name in others if found is None or name != found.where),
        keys=len(found.tensors) if found else 0,
        parameters=count_parameters(found) if found else 0,
        prefixes=tuple(found_prefixes(found.tensors)) if found else (),
        tensors=tuple(_tensor_rows(checkpoint)),
        other=tuple(_other_rows(checkpoint, found)),
        unknown=tuple(unknown_names(checkpoint.tree)),
        metadata=dict(checkpoint.metadata),
    )


def count_parameters(state: State) -> int:
    """Elements of the tensors, each storage's once, without BatchNorm's statistics."""
    counted: set[tuple[int, int, tuple[int, ...]]] = set()
    total = 0
    for name, tensor in state.tensors.items():
        key = (id(tensor.storage), tensor.offset, tensor.shape)
        if not name.endswith(BUFFERS) and key not in counted:
            counted.add(key)
            total += tensor.numel
    return total


def unknown_names(tree: object) -> list[str]:
    """Every name in the tree that is not understood, sorted."""
    names = {str(value) for value in walk(tree) if isinstance(value, Global)}
    return sorted(names - UNDERSTOOD)


def _tensor_rows(checkpoint: Checkpoint) -> Iterator[TensorRow]:
    first: dict[int, str] = {}
    for name, tensor in checkpoint.tensors():
        owner = first.setdefault(id(tensor.storage), name)
        shared = owner if owner != name and tensor.numel else None
        yield TensorRow(name, tensor.dtype.name, tensor.shape, tensor.nbytes, shared)


def _other_rows(checkpoint: Checkpoint, state: State | None) -> Iterator[OtherRow]:
    """Everything beside the tensors, as deep as names go; long lists and objects stay closed."""

    def inside(value: object) -> Iterable[Entry] | None:
        if state is not None and value is state.container:
            return state.others.items()  # its module versions are told by torch, not by people
        if is_module(value):
            return None
        return entries(value) if isinstance(value, dict) or _attributes(value) is not None else None

    for path, value in checkpoint.named(inside):
        attributes = None if is_module(value) else _attributes(value)
        if is_module(value):
            yield OtherRow(dotted(path), type_name(value))
        elif attributes is not None:
            yield OtherRow(dotted(path), type_name(value), size=len(attributes))
        elif isinstance(value, dict):
            if path and (not value or len(path) == MAX_DEPTH):
                yield OtherRow(dotted(path), type_name(value), size=len(value))
        elif tensor_of(value) is None:
            yield _other(dotted(path), value)


def _attributes(value: object) -> dict[object, object] | None:
    """The attributes of an object that was pickled with a dict of them (argparse.Namespace and its like)."""
    if isinstance(value, Record) and isinstance(value.state, dict) and not value.elements and not value.items:
        return value.state if all(isinstance(key, str) for key in value.state) else None
    return None


def _other(name: str, value: object) -> OtherRow:
    plain = _plain(value)
    size = len(value) if isinstance(value, list | tuple | set | frozenset | bytes) else None
    return OtherRow(name, type_name(value), plain, plain is not None or value is None, size)


def _plain(value: object, levels: int = 2) -> object:
    """The value when it is plain and short, else None. Lists may hold lists, `levels` deep."""
    if isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 4096):
        return value
    if isinstance(value, str):
        return value if len(value) <= 1000 else None
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and levels:
        items = [_plain(item, levels - 1) for item in value]
        return items if all(i is not None or v is None for i, v in zip(items, value, strict=True)) else None
    if isinstance(value, Global):
        return str(value)
    return None


def type_name(value: object) -> str:
    """What a person would call the type of an inert value."""
    if isinstance(value, Record):
        name = value.type_name
        if name == "_codecs.encode":
            return "bytes"  # as protocol 2 has them
        return name.rpartition(".")[2] if name in UNDERSTOOD else name
    if isinstance(value, OrderedDict_):
        return "OrderedDict"
    if isinstance(value, TensorRef):
        return "Tensor"
    if isinstance(value, Global):
        return "dtype" if str(value).removeprefix("torch.") in DTYPES else "name"
    return type(value).__name__
