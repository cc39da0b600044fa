"""NumPy's files: `.npy`, one array, and `.npz`, a zip of them, compressed or not. Pickled arrays stay closed.

A header is the text of a Python dict with three entries. It is matched as text and never evaluated. An array
in C or Fortran order is a view of its bytes. Source: numpy's `lib/format.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.formats.cursor import Cursor
from ..core.formats.pytorch import zip_entries
from ..core.inert_pickle.machine import PickleFault
from ..core.inert_pickle.reader import read_pickle
from ..core.inert_pickle.values import Global, OrderedDict_
from ..core.tensors import ref
from ..core.tensors.values import in_row_major
from ..errors import Damaged, Refused, Unsupported

NPY, NPZ = "npy", "npz"
MAGIC = b"\x93NUMPY"
ENDING = ".npy"
ALONE = "arr_0"  # what numpy.savez calls an array that it is given without a name
MAX_PICKLE = 16 << 20  # bytes, which are read at once
MAX_HEADER = 10_000  # bytes; numpy.load refuses longer ones too

ENTRY = re.compile(
    r"\s*(['\"])(?P<key>\w+)\1\s*:\s*"
    r"(?:(['\"])(?P<text>[^'\"]*)\3|(?P<flag>True|False)|\((?P<sizes>[0-9L,\s]*)\))\s*(?:,|$)"
)
DESCR = re.compile(r"([<>|=]?)([a-zA-Z])([0-9]*)(\[[^\]]*\])?")

# What arrays hold that torch has no type for, by NumPy's letter.
OTHERS = {
    "O": "pickled objects, which are never loaded",
    "U": "text",
    "S": "bytes of text",
    "M": "dates",
    "m": "times",
    "V": "elements that NumPy has no type for, such as bfloat16",
}


class ArrayHeader(NamedTuple):
    """What a header says: element type and byte order, or what other elements there are; and the shape."""

    dtype: ref.DType | None
    byteorder: str
    other: str
    itemsize: int | None  # bytes of an element; None where they are pickled objects, or not known
    shape: tuple[int, ...]
    is_fortran: bool

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements; None as for one."""
        return None if self.itemsize is None else _nbytes(self.itemsize, self.shape)


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is an array, or a zip that begins with one."""
    return head.startswith(MAGIC) or zip_entries.first_name(head).endswith(ENDING)


def read(source: ref.Source) -> Checkpoint:
    """Read the headers of all arrays; what is compressed is inflated into a temporary file."""
    if source.read(0, len(MAGIC)) == MAGIC:
        places = {ALONE: ref.Storage(ref.ByteRange(source, 0, source.size), "UntypedStorage")}
        return _checkpoint(source, NPY, places, ())
    records, inflating = zip_entries.read_directory(source, folded=False), zip_entries.Inflating(source)
    arrays = {name: record for name, record in records.items() if name.endswith(ENDING)}
    places = {name.removesuffix(ENDING): _whole(inflating, record) for name, record in arrays.items()}
    if both := sorted(places.keys() & records.keys()):
        what = f"holds the records '{both[0][:80]}' and '{both[0][:80]}{ENDING}', of which NumPy takes either"
        raise Damaged(source.path, what, hint="save the arrays again, under names of their own")
    others = tuple(f"record '{name[:80]}'" for name in records if name not in arrays)
    return _checkpoint(source, NPZ, places, others)


def _whole(inflating: zip_entries.Inflating, record: zip_entries.ZipRecord) -> ref.Storage:
    """Return all bytes of a record, of which its checksum is."""
    return ref.Storage(inflating.data(record), "UntypedStorage", crc32=record.crc32)


def _checkpoint(
    source: ref.Source, kind: str, places: Mapping[str, ref.Storage], unread: tuple[str, ...]
) -> Checkpoint:
    state = OrderedDict_()
    closed: list[str] = []
    names: set[Global] = set()
    for name, whole in places.items():
        assert isinstance(whole.data, ref.ByteRange)
        cursor = Cursor(whole.data, window=1 << 10)
        array = header(cursor, f"'{name[:80]}'")
        if array.dtype is None:
            closed.append(f"'{name[:80]}' ({array.other})")
            if array.other == OTHERS["O"]:
                names |= _names(cursor, name, source.size)
        else:
            state[name] = _tensor(cursor, name, array, whole)
    if closed and not state:
        raise Unsupported(source.path, f"holds {closed[0]}, and no array of numbers")
    return Checkpoint(source, kind, state, unread=(*closed, *unread), names=frozenset(names))


def _names(cursor: Cursor, name: str, size: int) -> frozenset[Global]:
    """Return the names that a pickled array mentions: what numpy would call if it were allowed to."""
    if cursor.left > min((1 << 20) + zip_entries.MAX_TEXT_GROWTH * size, MAX_PICKLE):
        what = f"its '{name[:80]}' is a pickle of {cursor.left} bytes, in a file of {size}"
        hint = f"write it again without that array, whose names are looked at up to {MAX_PICKLE >> 20} MiB"
        raise Refused(cursor.source.path, what, hint=hint)
    try:
        return read_pickle(cursor.take(cursor.left)).names
    except PickleFault as fault:
        raise Damaged(cursor.source.path, str(fault)) from None


def header(cursor: Cursor, called: str) -> ArrayHeader:
    """Read the header of an array, which messages call so, up to its values."""
    path = cursor.source.path
    if cursor.left < 10 or cursor.take(len(MAGIC)) != MAGIC:
        raise Damaged(path, f"its {called} does not begin as an array of NumPy does")
    major, _ = cursor.take(2)
    if major not in (1, 2, 3):
        raise Unsupported(path, f"its {called} has version {major} of the format, and 1 to 3 are read")
    size = cursor.number("H" if major == 1 else "I")
    if size > MAX_HEADER:
        raise Unsupported(path, f"its {called} has a header of {size} bytes, more than numpy.load takes")
    try:
        text = cursor.take(size).decode("utf-8" if major == 3 else "latin-1").strip()
    except UnicodeDecodeError:
        raise Damaged(path, f"its {called} has a header that is not UTF-8") from None
    return _parsed(path, called, text)


def _parsed(path: str, called: str, text: str) -> ArrayHeader:
    fields: dict[str, re.Match[str]] = {}
    at, inside = 0, text[1:-1].rstrip() if text[:1] + text[-1:] == "{}" else "?"
    while at < len(inside):
        match = ENTRY.match(inside, at)
        if match is None or match["key"] in fields:
            if re.search(r"['\"]descr['\"]\s*:\s*[\[(]", inside):
                return _of_records(path, called, text)
            raise Damaged(path, f"its {called} has a malformed header: {text[:80]!r}")
        fields[match["key"]], at = match, match.end()
    if {*fields} != {"descr", "fortran_order", "shape"}:
        raise Damaged(path, f"its {called} has a header without its three entries: {text[:80]!r}")
    descr, flag, sizes = fields["descr"]["text"], fields["fortran_order"]["flag"], fields["shape"]["sizes"]
    if descr is None or flag is None or sizes is None or not (kind := DESCR.fullmatch(descr)):
        raise Damaged(path, f"its {called} has a malformed header: {text[:80]!r}")
    return ArrayHeader(*_element(kind), _shape(path, called, sizes), flag == "True")


def _element(kind: re.Match[str]) -> tuple[ref.DType | None, str, str, int | None]:
    from ..core.inert_pickle.plain_objects import NUMBERS  # opening a zip asks this module first

    order, letter, size, unit = kind.groups()
    if letter + size in NUMBERS and not unit:
        dtype = ref.DTYPES[NUMBERS[letter + size][1]]
        return dtype, "big" if order == ">" else "little", "", dtype.itemsize
    other = OTHERS.get(letter, f"elements of type {kind[0][:20]}, which torch does not have")
    return None, "little", other, int(size) * (4 if letter == "U" else 1) if size and letter != "O" else None


def _itemsize(descr: object) -> int | None:
    """Return the bytes of an element; None where objects are in it. Raises ValueError or TypeError."""
    if isinstance(descr, list):
        sizes = [(_itemsize(inner), *shape) for _, inner, *shape in descr]
        return None if None in [size for size, *_ in sizes] else sum(_nbytes(*size) for size in sizes)
    if not isinstance(descr, str) or not (kind := DESCR.fullmatch(descr)):
        raise ValueError
    return None if kind[2] == "O" else int(kind[3]) * (4 if kind[2] == "U" else 1)


def _nbytes(itemsize: int, shape: tuple[int, ...] = ()) -> int:
    return 0 if 0 in shape else ref.extent(shape) * itemsize


def _of_records(path: str, called: str, text: str) -> ArrayHeader:
    import ast

    try:
        fields = ast.literal_eval(text)
        size, shape = _itemsize(fields["descr"]), tuple(fields["shape"])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        size, shape = None, (-1,)
    if not all(map(ref.is_count, shape)):
        raise Damaged(path, f"its {called} has a malformed header: {text[:80]!r}")
    other = OTHERS["O"] if size is None else "records of several fields"
    return ArrayHeader(None, "little", other, size, shape, False)


def _shape(path: str, called: str, sizes: str) -> tuple[int, ...]:
    texts = [text.strip().removesuffix("L") for text in sizes.split(",")]  # Python 2 wrote (3L,)
    texts = texts[:-1] if texts[-1:] == [""] else texts
    numbers = [int(text) if text.isdigit() and len(text) < 20 else -1 for text in texts]
    if not all(map(ref.is_count, numbers)) or ref.extent(numbers) * 16 > ref.MAX_BYTES:
        raise Damaged(path, f"its {called} has a malformed shape: ({sizes[:80]})")
    if len(numbers) > ref.MAX_AXES:
        raise Unsupported(
            path, f"its {called} has {len(numbers)} axes, and at most {ref.MAX_AXES} are supported"
        )
    return tuple(numbers)


def _tensor(cursor: Cursor, name: str, array: ArrayHeader, whole: ref.Storage) -> ref.TensorRef:
    dtype = array.dtype
    assert dtype is not None
    numel = 0 if 0 in array.shape else ref.extent(array.shape)
    if cursor.left != (nbytes := numel * dtype.itemsize):
        what = f"its '{name[:80]}' should have {nbytes} bytes by its shape, has {cursor.left}"
        raise Damaged(cursor.source.path, what)
    data = ref.Storage(cursor.place(nbytes), dtype.kind, byteorder=array.byteorder, origins=(whole,))
    stride = ref.contiguous_stride(array.shape)
    if array.is_fortran:
        stride = ref.contiguous_stride(array.shape[::-1])[::-1]
    flat = ref.TensorRef.contiguous(data, dtype, (numel,))
    if flat.is_swapped:  # a `.pt` has one byte order, and torch swaps no uint16
        data = in_row_major(flat).storage
    return ref.TensorRef(data, dtype, array.shape, stride)
