"""The format safetensors, and strict JSON objects for headers and indexes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from json.encoder import encode_basestring
from operator import attrgetter, le, sub
from typing import Any

from ...errors import Damaged, Refused, Unsupported
from ..checkpoint import full
from ..checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..checkpoint.module_tree import is_embedding
from ..files.copying import MOST_PIECES, Output, is_tiny
from ..files.reflink import sharing_order
from ..inert_pickle.values import OrderedDict_
from ..tensors import ref
from ..tensors.values import require_bounded, stream
from ..words import counted

# The names and values of an object.
Pairs = list[tuple[str, Any]]


def parse_object(
    path: str, raw: bytes, what: str, usual: Callable[[Pairs], object] = lambda pairs: None
) -> dict[str, Any]:
    """Parse JSON and return the object in it."""

    def once(pairs: Pairs) -> object:
        if (parsed := usual(pairs)) is not None:
            return parsed
        made = dict(pairs)
        if len(made) != len(pairs):
            raise Damaged(path, f"{what} has the same name twice")
        return made

    # A call for each number takes time; so does the search for two bytes, a hundred times that for one.
    parse_int = _but_minus_zero if b"-" in raw and b"-0" in raw else None
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{what} is not JSON: {str(error)[:80]}") from None
    if not isinstance(parsed, dict):
        raise Damaged(path, f"{what} is not a JSON object")
    return parsed


def _but_minus_zero(text: str) -> int:
    """Return an integer; refuse -0, which Python alone takes for one and others for a float."""
    if text == "-0":
        raise ValueError("a number is -0")
    return int(text)


# ---- The format: a length, a JSON header, and the values of the tensors without gaps.
#
# The writer's bytes are those of `safetensors.torch.save_file`: tensors ordered by type, then by name;
# compact JSON; the header padded with spaces to 8 bytes. The reader enforces all rules of the format,
# some of which the library does not. Source: the README of huggingface/safetensors.


NAME = "safetensors"
EXTENSIONS = (".safetensors",)
METADATA = "__metadata__"
DELTA = "ckpttool.delta"  # the entry of the metadata that makes a file a delta
PATCH = "sparse_weight_patch"  # the format that TRL's deltas state

Tensors = Mapping[str, ref.TensorRef]

FIELD_NAMES = ("dtype", "shape", "data_offsets")

# Bytes that the format allows a header.
MAX_HEADER = 100_000_000
WIDTH = 8  # bytes of which a header has a multiple

# Metadata with a meaning of its own; it never records another name of a tensor.
RESERVED = (*OF_TORCH, full.ENTRY)

# The order in which the library writes types: widest first, and within a width as its source lists them.
ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"),
    *("F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
RANK = {name: rank for rank, name in enumerate(ORDER)}
SHARING = {dtype.safetensors for dtype in ref.ALL_DTYPES.values() if dtype.numbers > 1}
BY_NAME = {dtype.safetensors: dtype for dtype in ref.ALL_DTYPES.values() if dtype.safetensors}


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes looks like safetensors."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER


def read(source: ref.Source) -> Checkpoint:
    """Read the header."""
    size = int.from_bytes(source.read(0, 8), "little")
    if size > MAX_HEADER or 8 + size > source.size:
        raise Damaged(source.path, f"is cut short: its header should have {size} bytes")
    header = _parse(source, source.read(8, size))
    metadata = header.pop(METADATA, {})
    metadata = {} if metadata is None else metadata  # as the library reads it
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged(source.path, "its __metadata__ is not a map of text to text")
    tensors = _tensors(source, header, 8 + size)
    if (text := metadata.pop(full.ENTRY, None)) is not None:
        tree, protocol = full.decode_entry(source.path, tensors, text)
        return Checkpoint(source, NAME, tree, protocol, metadata, full=True)
    state = OrderedDict_(tensors)
    if metadata.get("format") == PATCH and metadata.get("sparse") == "True":
        return Checkpoint(source, "trl", state, 2, {DELTA: json.dumps(metadata)})
    # Ties are recorded as safetensors.torch.save_model does: the other name, and the name that is kept.
    for name, kept in [*metadata.items()]:
        if kept in tensors and name not in tensors and name not in RESERVED:
            state[name] = tensors[metadata.pop(name)]
    return Checkpoint(source, NAME, state, 2, metadata)


def _parse(source: ref.Source, raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise Damaged(source.path, "its header is not a JSON object")
    header = parse_object(source.path, raw, "its header", _entry)
    if b"\\" in raw and b"\\u" in raw:  # the search for one byte takes a hundredth of the time
        try:
            json.dumps(header, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise Damaged(source.path, "its header has text that is not valid Unicode") from None
    return header


def _entry(pairs: Pairs) -> tuple[Any, ...] | None:
    """Return a tensor's entry, as the library writes it, as type, shape, begin and end; None for others."""
    if len(pairs) != len(FIELD_NAMES):
        return None
    (first, dtype), (second, shape), (third, place) = pairs
    if (first, second, third) != FIELD_NAMES or type(shape) is not list or type(place) is not list:
        return None
    return (dtype, tuple(shape), *place) if len(place) == 2 else None


def _tensors(source: ref.Source, header: dict[str, Any], start: int) -> dict[str, ref.TensorRef]:
    """Return the tensors in the order of the payload, which begins at `start`."""
    # A file may have 100,000, so each rule is checked for all of them in one C loop; a tensor that breaks it
    # is looked for only then.
    names, types, shapes, begins, ends = _columns(source, header)
    likes = list(zip(types, shapes, strict=True))
    example = dict(zip(likes, names, strict=True))
    of_like = {like: _form(source, name, *like) for like, name in example.items()}
    forms = list(map(of_like.__getitem__, likes))
    dtypes, sizes, strides, nbytes, kinds = zip(*forms, strict=True) if forms else ((),) * 5
    if (lengths := tuple(map(sub, ends, begins))) != nbytes:
        name, has, should = _first_unequal(names, lengths, nbytes)
        raise Damaged(source.path, f"tensor '{name}' should have {should} bytes by its shape, has {has}")
    if begins != (expected := (0, *ends)[: len(begins)]):
        name, _, _ = _first_unequal(names, begins, expected)
        raise Damaged(source.path, f"tensor '{name}' leaves a gap or overlaps the one before it")
    end = start + sum(nbytes)
    if end > source.size:
        raise Damaged(source.path, f"is cut short: {end - source.size} bytes are missing")
    if end < source.size:
        raise Damaged(source.path, f"has {source.size - end} bytes that belong to no tensor")
    places = map(ref.ByteRange, repeat(source), map(start.__add__, begins), nbytes)
    tensors = map(ref.TensorRef, map(ref.Storage, places, kinds), dtypes, sizes, strides)
    return dict(zip(names, tensors, strict=True))


def _first_unequal(names: Sequence[str], has: Sequence[int], should: Sequence[int]) -> tuple[str, int, int]:
    return next(row for row in zip(names, has, should, strict=True) if row[1] != row[2])


_Columns = tuple[Sequence[str], Sequence[str], Sequence[tuple[int, ...]], tuple[int, ...], tuple[int, ...]]


def _columns(source: ref.Source, header: dict[str, Any]) -> _Columns:
    """Return name, type, shape, begin and end of all tensors, in the order of the payload."""
    if not header:
        return ((),) * 5
    entries = [entry if type(entry) is tuple else _reordered(entry) for entry in header.values()]
    types, shapes, begins, ends = zip(*entries, strict=True)
    numbers = [*begins, *ends, *chain.from_iterable(shapes)]
    has_types = {*map(type, types)} == {str} and {*map(type, numbers)} == {int}
    if not has_types or min(numbers) < 0 or max(numbers) > ref.MAX_BYTES:
        regular = (
            type(t) is str and all(map(ref.is_count, (*shape, *place))) for t, shape, *place in entries
        )
        name = next(name for name, is_regular in zip(header, regular, strict=True) if not is_regular)
        raise Damaged(source.path, f"its header has a malformed entry for '{name[:80]}'")
    if all(map(le, ends, begins[1:])):
        return [*header], types, shapes, begins, ends
    rows = sorted(zip(begins, ends, header, types, shapes, strict=True))
    begins, ends, names, types, shapes = zip(*rows, strict=True)
    return names, types, shapes, begins, ends


def _reordered(entry: Any) -> tuple[Any, ...]:
    """Return an entry as a tuple, whatever the order of its fields; malformed entries become (None, ...)."""
    is_entry = isinstance(entry, dict) and entry.keys() == {*FIELD_NAMES}
    usual = _entry([(name, entry[name]) for name in FIELD_NAMES]) if is_entry else None
    return usual or (None, (), 0, 0)


Shape = tuple[int, ...]


def _form(
    source: ref.Source, name: str, type_name: str, shape: Shape
) -> tuple[ref.DType, Shape, Shape, int, str]:
    """Check the form of a tensor that is the first to have it: dtype, shape, stride, bytes, and storage."""
    dtype = BY_NAME.get(type_name)
    if dtype is None:
        raise Unsupported(source.path, f"tensor '{name}' has the type {type_name[:20]}, unknown to torch")
    if dtype.numbers > 1:
        if not shape or shape[-1] % dtype.numbers:
            size = f"{dtype.numbers} of them share {counted(dtype.itemsize, 'byte')}"
            what = f"tensor '{name[:80]}' has {type_name} in rows of {shape[-1] if shape else 1}, and {size}"
            raise Unsupported(source.path, what)
        shape = (*shape[:-1], shape[-1] // dtype.numbers)
    if ref.extent(shape) * dtype.itemsize > ref.MAX_BYTES:
        raise Damaged(source.path, f"tensor '{name}' has a shape larger than any file")
    if len(shape) > ref.MAX_AXES:
        reason = f"tensor '{name[:80]}' has {len(shape)} axes, and at most {ref.MAX_AXES} are supported"
        raise Unsupported(source.path, reason)
    like = ref.TensorRef.of_bytes(ref.ByteRange(source, 0, 0), dtype, shape)
    return dtype, shape, like.stride, like.nbytes, dtype.kind


def write(
    path: str, tensors: Tensors, metadata: Mapping[str, str], out: Output, head: bytes | None = None
) -> None:
    """Write tensors; each name gets its own copy of the values.

    `head`: the length and the header of tensors in the order that they have; None for the library's order.
    """
    ordered, place, block = tensors if head else in_order(path, tensors), 0, WIDTH
    if out.reflink.is_always:
        ordered, place = sharing_order(path, ordered, block := out.reflink.block)
    for name, tensor in ordered.items():
        if not tensor.is_stretch:  # which has no more bytes than its storage
            require_bounded(name, tensor, hint="keep it a view by writing a .pt file")
    out.write(head or header(path, ordered, metadata, place=place, block=block))
    tiny: list[tuple[int, ref.ByteRange]] = []
    for tensor in ordered.values():
        data = tensor.data if tensor.is_stretch else None
        if isinstance(data, ref.ByteRange) and is_tiny(data) and not out.reflink.is_always:
            tiny.append((out.position, data))
            out.position += data.nbytes
        elif data is not None:
            out.copy(data, near=tensor.storage.place)
        else:
            out.write_all(stream(tensor), tensor.nbytes, tensor.storage.place)
        if len(tiny) == MOST_PIECES:
            _write(tiny, out)
    _write(tiny, out)


def in_order(path: str, tensors: Tensors) -> Tensors:
    """Return tensors in the library's order; refuse the first that the format can't hold."""
    types = [*map(attrgetter("dtype.safetensors"), tensors.values())]
    if METADATA in tensors or None in types or not SHARING.isdisjoint(types):
        for name, tensor in tensors.items():
            _require_holdable(path, name, tensor)
    ordered = sorted(zip(map(RANK.__getitem__, types), tensors, tensors.values(), strict=True))
    return {name: tensor for _, name, tensor in ordered}


def _write(tiny: list[tuple[int, ref.ByteRange]], out: Output) -> None:
    """Write small ranges of files to their places, and forget them."""
    contents = out.taken([data for _, data in tiny])
    out.write_pieces(zip((position for position, _ in tiny), contents, strict=True))
    tiny.clear()


def ties(tensors: Tensors, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the names that are another name of a tensor: name -> the first name of that tensor.

    Of an embedding and what is tied to it, that is the embedding's, which transformers reads.
    """
    first: dict[tuple[object, ...], str] = {}
    first_of = {name: first.setdefault(tensor.view, name) for name, tensor in tensors.items() if tensor.numel}
    tied = [(name, kept) for name, kept in first_of.items() if name != kept]  # few of them, if any
    embeddings = {
        kept: name for name, kept in reversed(tied) if is_embedding(name) and not is_embedding(kept)
    }
    kept_of = {kept: embeddings.get(kept, kept) for _, kept in tied}
    kept_of |= {name: embeddings.get(kept, kept) for name, kept in tied}
    free = (name for name in kept_of if name not in metadata and name not in RESERVED)
    return {name: kept_of[name] for name in free if kept_of[name] != name}


def without_ties(texts: Mapping[str, str], tensors: Tensors) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of another format that a header can hold, and in words those that it would mistake."""
    mistaken = {
        name: text
        for name, text in texts.items()
        if name == full.ENTRY or (text in tensors and name not in tensors and name not in RESERVED)
    }
    kept = {name: text for name, text in texts.items() if name not in mistaken}
    return kept, tuple(f"metadata '{name[:80]}' ('{text[:80]}')" for name, text in mistaken.items())


def _require_holdable(path: str, name: str, tensor: ref.TensorRef) -> None:
    if name == METADATA:
        reason = f"safetensors can't hold a tensor named '{name}'"
        raise Refused(path, reason, hint="write a .pt file instead")
    if not tensor.is_holdable:
        what = f"type {tensor.dtype.name}" + (" without an axis" if tensor.dtype.safetensors else "")
        reason = f"safetensors can't hold '{name}': it has no {what}"
        raise Refused(path, reason, hint="write a .pt file instead, which keeps every type")


def header(
    path: str,
    tensors: Tensors,
    metadata: Mapping[str, str],
    fill: int = 0,
    place: int = 0,
    block: int = WIDTH,
) -> bytes:
    """Return the length and the JSON of a file, of `fill` bytes or more, which end at a place in a block."""
    entries = [f'"{METADATA}":{_json(dict(sorted(metadata.items())))}'] if metadata else []
    likes = [*map(attrgetter("dtype.safetensors", "shape", "dtype.itemsize"), tensors.values())]
    # What stands between a name and its place, and the bytes, for each form.
    forms = {like: (_form_text(*like[:2]), ref.count_of(like[1]) * like[2]) for like in {*likes}}
    begin = 0
    # Each name is quoted as json quotes it; an object for each of 100,000 entries takes four times as long.
    for name, like in zip(map(encode_basestring, tensors), likes, strict=True):
        form, nbytes = forms[like]
        entries.append(f"{name}{form}{begin},{begin + nbytes}]}}")
        begin += nbytes
    try:
        raw = f"{{{','.join(entries)}}}".encode()
    except UnicodeEncodeError as error:
        text = error.object[max(error.start - 20, 0) : error.end]
        key = next((name for name in tensors if any("\ud800" <= each <= "\udfff" for each in name)), None)
        what = f"text of the header (…{text})" if key is None else f"the key '{key[:80]}'"
        what = what.encode("utf-8", "backslashreplace").decode()
        raise Refused(path, f"{what} is not valid Unicode", hint="write a .pt file instead") from None
    raw = raw.ljust(fill - 8)
    raw += b" " * ((place - 8 - len(raw)) % block)
    if len(raw) > MAX_HEADER:
        raise Refused(path, "its names need a header of more than 100 MB", hint="write a .pt file instead")
    return struct.pack("<Q", len(raw)) + raw


def _form_text(dtype: str | None, shape: Shape) -> str:
    """Return what a tensor's entry says before its place."""
    if dtype is not None and dtype in SHARING:
        shape = (*shape[:-1], BY_NAME[dtype].numbers * shape[-1])
    return f':{{"dtype":{_json(dtype)},"shape":{_json(shape)},"data_offsets":['


_json = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))


def header_in_place(source: ref.Source, tensors: Tensors, metadata: Mapping[str, str]) -> bytes | None:
    """Return the header that takes the place of a file's own, if these tensors are exactly its payload."""
    places = []
    for item in tensors.items():
        where = item[1].data if item[1].is_plain else None
        if not isinstance(where, ref.ByteRange) or where.source is not source:
            return None
        places.append((where.offset, where.nbytes, item))
    places.sort(key=lambda place: place[:2])
    if [*(begin for begin, _, _ in places), source.size][1:] != [begin + n for begin, n, _ in places]:
        return None
    start = places[0][0] if places else 0
    new = header(source.path, dict(item for _, _, item in places), metadata, fill=start)
    return new if len(new) == start else None


def write_with_header(source: ref.Source, header: bytes, out: Output) -> None:
    """Write a file with another header of the same length, the payload shared with the old file or copied."""
    # A header that others may be reading can't be changed where it lies: a write is no single step, neither
    # for a process that reads or maps the file (ext4 locks no page against readers) nor for a disk that loses
    # power. So the output is always a new file, which shares blocks where the file system can (btrfs, xfs).
    out.write(header)
    out.copy(ref.ByteRange(source, len(header), source.size - len(header)))
