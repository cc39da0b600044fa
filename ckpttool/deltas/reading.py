"""Tensors made of a base's values and of what a delta says of them, a block at a time. Imports numpy."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ..core.checkpoint import full
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Named
from ..core.files.commit import no_such_file
from ..core.files.threads import cut
from ..core.lazy import NDArray, np
from ..core.remote import places
from ..core.remote.urls import is_url
from ..core.system import join
from ..core.tensors.ref import ByteRange, Computed, Storage, TensorRef
from ..core.tensors.values import read_into, stretches
from ..errors import Damaged, Refused, Unreadable
from . import differences, forms, patches, versions
from .differences import UNSIGNED, BadDifference, largest, unpack
from .header import BLOCK, ENTRY, NEW, SAME, TREE, XOR, DeltaEntry, Header, is_delta, read_header

# Places that are read together: 1 MiB of them, of 8 bytes each.
MANY = 1 << 17

Make = Callable[[int, memoryview], None]

_of_thread = threading.local()


def computed(path: str, nbytes: int, make: Make, require: Callable[[], None] | None = None) -> Computed:
    """Return bytes of which `make(number, buffer)` makes a whole block."""

    def fill(start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            number, skipped = divmod(start + done, BLOCK)
            size = min(BLOCK, nbytes - number * BLOCK)
            count = min(size - skipped, len(out) - done)
            if count == size:
                make(number, out[done : done + count])
            else:
                with memoryview(bytearray(size)) as block:
                    make(number, block)
                    out[done : done + count] = block[skipped : skipped + count]
            done += count

    return replace(Computed.filling(path, nbytes, fill), require=require)


def fill_values(tensor: TensorRef, start: int, out: memoryview) -> None:
    """Fill a buffer with a stretch of a tensor's values: row-major, little-endian, whole elements."""
    if tensor.is_stretch:
        data, done = tensor.data.part(start, len(out)), 0
        for piece in data.chunks(out):
            if isinstance(data, Computed) and data.fill is None:
                out[done : done + len(piece)] = piece
            done += len(piece)
        return
    width, done = tensor.dtype.itemsize, 0
    for part in stretches(tensor, start // width, len(out) // width):
        read_into(out[done : done + part.nbytes], part)
        done += part.nbytes


@dataclass
class Xored:
    """The values of a base, XORed with the differences that the frames of a payload hold.

    A payload is the frame of each block, one after another, and at its end the size of each as 4 bytes,
    little-endian. A size of 0 stands for a block that is the base's.
    """

    name: str
    base: TensorRef
    payload: ByteRange

    def make(self, number: int, out: memoryview) -> None:
        """Fill a buffer with a block."""
        begin, end = self._places[number : number + 2].tolist()
        fill_values(self.base, number * BLOCK, out)
        if begin == end:
            return
        if not hasattr(_of_thread, "decompress"):
            differences.require(self.payload.path)
            _of_thread.decompress = differences.decompressor()
        frame, width = memoryview(self.payload.part(begin, end - begin).read()), self.base.dtype.itemsize
        try:
            raw = _of_thread.decompress(frame, largest(len(out), width))
            unpack(raw, np.frombuffer(out, UNSIGNED[width]))
        except (differences.BadFrame, BadDifference) as fault:
            raise self._damaged(f"frame {number} {fault}") from None

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Where each frame begins, and the end of the last."""
        count = -(-self.base.nbytes // BLOCK)
        frames = self.payload.nbytes - 4 * count
        if frames < 0:
            raise self._damaged("its sizes of frames are cut short")
        sizes = np.frombuffer(self.payload.part(frames, 4 * count).read(), "<u4")
        places = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=places[1:])
        if places[-1] != frames:
            raise self._damaged("its sizes of frames do not add up")
        return places

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self.payload.path, f"'{self.name[:80]}' is no difference: {what}")


@dataclass
class Patched:
    """The values of a base, others in some places: flat, ascending, each once."""

    name: str
    base: TensorRef
    places: TensorRef
    values: TensorRef

    def make(self, number: int, out: memoryview) -> None:
        """Fill a buffer with a block."""
        width = self.base.dtype.itemsize
        begin, end = self._starts[number : number + 2].tolist()
        fill_values(self.base, number * BLOCK, out)
        elements, first = np.frombuffer(out, UNSIGNED[width]), number * BLOCK // width
        for start, count in cut(end - begin, MANY):
            places = self._read(begin + start, count)
            values = np.empty(count, UNSIGNED[width])
            fill_values(self.values, (begin + start) * width, _bytes(values))
            elements[places - first] = values

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """How many places lie before each block, and all; checks each place."""
        starts = np.zeros(-(-self.base.nbytes // BLOCK) + 1, np.int64)
        last = -1
        for begin, count in cut(self.places.numel, MANY):
            places = self._read(begin, count)
            if places[0] <= last or (np.diff(places) <= 0).any():
                raise self._damaged("its places do not ascend")
            last = int(places[-1])
            if last >= self.base.numel:
                raise self._damaged(f"place {last} is outside its {self.base.numel} elements")
            blocks = places // (BLOCK // self.base.dtype.itemsize)
            starts[1:] += np.bincount(blocks, minlength=len(starts) - 1)
        return np.cumsum(starts)

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        width = self.places.dtype.itemsize
        raw = np.empty(count, f"<i{width}")
        fill_values(self.places, first * width, _bytes(raw))
        return raw.astype(np.int64)

    def _damaged(self, what: str) -> Damaged:
        return Damaged(self.places.storage.data.path, f"'{self.name[:80]}' is no difference: {what}")


def _bytes(values: NDArray[Any]) -> memoryview:
    return memoryview(values.view("u1"))  # type: ignore[arg-type]


def values_of(path: str, tensor: TensorRef) -> Computed:
    """Return the values of a tensor that are not one stretch of bytes, row-major and little-endian."""
    return computed(path, tensor.nbytes, lambda number, out: fill_values(tensor, number * BLOCK, out))


# ---- A delta read as the newer checkpoint: over a base that is named, or lies beside it under its own
# name.


NAME = "delta"  # the format of what is made of a base and deltas
LONGEST = 64  # deltas one after another

Open = Callable[[str], Checkpoint]
Tensors = Mapping[str, TensorRef]


@dataclass(frozen=True, slots=True)
class DeltaLink:
    """A checkpoint of a chain, and what its delta takes of the one before it.

    Attributes:
        checkpoint: what is made of it and the deltas up to here.
        taken: storages of what stands before, whose checksums the delta states and no file does, by the names
            of their tensors; none for the first.
        version: its number among versions, where that is stated.
    """

    checkpoint: Checkpoint
    taken: tuple[Named, ...] = ()
    version: int | None = None


def split(name: str) -> list[str]:
    """Return the base and the deltas that a name `BASE+DELTA…` lists; of any other name itself alone.

    Raises Unreadable for one that is not there, where another is.
    """
    pieces = name.split("+")
    if len(pieces) == 1 or (not is_url(name) and os.path.lexists(name)):
        return [name]
    found = [pieces[0]]
    for piece in pieces[1:]:  # a name may have a + of its own
        if _stands_alone(found[-1]) and _stands_alone(piece):
            found.append(piece)
        else:
            found[-1] += f"+{piece}"
    if all(map(_stands_alone, found)):
        return found
    there = [*map(_stands_alone, pieces)]
    if any(there) and all(pieces) and not is_url(name):
        raise no_such_file(pieces[there.index(False)])
    return [name]


def _stands_alone(piece: str) -> bool:
    return piece == "-" or is_url(piece) or os.path.lexists(piece)


def chained(name: str, first: Checkpoint, deltas: Sequence[str], open_file: Open) -> Checkpoint:
    """Return what deltas make of a file, which may itself be one whose base lies beside it.

    Raises:
        Unreadable: a base is not there, there are too many deltas, or they lead in a circle.
        Refused: a delta is of another base than what stands before it.
        Damaged, Unsupported: as `read_header` does, and as opening a base does.
    """
    anchor, *names = versions.expanded(["", *deltas])  # a whole version takes the place of `first`
    files = [open_file(anchor)] if anchor else [*_with_bases(first, open_file)][::-1]
    files += map(open_file, names)
    if len(files) > LONGEST + 1:
        raise Unreadable(name, f"is a chain of more than {LONGEST} deltas", hint=_shorter(name))
    link = DeltaLink(files[0], version=forms.number_in(files[0].path, files[-1].path))
    for file in files[1:]:
        link = joined(link, file)
    sources = tuple(source for file in files for source in file.sources)
    return replace(link.checkpoint, source=files[-1].source.called(name), shards=sources)


def _shorter(name: str) -> str:
    return f"apply some of them first: ckpttool apply BASE DELTA… OUT ({name[:80]})"


def _with_bases(file: Checkpoint, open_file: Open) -> Iterator[Checkpoint]:
    """Yield a file, the base that lies beside it if it is a delta, the base of that, and so on."""
    seen: set[object] = set()
    yield file
    while is_delta(file):
        if file.source.identity in seen or len(seen) == LONGEST:
            what = "is its own base, by way of others" if len(seen) < LONGEST else "has too many deltas below"
            raise Unreadable(file.path, what, hint=_shorter(file.path))
        seen.add(file.source.identity)
        file = _beside(file, open_file)
        yield file


class BaseMissing(Unreadable, kind="base-missing"):
    """The base of a delta does not lie beside it."""


def _beside(file: Checkpoint, open_file: Open) -> Checkpoint:
    if file.format in forms.FORMS:
        if (below := versions.before(file)) is not None:
            return open_file(below)
        what = "is a delta, and the version that it is made from does not lie beside it"
        hint = f"name the base before it: {shlex.quote(f'BASE+{file.path}')}"
        raise BaseMissing(file.path, what, hint=hint)
    name = read_header(file).base.name
    path = join(folder := os.path.dirname(file.source.place), name)
    if name and not places.is_plain(folder, name):
        raise Damaged(file.path, f"names the base {name[:80]!r}, which is no name of a file beside it")
    if not name or file.path == "-" or not places.exists(path):
        shown = f"'{name}'" if name else "a checkpoint from standard input"
        what = f"is a delta, and its base, {shown}, does not lie beside it"
        hint = f"name the base before it: {shlex.quote(f'BASE+{file.path}')}"
        raise BaseMissing(file.path, what, hint=hint)
    return open_file(path)


def joined(below: DeltaLink, file: Checkpoint, *, digests: bool = False) -> DeltaLink:
    """Return the checkpoint that a delta makes of another, no value of which is read.

    Args:
        below: what stands before the delta.
        file: the delta.
        digests: state the digest of each storage, to be compared when it is read; the checksum otherwise.

    Raises:
        Refused: the file is no delta; or the base lacks a tensor, has it in another form, or states another
            checksum of it.
        Damaged, Unsupported: as `read_header` does.
    """
    if not is_delta(file):
        two = f"{shlex.quote(below.checkpoint.path)} {shlex.quote(file.path)}"
        hint = f"only deltas stand behind a +; to compare the two: ckpttool diff {two}"
        raise Refused(file.path, f"is no delta: its header has no entry '{ENTRY}'", hint=hint)
    if file.format in forms.FORMS:
        patch = forms.patch_of(file)
        forms.require_base(below.version, patch, file.path, below.checkpoint.path)
        new = replace(patches.made_of(below.checkpoint, patch, file), source=file.source, format=NAME)
        return DeltaLink(new, version=patch.version)
    header = read_header(file)
    tensors = _Tensors(file, header, below.checkpoint, digests)
    made = {name: tensors.made(name, entry) for name, entry in header.tensors.items()}
    tree, protocol = full.decode_entry(file.path, made, file.metadata.get(TREE, ""), TREE)
    kept = header.metadata
    new = Checkpoint(file.source, NAME, tree, protocol, kept, full=header.full)
    return DeltaLink(new, tuple(tensors.taken))


def wrong_base(base: str, delta: str, header: Header, what: str) -> Refused:
    """Return the error for a base that is not the one that a delta was made from."""
    named = f"that is '{header.base.name[:80]}'" if header.base.name else "that came from standard input"
    return Refused(base, f"is not the base of {delta}: {what}", hint=f"{named}; name it, or a copy of it")


def base_tensors(base: Checkpoint) -> tuple[dict[str, TensorRef], str]:
    """Return every tensor of a base by its dotted path, storages too, and what the state's begin with."""
    tensors = full.encode_entry(base.path, base.tree, base.protocol).tensors
    for name, tensor in base.tensors():
        tensors.setdefault(name, tensor)
    state = base.found_state()
    return tensors, "".join(f"{step}." for step in state.path) if state else ""


class _Tensors:
    """The tensors that a delta makes of a base."""

    def __init__(self, file: Checkpoint, header: Header, base: Checkpoint, digests: bool) -> None:
        self.file, self.header, self.base, self.digests = file, header, base, digests
        self.taken: list[Named] = []
        self.of_base, self.prefix = base_tensors(base)
        self.of_file: dict[str, TensorRef] = dict(file.tensors())

    def made(self, name: str, entry: DeltaEntry) -> TensorRef:
        """Return one of them, which reads nothing yet."""
        tensor = self._made(name, entry)
        return entry.over(replace(tensor.storage, digest=entry.digest)) if self.digests else tensor

    def _made(self, name: str, entry: DeltaEntry) -> TensorRef:
        parts = [self._part(name, part, crc32) for part, crc32 in entry.parts.items()]
        if entry.kind == NEW:
            self._require(name, parts[0], entry.dtype.name, entry.shape)
            return parts[0]
        base = self._base(name, entry)
        if entry.kind == SAME:
            return entry.over(base.storage)
        origins = (base.storage, *(part.storage for part in parts))
        make = self._xored if entry.kind == XOR else self._patched
        kind = entry.dtype.kind
        return entry.over(Storage(make(name, entry, base, parts), kind, crc32=entry.crc32, origins=origins))

    def _xored(self, name: str, entry: DeltaEntry, base: TensorRef, parts: list[TensorRef]) -> Computed:

        payload = parts[0].data
        self._require(name, parts[0], "uint8", (parts[0].numel,))
        assert isinstance(payload, ByteRange)
        make = Xored(name, base, payload).make
        return computed(self.file.path, entry.nbytes, make, partial(differences.require, self.file.path))

    def _patched(self, name: str, entry: DeltaEntry, base: TensorRef, parts: list[TensorRef]) -> Computed:

        places, values = parts
        count = places.numel
        width = "int32" if places.dtype.name == "int32" else "int64"
        self._require(name, places, width, (count,))
        self._require(name, values, entry.dtype.name, (count,))
        return computed(self.file.path, entry.nbytes, Patched(name, base, places, values).make)

    def _part(self, name: str, part: str, crc32: int) -> TensorRef:
        if (tensor := self.of_file.get(part)) is None:
            raise Damaged(self.file.path, f"lacks the tensor '{part[:80]}', which '{name[:80]}' is kept in")
        return replace(tensor, storage=replace(tensor.storage, crc32=crc32))

    def _require(self, name: str, part: TensorRef, dtype: str, shape: tuple[int, ...]) -> None:
        if (part.dtype.name, part.shape) != (dtype, shape):
            raise Damaged(self.file.path, f"'{name[:80]}' is kept in a tensor of another type or shape")

    def _base(self, name: str, entry: DeltaEntry) -> TensorRef:
        """Return the base's tensor in the form of the new one, with the checksum that it should have."""
        recorded, prefix = entry.base or "", self.header.base.prefix
        wanted = self.prefix + recorded.removeprefix(prefix) if recorded.startswith(prefix) else recorded
        tensor = self.of_base.get(wanted)
        if tensor is None:
            raise self._refused(f"it has no tensor '{wanted[:80]}'")
        if (tensor.dtype, tensor.nbytes) != (entry.dtype, entry.nbytes):
            raise self._refused(f"'{wanted[:80]}' is {tensor.dtype.name} {str(list(tensor.shape))[:80]}")
        storage, stated = _summed(tensor, entry), None
        if tensor.is_stretch and tensor.nbytes == tensor.storage.nbytes:
            stated = tensor.storage.crc32
        if stated not in (None, entry.base_crc32):
            raise self._refused(f"'{wanted[:80]}' has other values")
        if stated is None:
            self.taken.append((wanted, storage))
        return entry.over(storage)

    def _refused(self, what: str) -> Refused:
        return wrong_base(self.base.path, self.file.path, self.header, what)


def _summed(tensor: TensorRef, entry: DeltaEntry) -> Storage:
    """Return a storage that holds the values of a tensor and nothing else, in their order."""
    old, kind, crc32 = tensor.storage, entry.dtype.kind, entry.base_crc32
    if not tensor.is_stretch:
        return Storage(values_of(old.data.path, tensor), kind, crc32=crc32, origins=(old,))
    if tensor.nbytes < old.nbytes:
        return Storage(tensor.data, kind, crc32=crc32, origins=(old,))
    is_made = isinstance(old.data, Computed)  # by a delta below, or by another format
    return Storage(old.data, kind, crc32=crc32, origins=old.origins if is_made else ())
