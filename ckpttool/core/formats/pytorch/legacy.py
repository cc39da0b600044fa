"""The format of `torch.save` before torch 1.6: pickles one after another, then the bytes of the storages.

A magic number, a protocol version, facts about the machine, the tree, and the list of storage keys are
five pickles; the storages follow in the order of that list, each as a count of elements (8 bytes) and its
elements, little-endian whatever the facts about the machine are. Source: `_legacy_load` in torch's
`serialization.py`, `THPStorage_writeFileRaw` in its `csrc`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ....errors import Damaged
from ...checkpoint.checkpoint import Checkpoint, Remark
from ...inert_pickle.machine import CutShort, PickleFault
from ...inert_pickle.reader import Pickle, read_pickle
from ...inert_pickle.values import Global, in_brief
from ...tensors.ref import ByteRange, Source, Storage
from .fast_path import StorageForm
from .tensor_pickle import LEGACY_PARTS, read_torch_pickle

# Bytes that are read first, and how many times more each time they were not enough.
FIRST, GROWTH = 1 << 16, 8


def read_unsized(place: ByteRange, read: Callable[[bytes], Pickle], first: int = FIRST) -> Pickle:
    """Read the pickle with which a part of a file begins; its `end` is that within the file."""
    size = first
    while True:
        data = place.part(0, min(size, place.nbytes)).read()
        try:
            pickle = read(data)
        except CutShort:
            if size >= place.nbytes:
                raise
            size *= GROWTH
        else:
            return replace(pickle, end=place.offset + pickle.end)


NAME = "torch-legacy"
MAGIC = b"\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")  # LONG1 and its ten bytes
PROTOCOL_VERSION = 1001

_Storages = dict[str, tuple[StorageForm, Storage]]


def sniff(head: bytes) -> bool:
    """Whether a file that begins with `head` is of this format."""
    return head[:1] == b"\x80" and MAGIC in head[2:23]  # from protocol 4 on a FRAME comes between


def read(source: Source) -> Checkpoint:
    """Read the tree and find each storage; no element is read."""
    storages: _Storages = {}
    remarks: list[Remark] = []

    def read_tree(data: bytes) -> Pickle:
        storages.clear()
        remarks.clear()
        find = partial(_storage, source, storages)
        return read_torch_pickle(data, find, parts=LEGACY_PARTS, remarks=remarks)

    pickles: list[Pickle] = []
    try:
        for read_one in (read_pickle, _read_version, read_pickle, read_tree, read_pickle):
            start = pickles[-1].end if pickles else 0
            pickles.append(read_unsized(ByteRange(source, start, source.size - start), read_one))
    except PickleFault as fault:
        raise Damaged(source.path, str(fault)) from None
    *_, tree, keys = pickles
    _locate(source, storages, keys.value, keys.end)
    names = frozenset[Global]().union(*(pickle.names for pickle in pickles))
    return Checkpoint(source, NAME, tree.value, tree.protocol, names=names, remarks=tuple(remarks))


def _read_version(data: bytes) -> Pickle:
    pickle = read_pickle(data)
    if pickle.value != PROTOCOL_VERSION:
        version = in_brief(pickle.value)[:20]
        raise PickleFault(f"has version {version} of the legacy format, not {PROTOCOL_VERSION}")
    return pickle


def _storage(source: Source, storages: _Storages, key: str, form: StorageForm) -> Storage:
    """The storage of a key; `_locate` sets its place."""
    if key not in storages:
        storages[key] = form, Storage(ByteRange(source, 0, form.nbytes), form.kind, form.location)
    known, storage = storages[key]
    if known.nbytes != form.nbytes:
        raise PickleFault(f"its pickle has two sizes for storage '{key[:80]}'")
    return storage


def _locate(source: Source, storages: _Storages, keys: object, position: int) -> None:
    """Set the place of each storage. Where list and tree differ, torch leaves memory uninitialised."""
    listed = keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else [""]
    if sorted(listed) != sorted(storages):
        raise Damaged(source.path, "its list of storages does not match those its tensors refer to")
    for key in listed:
        form, storage = storages[key]
        (numel,) = struct.unpack("<q", source.read(position, 8))
        if numel != form.numel:
            what = f"storage '{key[:80]}' has {numel} elements, its tensors say {form.numel}"
            raise Damaged(source.path, what)
        position += 8
        if position + form.nbytes > source.size:
            raise Damaged(source.path, f"is cut short in storage '{key[:80]}'")
        storage.data = ByteRange(source, position, form.nbytes)
        position += form.nbytes
