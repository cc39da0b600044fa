"""Reading DCP folders, as `torch.distributed.checkpoint` saves them, without torch.

`.metadata` is a pickle of dataclasses: the names, their types and sizes, and which stretch of which file
holds each of their chunks. Every chunk is a small `torch.save` zip, and so is every value that is not a
tensor. torch's library would run what these pickles name (`pickle.load`, `torch.load(weights_only=False)`)
and load all values into memory; here they are read as inert values, and a tensor stays a place in a file. A
tensor that ranks saved in parts is described by its parts, and assembled when it is written.

What DCP itself loses can't be read back: keys that were numbers are text, empty dicts are gone, ties are
copies. Source: torch's `distributed/checkpoint`: `metadata.py`, `filesystem.py`, `_traverse.py`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...checkpoint import full_json
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.pickled_modules import detached
from ...checkpoint.ranks import HINT, Ranks
from ...checkpoint.special_tensors import torch_dtype
from ...errors import Damaged, Unsupported
from ...files.open_source import allow_open_files
from ...inert_pickle.reader import PickleFault, read_pickle
from ...inert_pickle.values import Global, Record, has_text_keys, in_brief
from ...remote.places import exists, is_folder, open_part, prepare
from ...system import join
from ...tensors.checked import BadTensor
from ...tensors.chunks import TensorPart, assembled
from ...tensors.dtypes import DType
from ...tensors.ref import MAX_BYTES, TensorRef, is_count
from ...tensors.source import ByteRange, Source
from ..pytorch.archive import Archive
from ..strangers import known as known_stranger
from .tree import nest, torch_size, with_extras

NAME = "dcp"
METADATA = ".metadata"
# How the names of the other files end.
ENDING = ".distcp"

FILE = re.compile(r"__(\d{1,7})_\d+\.distcp")

MODULE = "torch.distributed.checkpoint"


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes looks like the metadata of a DCP folder."""
    return head[:1] == b"\x80" and MODULE.encode() in head


def read(source: Source) -> Checkpoint:
    """Read the metadata and the headers of all chunks, and no element of a tensor."""
    try:
        metadata, names = _metadata(source)
        items = _Items(source, metadata.get("storage_data"))
        values = ((name, items.value(name, described)) for name, described in _names(metadata).items())
        flat = {name: value for name, value in values if value is not ABSENT}
        tree = nest(flat, metadata.get("planner_data"))
    except (PickleFault, BadTensor) as fault:
        raise Damaged(source.path, str(fault)) from None
    text, protocol = tree.get(full_json.ENTRY), 2
    content: object = tree
    if full := isinstance(text, str):
        content, protocol = full_json.decode_entry(source.path, tree, text)
    shards = tuple(items.files.values())
    ranks, names = _ranks(shards, items.absent), names | items.names
    checkpoint = Checkpoint(source, NAME, content, protocol, {}, shards, full=full, names=names, ranks=ranks)
    return with_extras(checkpoint, items.folder)


def _ranks(shards: Sequence[Source], absent: Collection[str]) -> Ranks | None:
    """Return the ranks that wrote the files, as their names `__{rank}_{n}.distcp` say; None if it was one."""
    nbytes: Counter[int] = Counter()
    for source in shards:
        for rank in _ranks_of([os.path.basename(source.path)]):
            nbytes[rank] += source.size
    if len(nbytes) < 2 and not absent:
        return None
    held, lacking = dict(sorted(nbytes.items())), tuple(sorted(absent)[:8])
    return Ranks("DCP", held=held, missing=_ranks_of(absent), lacking=lacking)


def _ranks_of(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({int(named[1]) for name in names if (named := FILE.fullmatch(name))}))


def file_names(source: Source) -> list[str]:
    """Return the names of the files that `.metadata` names, without opening them."""
    try:
        return sorted(_file_names(_metadata(source)[0].get("storage_data")))
    except PickleFault as fault:
        raise Damaged(source.path, str(fault)) from None


def _file_names(storage_data: object) -> set[str]:
    infos = storage_data.values() if isinstance(storage_data, dict) else ()
    names = [_fields(info, "_StorageInfo").get("relative_path") for info in infos]
    return {name for name in names if isinstance(name, str)}


# The metadata, as inert records.


def _metadata(source: Source) -> tuple[dict[Any, Any], frozenset[Global]]:
    """Read the metadata into memory: a mapping of it would end this process if the file became shorter."""
    if source.size > 1 << 30:  # a million chunks take a third of it
        raise Unsupported(source.path, "has metadata of more than 1 GB")
    pickle = read_pickle(source.read(0, source.size))
    return _fields(pickle.value, "Metadata"), pickle.names


def _fields(value: object, name: str) -> dict[Any, Any]:
    """Return the attributes of one of DCP's dataclasses."""
    match value:
        case Record(callable=Global(module, cls), state=dict() as state):
            if cls == name and module.startswith(MODULE):
                return state
    raise PickleFault(f"its metadata is malformed: it lacks a {name} where one should be")


def _names(metadata: Mapping[str, Any]) -> dict[str, object]:
    names = metadata.get("state_dict_metadata")
    if not has_text_keys(names):
        raise PickleFault("its metadata is malformed: it has no names")
    return names


def _dtype(properties: object) -> DType:
    """Return the element type, which `TensorProperties` keeps as the first item of a tuple."""
    state = properties.state if isinstance(properties, Record) else None
    named = state[0] if isinstance(state, tuple | list) and state else None
    if dtype := torch_dtype(named):
        return dtype
    raise PickleFault(f"its metadata has a tensor of unknown type {in_brief(named)[:40]}")


class _Items:
    """The chunks and values of a folder: where each lies, and reading them."""

    def __init__(self, source: Source, storage_data: object) -> None:
        self.source = source
        self.folder = source.path if is_folder(source.path) else os.path.dirname(source.path)
        self.files: dict[str, Source] = {}
        self.names: frozenset[Global] = frozenset()
        self.places: dict[tuple[object, object], ByteRange | None] = {}  # None where the file is not there
        self.loaded: dict[tuple[object, object], object] = {}
        if not isinstance(storage_data, dict):
            raise PickleFault("its metadata does not say where anything is stored")
        names = _file_names(storage_data)
        # What other ranks wrote can be looked at without these.
        absent = {name for name in names if FILE.fullmatch(name) and not exists(self.path_of(name))}
        self.absent = absent if len(absent) < len(names) else set[str]()
        allow_open_files(len(names), source.path)
        prepare([self.path_of(name) for name in names if FILE.fullmatch(name) and name not in self.absent])
        for index, info in storage_data.items():
            fields = _fields(index, "MetadataIndex")
            name, offset = fields.get("fqn"), fields.get("offset")
            if not isinstance(name, str):
                raise PickleFault("its metadata is malformed: it has a name that is not text")
            key = name, None if offset is None else torch_size(offset)
            if key in self.places:
                raise PickleFault(f"its metadata says twice where '{name}' is stored")
            self.places[key] = self.place(name, _fields(info, "_StorageInfo"))
        self.check_overlaps()

    def path_of(self, name: str) -> str:
        return join(self.folder, name)

    def place(self, name: str, info: Mapping[str, Any]) -> ByteRange | None:
        extensions = info.get("transform_descriptors")
        if extensions:
            listed = extensions if isinstance(extensions, list) else [extensions]
            what = f"was written through the extension {', '.join(map(in_brief, listed[:3]))[:60]}"
            hint = "load it with torch.distributed.checkpoint and save it without extensions"
            raise Unsupported(self.source.path, f"'{name}' {what}", hint=hint)
        file, offset, nbytes = (info.get(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not is_count(offset) or not is_count(nbytes):
            raise PickleFault(f"its metadata is malformed where it says where '{name}' is stored")
        if file in self.absent:
            return None
        source = self.file(file)
        if offset + nbytes > source.size:
            if fault := known_stranger(source):
                raise fault
            raise Damaged(source.path, f"is cut short: it ends before '{name}' does")
        return ByteRange(source, offset, nbytes)

    def file(self, name: str) -> Source:
        if name not in self.files:
            if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name:
                raise Damaged(self.source.path, f"names a file outside its folder: {name[:80]!r}")
            self.files[name] = open_part(self.source.path, f"its file '{name}'", self.path_of(name), HINT)
        return self.files[name]

    def check_overlaps(self) -> None:
        ends: dict[int, int] = {}
        for place in sorted(filter(None, self.places.values()), key=lambda place: place.offset):
            if place.offset < ends.get(id(place.source), 0):
                raise Damaged(place.path, f"has two items that overlap at byte {place.offset}")
            ends[id(place.source)] = place.offset + place.nbytes

    def value(self, name: str, metadata: object) -> object:
        """Return a tensor, or a value that is not one."""
        if isinstance(metadata, Record) and metadata.callable == BYTES:
            return ABSENT if self.is_absent(name, None) else self.load(name, None)
        fields = _fields(metadata, "TensorStorageMetadata")
        dtype, size = _dtype(fields.get("properties")), torch_size(fields.get("size"))
        listed = fields.get("chunks")
        if not isinstance(listed, list):
            raise PickleFault(f"its metadata does not say in which chunks '{name}' is stored")
        chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in listed]
        boxes = [(torch_size(chunk.get("offsets")), torch_size(chunk.get("sizes"))) for chunk in chunks]
        if any(self.is_absent(name, offsets) for offsets, _ in boxes):
            return self.with_gaps(name, dtype, size)
        parts = [self.part(name, offsets, sizes, dtype) for offsets, sizes in boxes]
        if len(parts) == 1 and parts[0].tensor.shape == size and not any(parts[0].begin):
            return parts[0].tensor
        return assembled(name, self.source.path, dtype, size, parts)

    def is_absent(self, name: str, offsets: tuple[int, ...] | None) -> bool:
        """Return whether the metadata says that something lies in a file that is not there."""
        return (name, offsets) in self.places and self.places[name, offsets] is None

    def with_gaps(self, name: str, dtype: DType, size: tuple[int, ...]) -> TensorRef:
        """Return a tensor of which values are not there; reading them raises Damaged."""
        from ..ranks.pieces import with_gaps  # what a whole folder needs not import

        tensor = with_gaps(self.source.path, dtype, size, _ranks_of(self.absent), None, *sorted(self.absent))
        if tensor.nbytes > MAX_BYTES:
            raise PickleFault(f"its metadata gives '{name[:80]}' a shape larger than any file")
        return tensor

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: DType) -> TensorPart:
        """Return a chunk and its place in the tensor."""
        tensor = detached(self.load(name, offsets))
        if not isinstance(tensor, TensorRef) or tensor.dtype is not dtype or tensor.shape != sizes:
            raise PickleFault(f"a chunk of '{name}' is not what the metadata says")
        if tensor.nbytes > tensor.storage.nbytes:
            raise PickleFault(f"a chunk of '{name}' repeats its elements")
        return TensorPart(offsets, tensor)

    def load(self, name: str, offsets: tuple[int, ...] | None) -> object:
        """Return what lies in a place, which is read once however often the metadata lists it."""
        place = self.places.get((name, offsets))
        if place is None:
            raise PickleFault(f"its metadata does not say where '{name}' is stored")
        if (name, offsets) not in self.loaded:
            pickle = Archive(place.source, place).read_pickle()
            self.names |= pickle.names
            self.loaded[name, offsets] = pickle.value
        return self.loaded[name, offsets]


# What stands for a value in a file that is not there.
ABSENT = object()

BYTES = Global(f"{MODULE}.metadata", "BytesStorageMetadata")
