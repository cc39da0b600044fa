"""The format of `torch.save` since torch 1.6: a zip of one pickle and one record for each storage.

`<root>/data.pkl` holds the tree, `<root>/data/<key>` the bytes of a storage, `<root>/byteorder` their order.
Source: torch's `serialization.py` and `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import NamedTuple

from ....errors import Damaged, Refused, Unsupported
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.pickled_modules import BadModules, ModuleParts, named
from ...files.copying import Output
from ...files.reflink import require_copied
from ...inert_pickle.values import Global, OrderedDict_, Record, TooDeep, tensor_of
from ...tensors.ref import ByteRange, Source, Storage
from .archive import SCRIPTED, Archive
from .tensor_pickle import write_torch_pickle
from .zip_writer import ZipWriter

NAME = "torch-zip"
EXTENSIONS = (".pt", ".pth", ".th", ".bin", ".ckpt")


def sniff(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zip."""
    return head.startswith(b"PK\x03\x04")


def read(source: Source) -> Checkpoint:
    """Read the tree; no storage is read, unless it is compressed."""
    archive = Archive(source)
    if "constants.pkl" in archive:
        return replace(_read_torchscript(archive), remarks=tuple(archive.remarks))
    pickle = archive.read_pickle()
    remarks = tuple(archive.remarks)
    return Checkpoint(source, NAME, pickle.value, pickle.protocol, names=pickle.names, remarks=remarks)


def write(checkpoint: Checkpoint, out: Output, name: str) -> None:
    """Write the whole tree, each storage once; its bytes are copied unread where their CRC is known."""
    try:
        pickle, storages = write_torch_pickle(checkpoint.tree, checkpoint.protocol, checkpoint.device)
    except TooDeep:
        raise Refused(checkpoint.path, "its contents are nested too deeply to be written") from None
    except ValueError as error:
        raise Refused(checkpoint.path, str(error)) from None
    if out.reflink.is_always:
        copied = [storage for storage in storages if isinstance(storage.data, ByteRange)]
        require_copied(checkpoint.path, storages, copied)
    archive = ZipWriter(out, _root_for(name))
    archive.write("data.pkl", pickle)
    # No ".format_version": by it torch takes the places of storages as computed from their sizes, and reads
    # other bytes where a file is laid out otherwise.
    archive.write(".storage_alignment", b"64")
    archive.write("byteorder", _common_byteorder(checkpoint, storages).encode())
    archive.copy_all(storages)
    archive.write("version", b"3\n")
    archive.write(".data/serialization_id", _serialization_id(pickle, archive.directory()))
    archive.close()


def _root_for(name: str) -> str:
    """The stem of the file's name where all readers accept it as a folder's name; else `archive`."""
    stem = os.path.splitext(os.path.basename(name))[0]
    return stem if stem.isascii() and "\\" not in stem and stem.strip(".") else "archive"


def _common_byteorder(checkpoint: Checkpoint, storages: list[Storage]) -> str:
    orders = {storage.byteorder for storage in storages}
    if len(orders) > 1:
        raise Refused(checkpoint.path, "mixes big-endian and little-endian tensors")
    return orders.pop() if orders else "little"


def _serialization_id(pickle: bytes, directory: bytes) -> bytes:
    """40 digits that are the same for the same contents, as torch's are; readers only compare them."""
    import hashlib  # loads OpenSSL, which most commands do without

    digest = hashlib.sha256(pickle + directory).digest()
    return str(int.from_bytes(digest[:16], "little")).zfill(40)[:40].encode()


TORCHSCRIPT = "torchscript"
CLASS = re.compile(r"^class (?P<name>\w+)\((?P<base>\w*)\):$", re.MULTILINE)
END = re.compile(r"^\S", re.MULTILINE)  # the next class or function
LIST = re.compile(r"^  __(?P<kind>parameters|buffers)__ = \[(?P<names>.*)\]$", re.MULTILINE)
QUOTED = re.compile(r'"([^"]*)"')


class Declared(NamedTuple):
    """What a module's class declares. `buffers` is None in old archives, which do not list them."""

    parameters: list[str]
    buffers: list[str] | None


def _read_torchscript(archive: Archive) -> Checkpoint:
    """Read the model's state from an archive that `torch.jit.save` wrote."""
    pickle = archive.read_pickle()
    try:
        state = OrderedDict_(named(pickle.value, _Modules(archive).parts))
    except BadModules as fault:
        raise Damaged(archive.source.path, str(fault)) from None
    for name, value in state.items():
        if tensor_of(value) is None:
            raise _not_plain(archive, f"'{name}' is {_what(value)}, not a plain tensor")
    if not state and "constants/0" not in archive:
        raise Unsupported(archive.source.path, "is a TorchScript archive without weights, only code")
    if not state:
        frozen = "weights have no names: it was frozen, which makes them constants of the code"
        raise _not_plain(archive, frozen)
    script = Checkpoint(archive.source, TORCHSCRIPT, pickle.value, pickle.protocol, names=pickle.names)
    unread = ("code", *(name for name, _ in script.tensors() if name not in state))
    return replace(script, tree=state, unread=unread)


def _not_plain(archive: Archive, what: str) -> Unsupported:
    return Unsupported(archive.source.path, f"is a TorchScript archive whose {what}", hint=SCRIPTED)


def _what(value: object) -> str:
    named = value.type_name if isinstance(value, Record) else type(value).__name__
    return {"torch._utils._rebuild_qtensor": "a quantised tensor"}.get(named, f"of type {named}")


class _Modules:
    """Splits modules into their parts as their classes declare them; each code file is read once."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.classes: dict[str, dict[Global, Declared]] = {}

    def parts(self, module: object) -> ModuleParts:
        """Return the tensors and modules of one module."""
        declared = self.declared(module)
        if declared is None or not isinstance(module, Record) or not isinstance(module.state, dict):
            raise _not_plain(self.archive, f"module {_what(module)} packs its state in its own way")
        present = {str(name): value for name, value in module.state.items() if value is not None}
        listed = declared.buffers
        if listed is None:
            listed = [name for name, value in present.items() if tensor_of(value)]
        tensors = {name: value for name, value in present.items() if name in declared.parameters}
        tensors |= {name: value for name, value in present.items() if name in listed}
        inside = {name: value for name, value in present.items() if self.declared(value) is not None}
        return ModuleParts(tensors, inside)

    def declared(self, value: object) -> Declared | None:
        """Return what a value's class declares; None when the value is not a module."""
        if not isinstance(value, Record) or not isinstance(value.callable, Global):
            return None
        cls = value.callable
        if not cls.module.startswith("__torch__") or cls.module.startswith("__torch__.torch.classes"):
            return None  # an object of a C++ class, not a module
        if cls.module not in self.classes:
            self.classes[cls.module] = self.read_code(cls.module)
        return self.classes[cls.module].get(cls)

    def read_code(self, module: str) -> dict[Global, Declared]:
        """Return the module classes of one code file by name."""
        text = self.archive.bytes_of(f"code/{module.replace('.', '/')}.py").decode("utf-8", "replace")
        declared: dict[Global, Declared] = {}
        for match in CLASS.finditer(text):
            if match["base"] == "Module":
                end = END.search(text, match.end())
                body = text[match.end() : end.start() if end else len(text)]
                lists = {kind: QUOTED.findall(names) for kind, names in LIST.findall(body)}
                like = Declared(lists.get("parameters", []), lists.get("buffers"))
                declared[Global(module, match["name"])] = like
        return declared
