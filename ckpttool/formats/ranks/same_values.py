"""Values of two files, compared to the type and the bit."""

from __future__ import annotations

from ...inert_pickle.values import Record
from ...tensors.ref import TensorRef
from ...tensors.values import MAX_EXPANSION, in_pieces

# The most bytes of a tensor that `same` reads although its checksum is known.
SMALL = 1 << 16

# Elements of two tensors that `same` compares at a time.
BLOCK = 1 << 18


def same(one: object, other: object) -> bool:
    """Return whether two values are the same, to the type; NaN is the same as NaN."""
    # Tensors are by dtype, shape and bytes, on whatever device they were. Of those of more than 64 KiB the
    # checksums are compared instead where both files state them. Those that repeat their elements very often
    # count as different.
    stack, seen = [(one, other)], set[tuple[int, int]]()
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            return False
        if isinstance(a, dict) and isinstance(b, dict):
            if list(a) != list(b):
                return False
            stack.extend(zip(a.values(), b.values(), strict=True))
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
            if len(a) != len(b):
                return False
            stack.extend(zip(a, b, strict=True))
        elif isinstance(a, Record) and isinstance(b, Record):
            fields = ("how", "callable", "args", "kwargs", "state", "elements", "items")
            stack.extend((getattr(a, name), getattr(b, name)) for name in fields)
        elif isinstance(a, TensorRef) and isinstance(b, TensorRef):
            if not _same_tensor(a, b):
                return False
        elif not (a == b or (a != a and b != b)):
            return False
    return True


def _same_tensor(one: TensorRef, other: TensorRef) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    both = one, other
    sums = {each.storage.crc32 for each in both}
    if one.nbytes > SMALL and None not in sums and all(is_whole(each) for each in both):
        return len(sums) == 1
    if any(each.nbytes > each.storage.nbytes + MAX_EXPANSION for each in both):
        return False
    pieces = zip(
        in_pieces(one, BLOCK * one.dtype.part), in_pieces(other, BLOCK * one.dtype.part), strict=True
    )
    return all(a == b for a, b in pieces)


def is_whole(tensor: TensorRef) -> bool:
    """Return whether a tensor is all of its storage, as it lies there: a checksum of one is of both."""
    return tensor.is_plain and tensor.nbytes == tensor.storage.nbytes
