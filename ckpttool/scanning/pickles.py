"""Pickles and arrays as loaders read them from a stream: one after another, with what lies in between.

That are the arrays of joblib, and the storages behind the five pickles of a legacy file of torch. The inert
machine runs each; a pickle that breaks off has run up to there, so its names count too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ..arrays import reading
from ..core.formats.cursor import Cursor
from ..core.formats.pytorch import legacy
from ..core.formats.pytorch.fast_path import itemsize
from ..core.inert_pickle.known_names import is_dangerous
from ..core.inert_pickle.machine import CutShort, Malformed, PickleFault, is_importable
from ..core.inert_pickle.plain_objects import DTYPE
from ..core.inert_pickle.reader import Pickle, read_pickle
from ..core.inert_pickle.values import Global, Record, walk
from ..core.tensors.ref import STORAGE_DTYPES, ByteRange, extent, is_count
from ..errors import CkptToolError

PROTO, NEWEST = b"\x80", 5  # the first byte of a pickle since protocol 2, and the largest that may follow
MAX_PICKLE = 512 << 20  # bytes of one pickle, which are read at once
MAX_IN_A_ROW = 10_000  # pickles and arrays
# Steps that the pickles of one file may take: a number, or one for each few bytes of the file
MAX_STEPS, BYTES_PER_STEP = 1 << 23, 4
MAX_NESTED = 20  # pickles of joblib's arrays in pickles of joblib's arrays
OF_TORCH = 5  # pickles of a legacy file of torch, before its storages; the last lists them

JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
OF_BYTES = ("ByteStorage", "CharStorage")  # whose elements may be a pickle, as those of _extra_state are


@dataclass(slots=True)
class PickleFindings:
    """What was found in pickles that lie one after another.

    Attributes:
        steps: those that the pickles may still take.
        spend: is told the bytes that are read.
        count: pickles that end as they should.
        names: those that count as what would be imported.
        values: what the pickles hold.
        numbers: keys of torch's storages of numbers: their bytes are values, whatever they look like.
        inner: what else is read of what lies in between, which may look like anything.
        fault: why the bytes can't be read as pickles, where they claim to be some.
        is_sure: they are one by what it did before, whatever else they may be.
        goes_on: a loader might read on.
        end: where the last one ends.
    """

    steps: Iterator[None]
    spend: Callable[[int], None]
    count: int = 0
    names: set[Global] = field(default_factory=set)
    values: list[object] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)  # the classes of storages, by key
    inner: list[ByteRange] = field(default_factory=list)
    fault: str | None = None
    is_sure: bool = False
    goes_on: bool = False
    end: int = 0

    def take_fault(self, fault: PickleFault, is_claimed: bool) -> None:
        """Note a pickle that breaks off: its names, and why it does."""
        self.goes_on = not isinstance(fault, Malformed)
        ran, count_all = fault.called or self.goes_on, is_claimed or fault.called
        self.names |= {n for n in fault.names if count_all or (is_dangerous(n) and is_importable(n))}
        self.is_sure = self.is_sure or ran
        self.fault = str(fault) if is_claimed or ran else None

    def stop(self, why: str) -> None:
        """Note that what follows is not looked at, though a loader might read it."""
        self.fault, self.goes_on = why, True


def is_pickle(head: bytes) -> bool:
    """Return whether bytes begin as a pickle of protocol 2 or newer does; older ones begin in no way."""
    return head[:1] == PROTO and len(head) > 1 and head[1] <= NEWEST


def read_in_a_row(
    place: ByteRange,
    found: PickleFindings,
    *,
    is_sure: bool,
    is_first_sure: bool = False,
    most: int = MAX_PICKLE,
) -> PickleFindings:
    """Read the pickles and NumPy's arrays with which a place begins.

    What does not begin as a pickle may be one all the same, or anything else. Its names count where the
    pickle ends, where one was called before it broke off, or where one is of what attacks use. That it breaks
    off is a fault where a name was called, or where Python's own machine might have gone on.

    Args:
        place: the bytes.
        found: what is added to.
        is_sure: what begins as a pickle is one. Else it may be so by chance.
        is_first_sure: something calls it a pickle, however it begins.
        most: bytes of one pickle that are read; what a longer one names by then is found.

    Raises:
        Refused: by `spend`.
    """
    of_torch = -1  # where a legacy file of torch begins among them
    for number in range(MAX_IN_A_ROW):
        rest = place.part(found.end, place.nbytes - found.end)
        head = rest.part(0, min(64, rest.nbytes)).read()
        if not head:
            return found
        if head.startswith(reading.MAGIC):
            holds_objects = _pass_array(rest, found)
            if holds_objects is None:
                return found
            is_first_sure = holds_objects
            continue
        of_torch = number if legacy.sniff(head) else of_torch
        is_claimed = is_sure and (is_pickle(head) or is_first_sure)
        if not _read_one(rest.part(0, min(rest.nbytes, most)), rest, found, is_claimed):
            return found
        is_first_sure, found.count = False, found.count + 1
        if of_torch >= 0 and number == of_torch + OF_TORCH - 1:
            is_sure = _pass_storages(place, found) and is_sure
    if found.end < place.nbytes:
        found.stop(f"holds more than {MAX_IN_A_ROW} pickles one after another")
    return found


def _pass_array(rest: ByteRange, found: PickleFindings) -> bool | None:
    """Pass over an array; return whether its objects follow as a pickle, None where that is unknown."""
    cursor = Cursor(rest, window=1 << 10)
    try:
        array = reading.header(cursor, "array")
    except CkptToolError as fault:  # NumPy reads headers as Python, so that it takes more than is read here
        found.stop(fault.reason)
        return None
    holds_objects = array.other == reading.OTHERS["O"]
    if array.nbytes is None and not holds_objects:
        found.stop(f"is an array of {array.other}")
        return None
    found.end += cursor.position - rest.offset + min(array.nbytes or 0, cursor.left)
    return holds_objects


def _pass_storages(place: ByteRange, found: PickleFindings) -> bool:
    """Pass over the storages of a legacy file of torch; return whether they are where torch reads them."""
    keys, end = found.values[-1], found.end
    for key in keys if isinstance(keys, list) else ():
        kind = found.kinds.get(key) if isinstance(key, str) else None
        if kind is None or end + 8 > place.nbytes:
            return False
        (numel,) = struct.unpack("<q", place.part(end, 8).read())
        size = numel * itemsize(kind)
        if not 0 <= size <= place.nbytes - end - 8:
            return False
        if kind in OF_BYTES and size:
            found.inner.append(place.part(end + 8, size))
        end += 8 + size
    if end > found.end:  # pickle.load goes on here, and torch.load and what comes after it there
        found.inner.append(place.part(found.end, place.nbytes - found.end))
        found.end = end
    return True


def _read_one(part: ByteRange, rest: ByteRange, found: PickleFindings, is_claimed: bool) -> bool:
    """Read one pickle, also as joblib does, and go on behind it; return whether there is one.

    Args:
        part: the bytes of `rest` as far as they are read.
    """
    plain, arrays = _Loader(found, skips=False), _Loader(found, skips=True)
    try:
        pickle = legacy.read_unsized(part, plain.read)
    except PickleFault as fault:
        if not plain.arrays:
            found.take_fault(fault, is_claimed)
            if part.nbytes < rest.nbytes and isinstance(fault, CutShort):
                found.stop(f"its pickle is longer than {part.nbytes} bytes")
            return False
        # pickle.load would take the array's bytes for opcodes, joblib.load does not.
        found.names |= {name for name in fault.names if is_dangerous(name)}
        try:
            pickle = legacy.read_unsized(part, arrays.read)
        except PickleFault as own:
            found.take_fault(own, is_claimed)
            return False
    found.names |= pickle.names | plain.names | arrays.names
    found.values.append(pickle.value)
    found.end += pickle.end - rest.offset
    return True


class _Loader:
    """Reads one pickle: external objects stay Records, and arrays in between are counted or skipped."""

    def __init__(self, found: PickleFindings, *, skips: bool) -> None:
        self.found = found
        self.skips = skips
        self.arrays = 0
        self.names: set[Global] = set()  # of pickles of arrays inside
        self.level = 0

    def read(self, data: bytes, start: int = 0) -> Pickle:
        self.found.spend(len(data) - start)
        after = partial(self._after_build, data)
        load, steps = self._persistent, self.found.steps
        return read_pickle(data, start, persistent_load=load, after_build=after, steps=steps, as_in_c=True)

    def _persistent(self, identity: object) -> object:
        match identity:
            case ("storage", Global(name=kind), str(key), *_):
                self.found.kinds[key] = kind
                if kind in STORAGE_DTYPES and kind not in OF_BYTES:
                    self.found.numbers.add(key)
            case ("module", kind, *_):
                return kind  # a class with its source text
        return Record("persistent", None, (identity,))

    def _after_build(self, data: bytes, made: object, position: int) -> int:
        if not isinstance(made, Record) or made.type_name != JOBLIB_ARRAY:
            return position
        self.arrays += 1
        return self._behind_array(data, made.state, position) if self.skips else position

    def _behind_array(self, data: bytes, state: object, position: int) -> int:
        """Return where joblib goes on behind an array. Raises EOFError past the end, PickleFault."""
        described = state if isinstance(state, dict) else {}
        dtype, shape = described.get("dtype"), described.get("shape")
        code, sizes = _code(dtype), shape if isinstance(shape, tuple) else (None,)
        if not code or not all(map(is_count, sizes)):
            raise PickleFault("its array of joblib is malformed")
        if any(_code(part)[:1] == "O" for part in walk(dtype)):
            return self._objects(data, position)
        if described.get("numpy_array_alignment_bytes") is not None:
            position += 1 + data[position] if position < len(data) else 1
        itemsize = int(code[1:] or 0) * (4 if code[0] == "U" else 1) if code[1:].isdigit() else 0
        position += 0 if 0 in sizes else extent(sizes) * itemsize
        if position > len(data):
            raise EOFError
        return position

    def _objects(self, data: bytes, position: int) -> int:
        if self.level == MAX_NESTED:
            raise PickleFault(f"has arrays of joblib nested more than {MAX_NESTED} deep")
        self.level += 1
        inner = self.read(data, position)
        self.level -= 1
        self.names |= inner.names
        return inner.end


def _code(value: object) -> str:
    """Return the letter and the size of a pickled dtype; empty for anything else."""
    match value:
        case Record(callable=name, args=(str(code), *_)) if name == DTYPE:
            return code
    return ""
