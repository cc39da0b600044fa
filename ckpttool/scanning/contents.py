"""What a file holds that Python could unpickle, container by container, each recognised by its content."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from ..arrays import reading
from ..core.formats import safetensors
from ..core.formats.pytorch import tar
from ..core.formats.pytorch.zip_entries import read_directory
from ..core.formats.pytorch.zip_writer import STORED
from ..core.formats.strangers import known
from ..core.inert_pickle.values import Global, walk
from ..core.tensors.ref import ByteRange, Source
from ..errors import CkptToolError, Damaged, Refused, Unsupported
from . import pickles, unpacking
from .verdicts import ScanProblem

HEAD = 512  # bytes by which something is recognised
MAX_LEVELS = 16  # of containers in containers
MAX_PROBLEMS = 100  # that are kept of one file
MAX_EXTENDED = 1 << 20  # bytes of a tar's extended header

# A pickle takes up to 70 times its bytes while it is read. Of an unpacked pickle at most GROWTH times the
# bytes of the file are read, or SMALL if that is more.
GROWTH, SMALL = 16, 1 << 20

# Endings of files that are only ever unpickled: none is harmless just because it can't be read.
PICKLED = (".pkl", ".pickle", ".joblib", ".dill", ".pt", ".pth", ".ckpt")

# What is not opened here, by how it begins: whether Python's own loaders open it, and what it is.
CLOSED = (
    (
        rb"version https://git-lfs",
        False,
        "is a Git LFS pointer, not the file itself (fetch it: git lfs pull)",
    ),
    (rb"7z\xbc\xaf'\x1c", False, "is a 7z archive, which is not opened here (unpack it first)"),
    (rb"Rar!", False, "is a RAR archive, which is not opened here (unpack it first)"),
    (
        rb"[\x1e\x22-\x28]\xb5\x2f\xfd",
        True,
        "is compressed with zstd, which is not unpacked here (unpack it first)",
    ),
    (
        rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",
        True,
        "is compressed with lz4, which is not unpacked here (unpack it first)",
    ),
    (
        rb"[\x50-\x5f]\x2a\x4d\x18",
        True,
        "is compressed with zstd or lz4, which is not unpacked here (unpack it first)",
    ),
)

# Members of torch's tar that hold more than pickles; an extended header may give any member such a name.
RENAMED = re.compile(rb"(?:^|=)(?:storages|tensors)/*(?:[\n\0]|$)")


class FilePart(NamedTuple):
    """Some bytes of a file, and the way to them."""

    place: ByteRange
    where: tuple[str, ...] = ()
    # Else they may look like something by chance: what breaks off is none, and no loader reads on either.
    is_sure: bool = True
    is_open: bool = True  # what zips hold of them is looked into elsewhere otherwise

    def inside(self, name: str, place: ByteRange) -> FilePart:
        """Return a part of this one."""
        return FilePart(place, (*self.where, name[:200]), self.is_sure)


class Contents:
    """The findings in one file so far: names with their places, and parts that could not be looked at."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.room = unpacking.Room(source)
        self.steps = repeat(None, max(pickles.MAX_STEPS, source.size // pickles.BYTES_PER_STEP))
        self.names: dict[Global, str] = {}
        self.problems: list[ScanProblem] = []
        self.pickles = 0

    def look(self, part: FilePart) -> set[str]:
        """Look into a part and all that it holds; return the keys of torch's storages of numbers in it."""
        try:
            if len(part.where) > MAX_LEVELS:
                raise Unsupported(self.source.path, f"is nested more than {MAX_LEVELS} containers deep")
            return self._look(part)
        except CkptToolError as fault:
            self._fault(part, fault)
        return set()

    def _look(self, part: FilePart) -> set[str]:
        """Follow each way in which a loader could open the bytes: one does not rule out another."""
        place = part.place
        head = place.part(0, min(HEAD, place.nbytes)).read()
        if safetensors.sniff(head):  # the size of its header comes first, and may look like anything
            part = part._replace(is_sure=False)
        is_known = False
        for begins, is_opened, what in CLOSED:
            if re.match(begins, head):
                is_known = True
                self._fault(part, what, goes_on=is_opened)
        for stream in unpacking.streams_of(head):
            is_known |= self._unpack(part, stream, place)
        if tar.sniff(head) or tar.is_header(head):
            is_known = True
            self._tar(part)
        if part.is_open and (head.startswith(unpacking.BEGINS) or unpacking.ends_as_zip(place)):
            is_known |= self._zips(part, is_zip=head.startswith(unpacking.BEGINS))
        if head.startswith(unpacking.BEGINS):  # as a pickle, it asks for an object that no loader has
            return set()
        return self._pickles(part, is_known=is_known)

    def _fault(self, part: FilePart, fault: CkptToolError | str, *, goes_on: bool | None = None) -> None:
        """Note why a part can't be looked at: a loader goes on there, or it stops too, if it opens it."""
        goes_on = isinstance(fault, Unsupported | Refused) if goes_on is None else goes_on
        is_new = len(self.problems) < MAX_PROBLEMS or not any(each.goes_on for each in self.problems)
        if (part.is_sure and len(self.problems) < MAX_PROBLEMS) or (goes_on and is_new):
            reason = fault if isinstance(fault, str) else fault.reason
            problem = ScanProblem(" > ".join(part.where), reason, goes_on)
            if problem not in self.problems:
                self.problems.append(problem)

    def _keep(self, part: FilePart, names: set[Global] | frozenset[Global]) -> None:
        for name in names:
            self.names.setdefault(name, " > ".join(part.where))

    # Pickles.

    def _pickles(self, part: FilePart, *, is_known: bool) -> set[str]:
        """Read what may be pickles and arrays, one after another, and look into a container behind them."""
        called = (part.where[-1] if part.where else self.source.path).lower()
        if not part.place.nbytes and called.endswith((*PICKLED, *safetensors.EXTENSIONS)):
            raise Damaged(self.source.path, "is empty")
        is_unpacked = part.place.source is not self.source
        most = max(SMALL, GROWTH * self.source.size) if is_unpacked else pickles.MAX_PICKLE
        read = pickles.PickleFindings(self.steps, self.room.spend)
        is_sure = part.is_sure and not is_known
        try:
            pickles.read_in_a_row(
                part.place, read, is_sure=is_sure, is_first_sure=called.endswith(PICKLED), most=most
            )
        finally:
            self.pickles += read.count
            self._keep(part, read.names)
        if read.fault:
            page = None if part.where or read.names or is_known else known(self.source)  # or what else it is
            claimed = part._replace(is_sure=part.is_sure or read.is_sure)
            self._fault(claimed, page or read.fault, goes_on=read.goes_on and not page)
        for raw in _bytes_in(read.values):
            inner, _ = self.room.put([raw])
            self.look(FilePart(inner, (*part.where, "bytes in it"), is_sure=False))
        for inner in read.inner:
            self.look(FilePart(inner, (*part.where, "behind it"), is_sure=False, is_open=False))
        rest = part.place.part(read.end, part.place.nbytes - read.end)
        if read.end and _begins_container(rest.part(0, min(HEAD, rest.nbytes)).read()):
            self.look(FilePart(rest, (*part.where, "behind it"), is_sure=False, is_open=False))
        return read.numbers

    # Containers.

    def _zips(self, part: FilePart, *, is_zip: bool) -> bool:
        """Look into a zip, or into several in a row; return whether it is one."""
        # Python's zipfile reads what a directory at the end says, torch the same from another place, both
        # more than a strict reader takes. So, unless that finds nothing odd, all records count.
        try:
            self._zip(part, part.place)
        except CkptToolError as fault:
            if is_zip and self._row_of_zips(part):
                return True
            if is_zip:
                self._fault(part, fault)
            self._loose(part)
            return is_zip
        return True

    def _row_of_zips(self, part: FilePart) -> bool:
        """Look into several zips, one after another; return whether there is nothing else in any way."""
        zips = [*unpacking.in_a_row(part.place)]
        if sum(zip_.nbytes for zip_ in zips) < part.place.nbytes or unpacking.leads_elsewhere(part.place):
            return False
        try:
            for zip_ in zips:
                self._zip(part, zip_)
        except CkptToolError:
            return False
        return True

    def _zip(self, part: FilePart, place: ByteRange) -> None:
        """Look into the records of one zip, pickles first: they say which records are numbers."""
        records = read_directory(place.source, place, folded=False)
        numbers: set[str] = set()
        storages: tuple[str, ...] = ()  # the folders of torch's, whose bytes may look like anything
        for record in sorted(records.values(), key=lambda record: not record.name.endswith(".pkl")):
            if not record.data.nbytes:
                continue
            is_sure = part.is_sure and not record.name.startswith(storages)
            inner = FilePart(record.data, (*part.where, record.name[:200]), is_sure)
            if record.compression not in (STORED, *unpacking.METHODS):
                what = f"is compressed in a way that is not unpacked here (method {record.compression})"
                self._fault(inner, what, goes_on=True)
                continue
            engine = unpacking.METHODS.get(record.compression)
            stream = unpacking.PackedStream(record.name, engine) if engine else None
            if record.name in numbers and not self._begins_as_array(record.data, stream):
                continue
            if stream:
                self._unpack(part, stream, record.data)
                continue
            keys, folder = self.look(inner), f"{record.name.removesuffix('.pkl')}/"
            # No storage of torch's has a name with an ending, by which another loader would know it.
            numbers |= {folder + key for key in keys if "." not in key}
            storages += (folder,) if record.name.endswith(".pkl") else ()

    def _begins_as_array(self, place: ByteRange, stream: unpacking.PackedStream | None) -> bool:
        """Whether numpy.load opens a record, which it does whatever torch takes it for."""
        try:
            begin = next(unpacking.unpacked(place, stream, self.room.spend), b"") if stream else None
        except CkptToolError:
            return True
        size = min(len(reading.MAGIC), place.nbytes)
        return (place.part(0, size).read() if begin is None else begin).startswith(reading.MAGIC)

    def _loose(self, part: FilePart) -> None:
        """Look into whatever records there are, where no directory can be believed."""
        for piece in unpacking.pieces(part.place):
            inner = FilePart(piece.data, (*part.where, piece.name[:200]), is_sure=False, is_open=False)
            if piece.is_closed:
                self._fault(
                    inner, "is encrypted, or compressed in a way that is not unpacked here", goes_on=True
                )
            if piece.data.nbytes:
                self.look(inner)
                self._unpack(
                    part._replace(is_sure=False),
                    unpacking.PackedStream(piece.name, unpacking.RAW_DEFLATE),
                    piece.data,
                )

    def _tar(self, part: FilePart) -> None:
        part, names = part._replace(is_sure=True), list[str]()
        end = 0
        for name, kind, place in tar.headers(part.place):
            names.append(name)
            end = place.offset - part.place.offset + place.nbytes + -place.nbytes % tar.BLOCK
            if kind in EXTENDED:
                _require_plain(place)
            elif kind == b"S" or (kind == b"\0" and name.endswith("/") and place.nbytes):
                what = f"is a tar with '{name[:80]}', which readers take for different files"
                raise Unsupported(self.source.path, what)
            elif place.nbytes:
                self.look(part.inside(name, place))
        if {*tar.MEMBERS} <= {*names}:  # of torch before 0.1.12, which reads pickles between its storages
            try:
                self._keep(part, tar.read(self.source, part.place).names)
            except CkptToolError as fault:
                self._fault(part, fault, goes_on=True)
        behind = unpacking.not_zero(part.place, end)
        if behind < part.place.nbytes:
            rest = part.place.part(behind, part.place.nbytes - behind)
            if not tar.is_header(rest.part(0, min(tar.BLOCK, rest.nbytes)).read()):
                raise Unsupported(
                    self.source.path, f"is a tar that ends before byte {behind}, and goes on there"
                )
            self.look(part.inside("behind it", rest)._replace(is_open=False))

    def _unpack(self, part: FilePart, stream: unpacking.PackedStream, place: ByteRange) -> bool:
        """Look into what a stream unpacks to; return whether it is one."""
        inner, wrong = self.room.put(unpacking.unpacked(place, stream, self.room.spend))
        unpacked = part.inside(stream.name, inner)
        if wrong is not None:
            self._fault(unpacked._replace(is_sure=part.is_sure and stream.is_sure), wrong)
        if inner.nbytes:
            self.look(unpacked._replace(is_sure=part.is_sure and stream.is_sure))
        return stream.is_sure or bool(inner.nbytes)


EXTENDED = (b"x", b"g", b"X", b"L", b"K")  # of a tar: what they say belongs to other members


def _require_plain(extended: ByteRange) -> None:
    """Raise Unsupported for what moves a tar's members, or gives them names that torch asks for."""
    if extended.nbytes > MAX_EXTENDED:
        raise Unsupported(extended.path, f"is a tar with an extended header of {extended.nbytes} bytes")
    raw = extended.read()
    if b" size=" in raw or b" GNU.sparse" in raw or RENAMED.search(raw):
        raise Unsupported(extended.path, "is a tar that states sizes or names apart from its headers")


def _begins_container(head: bytes) -> bool:
    """Return whether bytes begin as what a loader unpacks."""
    is_stream = bool(unpacking.streams_of(head)) or any(re.match(begins, head) for begins, *_ in CLOSED)
    return is_stream or tar.is_header(head)


def _bytes_in(values: list[object]) -> Iterator[bytes]:
    """Yield the bytes in some values that begin as a pickle, an array or a container does."""
    for value in (each for tree in values for each in walk(tree)):
        if isinstance(value, bytes | bytearray) and len(value) > 2:
            head = bytes(value[:HEAD])
            begins = pickles.is_pickle(head) or head.startswith((*unpacking.BEGINS, reading.MAGIC))
            if begins or _begins_container(head):
                yield bytes(value)
