"""Where a tensor's bytes lie, and how they are shaped: no values, no torch.

A `Storage` is what torch calls a storage: bytes that several tensors may share. A `TensorRef` is a tensor as
a view of a storage. Both are descriptions: reading a checkpoint makes a few hundred bytes per tensor,
whatever its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeGuard

from ..errors import Refused, Unsupported
from ..lazy import NDArray, np
from .dtypes import DType, numpy_type
from .source import ByteRange, Observer, Stretch, filled

MAX_BYTES = 2**63 - 1
USUAL, LARGEST = 1 << 20, 4 << 20  # bytes that are computed at a time, and the most
DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,3})?")  # what a storage may be tagged with: `cpu`, `cuda:0`
MAX_AXES = 64  # some operations of torch stop there


@dataclass(frozen=True, slots=True)
class Computed:
    """`nbytes` bytes that are made when asked for, always the same."""

    path: str
    nbytes: int
    # `make(start, nbytes)` yields a stretch, in pieces that are valid until the next.
    make: Callable[[int, int], Iterator[memoryview]]
    # Yields the values of a view of them, little-endian, in less memory than all the bytes take.
    view: Callable[[TensorRef], Iterator[memoryview]] | None = None
    # A stretch costs no more than its share, and several threads may make stretches at once.
    is_divisible: bool = False
    # `fill(start, buffer)`, where the bytes can be made in the caller's memory.
    fill: Callable[[int, memoryview], None] | None = None
    # Raises what making them would, for want of a package or a formula, and reads nothing.
    require: Callable[[], None] | None = None
    # How long each stretch is that comes from one place, and that place, in order; [] if it is not so simple.
    stretches: Callable[[], list[Stretch]] = list
    # Bytes that are best made at a time, LARGEST at most; 0 for as usual.
    together: int = 0
    # Called with what `fill` has made, in the thread that made it.
    observers: list[Observer] = field(default_factory=list, compare=False)

    @classmethod
    def filling(
        cls,
        path: str,
        nbytes: int,
        fill: Callable[[int, memoryview], None],
        stretches: Callable[[], list[Stretch]] = list,
        together: int = 0,
    ) -> Computed:
        """Return bytes that a function puts into the caller's memory, any stretch of them in any thread."""
        observers: list[Observer] = []

        def seen(start: int, out: memoryview) -> None:
            fill(start, out)
            for observer in observers:
                observer(start, out)

        def make(start: int, count: int) -> Iterator[memoryview]:
            return filled(
                seen, start, count, memoryview(bytearray(min(count, together or USUAL)))
            )  # whole elements

        return cls(path, nbytes, make, None, True, seen, None, stretches, together, observers)

    @classmethod
    def in_memory(cls, path: str, raw: bytes | bytearray) -> Computed:
        """Return bytes that are in memory already."""
        return cls(path, len(raw), lambda start, count: iter((memoryview(raw)[start : start + count],)))

    def read(self) -> bytes:
        """Return all bytes."""
        return b"".join(bytes(piece) for piece in self.make(0, self.nbytes))

    def part(self, start: int, nbytes: int) -> Computed:
        """Return `nbytes` bytes from `start`, which must lie inside and cut no element."""
        if nbytes == self.nbytes:
            return self
        if (fill := self.fill) is not None:
            here = self.together
            return self.filling(self.path, nbytes, lambda at, out: fill(start + at, out), together=here)
        return replace(
            self,
            nbytes=nbytes,
            make=lambda at, count: self.make(start + at, count),
            view=None,
            stretches=list,
        )

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """Make all bytes in order, through the buffer if they are made in the caller's memory."""
        if self.fill is not None and len(buffer):
            return filled(self.fill, 0, self.nbytes, buffer)
        return self.make(0, self.nbytes)


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes that tensors use. Two tensors share memory exactly when they have the same Storage object."""

    data: ByteRange | Computed
    kind: str  # the class under which torch pickles it: `FloatStorage`, `UntypedStorage`, …
    location: str = "cpu"
    crc32: int | None = None  # where the file states one
    byteorder: str = "little"
    digest: str | None = None  # of a tensor of all its bytes (docs/digest.md), where one is stated
    # The storages that these bytes are a part of, or are computed from.
    origins: tuple[Storage, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.data.nbytes

    @property
    def place(self) -> ByteRange | None:
        """Where the bytes lie, or the first of those that they come from; None for bytes of no file."""
        if isinstance(self.data, ByteRange):
            return self.data
        return next(filter(None, (origin.place for origin in self.origins)), None)


def extent(shape: Iterable[int]) -> int:
    """Return the product of the sizes that are not 0, MAX_BYTES + 1 at most."""
    # A file may state thousands of sizes of 2^62: their true product would take minutes and have no use.
    total = 1
    for size in shape:
        total *= size or 1
        if total > MAX_BYTES:
            return MAX_BYTES + 1
    return total


@lru_cache(1 << 12)  # the shapes of a file's tensors are few
def count_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape, MAX_BYTES + 1 at most."""
    return 0 if 0 in shape else extent(shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of each dimension in row-major order, as torch has it: a size of 0 counts as 1."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


@lru_cache(1 << 12)  # the forms of a file's tensors are few
def are_in_a_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements lie one after another in row-major order, as those of no elements do."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected and 0 not in shape:
                return False
            expected *= size
    return True


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor as a view of a storage, in torch's terms. Equal only to itself, like a tensor.

    Never changed: a transform makes a new one by `dataclasses.replace`. It is not frozen, as making a frozen
    one takes five times as long, and a file may have 100,000.

    Attributes:
        storage: the bytes.
        dtype: element type.
        shape, stride: size and step of each dimension, in elements; steps are ≥ 0.
        offset: first element within the storage.
        requires_grad: as saved.
        conj, neg: the lazy bits torch may save: the true values are the conjugate, or the negative, of the
            stored ones.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     tensor = checkpoint.state()["0.weight"]
        ...     tensor.dtype.name, tensor.shape, tensor.nbytes, tensor.numpy().shape
        ('float32', (8, 4), 128, (8, 4))
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
        return count_of(self.shape)

    @property
    def view(self) -> tuple[object, ...]:
        """A key that two tensors share exactly when one is another name for the other."""
        layout = (self.offset, self.shape, self.stride, self.conj, self.neg)
        return id(self.storage), self.dtype.name, *layout

    @property
    def nbytes(self) -> int:
        """Bytes of the values, whatever else the storage holds."""
        return count_of(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another in row-major order (torch's definition)."""
        return are_in_a_row(self.shape, self.stride)

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
        whole, nbytes = self.storage.data, self.nbytes
        return whole if nbytes == whole.nbytes else whole.part(self.offset * self.dtype.itemsize, nbytes)

    @property
    def contents(self) -> tuple[object, ...] | None:
        """A key that tensors of equal bytes share, wherever their files lie; None where no hash tells."""
        data = self.storage.data
        if not isinstance(data, ByteRange) or not data.source.content:
            return None
        place = data.source.content, data.offset, data.nbytes, self.storage.byteorder
        return *place, *self.view[1:]

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the bytes in use, within the storage; (0, 0) when there are none."""
        if not self.numel:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def numpy(self) -> NDArray[Any]:
        """Return the values as a new numpy array, without torch.

        bfloat16 and the 8-bit floats get the types of ml_dtypes.

        Raises:
            Unsupported: numpy has no such element type: complex32, quantised and bit types.
            Refused: a view that repeats its storage by more than 1 GiB.
            Damaged: the file ends early. Unreadable: the checkpoint was closed.
        """
        if self.nbytes > self.storage.nbytes + (1 << 30):
            raise Refused(self.storage.data.path, f"a view that expands its storage to {self.nbytes} bytes")
        kind = numpy_type(self.dtype)
        if kind is None:
            hint = "load it with torch: state.load(), or cast it first: ckpttool.cast"
            raise Unsupported(self.storage.data.path, f"numpy has no type {self.dtype.name}", hint=hint)
        begin, end = self.span
        array = np.frombuffer(bytearray(self.storage.data.part(begin, end - begin).read()), np.uint8)
        if self.is_swapped:
            array = array.view(f"u{self.dtype.part}").byteswap()
        steps = [step * self.dtype.itemsize for step in self.stride]
        # As mere bytes: numpy can't make strided views of the types of ml_dtypes.
        elements = np.lib.stride_tricks.as_strided(array.view(f"V{self.dtype.itemsize}"), self.shape, steps)
        values: NDArray[Any] = np.array(elements, order="C").view(kind)
        if self.conj:  # in place: else one number would become a scalar of numpy's
            np.conjugate(values, out=values)
        if self.neg:
            np.negative(values, out=values)
        return values

    def permuted(self, axes: Sequence[int]) -> TensorRef | None:
        """Return the tensor with its axes in another order; None where these are not its axes."""
        if sorted(axes) != [*range(len(self.shape))]:
            return None
        shape, stride = (tuple(sizes[axis] for axis in axes) for sizes in (self.shape, self.stride))
        return replace(self, shape=shape, stride=stride)

    def viewed(self, shape: tuple[int, ...]) -> TensorRef | None:
        """Return the elements in another shape, which must have as many; None when no strides do that."""
        if self.is_contiguous:
            return replace(self, shape=shape, stride=contiguous_stride(shape))
        sizes = [(size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1]
        if [size for size, _ in sizes] != [size for size in shape if size != 1]:
            return None
        steps = iter([step for _, step in sizes])
        stride = tuple(1 if size == 1 else next(steps) for size in shape)
        return replace(self, shape=shape, stride=stride)

    @classmethod
    def contiguous(cls, storage: Storage, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """Return a tensor that begins with its storage and lies in row-major order."""
        return cls(storage, dtype, shape, contiguous_stride(shape))

    @classmethod
    def of_bytes(
        cls,
        data: ByteRange | Computed,
        dtype: DType,
        shape: tuple[int, ...],
        *origins: Storage,
        location: str = "cpu",
        byteorder: str = "little",
    ) -> TensorRef:
        """Return a tensor in row-major order with a storage of its own, whose bytes come from the origins."""
        storage = Storage(data, dtype.kind, location, byteorder=byteorder, origins=origins)
        return cls.contiguous(storage, dtype, shape)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an int (no bool) from 0 to MAX_BYTES."""
    return type(value) is int and 0 <= value <= MAX_BYTES
