"""What a file holds that Python could unpickle, container by container, each recognised by its content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..arrays import reading
from ..core.formats import safetensors
from ..core.formats.cursor import Cursor
from ..core.formats.pytorch import tar
from ..core.formats.pytorch.zip_entries import read_directory, require_known_method
from ..core.formats.pytorch.zip_writer import STORED
from ..core.formats.strangers import known
from ..core.inert_pickle.values import Global, walk
from ..core.tensors.ref import ByteRange, Source
from ..errors import CkptToolError, Damaged, Unsupported
from . import pickles, unpacking
from .verdicts import ScanProblem

HEAD = 512  # bytes by which something is recognised
MAX_LEVELS = 16  # of containers in containers
MAX_PROBLEMS = 100  # that are kept of one file

# A pickle takes up to 70 times its bytes while it is read. Of an unpacked pickle at most GROWTH times the
# bytes of the file are read, or SMALL if that is more.
GROWTH, SMALL = 16, 1 << 20

# Endings of files that are only ever unpickled: none is harmless just because it can't be read.
PICKLED = (".pkl", ".pickle", ".joblib", ".dill", ".pt", ".pth", ".ckpt")

# What Python's loaders open with other programs or packages, by how it begins: what it is.
CLOSED = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself (fetch it: git lfs pull)"),
    (b"7z\xbc\xaf'\x1c", "is a 7z archive, which is not opened here (unpack it first)"),
    (b"Rar!", "is a RAR archive, which is not opened here (unpack it first)"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd, which is not unpacked here (unpack it first)"),
    (b"\x04\x22\x4d\x18", "is compressed with lz4, which is not unpacked here (unpack it first)"),
)


class FilePart(NamedTuple):
    """Some bytes of a file, and the way to them."""

    place: ByteRange
    where: tuple[str, ...] = ()
    is_sure: bool = True  # else they may look like something by chance, and faults are not reported

    def inside(self, name: str, place: ByteRange) -> FilePart:
        """Return a part of this one."""
        return FilePart(place, (*self.where, name[:200]), self.is_sure)


class Contents:
    """The findings in one file so far: names with their places, and parts that could not be looked at."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.room = unpacking.Room(source)
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
        place = part.place
        head = place.part(0, min(HEAD, place.nbytes)).read()
        if safetensors.sniff(head):  # the size of its header comes first, and may look like anything
            part = part._replace(is_sure=False)
        if closed := next((what for begin, what in CLOSED if head.startswith(begin)), None):
            raise Unsupported(self.source.path, closed)
        if head.startswith(unpacking.BEGINS):
            self._zips(part)
        elif tar.sniff(head) or tar.is_header(head):
            self._tar(part)
        elif head.startswith(reading.MAGIC):
            self._array(part)
        elif stream := unpacking.stream_of(head):
            self._unpack(part, *stream)
        else:
            if not part.where and unpacking.ends_as_zip(place):
                self._loose(part)
            return self._pickles(part)
        return set()

    def _fault(self, part: FilePart, fault: CkptToolError | str) -> None:
        """Note why a part can't be looked at."""
        if part.is_sure and len(self.problems) < MAX_PROBLEMS:
            reason = fault if isinstance(fault, str) else fault.reason
            self.problems.append(ScanProblem(" > ".join(part.where), reason))

    def _keep(self, part: FilePart, names: set[Global] | frozenset[Global]) -> None:
        for name in names:
            self.names.setdefault(name, " > ".join(part.where))

    # Pickles.

    def _pickles(self, part: FilePart, *, is_named: bool = False) -> set[str]:
        """Read what may be pickles, one after another, and what looks like containers in their values."""
        called = part.where[-1] if part.where else self.source.path
        is_named = is_named or called.lower().endswith(PICKLED)
        is_checkpoint = is_named or called.lower().endswith(safetensors.EXTENSIONS)
        if is_checkpoint and not part.place.nbytes:
            raise Damaged(self.source.path, "is empty")
        is_unpacked = part.place.source is not self.source
        most = max(SMALL, GROWTH * self.source.size) if is_unpacked else pickles.MAX_PICKLE
        read = pickles.read_in_a_row(part.place, is_sure=part.is_sure, is_first_sure=is_named, most=most)
        self.pickles += read.count
        self._keep(part, read.names)
        if read.fault:
            page = None if part.where or read.names else known(self.source)  # or what else it is
            self._fault(part._replace(is_sure=part.is_sure or read.is_sure), page or read.fault)
        for raw in _bytes_in(read.values):
            inner, _ = self.room.put([raw])
            self.look(FilePart(inner, (*part.where, "bytes in it"), is_sure=False))
        return read.numbers

    # Containers.

    def _zips(self, part: FilePart) -> None:
        """Look into a zip, or into several in a row and what follows them."""
        try:
            self._zip(part, part.place)
        except (Damaged, Unsupported) as fault:
            end = part.place.offset
            for zip_ in unpacking.in_a_row(part.place):
                end = zip_.offset + zip_.nbytes
                try:
                    self._zip(part, zip_)
                except (Damaged, Unsupported) as own:
                    self._fault(part, own)
                    self._loose(FilePart(zip_, part.where))
            rest = part.place.offset + part.place.nbytes - end
            if rest == part.place.nbytes:
                self._fault(part, fault)
                self._loose(part)
            elif rest:
                self.look(part.inside("behind it", ByteRange(part.place.source, end, rest)))

    def _zip(self, part: FilePart, place: ByteRange) -> None:
        """Look into the records of one zip, pickles first: they say which records are numbers."""
        records = read_directory(place.source, place, folded=False)
        numbers: set[str] = set()
        storages: tuple[str, ...] = ()  # the folders of torch's, whose bytes may look like anything
        for record in sorted(records.values(), key=lambda record: not record.name.endswith(".pkl")):
            is_pickle = record.name.lower().endswith(PICKLED)  # whatever another one calls a storage
            if (record.name in numbers and not is_pickle) or not record.data.nbytes:
                continue
            is_sure = part.is_sure and not record.name.startswith(storages)
            inner = FilePart(record.data, (*part.where, record.name[:200]), is_sure)
            if record.compression in unpacking.METHODS:
                self._unpack(part, record.name, unpacking.METHODS[record.compression], record.data)
                continue
            try:
                require_known_method(place.source, record)
            except Unsupported as fault:
                self._fault(inner, fault)
                continue
            keys, folder = self.look(inner), f"{record.name.removesuffix('.pkl')}/"
            numbers |= {folder + key for key in keys}
            storages += (folder,) if record.name.endswith(".pkl") else ()

    def _loose(self, part: FilePart) -> None:
        """Look into whatever records there are, where no directory can be believed."""
        for piece in unpacking.pieces(part.place):
            inner = FilePart(piece.data, (*part.where, piece.name[:200]), is_sure=False)
            if piece.method == STORED:
                self.look(inner)
            elif piece.method in unpacking.METHODS:
                doubted = part._replace(is_sure=False)
                self._unpack(doubted, piece.name, unpacking.METHODS[piece.method], piece.data)

    def _tar(self, part: FilePart) -> None:
        names = []
        for name, kind, place in tar.headers(part.place):
            names.append(name)
            if kind in (b"x", b"g") and b" size=" in place.read()[: 1 << 20]:
                raise Unsupported(self.source.path, "is a tar that states sizes apart from its headers")
            if kind == b"S":
                raise Unsupported(self.source.path, f"is a tar with the sparse file '{name[:80]}'")
            if place.nbytes and kind not in (b"x", b"g", b"L", b"K"):
                self.look(part.inside(name, place))
        if {*tar.MEMBERS} <= {*names}:  # of torch before 0.1.12, which reads pickles between its storages
            self._keep(part, tar.read(self.source, part.place).names)

    def _array(self, part: FilePart) -> None:
        """Read the pickle behind the header of an array of objects; other arrays hold numbers and text."""
        cursor = Cursor(part.place, window=1 << 10)
        array = reading.header(cursor, "array")
        if array.dtype is None:
            is_named = array.other == reading.OTHERS["O"]
            self._pickles(FilePart(cursor.place(cursor.left), part.where, part.is_sure), is_named=is_named)

    def _unpack(
        self, part: FilePart, name: str, engine: unpacking.Engine, place: ByteRange | None = None
    ) -> None:
        inner, wrong = self.room.put(unpacking.unpacked(place or part.place, name, engine))
        unpacked = part.inside(name, inner)
        if wrong is not None:
            self._fault(unpacked, wrong)
        if inner.nbytes:
            self.look(unpacked)


def _bytes_in(values: list[object]) -> Iterator[bytes]:
    """Yield the bytes in some values that begin as a pickle or a container does."""
    for value in (each for tree in values for each in walk(tree)):
        if isinstance(value, bytes | bytearray) and len(value) > 2:
            head = bytes(value[:HEAD])
            is_stream = unpacking.stream_of(head) is not None
            if pickles.is_pickle(head) or is_stream or head.startswith((*unpacking.BEGINS, reading.MAGIC)):
                yield bytes(value)
