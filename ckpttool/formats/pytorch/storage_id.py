"""Persistent ids: how torch refers to a storage inside a pickle.

`('storage', class, key, location, numel)`, and in torch before 0.4 a view of a storage as the sixth part.
Source: torch's `serialization.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...inert_pickle.machine import PickleFault
from ...inert_pickle.values import Global, in_brief
from ...tensors.dtypes import DTYPES, STORAGE_DTYPES, DType
from ...tensors.ref import Storage, is_count

UNTYPED = Global("torch.storage", "UntypedStorage")
STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")


class StorageForm(NamedTuple):
    """What a persistent id says of a storage beside its key. `numel` counts elements of the class `kind`."""

    kind: str
    location: str
    numel: int
    nbytes: int


# Returns the storage of a key, the same object each time.
FindStorage = Callable[[str, StorageForm], Storage]


class StorageId(NamedTuple):
    """A persistent id that was checked. `view` is (key, offset, numel)."""

    key: str
    form: StorageForm
    view: tuple[str, int, int] | None


def element_type(kind: str) -> DType:
    """Return the element type of a storage class; `uint8` for an untyped storage, which counts bytes."""
    return STORAGE_DTYPES.get(kind, DTYPES["uint8"])


def itemsize(kind: str) -> int:
    """Return the bytes of an element of a storage class."""
    return element_type(kind).itemsize


def parse_storage_id(identity: object) -> StorageId:
    """Check a persistent id."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise PickleFault(f"its pickle refers to something that is not a storage: {in_brief(identity)[:60]}")
    _, kind, key, location, numel = identity[:5]
    view = identity[5] if len(identity) == 6 else None
    if (
        not isinstance(kind, Global)
        or kind.module not in STORAGE_MODULES
        or (kind.name not in STORAGE_DTYPES and kind.name != UNTYPED.name)
    ):
        raise PickleFault(f"its pickle has a storage of unknown class {in_brief(kind)[:60]}")
    if not isinstance(key, str) or not isinstance(location, str) or not is_count(numel):
        raise PickleFault("its pickle has a malformed storage")
    if view is not None and not (
        isinstance(view, tuple)
        and len(view) == 3
        and isinstance(view[0], str)
        and is_count(view[1])
        and is_count(view[2])
        and view[1] + view[2] <= numel
    ):
        raise PickleFault(f"its pickle has a malformed view of storage '{key[:80]}'")
    form = StorageForm(kind.name, location, numel, numel * itemsize(kind.name))
    return StorageId(key, form, view)
