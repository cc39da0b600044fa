"""The true values of a tensor as bytes: row-major, little-endian, lazy bits resolved, without torch.

Most tensors are one byte range and are copied as they are (`TensorRef.is_plain`). The others are transposed
or expanded views, channels-last layouts, conjugate or negative views, big-endian, or saved in parts.
"""

from __future__ import annotations

import itertools
import math
import mmap
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add, lt, sub
from typing import TYPE_CHECKING, Any, Literal

from ...errors import Damaged, RanksDiffer, Refused, Unsupported
from .. import system
from ..lazy import NDArray, np
from .ref import DTYPES, MAX_BYTES, BadTensor, ByteRange, Computed, DType, Stretch, TensorRef, extent

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]
Index = Sizes

CHUNK = 1 << 20  # bytes of a piece of values

# Bytes by which a tensor may outgrow its storage when it is written: stride 0 repeats elements for free.
MAX_EXPANSION = 1 << 30
# The same where it is only read: more may never finish.
MAX_REPEATED = 1 << 36

FLIP_SIGN = bytes(i ^ 0x80 for i in range(256))


def require_bounded(
    name: str, tensor: TensorRef, most: int = MAX_EXPANSION, *, hint: str | None = None
) -> None:
    """Raise Refused for a view whose values outgrow its storage by more than `most` bytes."""
    if tensor.nbytes > tensor.storage.nbytes + most:
        reason = f"'{name}' is a view that expands {tensor.storage.nbytes} bytes to {tensor.nbytes}"
        raise Refused(tensor.storage.data.path, reason, hint=hint)


def without_repeats(tensor: TensorRef) -> tuple[TensorRef, int]:
    """Return the tensor without the repeats of strides of 0, and how often each of its elements was there."""
    if 0 not in tensor.stride:
        return tensor, 1
    shape = tuple(n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride, strict=True))
    once = replace(tensor, shape=shape)
    return once, tensor.numel // once.numel if once.numel else 1


def stream(tensor: TensorRef, *, buffer: memoryview | None = None) -> Iterator[memoryview]:
    """Yield the values in chunks, each valid until the next, however often elements are repeated."""
    where = tensor.storage.data
    if tensor.is_contiguous:
        buffer = memoryview(bytearray(min(CHUNK, tensor.nbytes))) if buffer is None else buffer
        pieces: Iterator[memoryview] = tensor.data.chunks(buffer)
    elif isinstance(where, Computed) and where.view is not None:
        yield from where.view(tensor)
        return
    else:
        pieces = gathered(tensor, CHUNK)
    yield from map(partial(_resolve, tensor), pieces)


def in_pieces(tensor: TensorRef, nbytes: int) -> Iterator[bytes | bytearray]:
    """Yield the values in pieces of one size, so that tensors of several files can be read in step."""
    if tensor.is_plain:
        for start in range(0, tensor.nbytes, nbytes):
            yield tensor.data.part(start, min(nbytes, tensor.nbytes - start)).read()
        return
    pending = bytearray()
    for chunk in stream(tensor):
        pending += chunk
        end = len(pending) - len(pending) % nbytes
        for begin in range(0, end, nbytes):
            yield pending[begin : begin + nbytes]
        del pending[:end]
    if pending:
        yield pending


def same_values(one: TensorRef, other: TensorRef) -> bool:
    """Return whether two tensors have the same type, shape and bytes. Reads them, unless they are tied."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(in_pieces(one, CHUNK), in_pieces(other, CHUNK), strict=True)
    return one.view == other.view or all(a == b for a, b in pairs)


def read_into(out: memoryview, tensor: TensorRef) -> None:
    """Fill a buffer with the values of a tensor."""
    done = 0
    for piece in stream(tensor, buffer=out):
        if not tensor.is_plain:
            out[done : done + len(piece)] = piece
        done += len(piece)


def stretches(tensor: TensorRef, first: int, count: int) -> Iterator[TensorRef]:
    """Yield views of `count` elements from number `first`, in row-major order, of whole rows if possible."""
    for begin, size in boxes_of(tensor.shape, first, count) if count else ():
        yield boxed(tensor, begin, size)


def in_row_major(tensor: TensorRef) -> TensorRef:
    """Return a tensor of the same values in row-major order, little-endian, put there when they are read."""
    width = tensor.dtype.itemsize

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        for part in stretches(tensor, start // width, nbytes // width):
            yield from stream(part)

    return made_from(tensor, make)


def made_from(tensor: TensorRef, make: Callable[[int, int], Iterator[memoryview]]) -> TensorRef:
    """Return a tensor of this type and shape in row-major order, any stretch of which can be made."""
    dtype, old = tensor.dtype, tensor.storage
    data = Computed(old.data.path, tensor.nbytes, make, is_divisible=True)
    return TensorRef.of_bytes(data, dtype, tensor.shape, old, location=old.location)


def boxed(tensor: TensorRef, begin: Iterable[int], shape: Sizes) -> TensorRef:
    """Return the view of a box within a tensor."""
    steps = sum(i * step for i, step in zip(begin, tensor.stride, strict=True))
    return replace(tensor, shape=shape, offset=tensor.offset + steps)


def boxes_of(shape: Sizes, first: int, count: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cut a row-major stretch of an array into boxes: where each begins, and its shape."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    i, skipped = divmod(first, row)
    if skipped:
        head = min(row - skipped, count)
        yield from (((i, *begin), (1, *size)) for begin, size in boxes_of(shape[1:], skipped, head))
        i, count = i + 1, count - head
    rows, left = divmod(count, row)
    if rows:
        yield (i, *(0 for _ in shape[1:])), (rows, *shape[1:])
    if left:
        yield from (((i + rows, *begin), (1, *size)) for begin, size in boxes_of(shape[1:], 0, left))


def _resolve(tensor: TensorRef, piece: memoryview) -> memoryview:
    """Apply the byte order first, then the signs of the lazy conjugate and negative."""
    part = tensor.dtype.part
    if not (tensor.is_swapped or tensor.neg or tensor.conj):
        return piece
    data = bytearray(piece)
    if tensor.is_swapped:
        swap(data, part)
    for is_set, step in ((tensor.neg, part), (tensor.conj, 2 * part)):
        if is_set:
            data[step - 1 :: step] = data[step - 1 :: step].translate(FLIP_SIGN)
    return memoryview(data)


def swap(data: bytearray, part: int) -> None:
    """Reverse the bytes of each element part of `part` bytes, in place."""
    for i in range(part // 2):
        data[i::part], data[part - 1 - i :: part] = data[part - 1 - i :: part], data[i::part]


# ---- Strided views
#
# A row of a transposed matrix is scattered over the whole file, and every mapped page counts as memory. So a
# block of the result is gathered tile by tile, and each tile needs one window of the file.

WINDOW = 4  # chunks of the file that are mapped together
BLOCK = 6  # chunks of the result: each block of a transposed matrix passes over all of the file

FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def gathered(tensor: TensorRef, chunk: int) -> Iterator[memoryview]:
    """Yield the row-major values of a strided view as they are stored."""
    width, shape, stride = tensor.dtype.itemsize, tensor.shape, tensor.stride
    offset = tensor.offset
    if width == 16:  # numpy has no integers of 16 bytes: such elements go as pairs of 8
        width, shape, stride, offset = 8, (*shape, 2), (*(2 * s for s in stride), 1), 2 * offset
    shape, stride = _coalesced(shape, stride)
    most = BLOCK * chunk // width
    buffer = np.empty(min(most, math.prod(shape)), f"u{width}")
    for start, size in blocks(shape, stride, most):
        elements = buffer[: math.prod(size)]
        steps = stride[len(stride) - len(size) :]
        _fill(elements.reshape(size), tensor, offset + start, steps, WINDOW * chunk // width)
        raw = memoryview(elements.view("u1"))  # type: ignore[arg-type]
        for begin in range(0, len(raw), chunk):
            yield raw[begin : begin + chunk]


def _coalesced(shape: Sizes, stride: Sizes) -> tuple[Sizes, Sizes]:
    """Return a shape and stride of the same elements in the same order, axes that lie together as one."""
    sizes, steps = [shape[0]], [stride[0]]
    for size, step in zip(shape[1:], stride[1:], strict=True):
        if steps[-1] == size * step or sizes[-1] == 1:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        elif size != 1:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps)


def blocks(shape: Sequence[int], stride: Sequence[int], most: int) -> Iterator[tuple[int, Sizes]]:
    """Cut an array into row-major blocks."""
    cut = len(shape) - 1  # the dimension that is cut into runs of rows; those after it stay whole
    while cut > 0 and math.prod(shape[cut:]) <= most:
        cut -= 1
    rows = max(1, most // math.prod(shape[cut + 1 :]))
    for index in itertools.product(*map(range, shape[:cut])):
        base = sum(i * s for i, s in zip(index, stride, strict=False))
        for row in range(0, shape[cut], rows):
            yield base + row * stride[cut], (min(rows, shape[cut] - row), *shape[cut + 1 :])


def _fill(block: NDArray[Any], tensor: TensorRef, start: int, stride: Sizes, most: int) -> None:
    """Fill a block of the result with the elements from number `start` on, `most` of the file at a time."""
    width = block.itemsize
    reach = [(n - 1) * s for n, s in zip(block.shape, stride, strict=True)]
    if sum(reach) < most:
        raw = _window(tensor, start * width, (start + sum(reach) + 1) * width)
        steps = [step * width for step in stride]
        block[...] = np.lib.stride_tricks.as_strided(np.frombuffer(raw, block.dtype), block.shape, steps)
        return
    axis = max(range(len(reach)), key=reach.__getitem__)
    rows = max(1, (most - sum(reach) + reach[axis]) // stride[axis])
    turned = block.swapaxes(0, axis)
    for row in range(0, len(turned), rows):
        _fill(turned[row : row + rows].swapaxes(0, axis), tensor, start + row * stride[axis], stride, most)


def _window(tensor: TensorRef, begin: int, end: int) -> memoryview:
    """Return the bytes of a tensor's storage from `begin` to `end`: mapped from the file, or computed."""
    where, size = tensor.storage.data, tensor.dtype.itemsize
    if isinstance(where, Computed):  # only whole elements can be made
        first = begin - begin % size
        elements = memoryview(where.part(first, end + -end % size - first).read())
        return elements[begin - first :][: end - begin]
    if not (where.source.is_local and system.REPLACES_MAPPED):
        return memoryview(where.part(begin, end - begin).read())
    skip = (where.offset + begin) % mmap.ALLOCATIONGRANULARITY
    length, offset = skip + end - begin, where.offset + begin - skip
    try:
        mapped = mmap.mmap(where.source.fd, length, access=mmap.ACCESS_READ, offset=offset)
    except ValueError:
        raise Damaged(where.path, "the file became shorter while it was read") from None
    return memoryview(mapped)[skip:]  # the mapping ends with its last user


# ---- A tensor joined from the parts that ranks saved, when its values are read
#
# A part is a box within the whole. Several ranks may hold the same part: reading compares the copies.


MAX_CUTS = 8  # dimensions along which a tensor may be cut; device meshes have three or four

NOTHING = memoryview(b"")

# Memory of each thread, used again and again: new pages cost as much as what is read into them.
_spare = threading.local()


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box within a tensor."""

    begin: Sizes
    tensor: TensorRef  # its shape is the size of the box
    copies: tuple[TensorRef, ...] = ()  # the same values as other ranks saved them
    ranks: tuple[int, ...] = ()  # that saved the tensor and its copies; empty where there are none


def assembled(name: str, path: str, dtype: DType, shape: Sizes, parts: Sequence[TensorPart]) -> TensorRef:
    """Return a tensor made of parts, unread; raise BadTensor unless they are the whole of it, each once.

    Reading its values raises RanksDiffer where a copy differs in any bit.
    """
    parts = sorted((part for part in parts if part.tensor.numel), key=lambda part: part.begin)
    if extent(shape) * dtype.itemsize > MAX_BYTES or not _tile(shape, parts):
        raise BadTensor(f"'{name}' of shape {str(list(shape))[:80]} whose chunks are not the whole of it")
    joined = _Whole(path, name, dtype.itemsize, shape, parts)
    origins = tuple(tensor.storage for part in parts for tensor in (part.tensor, *part.copies))
    data = Computed.filling(path, math.prod(shape) * dtype.itemsize, joined.fill, joined.stretches)
    return TensorRef.of_bytes(data, dtype, shape, *origins)


def _tile(shape: Sizes, parts: Sequence[TensorPart]) -> bool:
    """Return whether boxes fill a box without gap or overlap."""
    boxes = [(part.begin, part.tensor.shape) for part in parts]
    if any(len(begin) != len(shape) for begin, _ in boxes):
        return False
    if any(b + s > n for begin, size in boxes for b, s, n in zip(begin, size, shape, strict=True)):
        return False
    cut = [d for d, n in enumerate(shape) if any(size[d] != n for _, size in boxes)]
    if len(cut) > MAX_CUTS or not math.prod(shape):
        return not boxes and not math.prod(shape)
    corners: Counter[Sizes] = Counter()
    for begin, size in boxes:
        _add_corners(corners, [(begin[d], begin[d] + size[d]) for d in cut], 1)
    _add_corners(corners, [(0, shape[d]) for d in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[Sizes], sides: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        corners[corner] += sign * (-1) ** sum(ends)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Make the bytes of the whole; the parts are sorted by where they begin."""

    path: str
    name: str
    width: int
    shape: Sizes
    parts: Sequence[TensorPart]

    def stretches(self) -> list[Stretch]:
        """Return where the parts lie, if their values follow one another in the whole; else []."""
        found, end = list[Stretch](), 0
        for part in self.parts:
            at = 0
            for i, n in zip(part.begin, self.shape, strict=True):
                at = at * n + i
            # Boxes without gap or overlap are in a row exactly if each begins where those before it end.
            if at != end or part.copies or not part.tensor.is_plain:
                return []
            end += part.tensor.numel
            data = part.tensor.data
            assert isinstance(data, ByteRange)
            found.append((data.nbytes, data))
        return found

    def fill(self, start: int, out: memoryview) -> None:
        """Fill a buffer with the bytes from `start`."""
        for begin, size in boxes_of(self.shape, start // self.width, len(out) // self.width):
            nbytes = math.prod(size) * self.width
            self._fill_box(out[:nbytes], begin, size)
            out = out[nbytes:]

    def _fill_box(self, out: memoryview, low: Sizes, size: Sizes) -> None:
        high = tuple(map(add, low, size))
        last = len(self.parts) if not low else bisect_right(self.parts, high, key=lambda part: part.begin)
        for part in self.parts[:last]:
            if low and part.begin[0] + part.tensor.shape[0] <= low[0]:
                continue
            begin = tuple(map(max, low, part.begin))
            end = tuple(map(min, high, map(add, part.begin, part.tensor.shape)))
            if all(map(lt, begin, end)):
                self._put(out, size, tuple(map(sub, begin, low)), part, begin, tuple(map(sub, end, begin)))

    def _put(
        self, out: memoryview, size: Sizes, at: Sizes, part: TensorPart, begin: Sizes, shape: Sizes
    ) -> None:
        """Put the box of a part that begins at `begin` of the whole to `at` of a box of size `size`."""
        together = len(size)  # from this dimension on the part is as wide as the box
        while together and shape[together - 1] == size[together - 1]:
            together -= 1
        in_one_run = math.prod(shape[: max(together - 1, 0)]) == 1
        nbytes = math.prod(shape) * self.width
        if in_one_run:
            step, first = self.width, 0
            for n, i in zip(reversed(size), reversed(at), strict=True):
                first += i * step
                step *= n
            target = out[first : first + nbytes]
        else:
            # Taken away meanwhile, as a part may itself be made of parts.
            spare, _spare.memory = getattr(_spare, "memory", NOTHING), NOTHING
            if len(spare) < nbytes:
                spare = memoryview(mmap.mmap(-1, nbytes))
            target = spare[:nbytes]
        within = tuple(map(sub, begin, part.begin))
        read_into(target, boxed(part.tensor, within, shape))
        if part.copies:
            self._compare(target, part, within, shape)
        if not in_one_run:
            box = tuple(slice(i, i + n) for i, n in zip(at, shape, strict=True))
            elements = np.frombuffer(out, np.uint8).reshape(*size, self.width)
            elements[box] = np.frombuffer(target, np.uint8).reshape(*shape, self.width)
            _spare.memory = spare

    def _compare(self, values: memoryview, part: TensorPart, begin: Sizes, shape: Sizes) -> None:
        other = bytearray(len(values))
        for rank, copy in zip(part.ranks[1:], part.copies, strict=True):
            read_into(memoryview(other), boxed(copy, begin, shape))
            if other != values:
                first = part.ranks[0]
                what = f"'{self.name[:80]}' differs between rank {first} and rank {rank}"
                hint = f"take one rank's values: ckpttool.open_ranks(path, take_rank={first})"
                what += ", which should hold the same values"
                raise RanksDiffer(what, path=self.path, ranks=(first, rank), hint=hint)


# ---- torch tensors that view files; torch is imported where it is needed


def live_tensors(tensors: Mapping[str, TensorRef], *, mapped: bool = True) -> dict[str, torch.Tensor]:
    """Return torch tensors that view the file through a private mapping; bytes are read on first use.

    If the file becomes shorter, SIGBUS kills a process that uses the mapping. Not `mapped`, the bytes are
    read at once, and so are values that must be computed or lie at an odd place. Tensors that share a storage
    in the file share memory here. Raises Unsupported, Refused and Damaged as `loaded_tensor` does.
    """
    import torch

    maps: dict[int, mmap.mmap] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        dtype = torch_dtype(name, tensor)
        data = tensor.storage.data
        if not tensor.numel:
            made[name] = torch.empty(tensor.shape, dtype=dtype)
        elif not isinstance(data, ByteRange) or has_to_be_made(tensor) or data.offset % tensor.dtype.part:
            made[name] = loaded_tensor(name, tensor)
        else:
            key = id(tensor.storage)
            if key not in storages:
                can_be = mapped and data.source.is_local and system.REPLACES_MAPPED
                storages[key] = _mapped(data, maps) if can_be else _read(data)
            empty = torch.empty(0, dtype=dtype)
            made[name] = empty.set_(storages[key], tensor.offset, tensor.shape, tensor.stride)
    return made


def loaded_tensor(name: str, tensor: TensorRef) -> torch.Tensor:
    """Return a torch tensor read into new memory, with the same strides where it can be.

    Raises Unsupported for a type that this torch lacks, Refused for a view that repeats its storage by more
    than 1 GiB, Damaged for a file that ends early.
    """
    import torch

    dtype = torch_dtype(name, tensor)
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=dtype)
    if has_to_be_made(tensor):
        require_bounded(name, tensor)
        raw, at = bytearray(tensor.nbytes), 0
        for chunk in stream(tensor):  # of bounded size, as each is made in memory of its own
            raw[at : at + len(chunk)] = chunk
            at += len(chunk)
        return torch.frombuffer(raw, dtype=dtype).reshape(tensor.shape)
    data = tensor.storage.data
    assert isinstance(data, ByteRange)
    begin, end = tensor.span
    storage = _read(data.part(begin, end - begin))
    return torch.empty(0, dtype=dtype).set_(storage, 0, tensor.shape, tensor.stride)


def has_to_be_made(tensor: TensorRef) -> bool:
    """Return whether a tensor's values must be computed; once made, they have no gaps."""
    return tensor.conj or tensor.neg or tensor.is_swapped or isinstance(tensor.storage.data, Computed)


def torch_dtype(name: str, tensor: TensorRef) -> torch.dtype:
    """Return torch's element type of a tensor."""
    import torch

    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or tensor.dtype.name not in DTYPES:
        reason = f"this torch has no type {tensor.dtype.name}, which '{name}' has"
        raise Unsupported(tensor.storage.data.path, reason)
    return dtype


def _mapped(data: ByteRange, maps: dict[int, mmap.mmap]) -> torch.UntypedStorage:
    """Return a storage over a mapping of its file; writing to it changes memory, never the file."""
    import torch

    if id(data.source) not in maps:
        maps[id(data.source)] = mmap.mmap(data.source.fd, 0, access=mmap.ACCESS_COPY)
    mapping = maps[id(data.source)]
    data_bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=data.nbytes, offset=data.offset)
    return data_bytes.untyped_storage()


def _read(data: ByteRange) -> torch.UntypedStorage:
    import torch

    raw = bytearray(data.nbytes)
    data.source.fill(data.offset, memoryview(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
