"""The oldest format of `torch.save`, before torch 0.1.12: a tar of a pickle, tensors, and storages.

`storages` holds a count, and for each storage its key, device and class as a pickle, a count of elements
(8 bytes), and the elements; then a list of views of them. `tensors` holds a count, and for each tensor
its key, storage key and class as a pickle, then sizes, strides and offset as numbers. `pickle` holds the
tree, which refers to tensors and storages by their keys. Nothing is unpacked. Numbers and elements are
little-endian. Source: `legacy_load` in torch's `serialization.py`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

from ....errors import Damaged
from ...checkpoint.checkpoint import Checkpoint
from ...inert_pickle.machine import PickleFault
from ...inert_pickle.reader import Pickle, read_pickle
from ...inert_pickle.values import Global, in_brief
from ...tensors import ref
from ..strangers import checkpoints_inside
from .fast_path import itemsize
from .legacy import read_unsized
from .tensor_pickle import AnyStorage, StorageView, tensor_of_storage

NAME = "torch-tar"
MEMBERS = ("storages", "tensors", "pickle")

BLOCK = 512

MAX_ENTRIES = 64  # torch wrote four
# Types of entries: a regular file; records (length, name, value) that describe the next entry.
PLAIN, EXTENDED = (b"0", b"\0"), b"x"
# Links, devices, folders, pipes.
WITHOUT_CONTENTS = (b"1", b"2", b"3", b"4", b"5", b"6")

TIMES = re.compile(rb"([0-9]{1,3} [acm]time=[0-9.]{1,40}\n)*")

Objects = dict[int, AnyStorage | ref.TensorRef]


def sniff(head: bytes) -> bool:
    """Whether a file that begins with `head` is a tar."""
    return head[257:262] == b"ustar"


def read(source: ref.Source, place: ref.ByteRange | None = None) -> Checkpoint:
    """Read the tree and find each storage; no element is read."""
    places = _members(source, place or ref.ByteRange(source, 0, source.size))
    try:
        storages, tensors, pickle = (_Member(places[name]) for name in MEMBERS)
        objects = _read_storages(storages)
        objects |= _read_tensors(tensors, objects)
        tree = pickle.pickle(partial(_find, objects))
    except (PickleFault, ref.BadTensor) as fault:
        raise Damaged(source.path, str(fault)) from None
    names = frozenset().union(storages.names, tensors.names, pickle.names)
    return Checkpoint(source, NAME, tree.value, protocol=tree.protocol, names=names)


def _members(source: ref.Source, whole: ref.ByteRange) -> dict[str, ref.ByteRange]:
    """Where the members are: each must be there once, a regular file, and whole."""
    members: dict[str, ref.ByteRange] = {}
    for name, place in entries(whole):
        if name in members:
            raise Damaged(source.path, f"holds '{name[:80]}' twice")
        members[name] = place
    for name in MEMBERS:
        if name not in members:
            if inside := checkpoints_inside(source.path, [*members], "tar -xf"):
                raise inside
            raise Damaged(source.path, f"is a tar archive without '{name}', so not one from torch.save")
    return members


def entries(whole: ref.ByteRange) -> Iterator[tuple[str, ref.ByteRange]]:
    """Yield the name of each file in a tar of torch's and the place of its contents."""
    # Only what torch's files need is read: regular files, and extended headers that state times. Python's
    # tarfile reads all of the format, and takes minutes for some hostile files.
    for number, (name, kind, place) in enumerate(headers(whole)):
        if number == MAX_ENTRIES:
            raise Damaged(whole.path, "is a tar archive of many files, so not one from torch.save")
        if kind == EXTENDED:
            if place.nbytes > BLOCK or not TIMES.fullmatch(place.read()):
                raise Damaged(whole.path, "its tar has an extended header that says more than times")
        elif kind not in PLAIN or name.endswith("/"):
            raise Damaged(whole.path, f"its '{name[:80].rstrip('/')}' is not a regular file")
        else:
            yield name, place


def headers(whole: ref.ByteRange) -> Iterator[tuple[str, bytes, ref.ByteRange]]:
    """Yield the name, the type and the contents of each entry of a tar, extended headers too."""
    position = 0
    while position + BLOCK <= whole.nbytes and any(header := whole.part(position, BLOCK).read()):
        folder, name = _text(header[345:500]), _text(header[:100])
        name, size = f"{folder}/{name}" if folder else name, _number_of(header[124:136])
        if not is_header(header):
            raise Damaged(whole.path, "its tar is malformed: a header's checksum does not fit")
        if size is None:
            raise Damaged(whole.path, "its tar is malformed: a number in a header is none")
        kind = header[156:157]
        if kind in WITHOUT_CONTENTS or (kind == b"\0" and name.endswith("/")):  # whatever size it states
            size = 0
        position += BLOCK
        yield name, kind, whole.part(position, max(0, min(size, whole.nbytes - position)))
        if not 0 <= size <= whole.nbytes - position:  # a reader has had what there is of it
            raise Damaged(whole.path, f"is cut short in '{name[:80]}'")
        position += size + -size % BLOCK


def is_header(block: bytes) -> bool:
    """Return whether a block has the checksum of a tar's header, of bytes that are signed or not."""
    if len(block) < BLOCK or not any(block):
        return False
    others = block[:148] + 8 * b" " + block[156:BLOCK]
    signed = sum(others) - 256 * sum(byte > 127 for byte in others)
    return _number_of(block[148:156]) in (sum(others), signed)


def _number_of(field: bytes) -> int | None:
    """A number of a header: in base 8 as Python reads it, or the bytes of a large one; None if it is none."""
    if field[0] in (0o200, 0o377):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


class _Member:
    """One member, read from front to back."""

    def __init__(self, place: ref.ByteRange) -> None:
        self.source = place.source
        self.position = place.offset
        self.end = place.offset + place.nbytes
        self.names: set[Global] = set()

    def pickle(self, persistent_load: Any = None) -> Pickle:
        read = partial(read_pickle, persistent_load=persistent_load)
        rest = ref.ByteRange(self.source, self.position, self.end - self.position)
        pickle = read_unsized(rest, read, first=4096)  # those of storages and tensors are small, and many
        self.names |= pickle.names
        self.position = pickle.end
        return pickle

    def count(self) -> int:
        """Read a pickle of the number of entries that follow; each takes several bytes."""
        count = self.pickle().value
        if not ref.is_count(count) or not isinstance(count, int) or count > self.end - self.position:
            raise PickleFault(f"counts {in_brief(count)[:20]} entries, more than it can hold")
        return count

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)).read())

    def take(self, nbytes: int) -> ref.ByteRange:
        if not 0 <= nbytes <= self.end - self.position:
            raise PickleFault("is cut short: an entry runs past the end of its member")
        place = ref.ByteRange(self.source, self.position, nbytes)
        self.position += nbytes
        return place


def _read_storages(member: _Member) -> Objects:
    objects: Objects = {}
    for _ in range(member.count()):
        key, location, kind = _triple(member, "storage")
        if (
            not isinstance(location, str)
            or not isinstance(kind, Global)
            or kind.name not in ref.STORAGE_DTYPES
        ):
            raise PickleFault(f"has a storage of unknown class {in_brief(kind)[:60]}")
        (numel,) = member.numbers("<q")
        _put(objects, key, ref.Storage(member.take(numel * itemsize(kind.name)), kind.name, location))
    views = member.pickle().value
    if not isinstance(views, list):
        raise PickleFault("has a malformed list of views")
    roots = dict(objects)
    for view in views:
        if not isinstance(view, tuple) or len(view) != 4 or not all(map(ref.is_count, view)):
            raise PickleFault("has a malformed view of a storage")
        key, root, offset, numel = view
        storage = roots.get(root)
        if not isinstance(storage, ref.Storage) or (offset + numel) * itemsize(storage.kind) > storage.nbytes:
            raise PickleFault("has a view of a storage that it does not hold, or that is too small")
        _put(objects, key, StorageView(storage, offset, numel))
    return objects


def _read_tensors(member: _Member, storages: Objects) -> Objects:
    objects: Objects = {}
    for _ in range(member.count()):
        key, storage_key, _ = _triple(member, "tensor")
        storage = storages.get(storage_key) if isinstance(storage_key, int) else None
        dimensions, _ = member.numbers("<iI")
        if storage is None or isinstance(storage, ref.TensorRef) or not 0 <= dimensions <= ref.MAX_AXES:
            raise PickleFault("has a tensor without a storage, or of malformed size")
        shape, stride = member.numbers(f"<{dimensions}q"), member.numbers(f"<{dimensions}q")
        (offset,) = member.numbers("<q")
        _put(objects, key, tensor_of_storage(storage, None, shape, stride, offset))
    return objects


def _triple(member: _Member, what: str) -> tuple[object, object, object]:
    entry = member.pickle().value
    if not isinstance(entry, tuple) or len(entry) != 3:
        raise PickleFault(f"has a malformed {what}")
    return entry


def _put(objects: Objects, key: object, value: AnyStorage | ref.TensorRef) -> None:
    if type(key) is not int or key in objects:
        raise PickleFault(f"has the key {in_brief(key)[:20]} twice, or one that is not a number")
    objects[key] = value


def _find(objects: Objects, identity: object) -> object:
    """Return the tensor or storage of a persistent id by its key; a class comes with its source text."""
    if isinstance(identity, tuple) and identity and isinstance(identity[0], Global):
        return identity[0]
    text = str(identity) if isinstance(identity, str | int) else ""
    key = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if key not in objects:
        raise PickleFault(f"refers to a tensor or storage '{text[:20]}' that it does not hold")
    value = objects[key]
    if isinstance(value, StorageView):  # torch gives it memory of its own, where it is a value
        root, size = value.storage, itemsize(value.storage.kind)
        data = root.data.part(value.offset * size, value.numel * size)
        value = objects[key] = ref.Storage(data, root.kind, root.location)
    return value
