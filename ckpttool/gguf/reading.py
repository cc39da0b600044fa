"""The element types of GGUF, and the values of the packed ones, by the tables of the package `gguf`."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.commit import allow_open_files
from ..core.formats import safetensors
from ..core.formats.cursor import Cursor
from ..core.inert_pickle.values import OrderedDict_
from ..core.lazy import np
from ..core.remote.places import open_part, prepare
from ..core.system import join
from ..core.tensors.ref import DTYPES, MAX_BYTES, ByteRange, Computed, Source, Storage, TensorRef, extent
from ..errors import Damaged, Unsupported, UsageFault, install

# The element types that torch has too, by their number.
PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64"}
PLAIN[30] = "bfloat16"

# The packed ones: their name, elements of a block, and its bytes. Source: `GGML_QUANT_SIZES` of gguf-py.
_PACKED = """
    2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 9 Q8_1 32 40, 10 Q2_K 256 84,
    11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 15 Q8_K 256 292, 16 IQ2_XXS 256 66,
    17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82,
    23 IQ4_XS 256 136, 29 IQ1_M 256 56, 34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36,
    41 Q1_0 128 18
"""
PACKED = {int(row[0]): (row[1], int(row[2]), int(row[3])) for row in map(str.split, _PACKED.split(","))}
PACKED_NAMES = {name for name, _, _ in PACKED.values()}

PIECE = 1 << 17  # elements that are unpacked together, whole blocks; fewer and more are slower


def fill(data: ByteRange, name: str, kind: int, byteorder: str, start: int, out: memoryview) -> None:
    """Put values of a packed tensor into memory, float32, from byte `start` of them on."""
    _, elements, nbytes = PACKED[kind]
    unpack, values = _unpacker(data.path, name, kind, byteorder), np.frombuffer(out, "<f4")
    first, done = start // 4, 0
    while done < len(values):
        block, skipped = divmod(first + done, elements)
        count = min(len(values) - done, PIECE - skipped)
        blocks = -(-(skipped + count) // elements)
        raw = np.frombuffer(data.part(block * nbytes, blocks * nbytes).read(), np.uint8)
        with np.errstate(all="ignore"):  # scales may be infinite or NaN
            values[done : done + count] = unpack(raw.reshape(1, -1)).reshape(-1)[skipped : skipped + count]
        done += count


def require(path: str, name: str, kind: int, byteorder: str) -> None:
    """Raise what unpacking a tensor would, for want of the package or a formula: a block of zeros tells."""
    _unpacker(path, name, kind, byteorder)(np.zeros((1, PACKED[kind][2]), np.uint8))


def _unpacker(path: str, name: str, kind: int, byteorder: str) -> Any:
    """Return what makes an array of float32 of rows of blocks."""
    type_name = PACKED[kind][0]
    if byteorder == "big":
        what = f"tensor '{name[:80]}' is {type_name}, which is read in little-endian files alone"
        raise Unsupported(path, what, hint="turn it around first: gguf-convert-endian FILE little")
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        what = f"{path}: the values of '{name[:80]}' are packed as {type_name}, and need the package gguf"
        raise UsageFault(what, hint=install("gguf")) from None

    def unpack(raw: Any) -> Any:
        try:
            return dequantize(raw, GGMLQuantizationType[type_name])
        except (NotImplementedError, KeyError):
            raise Unsupported(
                path, f"tensor '{name[:80]}' is {type_name}, which gguf does not unpack"
            ) from None

    return unpack


# ---- GGUF, the files of llama.cpp: typed key-values, names and shapes of tensors, then their values.
#
# Plain types are byte ranges. Values of packed types are made when asked for, some blocks at a time, by
# the package `gguf` (extra `gguf`): no name, shape or key needs it. Of a model in several files any is
# opened, and all are read. Source: docs/gguf.md of ggml, and what its reader (gguf.cpp) refuses.


NAME = "gguf"
MAGIC = b"GGUF"

# Types of key-values by their number, as `struct` has them; 7, 8 and 9 are a bool, a text and an array.
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True))
BOOL, TEXT, ARRAY = 7, 8, 9

LEAST_INFO, LEAST_PAIR = 24, 13  # bytes that a tensor and a key-value take at least
MAX_FILES = 1000  # of a model
MAX_AXES = 4  # GGML_MAX_DIMS
MAX_NESTED = 4  # arrays in arrays; the format allows any number, and nothing writes one
MAX_ITEMS = 64  # of an array that is kept as text
MAX_NAME, MAX_TEXT = (1 << 16) - 1, 1 << 20  # bytes of a key, which the format says; of a text that is kept

ARCHITECTURE = "general.architecture"  # the key that is in every file of a model

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is of this format."""
    return head.startswith(MAGIC)


def read(source: Source) -> Checkpoint:
    """Read key-values, names and shapes, also those of the other files of the same model."""
    file = _read_file(source)
    files = {1: file} if file.total < 2 else _all_parts(source, file)
    state, kinds = OrderedDict_(), Counter[str]()
    for number in sorted(files):
        for name, tensor in files[number].tensors.items():
            if name in state:
                raise Damaged(source.path, f"tensor '{name[:80]}' is in two of its files")
            state[name] = tensor
        kinds.update(files[number].kinds)
    first = files[1]
    texts, ties = safetensors.without_ties(first.texts, state)
    return Checkpoint(
        source,
        NAME,
        state,
        metadata=texts,
        shards=tuple(each.source for each in files.values() if each is not file),
        unread=(*first.left, *ties),
        packed=dict(kinds.most_common()) if kinds.keys() & PACKED_NAMES else {},
    )


class File(NamedTuple):
    """One file: its key-values as texts and, in words, those that are none; its tensors and their types."""

    source: Source
    texts: Mapping[str, str]
    left: tuple[str, ...]
    tensors: Mapping[str, TensorRef]
    kinds: Mapping[str, int]  # types, and how many tensors have each
    number: int  # of the files of the model, from 1
    total: int  # files of the model


def _all_parts(source: Source, file: File) -> dict[int, File]:
    """Return all files of a model by number."""
    folder, own = os.path.split(source.path)
    match = PART.fullmatch(own)
    if not match or (int(match["number"]), int(match["count"])) != (file.number, file.total):
        what = f"is file {file.number} of the {file.total} of a model, and does not have the name of one"
        hint = f"call it NAME-{file.number:05d}-of-{file.total:05d}.gguf, next to the others"
        raise Unsupported(source.path, what, hint=hint)
    names = {n: f"{match['stem']}-{n:05d}-of-{file.total:05d}.gguf" for n in range(1, file.total + 1)}
    paths = {n: join(folder, name) for n, name in names.items() if n != file.number}
    allow_open_files(len(paths), source.path)
    prepare([*paths.values()])
    files = {file.number: file}
    for number, path in paths.items():
        what = f"its file '{names[number]}'"
        part = _read_file(open_part(source.path, what, path, "get that file again"))
        if (part.number, part.total) != (number, file.total):
            raise Damaged(source.path, f"{what} says that it is another one's part")
        files[number] = part
    return files


def _read_file(source: Source) -> File:
    cursor = _begun(source)
    counted, pairs = cursor.number("Q"), cursor.number("Q")
    if counted * LEAST_INFO + pairs * LEAST_PAIR > cursor.left:
        what = f"claims {counted} tensors and {pairs} key-values, more than its {source.size} bytes can hold"
        raise Damaged(source.path, what)
    values: dict[str, Value] = {}
    for _ in range(pairs):
        key = _text(cursor, "a key")
        if key in values:
            raise Damaged(source.path, f"has the key '{key[:80]}' twice")
        values[key] = _value(cursor, key, cursor.number("I"))
    infos: dict[str, Info] = {}
    for _ in range(counted):
        name = _text(cursor, "a tensor's name")
        if name in infos:
            raise Damaged(source.path, f"has the tensor '{name[:80]}' twice")
        infos[name] = _info(cursor, name)
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise Damaged(source.path, f"has an alignment that is no power of two: {str(alignment)[:40]}")
    tensors = _tensors(cursor, infos, alignment)
    kinds = Counter(info.type_name for info in infos.values())
    texts = {key: text for key, value in values.items() if (text := _as_text(value)) is not None}
    left = tuple(f"metadata '{key[:80]}' ({value})" for key, value in values.items() if key not in texts)
    number, count = (values.get(f"split.{name}", default) for name, default in (("no", 0), ("count", 1)))
    if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < max(count, 1) <= MAX_FILES):
        raise Damaged(source.path, f"says that it is file {number} of {count} of a model")
    return File(source, texts, left, tensors, kinds, number + 1, count)


def _begun(source: Source) -> Cursor:
    """Return a cursor behind magic and version, which tells the order of bytes."""
    cursor = Cursor(ByteRange(source, 0, source.size))
    cursor.take(4)
    version = cursor.number("I")
    if version and not version & 0xFFFF:
        cursor.order, version = ">", version >> 24
    if version == 1:
        hint = "write it again with the tools of llama.cpp that made it"
        raise Unsupported(source.path, "is a GGUF of version 1, of August 2023", hint=hint)
    if version not in (2, 3):
        raise Unsupported(source.path, f"is a GGUF of version {version}, and 2 and 3 are read")
    return cursor


# Key-values.


class InWords(str):
    """What stands for a value that has no text here: what it is, in words."""


Value = int | float | str | list[Any]


def _text(cursor: Cursor, what: str) -> str:
    if (nbytes := cursor.number("Q")) > MAX_NAME:
        raise Damaged(cursor.source.path, f"{what} has {nbytes} bytes, and may have {MAX_NAME}")
    return cursor.text(nbytes, f"{what} is")


def _value(cursor: Cursor, key: str, kind: int, level: int = 0) -> Value:
    """Read a value; a long array is passed over."""
    if kind in NUMBERS:
        value = cursor.number(NUMBERS[kind])
        return _shortest(value) if NUMBERS[kind] == "f" else value
    if kind == BOOL:
        if (flag := cursor.number("B")) > 1:
            raise Damaged(cursor.source.path, f"its key '{key[:80]}' has a bool that is {flag}")
        return bool(flag)
    if kind == TEXT:
        if (nbytes := cursor.number("Q")) > MAX_TEXT:
            cursor.place(nbytes)
            return InWords(f"{nbytes} bytes of text")
        raw = cursor.take(nbytes)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return InWords(f"{len(raw)} bytes that are not UTF-8")
    if kind != ARRAY:
        raise Damaged(cursor.source.path, f"its key '{key[:80]}' has a value of unknown type {kind}")
    if level == MAX_NESTED:
        raise Unsupported(
            cursor.source.path, f"its key '{key[:80]}' has arrays nested more than {level} deep"
        )
    return _array(cursor, key, level)


def _array(cursor: Cursor, key: str, level: int) -> Value:
    kind, count = cursor.number("I"), cursor.number("Q")
    if count <= MAX_ITEMS:
        items = [_value(cursor, key, kind, level + 1) for _ in range(count)]
        kept = [item for item in items if isinstance(item, InWords)]
        return kept[0] if kept else items
    if kind == TEXT:
        cursor.skip_texts(count)
        return InWords(f"{count} texts")
    if kind in NUMBERS or kind == BOOL:
        cursor.place(count * struct.calcsize("<" + NUMBERS.get(kind, "B")))
        return InWords(f"{count} numbers")
    for _ in range(count):
        _value(cursor, key, kind, level + 1)
    return InWords(f"{count} arrays")


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same float32, as people wrote it."""
    if math.isfinite(value):
        for digits in range(6, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
    return value


def _as_text(value: Value) -> str | None:
    if isinstance(value, InWords):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what the key-values of a GGUF say of its model, {} for another format.

    Keys of the architecture are without its name: `attention.head_count`. Without `output.weight` llama.cpp
    takes the embeddings, which is `tie_word_embeddings` here.
    """
    kind, state = checkpoint.metadata.get(ARCHITECTURE), checkpoint.found_state()
    if kind is None or state is None:
        return {}
    said = {key.removeprefix(f"{kind}."): _value_of(text) for key, text in checkpoint.metadata.items()}
    return said | {ARCHITECTURE: kind, "tie_word_embeddings": "output.weight" not in state.tensors}


def _value_of(text: str) -> object:
    """Return the value that a text stands for, as `_as_text` has made it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Tensors.


class Info(NamedTuple):
    """What is said of a tensor before the values."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return PACKED[self.kind][0] if self.kind in PACKED else DTYPES[PLAIN[self.kind]].safetensors or ""


def _info(cursor: Cursor, name: str) -> Info:
    path, called = cursor.source.path, f"tensor '{name[:80]}'"
    axes = cursor.number("I")
    if axes > MAX_AXES:
        raise Damaged(path, f"{called} has {axes} axes, and a GGUF has at most {MAX_AXES}")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]  # the innermost comes first
    kind, offset = cursor.number("I"), cursor.number("Q")
    if kind not in PLAIN and kind not in PACKED:
        raise Unsupported(path, f"{called} has the type {kind}, which is not known here")
    if extent(shape) * 8 > MAX_BYTES:
        raise Damaged(path, f"{called} has a shape larger than any file")
    count = math.prod(shape)
    if kind in PLAIN:
        return Info(shape, kind, offset, count * DTYPES[PLAIN[kind]].itemsize)
    type_name, elements, nbytes = PACKED[kind]
    if not shape or shape[-1] % elements:
        raise Damaged(path, f"{called} has rows that are no whole blocks of {type_name}: {[*shape]}")
    return Info(shape, kind, offset, count // elements * nbytes)


def _tensors(cursor: Cursor, infos: Mapping[str, Info], alignment: int) -> dict[str, TensorRef]:
    """Place the tensors: one behind the other, as ggml demands, each padded to the alignment."""
    source, tensors = cursor.source, dict[str, TensorRef]()
    start = cursor.position + -cursor.position % alignment
    end, order = 0, "big" if cursor.order == ">" else "little"
    asked: dict[int, Callable[[], None]] = {}  # once for each type, under the name of its first tensor
    for name, info in infos.items():
        if info.offset != end:
            what = f"tensor '{name[:80]}' lies at byte {info.offset} of the values, and should at {end}"
            raise Damaged(source.path, what)
        if start + end + info.nbytes > source.size:
            missing = start + end + info.nbytes - source.size
            raise Damaged(source.path, f"is cut short: {missing} bytes of tensor '{name[:80]}' are missing")
        data = ByteRange(source, start + end, info.nbytes)
        tensors[name] = _tensor(data, name, info, order, asked)
        end += info.nbytes + -info.nbytes % alignment
    return tensors


def _tensor(
    data: ByteRange, name: str, info: Info, byteorder: str, asked: dict[int, Callable[[], None]]
) -> TensorRef:
    if info.kind in PLAIN:
        dtype = DTYPES[PLAIN[info.kind]]
        return TensorRef.of_bytes(data, dtype, info.shape, byteorder=byteorder)
    dtype = DTYPES["float32"]
    values = partial(fill, data, name, info.kind, byteorder)
    made = Computed.filling(data.path, math.prod(info.shape) * dtype.itemsize, values)
    ask = asked.setdefault(info.kind, partial(require, data.path, name, info.kind, byteorder))
    made = replace(made, require=ask)
    return TensorRef.of_bytes(made, dtype, info.shape, Storage(data, "UntypedStorage"))
