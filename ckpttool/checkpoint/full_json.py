"""The entry of a tensor format that holds a whole tree, written and read (docs/full-format.md).

The tensors are in the file by name; the entry is a JSON text for the rest, in which types, order, sharing of
containers, ties and views survive. Anything JSON lacks is an array that begins with a tag: `["tuple", 1, 2]`,
`["tensor", "optimizer.state.0.exp_avg"]`, `["record", …]`. What is read is untrusted: nothing that it names
is imported or called.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import Damaged, Refused
from ..inert_pickle.machine import KeyGuard
from ..inert_pickle.values import FROM_TYPE, FrozenSet_, Global, OrderedDict_, Record, Set_, TooDeep, is_state
from ..tensors.checked import BadTensor, checked_tensor
from ..tensors.dtypes import DTYPES, STORAGE_DTYPES
from ..tensors.ref import DEVICE, Storage, TensorRef
from .dotted_names import TooManyNames
from .full_encoding import VERSION, Flat, Unholdable, encode
from .rebuilt_tensors import PLAIN, rebuilds, require_sound

# The name of the text in a file of `--full`: in a header's metadata, in an index, or in a DCP folder.
ENTRY = "ckpttool.full"


def encode_entry(path: str, tree: object, protocol: int) -> Flat:
    """Encode the tree of a file; Refused if it is nested too deeply or has a value that JSON can't hold."""
    try:
        return encode(tree, protocol)
    except TooDeep:
        raise Refused(path, "its contents are nested too deeply to be written") from None
    except TooManyNames:
        raise Refused(path, "its dotted names need too much memory") from None
    except Unholdable as fault:
        hint = f"leave it out, or what it is in: --drop {fault.name}"
        raise Refused(path, f"JSON can't hold {fault}", hint=hint) from None


def decode_entry(path: str, state: Mapping[str, object], text: str, entry: str = ENTRY) -> tuple[object, int]:
    """Return the tree and the pickle protocol of a file's text; Damaged if `encode` did not write it."""
    try:
        return decode({name: value for name, value in state.items() if isinstance(value, TensorRef)}, text)
    except BadJson as fault:
        raise Damaged(path, f"its entry '{entry}' {fault}") from None


class BadJson(Exception):
    """A text that `encode` does not write; the message reads on after "its entry"."""


def decode(tensors: Mapping[str, TensorRef], text: str) -> tuple[object, int]:
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
    def __init__(self, tensors: Mapping[str, TensorRef], guard: KeyGuard) -> None:
        self.tensors, self.guard = tensors, guard
        self.storages: dict[str, Storage] = {}
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

    def name(self, *nodes: Any) -> Global:
        module, name = map(self.text, nodes)
        if not module or not name or "\n" in module + name:
            raise BadJson("has a malformed name of a class or function")
        (module + name).encode()  # a lone surrogate is an error
        return Global(module, name)

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

    def fill_ordered(self, new: OrderedDict_, items: Any, *attributes: Any) -> None:
        self.fill_dict(new, *(items.items() if isinstance(items, dict) else items[1:]))
        if attributes:
            new.attributes = self.value(attributes[0])
            if not is_state(new.attributes):
                raise BadJson("has an ordered dict whose attributes are none")

    def fill_record(self, new: Record, node: dict[str, Any]) -> None:
        if node["how"] not in ("reduce", "newobj"):
            raise BadJson(f"makes an object by {str(node['how'])[:20]!r}")
        new.how, new.callable, new.args = node["how"], self.value(node["callable"]), self.value(node["args"])
        new.kwargs = self.value(node.get("kwargs"))
        if type(new.callable) not in (Global, Record) or type(new.args) is not tuple:
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

    def check_call(self, record: Record) -> None:
        """Check a call of torch's own functions, as the reader of a pickle does."""
        args: Any = record.args
        if record.how != "reduce" or not rebuilds(record.callable):
            return
        if record.has_state or record.elements or record.items:
            raise BadJson("changes a tensor after it was made")
        if record.callable in PLAIN or (record.callable in FROM_TYPE and {*args[:1]} & PLAIN):
            raise BadJson("has a call in place of a tensor")
        if record.callable in FROM_TYPE and len(args) == 3 and isinstance(args[0], TensorRef):
            return
        try:
            require_sound(record.callable, args)
        except BadTensor as fault:
            raise BadJson(f"has a tensor {fault}") from None

    def storage(self, name: str, kind: str | None = None, location: Any = "cpu") -> Storage:
        if name not in self.storages:
            base, where = self.tensors[name], self.text(location)
            kind = kind or base.dtype.kind
            if not DEVICE.fullmatch(where):
                raise BadJson(f"has a storage on no device for '{name}'")
            itemsize = STORAGE_DTYPES[kind].itemsize if kind != "UntypedStorage" else 1
            if base.nbytes % itemsize:
                raise BadJson(f"has a malformed storage for '{name}'")
            self.storages[name] = replace(base.storage, kind=kind, location=where)
        return self.storages[name]

    def tensor(self, name: str, options: Mapping[str, Any] | None = None) -> TensorRef:
        base, options = self.tensors[name], options or {}
        storage = self.storage(name, *options.get("storage", ()))
        dtype, offset, shape, stride = base.dtype, 0, base.shape, base.stride
        if "view" in options:
            dtype_name, offset, shape, stride = options["view"]
            dtype, shape, stride = DTYPES[dtype_name], tuple(shape), tuple(stride)
        flags = [options.get(flag, False) is True for flag in ("requires_grad", "conj", "neg")]
        return checked_tensor(storage, dtype, shape, stride, offset, *flags)


# What contents can refer to is made before them, and then filled.
CONTAINERS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "ordered": OrderedDict_,
    "record": lambda: Record("reduce", None),
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
    "set": lambda self, *items: self.elements(items, Set_),
    "frozenset": lambda self, *items: self.elements(items, FrozenSet_),
    "str": lambda self, raw: base64.b64decode(raw).decode("utf-8", "surrogatepass"),
    "int": lambda self, text: int(text, 16),
    "float": lambda self, raw: struct.unpack(">d", bytes.fromhex(raw))[0],
    "bytes": lambda self, raw: base64.b64decode(raw),
    "bytearray": lambda self, raw: bytearray(base64.b64decode(raw)),
    "global": lambda self, module, name: self.name(module, name),
}
