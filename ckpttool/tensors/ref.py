"""Where a tensor's bytes lie, and how they are shaped: no values, no torch.

A `Storage` is what torch calls a storage: bytes that several tensors may share. A `TensorRef` is a tensor as
a view of a storage. Both are descriptions: reading a checkpoint makes a few hundred bytes per tensor,
whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from .dtypes import SIGNED, DType
from .source import ByteRange as ByteRange
from .source import Computed as Computed
from .source import Source as Source

MAX_BYTES = 2**63 - 1

MAX_AXES = 64
"""Dimensions of a tensor; some operations of torch stop at 64."""


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes that tensors use. Two tensors share memory exactly when they have the same Storage object.

    Not changed once a reader has handed it out.

    Attributes:
        data: where the bytes are, or how they are made.
        kind: the class under which torch pickles it: `FloatStorage`, `UntypedStorage`, …
        location: the device it was saved from, `cpu` or `cuda:0`.
        crc32: CRC-32 of the bytes when the file states one, else None.
        byteorder: `little` or `big`.
        origins: the storages that these bytes are a part of, or are computed from.
    """

    data: ByteRange | Computed
    kind: str
    location: str = "cpu"
    crc32: int | None = None
    byteorder: str = "little"
    origins: tuple[Storage, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.data.nbytes


def extent(shape: Iterable[int]) -> int:
    """Return the product of the sizes that are not 0, or MAX_BYTES + 1 when it is more than any file holds.

    A file may state thousands of sizes of 2^62: their true product would take minutes and have no use.
    """
    total = 1
    for size in shape:
        total *= size or 1
        if total > MAX_BYTES:
            return MAX_BYTES + 1
    return total


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of each dimension in row-major order, as torch has it: a size of 0 counts as 1."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor as a view of a storage, in torch's terms. Equal only to itself, like a tensor.

    Never changed: a transform makes a new one by `dataclasses.replace`. It is not frozen, as making a frozen
    one takes five times as long, and a file may have 100,000.

    Attributes:
        storage: the bytes.
        dtype: element type.
        shape: size of each dimension.
        stride: step of each dimension, in elements, ≥ 0.
        offset: first element within the storage.
        requires_grad: as saved.
        conj, neg: the lazy bits torch may save: the true values are the conjugate, or the negative, of the
            stored ones.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False

    def __repr__(self) -> str:
        return f"<TensorRef {self.dtype.name} {list(self.shape)} in {self.storage.data.path}>"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return 0 if 0 in self.shape else extent(self.shape)

    @property
    def view(self) -> tuple[object, ...]:
        """A key that two tensors share exactly when one is another name for the other."""
        layout = (self.offset, self.shape, self.stride, self.conj, self.neg)
        return id(self.storage), self.dtype.name, *layout

    @property
    def nbytes(self) -> int:
        """Bytes of the values, whatever else the storage holds."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another in row-major order (torch's definition)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected and self.numel:
                    return False
                expected *= size
        return True

    @property
    def is_swapped(self) -> bool:
        """Whether the bytes of an element are in the other order in the file."""
        return self.storage.byteorder == "big" and self.dtype.part > 1

    @property
    def is_stretch(self) -> bool:
        """Whether the values are one stretch of the storage's bytes, with nothing to be done to them."""
        return self.is_contiguous and not (self.conj or self.neg or self.is_swapped)

    @property
    def is_plain(self) -> bool:
        """Whether the values are one byte range of a file, little-endian, that can be copied as it is."""
        return self.is_stretch and not isinstance(self.storage.data, Computed)

    @property
    def data(self) -> ByteRange | Computed:
        """The bytes of the values as they are stored; only for a contiguous tensor."""
        return self.storage.data.part(self.offset * self.dtype.itemsize, self.nbytes)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the bytes in use, within the storage; (0, 0) when there are none."""
        if not self.numel:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    @classmethod
    def contiguous(cls, storage: Storage, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """Return a tensor that begins with its storage and lies in row-major order."""
        return cls(storage, dtype, shape, contiguous_stride(shape))


class BadTensor(ValueError):
    """A description that no tensor can have. Its text follows the words "a tensor"."""


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an int (no bool) from 0 to MAX_BYTES."""
    return type(value) is int and 0 <= value <= MAX_BYTES


def checked_tensor(
    storage: Storage,
    dtype: DType,
    shape: Any,
    stride: Any,
    offset: Any,
    requires_grad: bool = False,
    conj: bool = False,
    neg: bool = False,
    *,
    limit: int | None = None,
) -> TensorRef:
    """Return a tensor as a file describes it, each of whose elements lies in its storage.

    Args:
        storage: the bytes.
        dtype: element type.
        shape, stride, offset: whatever the file holds in their places, of any type.
        requires_grad, conj, neg: as for TensorRef.
        limit: bytes of the storage that the tensor may use; all when None.

    Raises:
        BadTensor: shape and stride are no tuples of one length, or longer than MAX_AXES; a number is no int,
            negative or larger than MAX_BYTES; a lazy bit does not fit the dtype; an element lies past
            `limit`.
    """
    limit = storage.nbytes if limit is None else limit
    counts = type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride)
    if counts and len(shape) > MAX_AXES:
        raise BadTensor(f"of {len(shape)} axes, more than the {MAX_AXES} that are read here")
    for number in (offset, *shape, *stride) if counts else (None,):
        if type(number) is not int or not 0 <= number <= MAX_BYTES:
            raise BadTensor("of malformed size, stride or offset")
    if (conj and "complex" not in dtype.name) or (neg and not dtype.name.startswith(SIGNED)):
        raise BadTensor(f"that is a conjugate or negative view of {dtype.name}")
    if extent(shape) * dtype.itemsize > MAX_BYTES:
        raise BadTensor("of a shape larger than any file")
    tensor = TensorRef(storage, dtype, shape, stride, offset, requires_grad, conj, neg)
    if tensor.span[1] > limit:
        raise BadTensor(f"of shape {str(list(shape))[:80]} that reaches past its storage of {limit} bytes")
    return tensor
