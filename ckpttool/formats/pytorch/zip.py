"""The format of `torch.save` since torch 1.6: a zip of one pickle and one record for each storage.

`<root>/data.pkl` holds the tree, `<root>/data/<key>` the bytes of a storage, `<root>/byteorder` their order.
Source: torch's `serialization.py` and `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Refused
from ...files.copying import Output
from ...inert_pickle.values import TooDeep
from ...tensors.ref import Source, Storage
from ..zip.writer import ZipWriter
from .archive import Archive
from .tensor_pickle import write_torch_pickle
from .torchscript import is_torchscript, read_torchscript

NAME = "torch-zip"
EXTENSIONS = (".pt", ".pth", ".th", ".bin", ".ckpt")


def sniff(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zip."""
    return head.startswith(b"PK\x03\x04")


def read(source: Source) -> Checkpoint:
    """Read the tree; no storage is read, unless it is compressed."""
    archive = Archive(source)
    if is_torchscript(archive):
        return replace(read_torchscript(archive), remarks=tuple(archive.remarks))
    pickle = archive.read_pickle()
    return Checkpoint(
        source,
        NAME,
        pickle.value,
        protocol=pickle.protocol,
        names=pickle.names,
        remarks=tuple(archive.remarks),
    )


def write(checkpoint: Checkpoint, out: Output, name: str) -> None:
    """Write the whole tree, each storage once; its bytes are copied unread where their CRC is known."""
    try:
        pickle, storages = write_torch_pickle(checkpoint.tree, checkpoint.protocol, checkpoint.device)
    except TooDeep:
        raise Refused(checkpoint.path, "its contents are nested too deeply to be written") from None
    except ValueError as error:
        raise Refused(checkpoint.path, str(error)) from None
    archive = ZipWriter(out, _root_for(name))
    archive.write("data.pkl", pickle)
    # No ".format_version": by it torch takes the places of storages as computed from their sizes, and reads
    # other bytes where a file is laid out otherwise.
    archive.write(".storage_alignment", b"64")
    archive.write("byteorder", _common_byteorder(checkpoint, storages).encode())
    for key, storage in enumerate(storages):
        archive.copy(f"data/{key}", storage.data, storage.crc32)
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
