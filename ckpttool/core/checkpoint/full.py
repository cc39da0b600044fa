"""A whole tree as tensors by name and a JSON text for the rest (docs/full-format.md)."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...errors import Damaged, Refused
from ..inert_pickle import values as inert
from ..inert_pickle.machine import KeyGuard
from ..tensors import ref
from .dotted_names import TooManyNames, contents, dotted, named_values
from .special_tensors import PLAIN, rebuilds, require_sound

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

    tensors: dict[str, ref.TensorRef]
    text: str


def encode(tree: object, protocol: int = 2) -> Flat:
    """Take a tree apart. TooDeep, TooManyNames (MAX_NAMES) or Unholdable if that can't be done."""
    encoder = _Encoder(tree)
    try:
        document = {"version": VERSION, "protocol": protocol, "tree": encoder.node(tree, ())}
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise inert.TooDeep from None
    return Flat(encoder.tensors, text)


def _is_shared_by_identity(value: object) -> bool:
    """Return whether two places with one value differ from two with equal values."""
    if isinstance(value, ref.TensorRef | bytearray):
        return True
    return not (isinstance(value, inert.LEAVES) or (isinstance(value, tuple | frozenset) and not value))


def _references(tree: object) -> Counter[int]:
    """Count the appearances of each shareable value in the tree, by id."""
    containers = (value for value in inert.walk(tree) if not isinstance(value, inert.LEAVES))
    appearing = chain([tree], chain.from_iterable(map(inert.children, containers)))
    return Counter(id(value) for value in appearing if _is_shared_by_identity(value))


class _Encoder:
    def __init__(self, tree: object) -> None:
        self.tensors: dict[str, ref.TensorRef] = {}
        self.counts = _references(tree)
        self.repeats: Counter[str] = Counter()  # of names that are taken
        self.numbers: dict[int, int] = {}  # the numbers of values that others may refer to, by id
        self.referred: set[int] = set()
        self.unfinished = 0  # tuples being encoded, which may contain themselves
        self.owners: dict[int, tuple[str, ref.TensorRef]] = {}  # storage id -> owner of its bytes
        for path, value in named_values(tree, contents, MAX_NAMES):
            tensor = inert.tensor_of(value)
            if tensor is not None and id(tensor.storage) not in self.owners and _is_whole(tensor):
                self.own(path, tensor)
        self.level = 0

    def own(self, path: tuple[str, ...], tensor: ref.TensorRef) -> tuple[str, ref.TensorRef]:
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
            raise inert.TooDeep
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
        if isinstance(value, dict | list | inert.Record) and (several or self.unfinished):
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
        if isinstance(value, ref.TensorRef):
            return self.tensor(value, path)
        if isinstance(value, ref.Storage):
            name, _ = self.owner(value, path)
            return ["storage", name, value.kind, _text(value.location)]
        if isinstance(value, inert.OrderedDict_):
            items = self.items(value, path)  # before the attributes, as a reader meets them
            attributes = [] if value.attributes is None else [self.node(value.attributes, path)]
            return ["ordered", items, *attributes]
        if isinstance(value, dict):
            return self.items(value, path)
        if isinstance(value, inert.Record):
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
        return [[self.node(key, path), self.node(item, (*path, inert.in_brief(key)))] for key, item in items]

    def record(self, value: inert.Record, path: tuple[str, ...]) -> object:
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

    def tensor(self, value: ref.TensorRef, path: tuple[str, ...]) -> object:
        """Encode a tensor by its name, or as a view of the tensor that owns the storage's bytes."""
        name, owner = self.owner(value.storage, path, value.dtype)
        options: dict[str, object] = {}
        whole = ref.TensorRef.contiguous(owner.storage, owner.dtype, owner.shape)  # as a reader builds it
        if _layout(value) != _layout(whole):
            options["view"] = [value.dtype.name, value.offset, value.shape, value.stride]
        options |= {flag: True for flag in ("requires_grad", "conj", "neg") if getattr(value, flag)}
        if value.storage.location != "cpu" or value.storage.kind != owner.dtype.kind:
            options["storage"] = [value.storage.kind, _text(value.storage.location)]
        return ["tensor", name, options] if options else ["tensor", name]

    def owner(
        self, storage: ref.Storage, path: tuple[str, ...], dtype: ref.DType | None = None
    ) -> tuple[str, ref.TensorRef]:
        """Return the name and tensor that own a storage's bytes, adding a flat tensor when there is none."""
        if id(storage) not in self.owners:
            return self.own((*path, "storage"), flat(storage, dtype))
        return self.owners[id(storage)]


def _is_whole(tensor: ref.TensorRef) -> bool:
    """Return whether a tensor is its whole storage, in an element type that the file can hold."""
    is_all = tensor.is_contiguous and tensor.nbytes == tensor.storage.nbytes
    return is_all and not (tensor.conj or tensor.neg) and tensor.is_holdable


def flat(storage: ref.Storage, dtype: ref.DType | None = None) -> ref.TensorRef:
    """Return all elements of a storage as one tensor of a type that safetensors has, complex ones as
    pairs."""
    dtype = ref.STORAGE_DTYPES.get(storage.kind, dtype or ref.DTYPES["uint8"])
    if dtype.safetensors is None:
        dtype = ref.real_dtype(dtype)
    if dtype.safetensors is None or storage.nbytes % dtype.itemsize:
        dtype = ref.DTYPES["uint8"]
    return ref.TensorRef(storage, dtype, (storage.nbytes // dtype.itemsize,), (1,))


def _layout(tensor: ref.TensorRef) -> tuple[object, ...]:
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
    if isinstance(value, inert.Global):
        return ["global", _text(value.module), _text(value.name)]
    raise Unholdable(dotted(path), type(value).__name__)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# ---- The metadata entry that holds a whole tree.
#
# The tensors are in the file by name; the entry is a JSON text for the rest, in which types, order,
# sharing of containers, ties and views survive. Anything JSON lacks is an array that begins with a tag:
# `["tuple", 1, 2]`, `["tensor", "optimizer.state.0.exp_avg"]`, `["record", …]`. What is read is
# untrusted: nothing that it names is imported or called.


# The name of the text in a file of `--full`: in a header's metadata, in an index, or in a DCP folder.
ENTRY = "ckpttool.full"


def encode_entry(path: str, tree: object, protocol: int) -> Flat:
    """Encode the tree of a file; Refused if it is nested too deeply or has a value that JSON can't hold."""
    try:
        return encode(tree, protocol)
    except inert.TooDeep:
        raise Refused(path, "its contents are nested too deeply to be written") from None
    except TooManyNames:
        raise Refused(path, "its dotted names need too much memory") from None
    except Unholdable as fault:
        hint = f"leave it out, or what it is in: --drop {fault.name}"
        raise Refused(path, f"JSON can't hold {fault}", hint=hint) from None


def decode_entry(path: str, state: Mapping[str, object], text: str, entry: str = ENTRY) -> tuple[object, int]:
    """Return the tree and the pickle protocol of a file's text; Damaged if `encode` did not write it."""
    try:
        return decode(
            {name: value for name, value in state.items() if isinstance(value, ref.TensorRef)}, text
        )
    except BadJson as fault:
        raise Damaged(path, f"its entry '{entry}' {fault}") from None


class BadJson(Exception):
    """A text that `encode` does not write; the message reads on after "its entry"."""


def decode(tensors: Mapping[str, ref.TensorRef], text: str) -> tuple[object, int]:
    """Return the tree, and the pickle protocol that was kept with it."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_json)
        version, protocol, tree = (document[key] for key in ("version", "protocol", "tree"))
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadJson("is not JSON of the form {version, protocol, tree}") from None
    if type(protocol) is not int or protocol not in range(6):
        raise BadJson("names no pickle protocol")
    if version != VERSION:
        raise BadJson(f"has version {str(version)[:20]} of the layout, not {VERSION}")
    try:
        return _Decoder(tensors, KeyGuard(len(text))).value(tree), protocol
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise BadJson(f"is malformed ({type(error).__name__})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise BadJson("has the same name twice in a dict")
    return made


def _no_json(literal: str) -> Any:
    raise BadJson(f"holds {literal}, which is not JSON")


class _Decoder:
    def __init__(self, tensors: Mapping[str, ref.TensorRef], guard: KeyGuard) -> None:
        self.tensors, self.guard = tensors, guard
        self.storages: dict[str, ref.Storage] = {}
        self.shared: dict[int, object] = {}

    def value(self, node: Any, number: int | None = None) -> Any:
        """Build a value, known by its number to its own contents, if these can refer to it."""
        if not isinstance(node, dict | list):
            return node
        tag, *rest = node if isinstance(node, list) else ("dict", *node.items())
        if tag not in DECODERS:
            raise BadJson(f"has an unknown tag {str(tag)[:20]!r}")
        if tag not in CONTAINERS:
            return DECODERS[tag](self, *rest)
        made = CONTAINERS[tag]()
        if number is not None:
            self.shared[number] = made
        DECODERS[tag](self, made, *rest)
        return made

    def text(self, node: Any) -> str:
        text = self.value(node)
        if not isinstance(text, str):
            raise BadJson("has a name that is not text")
        return text

    def name(self, *nodes: Any) -> inert.Global:
        module, name = map(self.text, nodes)
        if not module or not name or "\n" in module + name:
            raise BadJson("has a malformed name of a class or function")
        (module + name).encode()  # a lone surrogate is an error
        return inert.Global(module, name)

    def define(self, number: int, node: Any) -> Any:
        """Build a value that others refer to."""
        if type(number) is not int or number in self.shared:
            raise BadJson(f"defines {str(number)[:20]!r} twice, or it is not a number")
        self.shared[number] = made = self.value(node, number)
        return made

    def fill_dict(self, new: dict[Any, Any], *pairs: Any) -> None:
        keys = (key if type(key) is str else self.guard.check(self.value(key), new) for key, _ in pairs)
        new.update((key, self.value(item)) for key, (_, item) in zip(keys, pairs, strict=True))
        if len(new) != len(pairs):
            raise BadJson("has the same key twice in a dict")

    def elements(self, nodes: tuple[Any, ...], kind: Callable[[Iterable[Any]], Any]) -> Any:
        """Build a set or frozenset."""
        made = kind(self.guard.check(self.value(node), nodes) for node in nodes)
        if len(made) != len(nodes):
            raise BadJson("has the same element twice in a set")
        return made

    def fill_ordered(self, new: inert.OrderedDict_, items: Any, *attributes: Any) -> None:
        self.fill_dict(new, *(items.items() if isinstance(items, dict) else items[1:]))
        if attributes:
            new.attributes = self.value(attributes[0])
            if not inert.is_state(new.attributes):
                raise BadJson("has an ordered dict whose attributes are none")

    def fill_record(self, new: inert.Record, node: dict[str, Any]) -> None:
        if node["how"] not in ("reduce", "newobj"):
            raise BadJson(f"makes an object by {str(node['how'])[:20]!r}")
        new.how, new.callable, new.args = node["how"], self.value(node["callable"]), self.value(node["args"])
        new.kwargs = self.value(node.get("kwargs"))
        if type(new.callable) not in (inert.Global, inert.Record) or type(new.args) is not tuple:
            raise BadJson("makes an object by something that can't be called")
        kwargs = {} if new.kwargs is None else new.kwargs
        if type(kwargs) is not dict or not all(isinstance(key, str) for key in kwargs):
            raise BadJson("makes an object with malformed arguments")
        if kwargs and new.how == "reduce":  # a pickle can't say it
            raise BadJson("calls something with arguments by name")
        new.state, new.has_state = self.value(node.get("state")), "state" in node
        new.elements = [self.value(item) for item in node.get("elements", ())]
        new.items = [(self.value(key), self.value(item)) for key, item in node.get("items", ())]
        self.check_call(new)

    def check_call(self, record: inert.Record) -> None:
        """Check a call of torch's own functions, as the reader of a pickle does."""
        args: Any = record.args
        if record.how != "reduce" or not rebuilds(record.callable):
            return
        if record.has_state or record.elements or record.items:
            raise BadJson("changes a tensor after it was made")
        if record.callable in PLAIN or (record.callable in inert.FROM_TYPE and {*args[:1]} & PLAIN):
            raise BadJson("has a call in place of a tensor")
        if record.callable in inert.FROM_TYPE and len(args) == 3 and isinstance(args[0], ref.TensorRef):
            return
        try:
            require_sound(record.callable, args)
        except ref.BadTensor as fault:
            raise BadJson(f"has a tensor {fault}") from None

    def storage(self, name: str, kind: str | None = None, location: Any = "cpu") -> ref.Storage:
        if name not in self.storages:
            base, where = self.tensors[name], self.text(location)
            kind = kind or base.dtype.kind
            if not ref.DEVICE.fullmatch(where):
                raise BadJson(f"has a storage on no device for '{name}'")
            itemsize = ref.STORAGE_DTYPES[kind].itemsize if kind != "UntypedStorage" else 1
            if base.nbytes % itemsize:
                raise BadJson(f"has a malformed storage for '{name}'")
            self.storages[name] = replace(base.storage, kind=kind, location=where)
        return self.storages[name]

    def tensor(self, name: str, options: Mapping[str, Any] | None = None) -> ref.TensorRef:
        base, options = self.tensors[name], options or {}
        storage = self.storage(name, *options.get("storage", ()))
        dtype, offset, shape, stride = base.dtype, 0, base.shape, base.stride
        if "view" in options:
            dtype_name, offset, shape, stride = options["view"]
            dtype, shape, stride = ref.DTYPES[dtype_name], tuple(shape), tuple(stride)
        flags = [options.get(flag, False) is True for flag in ("requires_grad", "conj", "neg")]
        return ref.checked_tensor(storage, dtype, shape, stride, offset, *flags)


# What contents can refer to is made before them, and then filled.
CONTAINERS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "ordered": inert.OrderedDict_,
    "record": lambda: inert.Record("reduce", None),
    "list": list,
}

DECODERS: dict[str, Callable[..., Any]] = {
    "tensor": _Decoder.tensor,
    "storage": _Decoder.storage,
    "def": _Decoder.define,
    "ref": lambda self, number: self.shared[number],
    "after": lambda self, first, then: (self.value(first), self.value(then))[1],
    "dict": _Decoder.fill_dict,
    "ordered": _Decoder.fill_ordered,
    "record": _Decoder.fill_record,
    "list": lambda self, made, *items: made.extend(map(self.value, items)),
    "tuple": lambda self, *items: tuple(self.value(item) for item in items),
    "set": lambda self, *items: self.elements(items, inert.Set_),
    "frozenset": lambda self, *items: self.elements(items, inert.FrozenSet_),
    "str": lambda self, raw: base64.b64decode(raw).decode("utf-8", "surrogatepass"),
    "int": lambda self, text: int(text, 16),
    "float": lambda self, raw: struct.unpack(">d", bytes.fromhex(raw))[0],
    "bytes": lambda self, raw: base64.b64decode(raw),
    "bytearray": lambda self, raw: bytearray(base64.b64decode(raw)),
    "global": lambda self, module, name: self.name(module, name),
}
