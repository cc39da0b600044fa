"""A whole tree as tensors by name and a JSON text for the rest (docs/full-format.md)."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..inert_pickle import values as inert
from ..inert_pickle.values import Global, OrderedDict_, Record, TooDeep, in_brief, tensor_of
from ..tensors.dtypes import DTYPES, STORAGE_DTYPES, DType, real_dtype
from ..tensors.ref import Storage, TensorRef
from .dotted_names import contents, dotted, named_values

# The version of the layout.
VERSION = 1

# Characters of all names together; a safetensors header holds a tenth of them.
MAX_NAMES = 1 << 30

# Integers from here on lose digits in JSON readers that know only doubles, so they are written as hex.
SAFE_INTEGER = 2**53


class Unholdable(ValueError):
    """A value that JSON can't express."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"'{name}', a {what}")
        self.name, self.what = name, what


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart: tensors by name, and the JSON text that puts them together again."""

    tensors: dict[str, TensorRef]
    text: str


def encode(tree: object, protocol: int = 2) -> Flat:
    """Take a tree apart. TooDeep, TooManyNames (MAX_NAMES) or Unholdable if that can't be done."""
    encoder = _Encoder(tree)
    try:
        document = {"version": VERSION, "protocol": protocol, "tree": encoder.node(tree, ())}
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise TooDeep from None
    return Flat(encoder.tensors, text)


def _is_shared_by_identity(value: object) -> bool:
    """Return whether two places with one value differ from two with equal values."""
    if isinstance(value, TensorRef | bytearray):
        return True
    return not (isinstance(value, inert.LEAVES) or (isinstance(value, tuple | frozenset) and not value))


def _references(tree: object) -> Counter[int]:
    """Count the appearances of each shareable value in the tree, by id."""
    containers = (value for value in inert.walk(tree) if not isinstance(value, inert.LEAVES))
    appearing = chain([tree], chain.from_iterable(map(inert.children, containers)))
    return Counter(id(value) for value in appearing if _is_shared_by_identity(value))


class _Encoder:
    def __init__(self, tree: object) -> None:
        self.tensors: dict[str, TensorRef] = {}
        self.counts = _references(tree)
        self.repeats: Counter[str] = Counter()  # of names that are taken
        self.numbers: dict[int, int] = {}  # the numbers of values that others may refer to, by id
        self.referred: set[int] = set()
        self.unfinished = 0  # tuples being encoded, which may contain themselves
        self.owners: dict[int, tuple[str, TensorRef]] = {}  # storage id -> owner of its bytes
        for path, value in named_values(tree, contents, MAX_NAMES):
            tensor = tensor_of(value)
            if tensor is not None and id(tensor.storage) not in self.owners and _is_whole(tensor):
                self.own(path, tensor)
        self.level = 0

    def own(self, path: tuple[str, ...], tensor: TensorRef) -> tuple[str, TensorRef]:
        """Make a tensor the owner of its storage's bytes, under its dotted path."""
        base = ".".join(path).encode("utf-8", "backslashreplace").decode() or "value"
        name = base
        while name in self.tensors or name == "__metadata__":  # keys with dots can give two paths one name
            self.repeats[base] += 1
            name = f"{base}~{self.repeats[base] + 1}"
        self.tensors[name] = tensor
        self.owners[id(tensor.storage)] = name, tensor
        return name, tensor

    def node(self, value: object, path: tuple[str, ...]) -> object:
        if self.level == inert.MAX_DEPTH:
            raise TooDeep
        self.level += 1
        made = self.maybe_shared(value, path)
        self.level -= 1
        return made

    def maybe_shared(self, value: object, path: tuple[str, ...]) -> object:
        """Encode a value that may appear in several places: whole in the first, a reference in the others."""
        if id(value) in self.numbers:
            self.referred.add(self.numbers[id(value)])
            return ["ref", self.numbers[id(value)]]
        several = self.counts[id(value)] > 1
        if isinstance(value, dict | list | Record) and (several or self.unfinished):
            number = self.number(value)  # before its contents, which may refer to it
            node = self.plain(value, path)
            return ["def", number, node] if several or number in self.referred else node
        if not several:
            return self.plain(value, path)
        self.unfinished += 1
        node = self.plain(value, path)
        self.unfinished -= 1
        if id(value) in self.numbers:  # a list inside the tuple holds it: it was encoded there
            return ["after", node, ["ref", self.numbers[id(value)]]]
        return ["def", self.number(value), node]

    def number(self, value: object) -> int:
        self.numbers[id(value)] = len(self.numbers)
        return self.numbers[id(value)]

    def plain(self, value: object, path: tuple[str, ...]) -> object:
        if isinstance(value, TensorRef):
            return self.tensor(value, path)
        if isinstance(value, Storage):
            name, _ = self.owner(value, path)
            return ["storage", name, value.kind, _text(value.location)]
        if isinstance(value, OrderedDict_):
            items = self.items(value, path)  # before the attributes, as a reader meets them
            attributes = [] if value.attributes is None else [self.node(value.attributes, path)]
            return ["ordered", items, *attributes]
        if isinstance(value, dict):
            return self.items(value, path)
        if isinstance(value, Record):
            return ["record", self.record(value, path)]
        if isinstance(value, list | tuple | set | frozenset):
            nodes = (self.node(item, (*path, str(i))) for i, item in enumerate(value))
            return [inert.container_name(value), *nodes]
        return _leaf(value, path)

    def items(self, value: dict[Any, Any], path: tuple[str, ...]) -> object:
        if all(isinstance(key, str) and _is_text(key) for key in value):
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        return ["dict", *self.pairs(value.items(), path)]

    def pairs(self, items: Iterable[tuple[object, object]], path: tuple[str, ...]) -> list[object]:
        return [[self.node(key, path), self.node(item, (*path, in_brief(key)))] for key, item in items]

    def record(self, value: Record, path: tuple[str, ...]) -> object:
        node: dict[str, object] = {"how": value.how, "callable": self.node(value.callable, path)}
        node["args"] = self.node(value.args, path)
        if value.kwargs is not None:
            node["kwargs"] = self.node(value.kwargs, path)
        if value.has_state:
            node["state"] = self.node(value.state, path)
        if value.elements:
            node["elements"] = [self.node(item, path) for item in value.elements]
        if value.items:
            node["items"] = self.pairs(value.items, path)
        return node

    def tensor(self, value: TensorRef, path: tuple[str, ...]) -> object:
        """Encode a tensor by its name, or as a view of the tensor that owns the storage's bytes."""
        name, owner = self.owner(value.storage, path, value.dtype)
        options: dict[str, object] = {}
        whole = TensorRef.contiguous(owner.storage, owner.dtype, owner.shape)  # as a reader builds it
        if _layout(value) != _layout(whole):
            options["view"] = [value.dtype.name, value.offset, value.shape, value.stride]
        options |= {flag: True for flag in ("requires_grad", "conj", "neg") if getattr(value, flag)}
        if value.storage.location != "cpu" or value.storage.kind != owner.dtype.kind:
            options["storage"] = [value.storage.kind, _text(value.storage.location)]
        return ["tensor", name, options] if options else ["tensor", name]

    def owner(
        self, storage: Storage, path: tuple[str, ...], dtype: DType | None = None
    ) -> tuple[str, TensorRef]:
        """Return the name and tensor that own a storage's bytes, adding a flat tensor when there is none."""
        if id(storage) not in self.owners:
            return self.own((*path, "storage"), flat(storage, dtype))
        return self.owners[id(storage)]


def _is_whole(tensor: TensorRef) -> bool:
    """Return whether a tensor is its whole storage, in an element type that the file can hold."""
    is_all = tensor.is_contiguous and tensor.nbytes == tensor.storage.nbytes
    return is_all and not (tensor.conj or tensor.neg) and tensor.dtype.safetensors is not None


def flat(storage: Storage, dtype: DType | None = None) -> TensorRef:
    """Return all elements of a storage as one tensor of a type that safetensors has, complex ones as
    pairs."""
    dtype = STORAGE_DTYPES.get(storage.kind, dtype or DTYPES["uint8"])
    if dtype.safetensors is None:
        dtype = real_dtype(dtype)
    if dtype.safetensors is None or storage.nbytes % dtype.itemsize:
        dtype = DTYPES["uint8"]
    return TensorRef(storage, dtype, (storage.nbytes // dtype.itemsize,), (1,))


def _layout(tensor: TensorRef) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _text(value: str) -> object:
    """Return text for JSON; text with lone surrogates as a tagged array."""
    return value if _is_text(value) else ["str", _base64(value.encode("utf-8", "surrogatepass"))]


def _leaf(value: object, path: tuple[str, ...]) -> object:
    """Return a scalar for JSON, with a tag when JSON lacks its type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return value if abs(value) < SAFE_INTEGER else ["int", hex(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, _base64(bytes(value))]
    if isinstance(value, Global):
        return ["global", _text(value.module), _text(value.name)]
    raise Unholdable(dotted(path), type(value).__name__)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
