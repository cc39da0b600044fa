"""The format of `torch.save` since torch 1.6: a zip of one pickle and one record for each storage.

`<root>/data.pkl` holds the tree, `<root>/data/<key>` the bytes of a storage, `<root>/byteorder` their order.
The root is the stem of the file's name when it was saved; today's name says nothing.
Source: torch's `serialization.py` and `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable

from ..checkpoint import Checkpoint
from ..errors import Damaged, Refused, Unsupported
from ..inert import TooDeep
from ..tensor import Source, Storage
from ..transfer import Output
from .inert_reader import PickleFault
from .torch_pickle import StorageId, read_torch_pickle, write_torch_pickle
from .zip_archive import STORED, Record, ZipWriter, read_directory

NAME = "torch-zip"
EXTENSIONS = (".pt", ".pth", ".th", ".bin", ".ckpt")
PICKLE = "/data.pkl"


def sniff(head: bytes) -> bool:
    return head.startswith(b"PK\x03\x04")


def read(source: Source) -> Checkpoint:
    """Reads the tree; no storage is touched.

    Raises:
        Damaged, Unsupported.
    """
    archive = _Archive(source)
    data = archive.bytes_of("data.pkl")
    try:
        pickle = read_torch_pickle(data, 0, archive.storage)
    except PickleFault as fault:
        raise Damaged(source.path, str(fault)) from None
    return Checkpoint(source, NAME, pickle.value, protocol=pickle.protocol)


class _Archive:
    """The records of one file under its root, and the storages made of them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.records = read_directory(source)
        self.root = _root(source, self.records)
        self.byteorder = self._byteorder()
        self.storages: dict[str, Storage] = {}

    def record(self, name: str) -> Record:
        record = self.records.get(f"{self.root}/{name}")
        if record is None:
            raise Damaged(self.source.path, f"its record '{name}' is missing")
        if record.compression != STORED:
            raise Unsupported(
                self.source.path,
                f"its record '{name}' is compressed",
                hint="load and save it once with torch, which does not compress",
            )
        return record

    def bytes_of(self, name: str) -> bytes:
        """A small record, whole, with its checksum looked at."""
        record = self.record(name)
        data = record.data.read()
        if record.crc32 is not None and zlib.crc32(data) != record.crc32:
            raise Damaged(self.source.path, f"its record '{name}' does not match its checksum")
        return data

    def _byteorder(self) -> str:
        if f"{self.root}/byteorder" not in self.records:
            return "little"  # before torch 2.1 nothing was said and little was meant
        order = self.bytes_of("byteorder").decode("ascii", "replace")
        if order not in ("little", "big"):
            raise Damaged(self.source.path, f"has the byte order {order[:20]!r}")
        return order

    def storage(self, parsed: StorageId) -> Storage:
        """The storage of a persistent id: one object a key, whoever refers to it."""
        known = self.storages.get(parsed.key)
        if known is None:
            record = self.record(f"data/{parsed.key}")
            known = Storage(record.data, parsed.kind, parsed.location, record.crc32, self.byteorder)
            self.storages[parsed.key] = known
        if parsed.nbytes != known.nbytes:
            raise Damaged(
                self.source.path,
                f"storage '{parsed.key}' should have {parsed.nbytes} bytes, its record has {known.nbytes}",
            )
        return known


def _root(source: Source, records: Iterable[str]) -> str:
    names = list(records)
    roots = [name.removesuffix(PICKLE) for name in names if name.endswith(PICKLE) and name.count("/") == 1]
    if len(roots) > 1:
        raise Damaged(source.path, "holds more than one 'data.pkl'")
    if roots and f"{roots[0]}/constants.pkl" not in names:
        return roots[0]
    if roots:
        raise Unsupported(
            source.path,
            "is a TorchScript archive, code and all, not a checkpoint",
            hint="load it with torch.jit.load and save its state_dict()",
        )
    raise Unsupported(source.path, "is a zip archive without a 'data.pkl', so not a file of torch.save")


def write(checkpoint: Checkpoint, out: Output, name: str) -> None:
    """Writes the whole tree, each storage once, its bytes copied unseen where their CRC is known.

    Args:
        name: the file's name, from which torch takes the root of the records.

    Raises:
        Refused: something in the tree can't be written.
    """
    try:
        pickle, storages = write_torch_pickle(checkpoint.tree, checkpoint.protocol)
    except TooDeep:
        raise Refused(checkpoint.path, "its contents are nested too deeply to be written") from None
    except ValueError as error:
        raise Refused(checkpoint.path, str(error)) from None
    archive = ZipWriter(out, _root_for(name))
    archive.write("data.pkl", pickle)
    archive.write(".format_version", b"1")
    archive.write(".storage_alignment", b"64")
    archive.write("byteorder", _common_byteorder(checkpoint, storages).encode())
    for key, storage in enumerate(storages):
        archive.copy(f"data/{key}", storage.data, storage.crc32)
    archive.write("version", b"3\n")
    archive.write(".data/serialization_id", _serialization_id(pickle, archive.directory))
    archive.close()


def _root_for(name: str) -> str:
    """The stem of the file's name where every reader takes it as a folder's name; else `archive`."""
    stem = os.path.splitext(os.path.basename(name))[0]
    return stem if stem.isascii() and "\\" not in stem and stem.strip(".") else "archive"


def _common_byteorder(checkpoint: Checkpoint, storages: list[Storage]) -> str:
    orders = {storage.byteorder for storage in storages}
    if len(orders) > 1:
        raise Refused(checkpoint.path, "mixes big-endian and little-endian tensors")
    return orders.pop() if orders else "little"


def _serialization_id(pickle: bytes, directory: bytes | bytearray) -> bytes:
    """40 digits that are the same for the same contents, as torch's are; readers only compare them."""
    digest = hashlib.sha256(pickle + directory).digest()
    return str(int.from_bytes(digest[:16], "little")).zfill(40)[:40].encode()
