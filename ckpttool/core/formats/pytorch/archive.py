"""What all zip files of torch have: records under one root, a byte order, and storages as `data/<key>`.

The root is the stem of the file's name when it was saved, whatever the file is called now.

torch writes uncompressed records, and reads compressed ones too, as `zip -r` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import repeat

from ....errors import Damaged, Refused, Unsupported
from ...checkpoint.checkpoint import Remark
from ...inert_pickle.machine import PickleFault
from ...inert_pickle.reader import Pickle
from ...tensors.ref import DEVICE, ByteRange, Source, Storage
from ..strangers import checkpoints_inside
from .fast_path import StorageForm
from .tensor_pickle import ZIP_PARTS, read_torch_pickle
from .zip_entries import Inflating, ZipRecord, read_directory, require_known_method, text_of
from .zip_writer import STORED

PICKLE = "/data.pkl"
# Versions of the file format that torch 2.15 reads (`kMinSupportedFileFormatVersion` to `kMax…`).
VERSIONS = range(1, 11)

LEADING_NUMBER = re.compile(rb"[ \t-\r]*([+-]?[0-9]+)")

# Records that are looked up by name; torch finds them in any case of letters.
LOOKED_UP = (PICKLE, "/byteorder", "/constants.pkl")

EXPORTED = "load it with torch.export.load and save its state_dict"
PACKAGED = "load the model with torch.package.PackageImporter and save its state_dict()"
SCRIPTED = "load it with torch.jit.load and save its state_dict()"

# Other things that are kept in a zip file, by how the name of a record ends.
OTHERS_BY_ENDING = (
    ("/archive_format", "is an exported program (torch.export) that another tool zipped again", EXPORTED),
    ("/.data/extern_modules", "is a torch.package archive, code and all, not a checkpoint", PACKAGED),
    ("/model.json", "is a TorchScript archive of torch before 1.4, which is not read here", SCRIPTED),
    (".npy", "holds NumPy arrays (.npz), but first something else", "load it and numpy.savez it"),
    (".weights.h5", "is a Keras model, which is not read here", "load it with Keras, and save its weights"),
)


class Archive:
    """The records of one file, and the storages made of them: one object per key, whatever refers to it."""

    def __init__(self, source: Source, place: ByteRange | None = None) -> None:
        self.source = source
        self.records = read_directory(source, place)
        self.root = _root(source, self.records)
        self.data = f"{self.root}/data/"
        self.byteorder = self._byteorder()
        self.inflating = Inflating(source)
        self.storages: dict[str, Storage] = {}
        self.remarks: list[Remark] = [*self._outside(), *self._version()]

    def __contains__(self, name: str) -> bool:
        return f"{self.root}/{name}" in self.records

    def record(self, name: str) -> ZipRecord:
        """Return a record by its name under the root."""
        record = self.records.get(f"{self.root}/{name}")
        if record is None:
            raise Damaged(self.source.path, f"its record '{name[:80]}' is missing")
        require_known_method(self.source, record)
        return record

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of a small record, a pickle or a line of text."""
        return text_of(self.source, self.record(name))

    def read_pickle(self) -> Pickle:
        """Read the tree in `data.pkl`; no storage is read, unless it is compressed."""
        try:
            data, find = self.bytes_of("data.pkl"), (self.storage, self.all_storages)
            return read_torch_pickle(data, *find, parts=ZIP_PARTS, remarks=self.remarks)
        except PickleFault as fault:
            raise Damaged(self.source.path, str(fault)) from None

    def storage(self, key: str, form: StorageForm) -> Storage:
        """Return the storage of a persistent id, the same object for the same key."""
        if storage := self.storages.get(key):
            self._require_size(key, form, storage.nbytes)
            return storage
        record = self.records.get(self.data + key)
        if record is None or record.compression != STORED:
            record = self.record(f"data/{key}")
        self._require_size(key, form, record.size)  # before anything is inflated
        data = record.data if record.compression == STORED else self.inflating.data(record)
        if form.location != "cpu" and not DEVICE.fullmatch(form.location):
            what = f"is tagged with '{form.location[:40]}', which is no device: torch refuses the file"
            self.remarks.append(Remark(f"storage '{key[:80]}'", what))
        self.storages[key] = Storage(data, form.kind, form.location, record.crc32, self.byteorder)
        return self.storages[key]

    def all_storages(self, keys: Sequence[str], forms: Sequence[StorageForm]) -> list[Storage]:
        """Return the storages of several keys."""
        records = [*filter(None, map(self.records.get, map(self.data.__add__, keys)))]
        is_new = len({*keys}) == len(keys) == len(records) and self.storages.keys().isdisjoint(keys)
        if is_new and {record.compression for record in records} == {STORED}:
            kinds, locations, _, nbytes = zip(*forms, strict=True)
            _, data, sizes, crcs, _ = zip(*records, strict=True)
            if sizes == nbytes and all(map(DEVICE.fullmatch, {*locations})):
                storages = [*map(Storage, data, kinds, locations, crcs, repeat(self.byteorder))]
                self.storages.update(zip(keys, storages, strict=True))
                return storages
        return [*map(self.storage, keys, forms)]

    def _require_size(self, key: str, form: StorageForm, size: int) -> None:
        if form.nbytes != size:
            what = f"storage '{key[:80]}' should have {form.nbytes} bytes, its record has {size}"
            raise Damaged(self.source.path, what)

    def _outside(self) -> Iterator[Remark]:
        folder = f"{self.root}/"
        outside = [name for name in self.records if not name.startswith(folder)]
        if outside:
            more = f" (and {len(outside) - 1} more)" if outside[1:] else ""
            what = f"is outside '{folder[:80]}': torch refuses the file"
            yield Remark(f"record '{outside[0][:80]}'{more}", what)

    def _version(self) -> Iterator[Remark]:
        """Remark on a version that torch refuses; torch reads its first digits, as C's `strtoull` does."""
        folder = f"{self.root}/".lower()
        ending = (name for name in self.records if name[-7:].lower() == "version")
        names = {name.lower().removeprefix(folder): name for name in ending}
        full_name = names.get(".data/version") or names.get("version")
        if full_name is None:
            yield Remark("record 'version'", "is missing: torch refuses the file")
            return
        name = full_name[len(folder) :]
        try:
            number = LEADING_NUMBER.match(self.bytes_of(name)[:80])
        except (Damaged, Unsupported, Refused):
            yield Remark(f"record '{name}'", "can't be read")
            return
        if not number:
            yield Remark(f"record '{name}'", "states no number: torch refuses the file")
        elif int(number[1]) not in VERSIONS:
            what = f"states version {int(number[1])}: torch reads {VERSIONS[0]} to {VERSIONS[-1]}"
            yield Remark(f"record '{name}'", what)

    def _byteorder(self) -> str:
        if "byteorder" not in self:
            return "little"  # torch before 2.1 writes no byte order
        order = self.bytes_of("byteorder").decode("ascii", "replace")
        if order not in ("little", "big"):
            raise Damaged(self.source.path, f"has the byte order {order[:20]!r}")
        return order


def _root(source: Source, records: dict[str, ZipRecord]) -> str:
    """The folder of `data.pkl`."""
    # Nearly all records are storages, `<root>/data/<key>`; those looked up are next to that folder.
    top = [name for name in records if "/data/" not in name and name.count("/") == 1]
    for name in top:
        if name.lower().endswith(LOOKED_UP) and not name.endswith(LOOKED_UP):
            raise Damaged(source.path, f"has a record whose name torch mistakes for another: {name[:80]!r}")
    roots = [name.removesuffix(PICKLE) for name in top if name.endswith(PICKLE)]
    if len(roots) == 1:
        return roots[0]
    if roots:
        raise Unsupported(source.path, f"holds several files of torch.save: {', '.join(roots)[:80]}")
    if inside := checkpoints_inside(source.path, [*records], "unzip"):
        raise inside
    for ending, what, hint in OTHERS_BY_ENDING:
        if any(name.endswith(ending) for name in records):
            raise Unsupported(source.path, what, hint=hint)
    raise Unsupported(source.path, "is a zip archive without a 'data.pkl', so not a file from torch.save")
