"""The format of `torch.save` before torch 1.6: pickles one after another, then the bytes of the storages.

A magic number, a protocol version, facts about the machine, the tree, and the list of storage keys are
five pickles; the storages follow in the order of that list, each as a count of elements (8 bytes) and its
elements, little-endian whatever the facts about the machine are. Source: `_legacy_load` in torch's
`serialization.py`, `THPStorage_writeFileRaw` in its `csrc`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ...checkpoint.checkpoint import Checkpoint, Remark
from ...errors import Damaged
from ...inert_pickle.machine import CutShort, PickleFault
from ...inert_pickle.reader import Pickle, read_pickle
from ...inert_pickle.values import Global, in_brief
from ...tensors.ref import ByteRange, Source, Storage
from .fast_path import StorageForm
from .tensor_pickle import LEGACY_PARTS, read_torch_pickle

# Bytes that are read first, and how many times more each time they were not enough.
FIRST, GROWTH = 1 << 16, 8


def read_unsized(
    source: Source, start: int, end: int, read: Callable[[bytes], Pickle], first: int = FIRST
) -> Pickle:
    """Read the pickle that begins at byte `start` of a file."""
    size = first
    while True:
        data = source.read(start, min(size, end - start))
        try:
            pickle = read(data)
        except CutShort:
            if size >= end - start:
                raise
            size *= GROWTH
        else:
            return replace(pickle, end=start + pickle.end)


NAME = "torch-legacy"
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
MAGIC = b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little")  # LONG1 and its ten bytes
PROTOCOL_VERSION = 1001

_Storages = dict[str, tuple[StorageForm, Storage]]


def sniff(head: bytes) -> bool:
    """Whether a file that begins with `head` is of this format."""
    return head[:1] == b"\x80" and MAGIC in head[2:23]  # from protocol 4 on a FRAME comes between


def read(source: Source) -> Checkpoint:
    """Read the tree and find each storage; no element is read."""
    try:
        tree = _read_pickles(source)
    except PickleFault as fault:
        raise Damaged(source.path, str(fault)) from None
    _locate(source, tree.storages, tree.keys.value, tree.keys.end)
    pickle = tree.pickle
    return Checkpoint(
        source, NAME, pickle.value, protocol=pickle.protocol, names=tree.names, remarks=tree.remarks
    )


@dataclass(frozen=True, slots=True)
class _Tree:
    """What the five pickles hold. The storages have no place yet, which only the end of the file tells."""

    pickle: Pickle
    storages: _Storages
    keys: Pickle
    names: frozenset[Global]
    remarks: tuple[Remark, ...]


def _read_pickles(source: Source) -> _Tree:
    magic = _read(source, 0)
    version = _read(source, magic.end)
    if version.value != PROTOCOL_VERSION:
        raise PickleFault(
            f"has version {in_brief(version.value)[:20]} of the legacy format, not {PROTOCOL_VERSION}"
        )
    machine = _read(source, version.end)
    storages: _Storages = {}
    remarks: list[Remark] = []

    def read_tree(data: bytes) -> Pickle:
        storages.clear()
        remarks.clear()
        find = partial(_storage, source, storages)
        return read_torch_pickle(data, 0, find, parts=LEGACY_PARTS, remarks=remarks)

    tree = read_unsized(source, machine.end, source.size, read_tree)
    keys = _read(source, tree.end)
    names = (pickle.names for pickle in (magic, version, machine, tree, keys))
    return _Tree(tree, storages, keys, frozenset().union(*names), tuple(remarks))


def _read(source: Source, start: int) -> Pickle:
    return read_unsized(source, start, source.size, read_pickle)


def _storage(source: Source, storages: _Storages, key: str, form: StorageForm) -> Storage:
    """The storage of a key; `_locate` sets its place."""
    if key not in storages:
        unplaced = ByteRange(source, 0, form.nbytes)
        storages[key] = form, Storage(unplaced, form.kind, form.location)
    elif storages[key][0].nbytes != form.nbytes:
        raise PickleFault(f"its pickle has two sizes for storage '{key[:80]}'")
    return storages[key][1]


def _locate(source: Source, storages: _Storages, keys: object, position: int) -> None:
    """Set the place of each storage. Where list and tree differ, torch leaves memory uninitialised."""
    listed = keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else [""]
    if sorted(listed) != sorted(storages):
        raise Damaged(source.path, "its list of storages does not match those its tensors refer to")
    for key in listed:
        form, storage = storages[key]
        (numel,) = struct.unpack("<q", source.read(position, 8))
        if numel != form.numel:
            raise Damaged(
                source.path, f"storage '{key[:80]}' has {numel} elements, its tensors say {form.numel}"
            )
        position += 8
        if position + form.nbytes > source.size:
            raise Damaged(source.path, f"is cut short in storage '{key[:80]}'")
        storage.data = ByteRange(source, position, form.nbytes)
        position += form.nbytes
