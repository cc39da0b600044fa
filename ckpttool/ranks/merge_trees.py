"""The training step that the files of ranks state: one number, in whatever form, in all files of one save."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import HINT
from ..core.checkpoint.dotted_names import MAX_NAMES, dotted, named_values
from ..core.checkpoint.optimizer_view import OptimizerView, is_optimizer
from ..core.inert_pickle.values import LEAVES, MAX_DEPTH, Record, in_brief, remade, tensor_of, with_tensor
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import MAX_EXPANSION, in_pieces, stream
from ..errors import Damaged, Refused
from .pieces import RankFile, RankPiece, Wholes
from .sharded_values import ShardedValue, unless_sharded

# The most bytes of a tensor that `same` reads although its checksum is known.
SMALL = 1 << 16

# The fields by which records are compared.
FIELDS = ("how", "callable", "args", "kwargs", "state", "elements", "items")

# Elements of two tensors that `same` compares at a time.
BLOCK = 1 << 18


def same(first: object, second: object) -> bool:
    """Return whether two values are the same, to the type; NaN is the same as NaN."""
    # Tensors are by dtype, shape and bytes, on whatever device they were. Of those of more than 64 KiB the
    # checksums are compared instead where both files state them. Those that repeat their elements very often
    # count as different.
    stack: list[tuple[Any, Any]] = [(first, second)]
    seen: set[tuple[int, int]] = set()
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            is_same = list(a) == list(b)
            stack.extend(zip(a.values(), b.values(), strict=False))
        elif isinstance(a, list | tuple):
            is_same = len(a) == len(b)
            stack.extend(zip(a, b, strict=False))
        elif isinstance(a, Record):
            is_same = True
            stack.extend((getattr(a, name), getattr(b, name)) for name in FIELDS)
        elif isinstance(a, TensorRef):
            is_same = _same_tensor(a, b)
        else:
            is_same = a == b or (a != a and b != b)
        if not is_same:
            return False
    return True


def _same_tensor(one: TensorRef, other: TensorRef) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    both = one, other
    sums = {tensor.storage.crc32 for tensor in both}
    if one.nbytes > SMALL and None not in sums and all(map(is_whole, both)):
        return len(sums) == 1
    if any(tensor.nbytes > tensor.storage.nbytes + MAX_EXPANSION for tensor in both):
        return False
    pieces = (in_pieces(tensor, BLOCK * tensor.dtype.part) for tensor in both)
    return all(a == b for a, b in zip(*pieces, strict=True))


def is_whole(tensor: TensorRef) -> bool:
    """Return whether a tensor is all of its storage, as it lies there: a checksum of one is of both."""
    return tensor.is_plain and tensor.nbytes == tensor.storage.nbytes


# Keys of numbers that are the same in all files of one save.
STEPS = ("step", "steps", "global_step", "global_steps", "iteration", "epoch", "current_epoch")

Number = int | float

_NAMES = "float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
# How `struct` calls the types that count steps.
CODES = dict(zip(_NAMES.split(), "dfeqihbQIHB?", strict=True))


class Held(NamedTuple):
    """What one rank's file has in a place."""

    file: RankFile
    value: Any


class Numbers:
    """Reads the numbers in values: a Python number, or a tensor of one element, whole or a rank's piece."""

    # Each parameter of an optimizer has its own step, in each rank's file, and nearly all are one number:
    # those of one checksum are read once.

    def __init__(self) -> None:
        self._read: dict[tuple[str, str, int], Number] = {}

    def of(self, value: object) -> Number | None:
        """Return the number in a value, NaN and infinities included; None where there is none."""
        if isinstance(value, int | float):
            return value
        if isinstance(value, ShardedValue) and len(value.pieces) == 1:
            value = value.pieces[0][1]
        tensor = tensor_of(value)
        if tensor is None or tensor.numel != 1 or tensor.dtype.name not in (*CODES, "bfloat16"):
            return None
        storage = tensor.storage
        if storage.crc32 is None or not is_whole(tensor):
            return _read(tensor)
        key = tensor.dtype.name, storage.byteorder, storage.crc32
        if key not in self._read:
            self._read[key] = _read(tensor)
        return self._read[key]


def _read(tensor: TensorRef) -> Number:
    raw = b"".join(map(bytes, stream(tensor)))
    if tensor.dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    number: Number = struct.unpack(f"<{CODES[tensor.dtype.name]}", raw)[0]
    return number


def require_one(what: str, held: Sequence[Held], numbers: Numbers, *, hint: str = HINT) -> None:
    """Check what is the same in all files of one save, as a step is: equal numbers, or else equal values."""
    first, *others = held
    wanted = numbers.of(first.value)
    for other in others:
        number = numbers.of(other.value)
        if wanted is None or number is None:
            agrees = same(first.value, other.value)
        else:
            agrees = number == wanted or (number != number and wanted != wanted)
        if agrees:
            continue
        there = f"{_shown(first.value, wanted)} in {first.file.path}"
        said = f"{what} is {_shown(other.value, number)}, and {there}"
        if _is_unshown(first.value, wanted) or _is_unshown(other.value, number):
            said = f"holds other values as {what} than {first.file.path}"
        raise other.file.damaged(f"is of another save: {said}", hint)


def _is_unshown(value: object, number: Number | None) -> bool:
    return number is None and (tensor_of(value) is not None or isinstance(value, ShardedValue))


def _shown(value: object, number: Number | None) -> str:
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return in_brief(value if number is None else number)[:80]


def step_of(files: Sequence[RankFile]) -> int | None:
    """Return the step that the optimizers of the files state; None where none does."""
    # Parameters that were left out of some steps have made fewer: a file's step is the largest in it.
    numbers = Numbers()
    stated = [Held(file, max(steps)) for file in files if (steps := [*_steps(file.tree, numbers)])]
    if not stated:
        return None
    require_one("its optimizer's step", stated, numbers)
    return int(stated[0].value)


def _steps(tree: Any, numbers: Numbers) -> Iterator[int]:
    """Yield the steps in a file's optimizers, which lie at its top or one level below."""
    inside: Iterable[Any] = tree.values() if isinstance(tree, dict) else ()
    for optimizer in (each for each in (tree, *inside) if is_optimizer(each)):
        for entry in OptimizerView(optimizer).entries:
            step = numbers.of(entry.get("step"))
            if isinstance(step, int) or (step is not None and step.is_integer()):  # not NaN
                yield int(step)


# ---- The trees of several ranks' files, merged value by value into one.


Path = tuple[object, ...]


def merged(wholes: Wholes, files: Sequence[RankFile], path: Path = (), *, common: bool = False) -> Any:
    """Return the trees of ranks as one; `wholes.left` gets what it lacks of them.

    Pieces become whole tensors, and what all ranks hold becomes one value. With `common`, entries of dicts
    that differ between ranks are left out.
    """
    return _SideBySide(wholes, common).merge(path, [Held(file, file.tree) for file in files])


class _SideBySide:
    """Merges the values that ranks have in one place."""

    def __init__(self, wholes: Wholes, common: bool) -> None:
        self._wholes, self._common = wholes, common
        self._numbers = Numbers()
        self._made: dict[tuple[int, ...], object] = {}

    def merge(self, path: Path, places: list[Held]) -> object:
        """Return the merged value."""
        if len(path) > MAX_DEPTH:
            raise Refused(places[0].file.path, "its contents are nested too deeply to be merged")
        key = tuple(id(place.value) for place in places)
        if isinstance(places[0].value, LEAVES):  # equal numbers are one object, at different places
            return self._merged(path, places)
        if key not in self._made:
            self._made[key] = self._merged(path, places)
        elif (tensor := tensor_of(self._made[key])) is not None:
            self._wholes.note(_name(path), tensor)
        return self._made[key]

    def _merged(self, path: Path, places: list[Held]) -> object:
        values: list[Any] = [item.value for item in places]
        if path and path[-1] in STEPS:
            self._require_one_number(path, places)
        if any(isinstance(value, ShardedValue) for value in values):
            return self._whole(path, places)
        if any(tensor_of(value) is not None for value in values):
            return self._replicated(path, places)
        first: Any = self._first(places).value
        if all(isinstance(value, dict) for value in values):
            return remade(first, self._entries(path, places))
        if len({*map(type, values)}) == 1:
            if isinstance(first, list | tuple) and len({*map(len, values)}) == 1:
                rows = zip(*values, strict=True)
                items = [self.merge((*path, i), _with(places, row)) for i, row in enumerate(rows)]
                return items if isinstance(first, list) else tuple(items)
            if isinstance(first, Record) and _alike(values):
                return self._record(path, places, first)
        self._require_no_pieces(path, places)
        self._compare(path, places)
        return first

    def _first(self, places: list[Held]) -> Held:
        """Return what is held by the rank whose values are taken, else by the first."""
        return next((place for place in places if place.file.rank == self._wholes.take_rank), places[0])

    def _entries(self, path: Path, places: list[Held]) -> Iterable[tuple[object, object]]:
        by_key: dict[object, list[Held]] = {}
        for place in places:
            for key, value in place.value.items():
                by_key.setdefault(key, []).append(Held(place.file, value))
        for key, holders in by_key.items():
            inner = (*path, key)
            self._require_holders(inner, places, holders)
            if self._common and not _agree(places, holders):
                if key in STEPS:
                    self._require_one(inner, holders)
                what = "(differs between ranks; merge --take-rank R takes one's)"
                self._wholes.left.append(f"{_quoted(inner)} {what}")
                continue
            value = self.merge(inner, holders)
            if not self._common or value != {} or not holders[0].value:
                yield key, value

    def _require_holders(self, path: Path, places: list[Held], holders: list[Held]) -> None:
        """Check that no rank lacks a tensor of which it has a part; stages of a pipeline have their own."""
        first = holders[0]
        if len(holders) < len(places) and isinstance(first.value, ShardedValue):
            ranks = first.value.ranks - {place.file.rank for place in holders}
            if lacking := next((place.file for place in places if place.file.rank in ranks), None):
                raise Damaged(lacking.path, f"lacks {_quoted(path)}, of which {first.file.path} has a piece")

    def _record(self, path: Path, places: list[Held], first: Record) -> Record:
        def field(name: str) -> Any:
            return self.merge((*path, name), _with(places, (getattr(place.value, name) for place in places)))

        made = replace(first, args=field("args"), kwargs=field("kwargs"), state=field("state"))
        if first.elements or first.items:
            made.elements, made.items = field("elements"), field("items")
        return made

    # Tensors

    def _whole(self, path: Path, places: list[Held]) -> TensorRef:
        """Join a sharded tensor."""
        quoted, pieces = _quoted(path), []
        first = next(place.value for place in places if isinstance(place.value, ShardedValue))
        for file, piece in places:
            if not isinstance(piece, ShardedValue):
                raise Damaged(file.path, f"has no piece of {quoted}, and other ranks have")
            if (piece.shape, piece.dtype) != (first.shape, first.dtype):
                forms = f"as {_form(piece)}, and rank {first.rank} as {_form(first)}"
                raise Damaged(file.path, f"has a piece of {quoted} {forms}")
            if piece.rank != file.rank:
                raise Damaged(file.path, f"has pieces of rank {file.rank} and of rank {piece.rank}: {quoted}")
            pieces += [RankPiece(piece.rank, begin, tensor) for begin, tensor in piece.pieces]
        return self._wholes.tensor(_name(path), first.dtype, first.shape, pieces)

    def _replicated(self, path: Path, places: list[Held]) -> object:
        """Return a plain tensor, which should be the same on all ranks."""
        quoted, pieces = _quoted(path), []
        first = tensor_of(places[0].value)
        for file, value in places:
            tensor = tensor_of(value)
            if tensor is None or first is None:
                raise Damaged(file.path, f"{quoted} is no tensor, and other ranks have one")
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                there = places[0].file.path
                raise Damaged(file.path, f"{quoted} is {_form(tensor)}, and {_form(first)} in {there}")
            pieces.append(RankPiece(file.rank, (0,) * len(tensor.shape), tensor))
        if first is None or len(pieces) == 1:
            return places[0].value
        whole = self._wholes.tensor(_name(path), first.dtype, first.shape, pieces)
        return with_tensor(self._first(places).value, whole)

    def _require_no_pieces(self, path: Path, places: list[Held]) -> None:
        """Check that values of several forms hold no piece, as no whole would be made of it."""
        if all(isinstance(place.value, LEAVES) for place in places):
            return
        pieces = {place.file.rank: _sharded_in(path, place) for place in places}
        for here, there in permutations((place.file for place in places), 2):
            if lacking := [name for name in pieces[there.rank] if name not in pieces[here.rank]]:
                what = f"lacks '{lacking[0][:80]}', of which {there.path} has a piece"
                raise here.damaged(what, "save it on all ranks, or whole on one of them")
        first, *others = places
        if pieces[first.file.rank]:
            other = next((other for other in others if type(other.value) is not type(first.value)), others[0])
            what = f"holds {_quoted(path)} in another form than {first.file.path}"
            raise Damaged(other.file.path, f"{what}, and pieces of tensors are in it")

    # Everything else

    def _compare(self, path: Path, places: list[Held]) -> None:
        """Note values that differ; those that say the step are of two saves."""
        taken = self._first(places)
        others = [place for place in places if not same(taken.value, place.value)]
        if not others:
            return
        if path and path[-1] in STEPS:
            self._require_one(path, [taken, *others])
        ranks = ", ".join(str(other.file.rank) for other in others[:8]) + (" …" if others[8:] else "")
        what = f"of rank {ranks}, which differs from rank {taken.file.rank}'s"
        self._wholes.left.append(f"{_quoted(path)} {what}")

    def _require_one(self, path: Path, places: Sequence[Held]) -> None:
        hint = "take the files of one save, or merge --take-rank R" if self._common else HINT
        require_one(_quoted(path), places, self._numbers, hint=hint)

    def _require_one_number(self, path: Path, places: list[Held]) -> None:
        """Check those of the values that are numbers."""
        taken = self._first(places)
        in_turn = [taken, *(place for place in places if place is not taken)]
        numbers = [Held(place.file, self._numbers.of(place.value)) for place in in_turn]
        if stated := [place for place in numbers if place.value is not None]:
            self._require_one(path, stated)


def _with(places: list[Held], values: Iterable[object]) -> list[Held]:
    return [Held(place.file, value) for place, value in zip(places, values, strict=True)]


def _sharded_in(path: Path, place: Held) -> dict[str, None]:
    """Return the names of the sharded tensors within a value."""
    named = named_values(place.value, unless_sharded, MAX_NAMES + 64 * place.file.source.size)
    names = (dotted((*map(in_brief, path), *at)) for at, value in named if isinstance(value, ShardedValue))
    return dict.fromkeys(names)


def _name(path: Path) -> str:
    return dotted(tuple(map(in_brief, path)))


def _quoted(path: Path) -> str:
    return f"'{_name(path)[:80]}'"


def _form(tensor: TensorRef | ShardedValue) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _alike(records: Sequence[Record]) -> bool:
    """Return whether records were made in the same way, from as many values."""
    return len({(each.how, str(each.callable), len(each.elements), len(each.items)) for each in records}) == 1


def _agree(places: Sequence[Held], having: Sequence[Held]) -> bool:
    """Return whether an entry is the same on all ranks, or dicts that may have entries in common."""
    first, *others = (place.value for place in having)
    if len(having) < len(places):
        return False
    are_dicts = all(isinstance(place.value, dict) for place in having)
    return are_dicts or all(same(first, other) for other in others)
