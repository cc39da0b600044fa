"""Where a tensor's bytes lie, and how they are shaped: no values, no torch.

A `Source` is an open file, a `ByteRange` a stretch of it, a `Storage` what torch calls a storage (bytes that
several tensors may share), and a `TensorRef` a tensor as a view of a storage. All are descriptions: reading
a checkpoint of any size makes a few hundred bytes per tensor. A transform that changes values (another dtype)
describes them too, as `Computed` bytes that are made when they are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Any, NamedTuple, TypeGuard

from ..errors import Damaged, Unreadable
from .dtypes import SIGNED, DType

MAX_BYTES = 2**63 - 1

MAX_AXES = 64
"""Dimensions of a tensor; some operations of torch stop at 64."""


class Source:
    """A file opened for reading; closed by `close()` or with its last user.

    `path` is for messages only: the descriptor is what is read, whatever happens to the name meanwhile.
    """

    __slots__ = ("_fd", "path", "size")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.size = os.fstat(fd).st_size

    @property
    def fd(self) -> int:
        """The descriptor. Raises Unreadable after `close`."""
        if self._fd < 0:
            raise Unreadable(self.path, "is closed", hint="read its tensors inside the `with` block")
        return self._fd

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes. Raises Damaged when the file ends before them."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
        pieces = []
        while nbytes:
            piece = os.pread(self.fd, nbytes, offset)
            if not piece:
                raise Damaged(self.path, "the file became shorter while it was read")
            pieces.append(piece)
            offset += len(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class ByteRange(NamedTuple):
    """`nbytes` bytes of a file from `offset`."""

    source: Source
    offset: int
    nbytes: int

    @property
    def path(self) -> str:
        """The file, for messages."""
        return self.source.path

    def read(self) -> bytes:
        return self.source.read(self.offset, self.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """A stretch of this range; the caller has checked that it lies inside."""
        return ByteRange(self.source, self.offset + start, nbytes)

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """All bytes in order, through one buffer: each chunk is valid until the next is asked for."""
        done = 0
        while done < self.nbytes:
            view = buffer[: min(len(buffer), self.nbytes - done)]
            filled = 0
            while filled < len(view):
                moved = os.preadv(self.source.fd, [view[filled:]], self.offset + done + filled)
                if not moved:
                    raise Damaged(self.source.path, "the file became shorter while it was read")
                filled += moved
            done += filled
            yield view


@dataclass(frozen=True, slots=True)
class Computed:
    """`nbytes` bytes that are made when asked for, always the same.

    Attributes:
        path: the file they come from, for messages.
        make: `make(start, nbytes)` gives a stretch of them, in pieces that are valid until the next.
        view: gives the true values of a tensor that is a view of them, little-endian, where that takes less
            memory than all of them; None where it can't.
        events: counts what there was to note beside the bytes, such as overflows, which only this process can
            report; None if no other process should make a stretch of them.
    """

    path: str
    nbytes: int
    make: Callable[[int, int], Iterator[memoryview]]
    view: Callable[[TensorRef], Iterator[memoryview]] | None = None
    events: Callable[[], int] | None = None

    def read(self) -> bytes:
        return b"".join(bytes(piece) for piece in self.make(0, self.nbytes))

    def part(self, start: int, nbytes: int) -> Computed:
        """A stretch; the caller has checked that it lies inside and cuts no element."""
        return Computed(self.path, nbytes, lambda at, count: self.make(start + at, count), events=self.events)

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """All bytes in order; the buffer is not needed."""
        return self.make(0, self.nbytes)


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
        origins: the storages whose bytes these are a part of, or are computed from.
    """

    data: ByteRange | Computed
    kind: str
    location: str = "cpu"
    crc32: int | None = None
    byteorder: str = "little"
    origins: tuple[Storage, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def extent(shape: Iterable[int]) -> int:
    """The product of the sizes that are not 0, or MAX_BYTES + 1 when it is more than any file holds.

    A file may state thousands of sizes of 2^62: their true product would take minutes and have no use.
    """
    total = 1
    for size in shape:
        total *= size or 1
        if total > MAX_BYTES:
            return MAX_BYTES + 1
    return total


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of each dimension in row-major order, as torch has it: a size of 0 counts as 1."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor as a view of a storage, in torch's terms. Equal only to itself, like a tensor.

    Attributes:
        dtype: element type.
        shape, stride, offset: in elements; the stride of each dimension is ≥ 0.
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
        """How many elements it has."""
        return 0 if 0 in self.shape else extent(self.shape)

    @property
    def view(self) -> tuple[object, ...]:
        """What two tensors have in common when one is another name for the other."""
        layout = (self.offset, self.shape, self.stride, self.conj, self.neg)
        return id(self.storage), self.dtype.name, *layout

    @property
    def nbytes(self) -> int:
        """Bytes of the values, whatever the storage holds beside them."""
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
        """Whether the values are one byte range of a file, little-endian, to be copied unseen."""
        return self.is_stretch and not isinstance(self.storage.data, Computed)

    @property
    def data(self) -> ByteRange | Computed:
        """The bytes of the values as they are stored; only for a contiguous tensor."""
        return self.storage.data.part(self.offset * self.dtype.itemsize, self.nbytes)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the bytes looked at, within the storage; (0, 0) when there are none."""
        if not self.numel:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    @classmethod
    def contiguous(cls, storage: Storage, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A tensor that begins with its storage and lies in row-major order."""
        return cls(storage, dtype, shape, contiguous_stride(shape))


# Objects of the same fields that may be set: making a frozen one takes five times as long.
_Draft = make_dataclass(
    "_Draft",
    [(f.name, Any) if f.default is MISSING else (f.name, Any, f.default) for f in fields(TensorRef)],
    slots=True,
    eq=False,
)


def new_tensor(*args: Any) -> TensorRef:
    """`TensorRef(*args)`, for the readers of files with very many tensors."""
    draft: Any = _Draft(*args)
    draft.__class__ = TensorRef
    return draft  # type: ignore[no-any-return]


class BadTensor(ValueError):
    """A description that no tensor can have; reads on after "a tensor"."""


def is_count(value: object) -> TypeGuard[int]:
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
    room: int | None = None,
) -> TensorRef:
    """A tensor as a file describes it, each of whose elements lies in its storage.

    Args:
        room: bytes of the storage that it may use; all when None.

    Raises:
        BadTensor: malformed, negative, overflowing, or reaching past the storage.
    """
    room = storage.nbytes if room is None else room
    counts = type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride) <= MAX_AXES
    for number in (offset, *shape, *stride) if counts else (None,):
        if type(number) is not int or not 0 <= number <= MAX_BYTES:
            raise BadTensor("of malformed size, stride or offset")
    if (conj and "complex" not in dtype.name) or (neg and not dtype.name.startswith(SIGNED)):
        raise BadTensor(f"that is a conjugate or negative view of {dtype.name}")
    if extent(shape) * dtype.itemsize > MAX_BYTES:
        raise BadTensor("of a shape larger than any file")
    tensor = TensorRef(storage, dtype, shape, stride, offset, requires_grad, conj, neg)
    if tensor.span[1] > room:
        raise BadTensor(f"of shape {str(list(shape))[:80]} that reaches past its storage of {room} bytes")
    return tensor
