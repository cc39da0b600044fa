"""The initialisers of an ONNX model: values inside its file, or in other files of its folder.

Of the protobuf only what leads to a tensor is read, by its own few rules; the graph is counted and passed
over. Names and shapes are the model's; its nodes, and constants in them, are named as not read. Source:
`onnx.proto` and docs/ExternalData.md of onnx, 1.19.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.commit import allow_open_files
from ..core.formats import safetensors
from ..core.formats.cursor import Cursor
from ..core.inert_pickle.values import OrderedDict_
from ..core.lazy import np
from ..core.remote.places import is_inside, is_plain, open_part, prepare
from ..core.system import join
from ..core.tensors import ref
from ..errors import Damaged, Unsupported

NAME = "onnx"

# Element types by number (TensorProto.DataType): torch's name, or what they are where torch has none.
_TYPES = """
    1 float32, 2 uint8, 3 int8, 4 uint16, 5 int16, 6 int32, 7 int64, 9 bool, 10 float16, 11 float64,
    12 uint32, 13 uint64, 14 complex64, 15 complex128, 16 bfloat16, 17 float8_e4m3fn, 18 float8_e4m3fnuz,
    19 float8_e5m2, 20 float8_e5m2fnuz, 24 float8_e8m0fnu
"""
TYPES = {int(number): name for number, name in map(str.split, _TYPES.split(","))}
OTHER_TYPES = {8: "text", 21: "uint4", 22: "int4", 23: "float4", 25: "uint2", 26: "int2"}

# Fields of a TensorProto that hold values: as they lie in memory, or each as a number of seven bits a byte.
RAW, AS_BYTES, AS_NUMBERS = 9, (4, 9, 10), (5, 7, 11)
# The field other than RAW that each type is in; types not listed are in the first of AS_NUMBERS.
FIELDS = {1: 4, 14: 4, 11: 10, 15: 10, 7: 7, 12: 11, 13: 11}
EXTERNAL = 1  # DataLocation

MAX_TEXT = 1 << 20  # bytes of a name or of a text that is kept
CHUNK = 1 << 16  # bytes of coded numbers that are decoded together


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes looks like a model: a version, then who made it."""
    # Core ML and TensorFlow's SavedModel begin with a version too; a message follows there, not a text.
    if len(head) < 4 or head[0] != 0x08 or not 2 <= head[1] < 0x40:
        return False
    if head[2] != 0x12:
        return head[2] in (0x3A, 0x42)  # the graph or the versions of operators come next
    end = 4 + head[3]
    return end < len(head) and head[4:end].isascii() and (head[3] == 0 or head[4:end].decode().isprintable())


def read(source: ref.Source) -> Checkpoint:
    """Read names, types and shapes of the initialisers, and open the files beside that hold values."""
    model = Cursor(ref.ByteRange(source, 0, source.size))
    tensors: dict[str, Tensor] = {}
    texts: dict[str, str] = {}
    left: list[str] = []
    graphs = 0
    for number, value in model.fields():
        if number == 7 and isinstance(value, Cursor):
            graphs += 1
            left += _read_graph(value, tensors)
        elif number == 14 and isinstance(value, Cursor):
            if value.left > MAX_TEXT:
                left.append(f"metadata of {value.left} bytes")
                continue
            key, text = _pair(value)
            texts[key] = text
        elif number in (20, 25):
            left.append("training information" if number == 20 else "a function")
    if graphs != 1:
        raise Damaged(source.path, f"has {graphs} graphs, where an ONNX model has one")
    files = _open_beside(source, [*tensors.values()])
    state = OrderedDict_()
    for name, tensor in tensors.items():
        if tensor.kind in OTHER_TYPES:
            left.append(f"'{name[:80]}' ({OTHER_TYPES[tensor.kind]})")
        else:
            state[name] = _tensor(tensor, files)
    texts, ties = safetensors.without_ties(texts, state)
    unread = tuple(dict.fromkeys([*left, *ties]))
    return Checkpoint(source, NAME, state, metadata=texts, shards=tuple(files.values()), unread=unread)


@dataclass(slots=True)
class Tensor:
    """A TensorProto as it was read."""

    source: ref.Source
    name: str = ""
    shape: list[int] = field(default_factory=list)
    kind: int = 0
    values: dict[int, ref.ByteRange] = field(default_factory=dict)  # by the field that they are in
    elsewhere: dict[str, str] = field(default_factory=dict)  # location, offset, length
    is_elsewhere: bool = False

    @property
    def called(self) -> str:
        return f"initialiser '{self.name[:80]}'"

    def damaged(self, what: str) -> Damaged:
        return Damaged(self.source.path, f"{self.called} {what}")


# The messages.


def _read_graph(graph: Cursor, tensors: dict[str, Tensor]) -> Iterator[str]:
    """Read the initialisers; yield in words what else there is."""
    nodes = 0
    for number, value in graph.fields():
        if number == 1:
            nodes += 1
        elif number == 5 and isinstance(value, Cursor):
            tensor = _read_tensor(value)
            if tensor.name in tensors:
                raise tensor.damaged("is there twice")
            tensors[tensor.name] = tensor
        elif number == 15:
            yield "a sparse initialiser"
    if nodes:
        yield f"the graph (nodes: {nodes})"


def _read_tensor(message: Cursor) -> Tensor:
    tensor = Tensor(message.source)
    for number, value in message.fields():
        if isinstance(value, int):
            if number == 1:
                tensor.shape.append(value)
            elif number == 2:
                tensor.kind = value
            elif number == 14:
                tensor.is_elsewhere = value == EXTERNAL
        elif number == 1:
            while value.left and len(tensor.shape) <= ref.MAX_AXES:
                tensor.shape.append(value.varint())
        elif number == 8:
            tensor.name = _text(value)
        elif number == 13:
            key, text = _pair(value)
            tensor.elsewhere[key] = text
        elif number == 3:
            raise Unsupported(message.source.path, "has a tensor in segments, which nothing writes")
        elif number in AS_BYTES or number in AS_NUMBERS:
            if number in tensor.values:
                raise Unsupported(message.source.path, "has the values of a tensor in several pieces")
            tensor.values[number] = value.place(value.left)
        if len(tensor.shape) > ref.MAX_AXES:
            raise Unsupported(message.source.path, f"has a tensor of more than {ref.MAX_AXES} axes")
    _check(tensor)
    return tensor


def _check(tensor: Tensor) -> None:
    if not tensor.name:
        raise Damaged(tensor.source.path, "has an initialiser without a name")
    if tensor.kind not in TYPES and tensor.kind not in OTHER_TYPES:
        raise Unsupported(tensor.source.path, f"{tensor.called} has the type {tensor.kind}, unknown here")
    if ref.extent(tensor.shape) * 16 > ref.MAX_BYTES:  # a negative size is one of more than 2^63
        raise tensor.damaged("has a shape larger than any file")
    if not {*tensor.values} <= {RAW, FIELDS.get(tensor.kind, AS_NUMBERS[0])} and tensor.kind in TYPES:
        raise tensor.damaged("has values of another type than its own")
    if len(tensor.values) + tensor.is_elsewhere > 1:
        raise tensor.damaged("has its values in two places")


def _text(message: Cursor) -> str:
    if message.left > MAX_TEXT:
        raise Damaged(message.source.path, f"has a name of {message.left} bytes")
    return message.text(message.left, "has a name that is")


def _pair(message: Cursor) -> tuple[str, str]:
    """Return key and value of a StringStringEntryProto."""
    texts = {number: _text(value) for number, value in message.fields() if isinstance(value, Cursor)}
    return texts.get(1, ""), texts.get(2, "")


# Values.


def _open_beside(source: ref.Source, tensors: list[Tensor]) -> dict[str, ref.Source]:
    """Open the files that hold values, each in the folder of the model; by the name that it has there."""
    names = dict.fromkeys(tensor.elsewhere.get("location", "") for tensor in tensors if tensor.is_elsewhere)
    if names and source.path == "-":
        raise Unsupported("-", "is an ONNX model whose values are in other files, which are not in it")
    folder = os.path.dirname(source.path)
    for name in names:
        if not is_plain(folder, name.removeprefix("./")) or not is_inside(folder, name):
            raise Damaged(source.path, f"names a file outside its folder: {name[:80]!r}")
    paths = {name: join(folder, name.removeprefix("./")) for name in names}
    allow_open_files(len(paths), source.path)
    prepare([*paths.values()])
    hint = "get that file too, into the same folder"
    return {
        name: open_part(source.path, f"its values in '{name[:80]}'", path, hint)
        for name, path in paths.items()
    }


def _tensor(tensor: Tensor, files: dict[str, ref.Source]) -> ref.TensorRef:
    dtype, shape = ref.DTYPES[TYPES[tensor.kind]], tuple(tensor.shape)
    data = _data(tensor, dtype, 0 if 0 in shape else math.prod(shape), files)
    origins = (ref.Storage(data.origin, "UntypedStorage"),) if isinstance(data, _Coded) else ()
    stored = data.computed() if isinstance(data, _Coded) else data
    return ref.TensorRef.of_bytes(stored, dtype, shape, *origins)


def _data(
    tensor: Tensor, dtype: ref.DType, numel: int, files: dict[str, ref.Source]
) -> ref.ByteRange | _Coded:
    nbytes = numel * dtype.itemsize
    if tensor.is_elsewhere:
        return _elsewhere(tensor, files[tensor.elsewhere.get("location", "")], nbytes)
    for number, place in tensor.values.items():
        if number in AS_NUMBERS:
            coded = _Coded(place, numel, dtype.itemsize, tensor.called)
            coded.check()
            return coded
        if place.nbytes != nbytes:
            raise tensor.damaged(f"should have {nbytes} bytes by its shape, has {place.nbytes}")
        return place
    if nbytes:
        raise tensor.damaged("has no values")
    return ref.ByteRange(tensor.source, 0, 0)


def _elsewhere(tensor: Tensor, file: ref.Source, nbytes: int) -> ref.ByteRange:
    given = {"offset": "0", "length": str(nbytes)} | tensor.elsewhere
    numbers = [given["offset"], given["length"]]
    if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in numbers):
        raise tensor.damaged("has a malformed place in another file")
    offset, length = map(int, numbers)
    if length != nbytes:
        raise tensor.damaged(f"should have {nbytes} bytes by its shape, has {length}")
    if offset + nbytes > file.size:
        raise tensor.damaged(f"reaches past the end of {os.path.basename(file.path)}, at {file.size} bytes")
    return ref.ByteRange(file, offset, nbytes)


@dataclass(frozen=True, slots=True)
class _Coded:
    """Numbers of seven bits a byte, as bytes of an element type."""

    origin: ref.ByteRange
    numel: int
    itemsize: int
    called: str

    def computed(self) -> ref.Computed:
        return ref.Computed(self.origin.path, self.numel * self.itemsize, self.make)

    def check(self) -> None:
        """Count the numbers, which are as many as bytes that end one."""
        chunks = self.origin.chunks(memoryview(bytearray(CHUNK)))
        found = sum(int(np.count_nonzero(np.frombuffer(chunk, np.uint8) < 0x80)) for chunk in chunks)
        if found != self.numel:
            what = f"{self.called} should have {self.numel} values by its shape, has {found}"
            raise Damaged(self.origin.path, what)

    def make(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a stretch of the bytes: all numbers before it are decoded too."""
        end, at = start + nbytes, 0
        for values in self._decoded():
            low, high = max(start - at, 0), min(end - at, len(values))
            if low < high:
                yield values[low:high]
            at += len(values)
            if at >= end:
                return

    def _decoded(self) -> Iterator[memoryview]:
        rest = b""
        for chunk in self.origin.chunks(memoryview(bytearray(CHUNK))):
            raw = np.frombuffer(rest + bytes(chunk), np.uint8)
            ends = np.flatnonzero(raw < 0x80)
            starts = np.concatenate(([0], ends + 1))
            rest = raw[starts[-1] :].tobytes()
            lengths = ends - starts[:-1] + 1
            if len(rest) > 10 or lengths.max(initial=0) > 10:
                raise Damaged(self.origin.path, f"{self.called} has a number without an end")
            values = np.zeros(len(ends), np.uint64)
            for step in range(lengths.max(initial=0)):
                long = lengths > step
                part = (raw[starts[:-1][long] + step] & 0x7F).astype(np.uint64)
                values[long] |= part << np.uint64(7 * step)
            yield memoryview(values.astype(f"<u{self.itemsize}").tobytes())
        if rest:
            raise Damaged(self.origin.path, f"{self.called} has a number without an end")
