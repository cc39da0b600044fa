"""Exported programs (`.pt2`): the state dict of what `torch.export.save` and AOTInductor write, without code.

A package is a zip. `data/weights/` has the storages, each a record of bytes, and JSON that says which tensor
is which view of one; older packages, and AOTInductor's, have files of torch.save there. torch before 2.7
wrote a zip of four records without a folder. Source: torch's `export/pt2_archive/_package.py`, 2.7 to 2.15,
and `export/__init__.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ....errors import Damaged, Unsupported
from ...checkpoint.checkpoint import Checkpoint
from ...inert_pickle.values import Global, OrderedDict_, tensor_of
from ...tensors.ref import DEVICE, DTYPES, BadTensor, DType, Source, Storage, TensorRef, checked_tensor
from ..safetensors import parse_object
from .archive import Archive
from .zip_entries import Inflating, ZipRecord, first_name, read_directory, text_of

NAME = "torch-export"
FIRST = re.compile(
    r"[^/]*/(data/(weights|constants|aotinductor|executorch)/|models/|archive_(format|version)$).*"
)
CODE = re.compile(r"models/.*|data/aotinductor/.*|serialized_exported_program.*")
OLD = re.compile(r"serialized_(exported_program|state_dict|constants|example_inputs)\.(json|pt)")

STATE = re.compile(r"data/weights/(?P<model>.+)_(weights|model_param)_config\.json")
CONSTANTS = re.compile(r"data/constants/(?P<model>.+)_(model_)?constants_config\.json")
SAVED = re.compile(r"data/weights/(?P<model>.+)\.pt")
COMPILED = re.compile(r"data/aotinductor/(?P<model>[^/]+)/(?P<file>.+)")
WEIGHTS = "data/weights/"

# Element types by their number (torch/_export/serde/schema.py, ScalarType).
TYPES = {
    **dict(enumerate(["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"], 1)),
    **dict(enumerate(["complex32", "complex64", "complex128", "bool", "bfloat16"], 9)),
    **dict(enumerate(["uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"], 28)),
    **dict(enumerate(["float8_e8m0fnu", "uint32", "uint64"], 33)),
}
STRIDED = 7  # Layout

# What else a package holds, by how the names of its records begin.
OTHERS = {
    "serialized_constants": "constants",
    "data/sample_inputs/": "sample inputs",
    "serialized_example_inputs": "sample inputs",
    "data/executorch/": "a program of ExecuTorch",
    "extra": "extra files",
}
EMPTY = "is a package of torch.export without weights"
OUTSIDE = "aot_inductor.package_constants_in_so=False, …_on_disk_format='pickle_weights' puts them outside"


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a zip whose first record is one of a package."""
    name = first_name(head)
    return bool(FIRST.fullmatch(name) or OLD.fullmatch(name))


def read(source: Source) -> Checkpoint:
    """Read the state dict; of several models each has its own, under its name."""
    package = Package(source)
    states = package.states()
    if not states:
        is_compiled = any(map(COMPILED.fullmatch, package.records))
        what = "is a package of AOTInductor whose weights are inside its library" if is_compiled else EMPTY
        raise Unsupported(source.path, what, hint=OUTSIDE if is_compiled else None)
    tree = next(iter(states.values())) if len(states) == 1 else OrderedDict_(states)
    unread = tuple(dict.fromkeys(package.unread()))
    return Checkpoint(source, NAME, tree, unread=unread, names=frozenset(package.names))


class Package:
    """The records of one file, and the storages made of them."""

    def __init__(self, source: Source) -> None:
        self.source, self.inflating = source, Inflating(source)
        found = read_directory(source)
        root = next(iter(found), "").partition("/")[0] + "/"
        if OLD.fullmatch(root[:-1]):
            root = ""
        self.records = {name[len(root) :]: each for name, each in found.items() if name.startswith(root)}
        self.outside = [name for name in found if not name.startswith(root)]
        self.storages: dict[str, Storage] = {}
        self.wholes: dict[str, object] = {}  # what torch.save wrote, by its record's name
        self.names: set[Global] = set()
        if self.records.get("archive_format") and self.text("archive_format") != b"pt2":
            raise Unsupported(source.path, "is an archive of torch of an unknown format")
        order = self.text("byteorder") if "byteorder" in self.records else b"little"
        if order not in (b"little", b"big"):
            raise Damaged(source.path, f"has the byte order {order[:20]!r}")
        self.byteorder = order.decode()

    def record(self, name: str) -> ZipRecord:
        if name not in self.records:
            raise Damaged(self.source.path, f"its record '{name[:80]}' is missing")
        return self.records[name]

    def text(self, name: str) -> bytes:
        return text_of(self.source, self.record(name))

    def json(self, name: str) -> dict[str, Any]:
        return parse_object(self.source.path, self.text(name), f"its record '{name[:80]}'")

    def saved(self, name: str) -> object:
        """Return what torch.save wrote into a record."""
        if name not in self.wholes:
            place = self.inflating.data(self.record(name))
            pickle = Archive(place.source, place).read_pickle()
            self.names |= pickle.names
            self.wholes[name] = pickle.value
        return self.wholes[name]

    def states(self) -> dict[str, object]:
        """Return the state dict of each model by its name."""
        states: dict[str, object] = {}
        for name in self.records:
            if match := STATE.fullmatch(name):
                listed = self.config(name)
                states[match["model"]] = OrderedDict_((key, self.tensor(key, listed[key])) for key in listed)
            elif (match := COMPILED.fullmatch(name)) and match["file"] == "weights_config.json":
                listed, model = self.json(name), match["model"]
                model += ".aotinductor" * (model in states)
                states[model] = OrderedDict_((key, self.view(key, listed[key])) for key in listed)
            elif match := SAVED.fullmatch(name):
                states[match["model"]] = self.saved(name)
            elif (old := OLD.fullmatch(name)) and old[1] == "state_dict":
                states["model"] = self.saved(name)
        return {name: state for name, state in states.items() if state or len(states) == 1}

    def tensor(self, name: str, meta: object) -> object:
        """Return a tensor as its PayloadMeta describes it."""
        match meta:
            case {"path_name": str(file), "use_pickle": True}:
                return self.saved(WEIGHTS + file)
            case {
                "path_name": str(file),
                "tensor_meta": {
                    "dtype": int(kind),
                    "sizes": list(sizes),
                    "strides": list(strides),
                    "storage_offset": offset,
                    "layout": int(layout),
                    "device": {"type": str(device), **rest},
                },
            } if kind in TYPES and layout == STRIDED:
                index = rest.get("index")
                place = device if index is None else f"{device}:{index}"
                storage = self.storage(file, DTYPES[TYPES[kind]], place)
                shape, stride = (tuple(map(_integer, numbers)) for numbers in (sizes, strides))
                return self.checked(name, storage, DTYPES[TYPES[kind]], shape, stride, _integer(offset))
        raise self.unknown(name)

    def view(self, name: str, described: object) -> TensorRef:
        """Return a tensor as AOTInductor describes it: a view of another that torch.save wrote."""
        match described:
            case [str(file), list(shape), list(stride), offset]:
                if (whole := tensor_of(self.saved(WEIGHTS + file))) is not None:
                    return self.checked(name, whole.storage, whole.dtype, tuple(shape), tuple(stride), offset)
        raise self.unknown(name)

    def storage(self, file: str, dtype: DType, device: str) -> Storage:
        if file not in self.storages:
            if not DEVICE.fullmatch(device):
                raise Damaged(self.source.path, f"has a tensor on '{device[:40]}', which is no device")
            record = self.record(WEIGHTS + file)
            data = self.inflating.data(record)
            self.storages[file] = Storage(data, dtype.kind, device, record.crc32, self.byteorder)
        return self.storages[file]

    def checked(self, name: str, *parts: Any) -> TensorRef:
        try:
            return checked_tensor(*parts)
        except BadTensor as fault:
            raise Damaged(self.source.path, f"'{name[:80]}' is a tensor {fault}") from None

    def unknown(self, name: str) -> Damaged:
        return Damaged(self.source.path, f"describes '{name[:80]}' in a way that is not known here")

    def unread(self) -> Iterator[str]:
        """Yield in words what else is in the package."""
        yield from (f"record '{name[:80]}'" for name in self.outside)
        for name in self.records:
            if CONSTANTS.fullmatch(name):
                yield from (f"constant '{key[:80]}'" for key in self.config(name))
            elif CODE.fullmatch(name):
                yield "code"
            elif re.fullmatch(r"data/constants/.+\.pt", name):
                yield "constants"
            else:
                yield from (what for begin, what in OTHERS.items() if name.startswith(begin))

    def config(self, name: str) -> dict[str, Any]:
        """Return what a list of tensors says of each."""
        listed = self.json(name).get("config")
        if not isinstance(listed, dict):
            raise Damaged(self.source.path, f"its record '{name[:80]}' lists no tensors")
        return listed


def _integer(value: object) -> object:
    """Return the number of a size, which is of no use as an expression; what is none is refused later."""
    return value.get("as_int") if isinstance(value, dict) else value
