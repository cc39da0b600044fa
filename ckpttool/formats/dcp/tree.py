"""What DCP makes of a tree: what it can't hold, what it loses, and how the flat names become a tree again.

Needs no torch. What frameworks add to a folder is here too: Lightning's `meta.pt`, Megatron's `common.pt`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Entry, dotted
from ...errors import Damaged, Refused
from ...inert_pickle.reader import PickleFault
from ...inert_pickle.values import MAX_DEPTH, Global, OrderedDict_, Record, in_brief, remade, tensor_of, walk
from ...remote.places import exists, open_source_at
from ...system import join
from ...tensors.dtypes import DTYPES
from ...tensors.ref import MAX_AXES, Storage, is_count
from ...words import first_few
from ..pytorch import zip as torch_zip

# What messages call the outermost dict, which has no name.
TOP = "the dict at the top"

WITH_FULL = "keep everything with convert --full"
# How many objects an error names one by one.
MOST_TOLD = 4

MAX_VALUES = 10_000_000  # what is in several places counts in each

# Places of lists that may stay empty, besides 100 for each entry: DCP drops empty items.
SPARE = 1000

Path = tuple[str | int, ...]


def torch_size(value: object) -> tuple[int, ...]:
    """Return what a `torch.Size` holds."""
    match value:
        case Record(callable=Global("torch", "Size"), args=(tuple() as size,)) | (tuple() as size):
            if all(map(is_count, size)) and len(size) <= MAX_AXES:
                return size
            if all(map(is_count, size)):
                raise PickleFault(f"has a tensor of {len(size)} axes, and at most {MAX_AXES} are supported")
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
        if isinstance(value, Global | Record | Storage) and not _is_data(value)
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


def _is_data(value: Global | Record | Storage) -> bool:
    """Return whether something that a pickle names is data: a tensor, an element type or a size."""
    match value:
        case Global("torch", name):
            return name in DTYPES
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
        if left < 0 or len(path) > MAX_DEPTH:
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
        if isinstance(value, OrderedDict_) and isinstance(value.attributes, dict):
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
            plain[id(value)] = all(tensor_of(inner) is None for inner in walk(value))
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
    if not all(type(step) is str or is_count(step) for step in steps):
        raise PickleFault(f"its metadata has a malformed path for '{name}'")
    return steps


# What frameworks add to a folder.


# All of Lightning's checkpoint that is no tensor: its keys join those of the folder.
META = "meta.pt"

# The key by which Lightning's Trainer knows its own checkpoints; those of Fabric lack it.
OF_TRAINER = "pytorch-lightning_version"

# Megatron's arguments and counters, which are left out.
COMMON = "common.pt"


def not_read(name: str) -> str:
    """Return how a file that is left out is named in `Checkpoint.unread`."""
    return f"{name} (not read)"


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
