"""What DCP makes of a tree: what it can't hold, what it loses, and how the flat names become a tree again.

Needs no torch. What frameworks add to a folder is here too: Lightning's `meta.pt`, Megatron's `common.pt`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from ..core.checkpoint import full as full_json
from ..core.checkpoint.checkpoint import HINT, Checkpoint, Ranks, not_read, with_gaps
from ..core.checkpoint.dotted_names import Entry, dotted
from ..core.checkpoint.pickled_modules import detached
from ..core.checkpoint.special_tensors import torch_dtype
from ..core.files.commit import allow_open_files
from ..core.formats.folders import DCP as NAME
from ..core.formats.pytorch import zip as torch_zip
from ..core.formats.pytorch.archive import Archive
from ..core.formats.strangers import known as known_stranger
from ..core.inert_pickle import values as inert
from ..core.inert_pickle.reader import PickleFault, read_pickle
from ..core.inert_pickle.values import Global, Record, in_brief, remade, tensor_of
from ..core.remote.places import exists, is_folder, is_plain, open_part, open_source_at, prepare
from ..core.system import join
from ..core.tensors import ref
from ..core.tensors.values import Index, TensorPart, assembled
from ..core.words import first_few
from ..errors import Damaged, Refused, Unsupported

# What messages call the outermost dict, which has no name.
TOP = "the dict at the top"

WITH_FULL = "keep everything with convert --full"
# How many objects an error names one by one.
MOST_TOLD = 4

MAX_VALUES = 10_000_000  # what is in several places counts in each

# Places of lists that may stay empty, besides 100 for each entry: DCP drops empty items.
SPARE = 1000

Path = tuple[str | int, ...]


def torch_size(value: object) -> Index:
    """Return what a `torch.Size` holds."""
    match value:
        case Record(callable=Global("torch", "Size"), args=(tuple() as size,)) | (tuple() as size):
            if all(map(ref.is_count, size)):
                if len(size) <= ref.MAX_AXES:
                    return size
                what = f"has a tensor of {len(size)} axes, and at most {ref.MAX_AXES} are supported"
                raise PickleFault(what)
    raise PickleFault("its metadata is malformed: it has an invalid size")


def check(checkpoint: Checkpoint) -> None:
    """Check that DCP can hold a checkpoint. Needs no torch, unlike `write`."""
    tree, path = checkpoint.tree, checkpoint.path
    way_out = f"{WITH_FULL}, or write a .pt file"
    if not isinstance(tree, dict):
        raise Refused(path, "is not a dict at the top, as DCP needs", hint=way_out)
    for name, times in Counter(map(name_of, tree)).items():
        if times > 1:
            what = f"'{name[:80]}' is a key as text and as something else, and all keys are text in DCP"
            raise Refused(path, what, hint=way_out)
    for name, tensor in checkpoint.tensors():
        if tensor.dtype.name.startswith("bits"):  # torch asks for the bits of an integer type, and fails
            what = f"torch can't write '{name[:80]}' as DCP: its type is {tensor.dtype.name}"
            raise Refused(path, what, hint="write a .pt file instead, which keeps every type")
    objects = [
        (dotted(at), in_brief(value))
        for at, value in checkpoint.named(inside)
        if isinstance(value, Global | Record | ref.Storage) and not _is_data(value)
    ]
    if objects:
        raise _objects_refused(path, objects)


def _objects_refused(path: str, objects: list[tuple[str, str]]) -> Refused:
    """Return the error for objects, given by name and type; it names the first few."""
    told = first_few([f"'{name}' ({kind})" for name, kind in objects], MOST_TOLD)
    said = f"holds objects: {told};"
    if len(objects) == 1:
        said = "'{}' is an object ({}), and".format(*objects[0])
    drops = " ".join(f"--drop {shlex.quote(name)}" for name, _ in objects[:MOST_TOLD])
    hint = f"{WITH_FULL}, or leave out what you can do without: {drops}"
    return Refused(path, f"{said} objects are never created from a file here", hint=hint)


def name_of(key: object) -> str:
    """Return what DCP calls an entry of a dict: its key as text."""
    return in_brief(key) if isinstance(key, int) else str(key)


def inside(value: object) -> Iterable[Entry] | None:
    """Return the named items that are saved of a container; None for what is no container."""
    if isinstance(value, dict):
        return ((name_of(key), item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ((str(number), item) for number, item in enumerate(value))
    return None


def _is_data(value: Global | Record | ref.Storage) -> bool:
    """Return whether something that a pickle names is data: a tensor, an element type or a size."""
    match value:
        case Global("torch", name):
            return name in ref.DTYPES
        case Record(callable=Global("torch", "Size")):
            try:
                return torch_size(value) is not None
            except PickleFault:
                return False
    return tensor_of(value) is not None


def without_models(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with a dict of tensors in the place of a pickled model, which DCP can't hold."""
    state = checkpoint.found_state()
    return checkpoint if state is None or state.module is None else checkpoint.changed(state, lambda v: v)


def with_each_its_own(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose containers are in one place each: DCP writes what is in several in each."""
    left = MAX_VALUES

    def own(value: Any, path: Path) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or len(path) > inert.MAX_DEPTH:
            what = f"'{'.'.join(map(str, path[:4]))}…' is nested too deeply, or holds too much"
            raise Refused(checkpoint.path, what)
        if isinstance(value, dict):
            return remade(value, [(key, own(item, (*path, name_of(key)))) for key, item in value.items()])
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(own(item, (*path, number)) for number, item in enumerate(value))
        return value

    return replace(checkpoint, tree=own(checkpoint.tree, ()))


def lost(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the dotted names of what DCP does not keep."""
    # These are empty dicts, the module versions of a state dict, and of a pickled model its class.
    plain = without_models(checkpoint)
    names: list[str] = []
    for name, value in _dicts(plain):
        if not value:
            names.append(name)
        if isinstance(value, inert.OrderedDict_) and isinstance(value.attributes, dict):
            names += [f"{name}.{attribute}" if name else attribute for attribute in value.attributes]
    return (*names, *plain.opened)


def with_keys_made_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the dotted names of the dicts that have keys, such as numbers, of which DCP makes text."""
    dicts = _dicts(without_models(checkpoint))
    return tuple(name or TOP for name, value in dicts if not all(isinstance(key, str) for key in value))


def _dicts(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[Any, object]]]:
    """Yield every dict of which DCP names the entries one by one, with its dotted name."""
    plain: dict[int, bool] = {}  # of each list whether no tensor is in it; many places may refer to one

    def apart(value: object) -> Iterable[Entry] | None:
        if isinstance(value, list) and id(value) not in plain:
            plain[id(value)] = all(tensor_of(inner) is None for inner in inert.walk(value))
        return inside(value) if isinstance(value, dict | list) and not plain.get(id(value)) else None

    for path, value in checkpoint.named(apart):
        if isinstance(value, dict):
            yield dotted(path), value


# The tree, built from the paths that the writer kept for each flat name.


def nest(flat: Mapping[str, object], paths: object) -> dict[str, object]:
    """Build the tree of the flat names, as torch's `set_element` does."""
    known = paths if isinstance(paths, dict) else {}
    spare = SPARE + 100 * len(flat)
    root: dict[str, object] = {}
    for name, value in flat.items():
        path = _path(known.get(name, (name,)), name)
        holder: Any = root
        for step, following in zip(path, (*path[1:], None), strict=True):
            if isinstance(holder, dict) and isinstance(step, str):
                holder.setdefault(step, None)
            elif isinstance(holder, list) and isinstance(step, int):
                missing = max(0, step + 1 - len(holder))
                spare -= max(0, missing - 1)
                if spare < 0:
                    raise PickleFault("its metadata has a list with few items and a giant index")
                holder.extend([None] * missing)
            else:
                raise PickleFault("its metadata has paths that contradict each other")
            if holder[step] is None:
                inner: object = {} if isinstance(following, str) else []
                holder[step] = value if following is None else inner
            elif following is None:
                raise PickleFault(f"its metadata has two values for '{'.'.join(map(str, path))[:80]}'")
            holder = holder[step]
    return root


def _path(value: object, name: str) -> Path:
    steps = value if isinstance(value, tuple) and value and isinstance(value[0], str) else (None,)
    if not all(type(step) is str or ref.is_count(step) for step in steps):
        raise PickleFault(f"its metadata has a malformed path for '{name}'")
    return steps


# What frameworks add to a folder.


# All of Lightning's checkpoint that is no tensor: its keys join those of the folder.
META = "meta.pt"

# The key by which Lightning's Trainer knows its own checkpoints; those of Fabric lack it.
OF_TRAINER = "pytorch-lightning_version"

# Megatron's arguments and counters, which are left out.
COMMON = "common.pt"


def with_extras(checkpoint: Checkpoint, folder: str) -> Checkpoint:
    """Return the checkpoint of a DCP folder with these files' contents; what is left out is named."""
    # That of Lightning's Trainer gets the form of its whole checkpoints, which the Trainer loads on any
    # number of ranks: source, lightning/pytorch/utilities/consolidate_checkpoint.py.
    if exists(join(folder, COMMON)):
        checkpoint = replace(checkpoint, unread=(*checkpoint.unread, not_read(COMMON)))
    path, tree = join(folder, META), checkpoint.tree
    if not exists(path) or not isinstance(tree, dict):
        return checkpoint
    source = open_source_at(path)
    meta = torch_zip.read(source) if torch_zip.sniff(source.read(0, min(source.size, 4))) else None
    if meta is None or not isinstance(meta.tree, dict):
        return replace(checkpoint, unread=(*checkpoint.unread, f"{META} (not a dict that torch.save wrote)"))
    if OF_TRAINER in meta.tree:
        tree = _as_trainer(tree)
    if twice := tree.keys() & meta.tree.keys():
        raise Damaged(path, f"has '{str(twice.pop())[:80]}', and so has the DCP folder that it is in")
    whole = remade(checkpoint.tree, [*tree.items(), *meta.tree.items()])
    shards, names = (*checkpoint.shards, source), checkpoint.names | meta.names
    return replace(checkpoint, tree=whole, shards=shards, names=names)


def _as_trainer(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a Trainer's folder under the names that they have in its whole checkpoints."""
    entries = dict(tree)
    if "model" in entries and "state_dict" not in entries:
        entries["state_dict"] = entries.pop("model")
    names = list(takewhile(entries.__contains__, map("optimizer_{}".format, count())))
    if names and "optimizer_states" not in entries:
        entries["optimizer_states"] = [entries.pop(name) for name in names]
    return entries


# ---- Reading DCP folders, as `torch.distributed.checkpoint` saves them, without torch.
#
# `.metadata` is a pickle of dataclasses: the names, their types and sizes, and which stretch of which
# file holds each of their chunks. Every chunk is a small `torch.save` zip, and so is every value that is
# not a tensor. torch's library would run what these pickles name (`pickle.load`,
# `torch.load(weights_only=False)`) and load all values into memory; here they are read as inert values,
# and a tensor stays a place in a file. A tensor that ranks saved in parts is described by its parts, and
# assembled when it is written.
#
# What DCP itself loses can't be read back: keys that were numbers are text, empty dicts are gone, ties
# are copies. Source: torch's `distributed/checkpoint`: `metadata.py`, `filesystem.py`, `_traverse.py`.


# How the names of the other files end.

FILE = re.compile(r"__(\d{1,7})_\d+\.distcp")

MODULE = "torch.distributed.checkpoint"


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes looks like the metadata of a DCP folder."""
    return head[:1] == b"\x80" and MODULE.encode() in head


def read(source: ref.Source) -> Checkpoint:
    """Read the metadata and the headers of all chunks, and no element of a tensor."""
    try:
        metadata, names = _metadata(source)
        items = _Items(source, metadata.get("storage_data"))
        values = ((name, items.value(name, described)) for name, described in _names(metadata).items())
        flat = {name: value for name, value in values if value is not ABSENT}
        tree = nest(flat, metadata.get("planner_data"))
    except (PickleFault, ref.BadTensor) as fault:
        raise Damaged(source.path, str(fault)) from None
    text, protocol = tree.get(full_json.ENTRY), 2
    content: object = tree
    if full := isinstance(text, str):
        content, protocol = full_json.decode_entry(source.path, tree, text)
    shards = tuple(items.files.values())
    ranks, names = _ranks(shards, items.absent), names | items.names
    checkpoint = Checkpoint(source, NAME, content, protocol, {}, shards, full=full, names=names, ranks=ranks)
    return with_extras(checkpoint, items.folder)


def _ranks(shards: Sequence[ref.Source], absent: Collection[str]) -> Ranks | None:
    """Return the ranks that wrote the files, as their names `__{rank}_{n}.distcp` say; None if it was one."""
    nbytes: Counter[int] = Counter()
    for source in shards:
        for rank in _ranks_of([os.path.basename(source.path)]):
            nbytes[rank] += source.size
    if len(nbytes) < 2 and not absent:
        return None
    held, lacking = dict(sorted(nbytes.items())), tuple(sorted(absent)[:8])
    return Ranks("DCP", held=held, missing=_ranks_of(absent), lacking=lacking)


def _ranks_of(names: Iterable[str]) -> Index:
    return tuple(sorted({int(named[1]) for name in names if (named := FILE.fullmatch(name))}))


def file_names(source: ref.Source) -> list[str]:
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


def _metadata(source: ref.Source) -> tuple[dict[Any, Any], frozenset[Global]]:
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
    if not inert.has_text_keys(names):
        raise PickleFault("its metadata is malformed: it has no names")
    return names


def _dtype(properties: object) -> ref.DType:
    """Return the element type, which `TensorProperties` keeps as the first item of a tuple."""
    state = properties.state if isinstance(properties, Record) else None
    named = state[0] if isinstance(state, tuple | list) and state else None
    if dtype := torch_dtype(named):
        return dtype
    raise PickleFault(f"its metadata has a tensor of unknown type {in_brief(named)[:40]}")


class _Items:
    """The chunks and values of a folder: where each lies, and reading them."""

    def __init__(self, source: ref.Source, storage_data: object) -> None:
        self.source = source
        self.folder = source.path if is_folder(source.path) else os.path.dirname(source.path)
        self.files: dict[str, ref.Source] = {}
        self.names: frozenset[Global] = frozenset()
        # Each item's place; None where its file is not there.
        self.places: dict[tuple[object, object], ref.ByteRange | None] = {}
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

    def place(self, name: str, info: Mapping[str, Any]) -> ref.ByteRange | None:
        extensions = info.get("transform_descriptors")
        if extensions:
            listed = extensions if isinstance(extensions, list) else [extensions]
            what = f"was written through the extension {', '.join(map(in_brief, listed[:3]))[:60]}"
            hint = "load it with torch.distributed.checkpoint and save it without extensions"
            raise Unsupported(self.source.path, f"'{name}' {what}", hint=hint)
        file, offset, nbytes = (info.get(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not ref.is_count(offset) or not ref.is_count(nbytes):
            raise PickleFault(f"its metadata is malformed where it says where '{name}' is stored")
        if file in self.absent:
            return None
        source = self.file(file)
        if offset + nbytes > source.size:
            if fault := known_stranger(source):
                raise fault
            raise Damaged(source.path, f"is cut short: it ends before '{name}' does")
        return ref.ByteRange(source, offset, nbytes)

    def file(self, name: str) -> ref.Source:
        if name not in self.files:
            if "/" in name or not is_plain(self.source.path, name):
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

    def is_absent(self, name: str, offsets: Index | None) -> bool:
        """Return whether the metadata says that something lies in a file that is not there."""
        return (name, offsets) in self.places and self.places[name, offsets] is None

    def with_gaps(self, name: str, dtype: ref.DType, size: Index) -> ref.TensorRef:
        """Return a tensor of which values are not there; reading them raises Damaged."""
        tensor = with_gaps(self.source.path, dtype, size, _ranks_of(self.absent), None, *sorted(self.absent))
        if tensor.nbytes > ref.MAX_BYTES:
            raise PickleFault(f"its metadata gives '{name[:80]}' a shape larger than any file")
        return tensor

    def part(self, name: str, offsets: Index, sizes: Index, dtype: ref.DType) -> TensorPart:
        """Return a chunk and its place in the tensor."""
        tensor = detached(self.load(name, offsets))
        if not isinstance(tensor, ref.TensorRef) or tensor.dtype is not dtype or tensor.shape != sizes:
            raise PickleFault(f"a chunk of '{name}' is not what the metadata says")
        if tensor.nbytes > tensor.storage.nbytes:
            raise PickleFault(f"a chunk of '{name}' repeats its elements")
        return TensorPart(offsets, tensor)

    def load(self, name: str, offsets: Index | None) -> object:
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
