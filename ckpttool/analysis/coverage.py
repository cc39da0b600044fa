"""Which bytes of a checkpoint's files a checksum covers, and whether it holds for those of no tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import reads_of
from ..formats import numpy_files
from ..formats.dcp import reading as dcp
from ..formats.delta.reading import NAME as DELTA
from ..formats.pytorch import exported
from ..formats.pytorch import zip as torch_zip
from ..formats.pytorch.inflating import is_intact
from ..formats.pytorch.zip_reader import ZipRecord, read_directory
from ..formats.shards import TORCH
from ..tensors.ref import Storage
from ..tensors.source import ByteRange, Source
from .zip_structure import zip_frame

ZIPS = (torch_zip.NAME, torch_zip.TORCHSCRIPT, TORCH)  # The formats that are zips, or folders of zips
OTHER_ZIPS = (numpy_files.NPZ, exported.NAME)  # Those whose other records and frame are not torch.save's

# The records that torch.save writes in addition to storages.
OWN_RECORDS = {"data.pkl", "version", "byteorder", ".format_version", ".storage_alignment"}
OWN_RECORDS |= {".data/version", ".data/serialization_id"}

# The first byte of a pickle of protocol 2 or newer, and the newest protocol, which follows it
PROTO, NEWEST = b"\x80", b"\x05"

SIGNATURE = b"PK\x03\x04"  # The first bytes of a zip; the index of a folder has others

MISMATCH = "its bytes do not match their checksum"


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something wrong with a file.

    Attributes:
        kind: `checksum`, `frame` (the bytes around a record), `non-finite`, `torch` (a remark of the reader),
            `ranks` (ranks differ), `code` (a name that could run, or a record that nothing refers to), or the
            difference from another file: `only-here`, `only-there`, `form` (dtype or shape) or `values`.
        name: the tensor or record.
        message: the problem, to be read after the name.
    """

    kind: str
    name: str
    message: str


class ByteCoverage:
    """The bytes of a checkpoint's files: those of storages, and the rest, with the problems found there."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.problems: list[FileProblem] = []  # of records, and of what lies around them
        self.strays: list[FileProblem] = []  # records that nothing refers to
        self.checked = self.unsummed = 0  # bytes of storages and records
        self.free: Counter[str] = Counter()  # bytes that no checksum covers, by what they are
        self._within: Counter[int] = Counter()  # bytes of storages in each source, by its id
        self._known: set[tuple[int, int]] = set()
        self._pieces: set[tuple[int, int]] = set()  # the records that whole tensors are put together from
        for storage in {id(storage): storage for _, storage in checkpoint.storages()}.values():
            self._count(storage)
            if checkpoint.format == DELTA:  # whose files hold nothing but what tensors are made of
                self._count_origins(storage)
        of_ranks = checkpoint.ranks is not None
        zips = checkpoint.format in ZIPS or (of_ranks and checkpoint.format != dcp.NAME)
        for source in filter(attrgetter("size"), checkpoint.sources):
            is_one = not source.path.endswith(dcp.ENDING)  # many zips in a row
            is_zip = zips and is_one and source.read(0, 4) == SIGNATURE
            if checkpoint.format in OTHER_ZIPS:
                self._check_records(source)
            else:
                self._check_rest(source, is_zip=is_zip, is_of_rank=is_zip and of_ranks)

    def _count(self, storage: Storage) -> None:
        data = storage.data
        self.checked += data.nbytes
        pieces = (each.data for each in storage.origins)
        self._pieces |= {(id(each.source), each.offset) for each in pieces if isinstance(each, ByteRange)}
        are_summed = storage.origins and all(each.crc32 is not None for each in storage.origins)
        if data.nbytes and storage.crc32 is None and not are_summed:
            self.unsummed += 1
            self.free["values"] += data.nbytes
        if data.nbytes and isinstance(data, ByteRange):
            self._known.add((id(data.source), data.offset))
            self._within[id(data.source)] += data.nbytes

    def _count_origins(self, storage: Storage) -> None:
        for data in reads_of(("", each) for each in storage.origins):
            if (id(data.source), data.offset) not in self._known:
                self._known.add((id(data.source), data.offset))
                self._within[id(data.source)] += data.nbytes

    def _check_rest(self, source: Source, *, is_zip: bool, is_of_rank: bool) -> None:
        """Check everything else in a zip: the pickle, code, and storages that no tensor uses."""
        if not is_zip:
            self.free["contents"] += source.size - self._within[id(source)]
            return
        faults, free = zip_frame(source)
        self.free.update(free)
        self.problems += [FileProblem("frame", f"record {name}", message) for name, message in faults]
        # Only a rank's file may refer to storages of which the whole takes nothing.
        referred: set[int] | None = None if is_of_rank else set()
        for record in read_directory(source).values():
            if (id(source), record.data.offset) in self._known:
                continue
            self.checked += record.size
            is_piece = (id(source), record.data.offset) in self._pieces
            if record.size and not is_piece and record.name.partition("/")[2] not in OWN_RECORDS:
                referred = _referred(source) if referred is None else referred
                if record.data.offset not in referred:
                    self.strays.append(_stray(source, record))
            self._check_record(source, record)

    def _check_records(self, source: Source) -> None:
        """Check what another tool zipped but for the tensors: all other records."""
        records = [*read_directory(source, folded=False).values()]
        rest = [each for each in records if (id(source), each.data.offset) not in self._pieces | self._known]
        self.free["contents"] += source.size - sum(record.data.nbytes for record in records)
        for record in rest:
            self.checked += record.size
            self._check_record(source, record)

    def _check_record(self, source: Source, record: ZipRecord) -> None:
        intact = is_intact(source, record)
        if intact is None:
            self.free["records"] += record.size
        if intact is False:
            self.problems.append(FileProblem("checksum", f"record {record.name}", MISMATCH))


def _referred(source: Source) -> set[int]:
    """Return where the storages lie that the pickle of a zip refers to."""
    storages = (storage.data for _, storage in torch_zip.read(source).storages())
    return {data.offset for data in storages if isinstance(data, ByteRange)}


def _stray(source: Source, record: ZipRecord) -> FileProblem:
    """Return the problem of a record that torch.save does not write and that no tensor lies in."""
    head = source.read(record.data.offset, min(2, record.data.nbytes))
    what = "is a pickle that" if head[:1] == PROTO and head[1:] <= NEWEST else "is a record that"
    return FileProblem("code", f"record {record.name}", f"{what} nothing in the file refers to")
