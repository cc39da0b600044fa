"""Pickles as loaders read them: one after another, those of joblib with arrays in between.

The inert machine runs each; a pickle that breaks off has run up to there, so its names count too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ..core.formats.pytorch import legacy
from ..core.inert_pickle.known_names import is_dangerous
from ..core.inert_pickle.machine import CutShort, Malformed, PickleFault, is_importable
from ..core.inert_pickle.plain_objects import DTYPE
from ..core.inert_pickle.reader import Pickle, read_pickle
from ..core.inert_pickle.values import Global, Record, walk
from ..core.tensors.ref import STORAGE_DTYPES, ByteRange, extent, is_count

PROTO, NEWEST = b"\x80", 5  # the first byte of a pickle since protocol 2, and the largest that may follow
MAX_PICKLE = 512 << 20  # bytes of one pickle, which are read at once
MAX_IN_A_ROW = 10_000  # pickles
MAX_NESTED = 20  # pickles of joblib's arrays in pickles of joblib's arrays
OF_TORCH = 5  # pickles of a legacy file of torch, before its storages

JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
OF_BYTES = ("ByteStorage", "CharStorage")  # whose elements may be a pickle, as those of _extra_state are


@dataclass(slots=True)
class PickleFindings:
    """What was found in pickles that lie one after another.

    Attributes:
        count: pickles that end as they should.
        names: those that count as what would be imported.
        values: what the pickles hold.
        numbers: keys of torch's storages of numbers: their bytes are values, whatever they look like.
        fault: why the bytes can't be read as pickles, where they claim to be some.
        is_sure: they are one by what it did before, whatever else they may be.
    """

    count: int = 0
    names: set[Global] = field(default_factory=set)
    values: list[object] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)
    fault: str | None = None
    is_sure: bool = False

    def take_fault(self, fault: PickleFault, is_claimed: bool) -> None:
        """Note a pickle that breaks off: its names, and why it does."""
        ran, count_all = fault.called or not isinstance(fault, Malformed), is_claimed or fault.called
        self.names |= {n for n in fault.names if count_all or (is_dangerous(n) and is_importable(n))}
        self.is_sure = self.is_sure or ran
        self.fault = str(fault) if is_claimed or ran else None


def is_pickle(head: bytes) -> bool:
    """Return whether bytes begin as a pickle of protocol 2 or newer does; older ones begin in no way."""
    return head[:1] == PROTO and len(head) > 1 and head[1] <= NEWEST


def read_in_a_row(
    place: ByteRange, *, is_sure: bool, is_first_sure: bool = False, most: int = MAX_PICKLE
) -> PickleFindings:
    """Read the pickles with which a place begins.

    What does not begin as a pickle may be one all the same, or anything else. Its names count where the
    pickle ends, where one was called before it broke off, or where one is of what attacks use. That it breaks
    off is a fault where a name was called, or where Python's own machine might have gone on.

    Args:
        place: the bytes.
        is_sure: what begins as a pickle is one. Else it may be so by chance.
        is_first_sure: something calls it a pickle, however it begins.
        most: bytes of one pickle that are read; what a longer one names by then is found.
    """
    found, at, limit = PickleFindings(), 0, MAX_IN_A_ROW
    while at < place.nbytes and found.count < limit:
        head = place.part(at, min(64, place.nbytes - at)).read()
        if not at and legacy.sniff(head):
            limit = OF_TORCH + 1
        is_claimed = is_sure and (is_pickle(head) or (is_first_sure and not at))
        is_claimed = is_claimed and found.count < limit - (limit == OF_TORCH + 1)
        end = _read_one(place.part(at, min(place.nbytes - at, most)), place, found, is_claimed)
        if end is None:
            return found
        found.count, at = found.count + 1, end
    if at < place.nbytes and limit == MAX_IN_A_ROW:
        found.fault = f"holds more than {MAX_IN_A_ROW} pickles one after another"
    return found


def _read_one(rest: ByteRange, place: ByteRange, found: PickleFindings, is_claimed: bool) -> int | None:
    """Read one pickle, also as joblib does; return where it ends, None where there is no pickle.

    Args:
        rest: the bytes of `place` from there, as far as they are read.
    """
    plain, arrays = _Loader(found, skips=False), _Loader(found, skips=True)
    try:
        pickle = legacy.read_unsized(rest, plain.read)
    except PickleFault as fault:
        if not plain.arrays:
            found.take_fault(fault, is_claimed)
            is_cut = rest.offset + rest.nbytes < place.offset + place.nbytes
            if is_cut and isinstance(fault, CutShort):
                found.fault = f"its pickle is longer than {rest.nbytes} bytes"
            return None
        # pickle.load would take the array's bytes for opcodes, joblib.load does not.
        found.names |= {name for name in fault.names if is_dangerous(name)}
        try:
            pickle = legacy.read_unsized(rest, arrays.read)
        except PickleFault as own:
            found.take_fault(own, is_claimed)
            return None
    found.names |= pickle.names | plain.names | arrays.names
    found.values.append(pickle.value)
    return pickle.end - place.offset


class _Loader:
    """Reads one pickle: external objects stay Records, and arrays in between are counted or skipped."""

    def __init__(self, found: PickleFindings, *, skips: bool) -> None:
        self.found = found
        self.skips = skips
        self.arrays = 0
        self.names: set[Global] = set()  # of pickles of arrays inside
        self.level = 0

    def read(self, data: bytes, start: int = 0) -> Pickle:
        after = partial(self._after_build, data)
        return read_pickle(data, start, persistent_load=self._persistent, after_build=after)

    def _persistent(self, identity: object) -> object:
        match identity:
            case ("storage", Global(name=kind), str(key), *_):
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
