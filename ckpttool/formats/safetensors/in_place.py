"""A safetensors file that keeps its payload and gets another header of the same length.

The header of a file that others may be reading can't be changed where it lies: a write is no single step,
neither for a process that reads or maps the file meanwhile (ext4 locks no page against readers) nor for a
disk that loses power (the page cache promises no order and no whole pages). So the output is always a new
file. On a file system that shares blocks between files (btrfs, xfs) it shares those of the payload; elsewhere
the payload is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...files.copying import Output
from ...tensors.ref import ByteRange, Source, TensorRef


def payload_start(source: Source, tensors: Mapping[str, TensorRef]) -> int | None:
    """Return the byte at which a file's payload begins; None if these tensors are not exactly its payload."""
    if not all(
        t.is_plain and isinstance(t.data, ByteRange) and t.data.source is source for t in tensors.values()
    ):
        return None
    places = sorted(map(_place, tensors.values()))
    ends = [offset + nbytes for offset, nbytes in places]
    if [offset for offset, _ in places[1:]] + [source.size] != ends:
        return None
    return places[0][0]


def by_place(item: tuple[str, TensorRef]) -> tuple[int, int]:
    """Return the key that sorts (name, tensor) pairs by their place in the file."""
    return _place(item[1])


def _place(tensor: TensorRef) -> tuple[int, int]:
    """Return a tensor's offset in the file, and its bytes."""
    where = tensor.storage.data
    offset = where.offset if isinstance(where, ByteRange) else 0
    return offset + tensor.offset * tensor.dtype.itemsize, tensor.nbytes


def write(source: Source, header: bytes, out: Output) -> None:
    """Write a file with another header, the payload shared with the old file or copied."""
    out.write(header)
    out.copy(ByteRange(source, len(header), source.size - len(header)))
