"""A tensor as a place in a file: element types, files and ranges of them, storages and views; no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

from ...errors import Damaged, Refused, Unreadable, Unsupported
from ...rooms import need
from .. import system
from ..lazy import NDArray, np

# ---- Element types, and their names in the formats

INTEGERS = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


@dataclass(frozen=True, slots=True)
class DType:
    """An element type."""

    name: str  # torch's, `float32`
    itemsize: int  # bytes per element
    storage: str | None  # the class that torch has for it, `FloatStorage`; none for types younger than 2.0
    safetensors: str | None  # the name in a safetensors header, `F32`, if that format has the type
    part: int  # bytes of the unit that byte order and sign apply to: half an element for complex types
    numbers: int = 1  # that share an element; the shape of safetensors counts each of them

    @property
    def kind(self) -> str:
        """The storage class under which torch pickles tensors of it; an untyped one goes with their dtype."""
        return self.storage or "UntypedStorage"


# The floats that need no scale beside them: what is averaged, added to, scaled and made fp8.
PLAIN_FLOATS = ("float64", "float32", "float16", "bfloat16")

DTYPES = {
    name: DType(
        name,
        size,
        storage,
        safetensors,
        part=size // 2 if "complex" in name else size,
        numbers=2 if safetensors == "F4" else 1,
    )
    for name, size, storage, safetensors in (
        ("float64", 8, "DoubleStorage", "F64"),
        ("float32", 4, "FloatStorage", "F32"),
        ("float16", 2, "HalfStorage", "F16"),
        ("bfloat16", 2, "BFloat16Storage", "BF16"),
        ("int64", 8, "LongStorage", "I64"),
        ("int32", 4, "IntStorage", "I32"),
        ("int16", 2, "ShortStorage", "I16"),
        ("int8", 1, "CharStorage", "I8"),
        ("uint8", 1, "ByteStorage", "U8"),
        ("bool", 1, "BoolStorage", "BOOL"),
        ("uint64", 8, None, "U64"),
        ("uint32", 4, None, "U32"),
        ("uint16", 2, None, "U16"),
        ("float8_e4m3fn", 1, None, "F8_E4M3"),
        ("float8_e5m2", 1, None, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", 1, None, "F8_E8M0"),
        ("float4_e2m1fn_x2", 1, None, "F4"),  # two in a byte, which torch counts as one element
        ("complex128", 16, "ComplexDoubleStorage", None),
        ("complex64", 8, "ComplexFloatStorage", "C64"),
        ("complex32", 4, None, None),
        ("bcomplex32", 4, None, None),
        # Quantised and bit types: kept as they are where the format can hold them, and not interpreted.
        ("qint8", 1, "QInt8Storage", None),
        ("quint8", 1, "QUInt8Storage", None),
        ("qint32", 4, "QInt32Storage", None),
        ("quint4x2", 1, "QUInt4x2Storage", None),
        ("quint2x4", 1, "QUInt2x4Storage", None),
        ("bits16", 2, None, None),
        *((name, 1, None, None) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")),
    )
}

# With those of safetensors that torch lacks: four numbers in three bytes
ALL_DTYPES = DTYPES | {
    f"float6_{form}fn_x4": DType(f"float6_{form}fn_x4", 3, None, f"F6_{form.upper()}", 1, 4)
    for form in ("e2m3", "e3m2")
}

# Element types by the storage class under which torch pickles them
STORAGE_DTYPES = {dtype.storage: dtype for dtype in DTYPES.values() if dtype.storage}

# The types of the real and imaginary parts of complex types
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
REAL_TYPES = {name: DTYPES[part] for name, part in _PARTS.items()}


def real_dtype(dtype: DType) -> DType:
    """Return the type of the parts of a complex type; for any other type itself."""
    return REAL_TYPES.get(dtype.name, dtype)


def has_gradients(dtype: DType) -> bool:
    """Return whether torch lets a tensor of this type require gradients."""
    return "float" in dtype.name or "complex" in dtype.name


# Types that numpy lacks; the package ml_dtypes has them under torch's names.
OF_ML_DTYPES = {name for name in DTYPES if name.startswith(("bfloat16", "float8"))}


def numpy_type(dtype: DType) -> Any:
    """Return numpy's element type, or that of ml_dtypes; None where there is none."""
    if dtype.name in OF_ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype.name))
    # np.dtype would also know the types that another package has registered.
    own = getattr(np, "bool_" if dtype.name == "bool" else dtype.name, None)
    return own and np.dtype(own)


# Types that torch's lazy negative may be set on: flipping the sign bit is all it means
SIGNED = ("float16", "float32", "float64", "bfloat16", "complex", "bcomplex")


# ---- The bytes of a file, and ranges of them


NEAR, TOGETHER = 1 << 12, 1 << 20  # bytes of a gap that is read along, and of one read


class Source:
    """A file opened for reading; closed by `close()` or with its last user."""

    is_local = True  # it has a descriptor: it can be mapped, and other files can share its blocks
    content = ""  # a hash of the bytes, where one is known without reading them
    commit = ""  # of a repository on the hub, which the file is of

    def __init__(self, path: str, fd: int) -> None:
        self.path = path  # for messages: the descriptor is what is read, whatever happens to the name
        self._fd = fd
        # Called with the offset and the bytes of each read, in the thread that reads.
        self.observers: list[Observer] = []
        self.size = os.fstat(fd).st_size
        self._replaced: tuple[object, object] | None = None
        system.opened(self)

    @property
    def fd(self) -> int:
        """The descriptor. Raises Unreadable after `close`."""
        if self._fd < 0:
            raise Unreadable(self.path, "is closed", hint="read its tensors inside the `with` block")
        return self._fd

    @property
    def unchecked(self) -> int:
        """The number of stretches whose preceding bytes were not checked yet."""
        return 0

    @property
    def place(self) -> str:
        """Where the file is, whatever messages call it."""
        return self.path

    @property
    def version(self) -> tuple[object, ...]:
        """A key that differs whenever the bytes do: a file's inode, size and time of change."""
        facts = os.fstat(self.fd)
        return (*self.identity, facts.st_size, facts.st_mtime_ns)

    @property
    def shared_version(self) -> tuple[object, ...]:
        """A key that differs whenever the bytes do, and is the same on all machines that share the file."""
        return self.place, *self.version[-2:]

    @property
    def identity(self) -> tuple[object, object]:
        """A key that two sources share exactly when they are the same file: device and inode."""
        if self._replaced:
            return self._replaced
        facts = os.fstat(self.fd)
        return facts.st_dev, facts.st_ino

    def called(self, path: str) -> Source:
        """Return a source, of size 0, that stands for several files in messages."""
        source = Source(path, os.dup(self.fd))
        source.size = 0  # its bytes are those of the first file, which counts itself
        source.commit = self.commit
        return source

    def guard(self, start: int, nbytes: int, before: int, check: Callable[[bytes], None]) -> None:
        """Have the bytes from `before` to `start` checked before any of those behind them is used."""
        check(self.read(before, start - before))

    def check_rest(self) -> None:
        """Check the bytes before stretches that were not read; a file checks them at once."""

    def opened(self) -> None:
        """Note that the checkpoint is open: from now on values are read."""

    def expect(self, ranges: Sequence[tuple[int, int]], nbytes: int, first: int, line: Any) -> Any:
        """Announce what will be read. A remote source fetches it ahead of time; a file does nothing."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`. Raises Damaged where the file ends before them."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
        data = self._read(offset, nbytes)
        self.seen(offset, data)
        return data

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = system.pread(self.fd, nbytes - len(data), offset + len(data))
            if not piece:
                raise Damaged(self.path, "the file became shorter while it was read")
            data += piece
        return data

    def read_near(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges (offset, size) that are sorted by offset; neighbours are read together.

        Raises Damaged where the file ends before them.
        """
        found: list[bytes] = []
        while len(found) < len(ranges):
            first = last = len(found)
            begin = end = ranges[first][0]
            most = begin + TOGETHER
            for offset, size in islice(ranges, first, None):
                stop = offset + size
                if (offset > end + NEAR or stop > most) and last > first:
                    break
                if stop > end:  # a call of max() would take three times as long
                    end = stop
                last += 1
            if begin < 0 or end > self.size:
                raise Damaged(self.path, f"ends at byte {self.size}, before its stated contents do")
            data = self._read(begin, end - begin)
            found += [data[offset - begin : offset - begin + size] for offset, size in ranges[first:last]]
        for (offset, _), data in zip(ranges, found, strict=True) if self.observers else ():
            self.seen(offset, data)
        return found

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill memory with the bytes from `offset`. Raises Damaged where the file ends before them."""
        self._fill(offset, view)
        self.seen(offset, view)

    def seen(self, offset: int, data: memoryview | bytes) -> None:
        """Show bytes that lie at `offset` to the observers."""
        for observer in self.observers:
            observer(offset, data)

    def _fill(self, offset: int, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            moved = system.preadv(self.fd, [view[filled:]], offset + filled)
            if not moved:
                raise Damaged(self.path, "the file became shorter while it was read")
            filled += moved

    def release(self, replaced: Collection[object]) -> None:
        """Close the descriptor if the file is one of `replaced`; its identity stays known."""
        if self._fd >= 0 and self.identity in replaced:
            self._replaced = self.identity
            self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
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
        """The file's name, for messages."""
        return self.source.path

    def read(self) -> bytes:
        """Return all bytes. Raises Damaged where the file ends before them."""
        return self.source.read(self.offset, self.nbytes)

    def part(self, start: int, nbytes: int) -> ByteRange:
        """Return `nbytes` bytes from `start` within this range, which must lie inside it."""
        return ByteRange(self.source, self.offset + start, nbytes)

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """Read all bytes through one buffer: each chunk is valid until the next."""
        return filled(self._fill, 0, self.nbytes, buffer)

    def _fill(self, start: int, view: memoryview) -> None:
        self.source.fill(self.offset + start, view)


Stretch = tuple[int, ByteRange]  # how many bytes, and where they come from
Observer = Callable[[int, "memoryview | bytes"], object]  # of bytes, with the place of the first


def filled(
    fill: Callable[[int, memoryview], None], start: int, nbytes: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield stretches that a function puts into a buffer, each valid until the next."""
    for done in range(0, nbytes, len(buffer) or 1):
        view = buffer[: min(len(buffer), nbytes - done)]
        fill(start + done, view)
        yield view


# ---- Storages and tensors, without their values
#
# A `Storage` is a storage of torch: bytes that several tensors may share. A `TensorRef` is a tensor as a view
# of a storage. Both are descriptions of a few hundred bytes, whatever the size of the tensor.


MAX_BYTES = 2**63 - 1
USUAL, LARGEST = 1 << 20, 4 << 20  # bytes that are computed at a time, and the most
DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,3})?")  # the tag of a storage: `cpu`, `cuda:0`
MAX_AXES = 64  # the limit of some operations of torch


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
    # Raises the error of making them where a package or a formula is missing; reads nothing.
    require: Callable[[], None] | None = None
    # The length and the place of each stretch, in order; [] if the bytes do not come in stretches.
    stretches: Callable[[], list[Stretch]] = list
    # Bytes that are best made at a time, LARGEST at most; 0 for the usual number.
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
            buffer = memoryview(bytearray(min(count, together or USUAL)))  # whole elements
            return filled(seen, start, count, buffer)

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

        def make(at: int, count: int) -> Iterator[memoryview]:
            return self.make(start + at, count)

        return replace(self, nbytes=nbytes, make=make, view=None, stretches=list)

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
    # Whether the bytes were compared with what is stated of them; of other bytes (`replace`) nobody knows.
    is_compared: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.data.nbytes

    @property
    def is_stated(self) -> bool:
        """Whether something is stated of the bytes, or may be of those that they come from."""
        return self.crc32 is not None or self.digest is not None or bool(self.origins)

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
    def is_holdable(self) -> bool:
        """Whether safetensors has its type in its shape: two F4 need an axis that counts them."""
        return self.dtype.safetensors is not None and bool(self.shape or self.dtype.numbers == 1)

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

    def numpy(self, *, verify: bool = True) -> NDArray[Any]:
        """Return the values as a new numpy array, without torch.

        bfloat16 and the 8-bit floats get the types of ml_dtypes.

        Args:
            verify: read the whole storage, the first time, and compare it with the checksum that the file
                states, if it does.

        Raises:
            Unsupported: numpy has no such element type: complex32, quantised and bit types.
            Refused: a view that repeats its storage by more than 1 GiB.
            Damaged: the file ends early, or a checksum is wrong. Unreadable: the checkpoint was closed.
        """
        if self.nbytes > self.storage.nbytes + (1 << 30):
            raise Refused(self.storage.data.path, f"a view that expands its storage to {self.nbytes} bytes")
        kind = numpy_type(self.dtype)
        if kind is None:
            hint = "load it with torch: state.load(), or cast it first: ckpttool.cast"
            raise Unsupported(self.storage.data.path, f"numpy has no type {self.dtype.name}", hint=hint)
        begin, end = self.span
        is_new = self.storage.is_stated and not self.storage.is_compared
        with self._compared() if verify and is_new else nullcontext():
            raw = bytearray(self.storage.data.part(begin, end - begin).read())
        array = np.frombuffer(raw, np.uint8)
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

    def _compared(self) -> AbstractContextManager[None]:
        # What knows of checksums stands above the folder of this file.
        checksums = need("core.checkpoint.checksums")
        context: AbstractContextManager[None] = checksums.compared(
            [(f"{self.dtype.name} {[*self.shape]}", self.storage)]
        )
        return context

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


# ---- Descriptions of tensors in files, checked before they are used


class BadTensor(ValueError):
    """A description that no tensor can have. Its text follows the words "a tensor"."""


def checked_tensor(
    storage: Storage,
    dtype: DType,
    shape: Any,
    stride: Any,
    offset: Any,
    *flags: bool,
    limit: int | None = None,
) -> TensorRef:
    """Return a tensor from a file's description, in values of any type. Raises BadTensor if it is impossible.

    `flags` are requires_grad, conj and neg.
    """
    limit = storage.nbytes if limit is None else limit
    are_tuples = type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride)
    if are_tuples and len(shape) > MAX_AXES:
        raise BadTensor(f"of {len(shape)} axes, more than the {MAX_AXES} that are read here")
    if not (are_tuples and all(map(is_count, (offset, *shape, *stride)))):
        raise BadTensor("of malformed size, stride or offset")
    tensor = TensorRef(storage, dtype, shape, stride, offset, *flags)
    if (tensor.conj and "complex" not in dtype.name) or (tensor.neg and not dtype.name.startswith(SIGNED)):
        raise BadTensor(f"that is a conjugate or negative view of {dtype.name}")
    if tensor.requires_grad and not has_gradients(dtype):
        raise BadTensor(f"of {dtype.name} that requires gradients")
    if extent(shape) * dtype.itemsize > MAX_BYTES:
        raise BadTensor("of a shape larger than any file")
    if tensor.span[1] > limit:
        raise BadTensor(f"of shape {str(list(shape))[:80]} that reaches past its storage of {limit} bytes")
    return tensor
