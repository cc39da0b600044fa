"""A delta read as the newer checkpoint: over a base that is named, or lies beside it under its own name."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...checkpoint import full_json
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.full_encoding import usual_kind
from ...errors import Damaged, Refused, Unreadable
from ...remote import places
from ...remote.urls import is_url
from ...tensors.ref import ByteRange, Computed, Source, Storage, TensorRef
from . import compression
from .header import ENTRY, NEW, SAME, TREE, XOR, Base, Digests, Entry, Header, is_delta, read_header

NAME = "delta"  # the format of what is made of a base and deltas
LONGEST = 64  # deltas one after another

Open = Callable[[str], Checkpoint]
Tensors = Mapping[str, TensorRef]


@dataclass(frozen=True, slots=True)
class Link:
    """A checkpoint of a chain, and what the delta said that made it; None for the first base."""

    checkpoint: Checkpoint
    header: Header | None = None


def split(name: str) -> list[str]:
    """Return the base and the deltas that a name `BASE+DELTA…` lists; of any other name itself alone."""
    pieces = name.split("+")
    if len(pieces) == 1 or (not is_url(name) and os.path.lexists(name)):
        return [name]
    found = [pieces[0]]
    for piece in pieces[1:]:  # a name may have a + of its own
        if _stands_alone(found[-1]) and _stands_alone(piece):
            found.append(piece)
        else:
            found[-1] += f"+{piece}"
    return found if all(map(_stands_alone, found)) else [name]


def _stands_alone(piece: str) -> bool:
    return piece == "-" or is_url(piece) or os.path.lexists(piece)


def chained(name: str, first: Checkpoint, deltas: Sequence[str], open_file: Open) -> Checkpoint:
    """Return what deltas make of a file, which may itself be one whose base lies beside it.

    Raises:
        Unreadable: a base is not there, there are too many deltas, or they lead in a circle.
        Refused: a delta is of another base than what stands before it.
        Damaged, Unsupported: as `read_header` does, and as opening a base does.
    """
    files = [*_with_bases(first, open_file)]
    files = [*reversed(files), *map(open_file, deltas)]
    if len(files) > LONGEST + 1:
        raise Unreadable(name, f"is a chain of more than {LONGEST} deltas", hint=_shorter(name))
    link = Link(files[0])
    for file in files[1:]:
        link = joined(link, file)
    return replace(link.checkpoint, source=files[-1].source.called(name), shards=_sources(files))


def _sources(files: Sequence[Checkpoint]) -> tuple[Source, ...]:
    return tuple(source for file in files for source in (file.source, *file.shards))


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


def _beside(file: Checkpoint, open_file: Open) -> Checkpoint:
    name = read_header(file).base.name
    path = os.path.join(os.path.dirname(file.source.place), name)
    if not name or file.path == "-" or not places.exists(path):
        shown = f"'{name}'" if name else "a checkpoint from standard input"
        what = f"is a delta, and its base, {shown}, does not lie beside it"
        hint = f"name the base before it: {shlex.quote(f'BASE+{file.path}')}"
        raise Unreadable(file.path, what, hint=hint)
    return open_file(path)


def joined(below: Link, file: Checkpoint) -> Link:
    """Return the checkpoint that a delta makes of another, no value of which is read.

    Raises:
        Refused: the file is no delta; or the base lacks a tensor, or has it in another form; or it is made by
            a delta, and not the one that this delta was made from.
        Damaged, Unsupported: as `read_header` does.
    """
    if not is_delta(file):
        hint = f"name what is to become of the two: ckpttool diff, merge or average ({file.path[:80]})"
        raise Refused(file.path, f"is no delta: its header has no entry '{ENTRY}'", hint=hint)
    header = read_header(file)
    if below.header is not None and not agree(header.base.digests, below.header.new):
        raise wrong_base(below.checkpoint.path, file.path, header.base, below.header.new.shown)
    tensors = _Tensors(file, header, below.checkpoint)
    made = {name: tensors.made(name, entry) for name, entry in header.tensors.items()}
    tree, protocol = full_json.decode_entry(file.path, made, file.metadata.get(TREE, ""), TREE)
    kept = header.metadata
    new = Checkpoint(file.source, NAME, tree, protocol, kept, full=header.full)
    return Link(new, header)


def agree(wanted: Digests, found: Digests) -> bool:
    """Return whether a digest is the one that is wanted: of the whole where the state is not enough."""
    return wanted.state == found.state if wanted.whole is None else wanted.whole == found.whole


def wrong_base(path: str, delta: str, base: Base, found: str) -> Refused:
    """Return the error for a base that is not the one that a delta was made from."""
    named = f" ('{base.name[:80]}')" if base.name else ""
    what = f"is not the base of {delta}: that has the digest {base.digests.shown}{named}, this {found}"
    return Refused(path, what, hint="ckpttool digest FILE… prints the digests of others")


def base_tensors(base: Checkpoint) -> tuple[dict[str, TensorRef], str]:
    """Return every tensor of a base by its dotted path, storages too, and what the state's begin with."""
    tensors = full_json.encode_entry(base.path, base.tree, base.protocol).tensors
    for name, tensor in base.tensors():
        tensors.setdefault(name, tensor)
    state = base.found_state()
    return tensors, "".join(f"{step}." for step in state.path) if state else ""


class _Tensors:
    """The tensors that a delta makes of a base."""

    def __init__(self, file: Checkpoint, header: Header, base: Checkpoint) -> None:
        self.file, self.header, self.base = file, header, base
        self.of_base, self.prefix = base_tensors(base)
        self.of_file: dict[str, TensorRef] = dict(file.tensors())

    def made(self, name: str, entry: Entry) -> TensorRef:
        """Return one of them, which reads nothing yet."""
        parts = [self._part(name, part, crc32) for part, crc32 in entry.parts.items()]
        if entry.kind == NEW:
            self._require(name, parts[0], entry.dtype.name, entry.shape)
            return parts[0]
        base = self._base(name, entry)
        if entry.kind == SAME:
            return entry.over(base.storage)
        origins = (base.storage, *(part.storage for part in parts))
        make = self._xored if entry.kind == XOR else self._patched
        kind = usual_kind(entry.dtype)
        return entry.over(Storage(make(name, entry, base, parts), kind, origins=origins))

    def _xored(self, name: str, entry: Entry, base: TensorRef, parts: list[TensorRef]) -> Computed:
        from .blocks import Xored, computed

        payload = parts[0].data
        self._require(name, parts[0], "uint8", (parts[0].numel,))
        assert isinstance(payload, ByteRange)
        make = Xored(name, base, payload).make
        return computed(self.file.path, entry.nbytes, make, partial(compression.require, self.file.path))

    def _patched(self, name: str, entry: Entry, base: TensorRef, parts: list[TensorRef]) -> Computed:
        from .blocks import Patched, computed

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

    def _base(self, name: str, entry: Entry) -> TensorRef:
        """Return the base's tensor in the form of the new one, with the checksum that it should have."""
        recorded, prefix = entry.base or "", self.header.base.prefix
        wanted = self.prefix + recorded.removeprefix(prefix) if recorded.startswith(prefix) else recorded
        tensor = self.of_base.get(wanted)
        if tensor is None:
            raise self._refused(f"it has no tensor '{wanted[:80]}'")
        if (tensor.dtype, tensor.nbytes) != (entry.dtype, entry.nbytes):
            raise self._refused(f"'{wanted[:80]}' is {tensor.dtype.name} {str(list(tensor.shape))[:80]}")
        is_summed = tensor.is_plain and tensor.nbytes == tensor.storage.nbytes
        if is_summed and tensor.storage.crc32 not in (None, entry.base_crc32):
            raise self._refused(f"'{wanted[:80]}' has other values")
        return entry.over(_summed(tensor, entry))

    def _refused(self, what: str) -> Refused:
        base = self.header.base
        hint = f"that is '{base.name[:80]}', with the digest {base.digests.shown}"
        return Refused(self.base.path, f"is not the base of {self.file.path}: {what}", hint=hint)


def _summed(tensor: TensorRef, entry: Entry) -> Storage:
    """Return a storage that holds the values of a tensor and nothing else, in their order."""
    old, kind = tensor.storage, usual_kind(entry.dtype)
    if not tensor.is_stretch:
        from .blocks import values_of

        return Storage(values_of(old.data.path, tensor), kind, origins=(old,))
    if tensor.nbytes < old.nbytes:
        data = tensor.data
        crc32 = entry.base_crc32 if isinstance(data, ByteRange) else None
        return Storage(data, kind, crc32=crc32, origins=(old,))
    if isinstance(old.data, Computed):  # by a delta below, whose parts have their own checksums
        return Storage(old.data, kind, origins=old.origins or (old,))
    return Storage(old.data, kind, crc32=entry.base_crc32)
