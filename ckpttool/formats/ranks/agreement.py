"""The training step that the files of ranks state: one number, in whatever form, in all files of one save."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...checkpoint.flat_optimizers import as_nested
from ...checkpoint.ranks import HINT
from ...checkpoint.states import is_optimizer
from ...errors import Damaged
from ...inert_pickle.values import Record, in_brief, tensor_of
from ...tensors.ref import TensorRef
from ...tensors.values import MAX_EXPANSION, in_pieces, stream
from .pieces import RankFile
from .sharded_values import Sharded

# The most bytes of a tensor that `same` reads although its checksum is known.
SMALL = 1 << 16

# Elements of two tensors that `same` compares at a time.
BLOCK = 1 << 18


def same(first: object, second: object) -> bool:
    """Return whether two values are the same, to the type; NaN is the same as NaN."""
    # Tensors are by dtype, shape and bytes, on whatever device they were. Of those of more than 64 KiB the
    # checksums are compared instead where both files state them. Those that repeat their elements very often
    # count as different.
    stack, seen = [(first, second)], set[tuple[int, int]]()
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            return False
        if isinstance(a, dict) and isinstance(b, dict):
            if list(a) != list(b):
                return False
            stack.extend(zip(a.values(), b.values(), strict=True))
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
            if len(a) != len(b):
                return False
            stack.extend(zip(a, b, strict=True))
        elif isinstance(a, Record) and isinstance(b, Record):
            fields = ("how", "callable", "args", "kwargs", "state", "elements", "items")
            stack.extend((getattr(a, name), getattr(b, name)) for name in fields)
        elif isinstance(a, TensorRef) and isinstance(b, TensorRef):
            if not _same_tensor(a, b):
                return False
        elif not (a == b or (a != a and b != b)):
            return False
    return True


def _same_tensor(one: TensorRef, other: TensorRef) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    both = one, other
    sums = {tensor.storage.crc32 for tensor in both}
    if one.nbytes > SMALL and None not in sums and all(is_whole(tensor) for tensor in both):
        return len(sums) == 1
    if any(tensor.nbytes > tensor.storage.nbytes + MAX_EXPANSION for tensor in both):
        return False
    pieces = zip(
        in_pieces(one, BLOCK * one.dtype.part), in_pieces(other, BLOCK * one.dtype.part), strict=True
    )
    return all(a == b for a, b in pieces)


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
    value: object


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
        if isinstance(value, Sharded) and len(value.pieces) == 1:
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
        found = numbers.of(other.value)
        if wanted is None or found is None:
            if same(first.value, other.value):
                continue
        elif found == wanted or (found != found and wanted != wanted):
            continue
        there = first.file.source.path
        said = f"holds other values as {what} than {there}"
        if not any(_is_unshown(place.value, number) for place, number in ((first, wanted), (other, found))):
            said = f"{what} is {_shown(other.value, found)}, and {_shown(first.value, wanted)} in {there}"
        raise Damaged(other.file.source.path, f"is of another save: {said}", hint=hint)


def _is_unshown(value: object, number: Number | None) -> bool:
    return number is None and (tensor_of(value) is not None or isinstance(value, Sharded))


def _shown(value: object, number: Number | None) -> str:
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return in_brief(value if number is None else number)[:80]


def step_of(files: Sequence[RankFile]) -> int | None:
    """Return the step that the optimizers of the files state; None where none does."""
    # Parameters that were left out of some steps have made fewer: a file's step is the largest in it.
    numbers = Numbers()
    stated = [Held(file, max(steps)) for file in files if (steps := [*_steps(file.tree, numbers)])]
    if stated:
        require_one("its optimizer's step", stated, numbers)
    return int(stated[0].value) if stated else None  # type: ignore[call-overload]


def _steps(tree: Any, numbers: Numbers) -> Iterator[int]:
    """Yield the steps in a file's optimizers, which lie at its top or one level below."""
    inside: Iterable[Any] = tree.values() if isinstance(tree, dict) else ()
    for optimizer in (each for each in (tree, *inside) if is_optimizer(each)):
        state = as_nested(optimizer)["state"]
        for entry in state.values() if isinstance(state, dict) else ():
            step = numbers.of(entry.get("step")) if isinstance(entry, dict) else None
            if isinstance(step, int) or (step is not None and step.is_integer()):  # not NaN
                yield int(step)
