"""The training step that the files of ranks state: one number, in whatever form, in all files of one save."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...checkpoint.optimizer_view import OptimizerView, is_optimizer
from ...checkpoint.ranks import HINT
from ...inert_pickle.values import Record, in_brief, tensor_of
from ...tensors.ref import TensorRef
from ...tensors.values import MAX_EXPANSION, in_pieces, stream
from .pieces import RankFile
from .sharded_values import ShardedValue

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
