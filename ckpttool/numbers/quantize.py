"""Make packed tensors plain, and plain ones fp8; values are computed on writing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.module_tree import EMBEDDINGS, POSITIONS, orientations
from ..core.checkpoint.selection import cast, replace_state
from ..core.checkpoint.settings import require_unpacked
from ..core.checkpoint.special_tensors import require_plain, with_plain_tensor
from ..core.checkpoint.state import State
from ..core.lazy import NDArray, np
from ..core.tensors.cast import Caster, CastReports
from ..core.tensors.ref import DTYPES, PLAIN_FLOATS, Computed, DType, TensorRef
from ..errors import CkptToolError, Collision, NothingToDo, Refused, UsageFault
from ..rooms import need
from .formula import Field, Grid, Sizes, boxes_in, elements, numbers
from .integers import levels_of
from .lookup import rounded_to_fp8
from .recognise import PackedState, recognise, unknown, without_packing
from .settings import packing_beside


@dataclass(frozen=True, slots=True)
class Dequantized:
    """What became plain.

    Attributes:
        dequantized: how tensors were packed, in words -> how many of them were.
        left_out: names of scales of activations and the like, which a plain model has not.
        settings: the file beside the checkpoint that says how it is packed; "" where there is none.
        casting: which numbers became infinite or 0, complete once the result is saved.
    """

    dequantized: Mapping[str, int]
    left_out: tuple[str, ...]
    settings: str
    casting: CastReports = field(metadata={"json": None})


@takes_checkpoint
def dequantize(
    checkpoint: Checkpoint, *, dtype: DType | None = None, state: str | None = None
) -> tuple[Checkpoint, Dequantized]:
    """Return a checkpoint with the packed tensors of its state as plain ones; others stay.

    Values are those that the library of each scheme computes. They are made when they are written, and those
    of a GGUF are plain already.

    Args:
        checkpoint: the checkpoint; it stays as it is. A `config.json` beside it says how it is packed.
        dtype: the type of all floating-point tensors; None gives each packed one the type that its library
            returns, and leaves the others.
        state: dotted path of the model's state; found when None.

    Raises:
        NothingToDo: no tensor is packed.
        Refused: parts of a tensor are missing or do not fit; once it is written, a scale is no number.
        Unsupported: the scheme is none of those known here.
        Collision: the plain tensor's name is taken.
        Damaged: the settings beside the file are no JSON.
        NoState: there is no state, or none at `state`.
    """
    target = checkpoint.state(state)
    found = recognise(checkpoint, target)
    if found.faults:
        raise found.faults[0]
    if not found.groups and not checkpoint.packed:
        raise _nothing(checkpoint.path, found)
    casters: dict[DType, Caster] = {}
    plain: dict[str, tuple[str, object]] = {}  # name of the part whose place it takes -> name, tensor
    made: dict[tuple[object, ...], TensorRef] = {}
    gone = {*found.unused, *(part for group in found.groups for part in group.parts)}
    for group in found.groups:
        to = dtype or group.dtype
        if group.name in target.container and group.name not in group.parts:
            raise Collision(f"'{group.parts[0]}' would become '{group.name}', which already exists")
        tensor = group.tensor(casters.setdefault(to, Caster(to)))
        form = group.scheme, to.name, group.shape, *(_identity(target, part) for part in group.parts)
        plain[group.parts[0]] = group.name, made.setdefault(form, tensor)  # what was tied stays tied

    def change(old: dict[object, object]) -> dict[object, object]:
        stay = ((key, value) for key, value in old.items() if key not in gone or key in plain)
        return dict(plain.get(str(key), (key, value)) for key, value in stay)

    new, reports = replace_state(checkpoint, target, change), [caster.report for caster in casters.values()]
    new = replace(new, metadata=without_packing(checkpoint.metadata))
    if dtype is not None:
        with suppress(NothingToDo):  # the others have that type already
            new, report = cast(new, dtype, state=state)
            reports.append(report)
    schemes = Counter(group.scheme for group in found.groups)
    if checkpoint.packed:
        known = need("gguf.reading").PACKED_NAMES
        schemes.update({kind: count for kind, count in checkpoint.packed.items() if kind in known})
    return new, Dequantized(schemes, found.unused, found.settings.path, CastReports(reports=reports))


def _identity(state: State, name: str) -> object:
    """Return a key that the parts of tied packed tensors share."""
    tensor = state.tensors.get(name)
    return id(state.container.get(name)) if tensor is None else tensor.view


def _nothing(path: str, found: PackedState) -> CkptToolError:
    if found.bare:
        hint = f"they are plain numbers, so cast them: --dtype bf16 (the first is '{found.bare[0][:80]}')"
        return NothingToDo(f"{path}: its 8-bit floats have no scales", hint=hint)
    nothing = NothingToDo(f"{path}: no tensor is quantised")
    return next(unknown(path, packing_beside(path)), nothing)


# ---- fp8 (e4m3) with scales, as vLLM and transformers load it
#
# A scale is the largest magnitude over 448, in float32, of a tensor, a row, or a block of 128 × 128; an
# element is divided by it and rounded once. Sources: DeepSeek-V3's `weight_scale_inv` and
# `weight_block_size`, which vLLM's and transformers' method `fp8` read; for the other two compressed-
# tensors' `float-quantized`.


FP8, FLOAT = DTYPES["float8_e4m3fn"], DTYPES["float32"]
LARGEST = 448.0  # of e4m3
LEAST = 2.0**-126  # of a scale: the reciprocal of a subnormal one is infinite
BLOCK, PIECE = 128, 1 << 17  # the sides of a block, and elements worked on at a time
SMALLEST = 64  # rows and columns of a matrix that is worth scales

# The sizes of a block of each scheme along rows and columns; None for all of them.
SCHEMES: Mapping[str, tuple[int | None, int | None]] = {
    "fp8": (None, None),
    "fp8-channel": (1, None),
    "fp8-block": (BLOCK, BLOCK),
}

# Modules whose matrices stay, whoever quantises: the output, and what chooses experts.
KEPT = {"lm_head", "output", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate"}


@dataclass(slots=True)
class Error:
    """How far a tensor's numbers are from their codes'; complete once the codes are written."""

    largest: float = 0.0
    _squares: float = 0.0
    _of: float = 0.0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def relative(self) -> float:
        """The root of the mean square of the error, over that of the numbers."""
        return math.sqrt(self._squares / self._of) if self._of else 0.0

    def note(self, exact: NDArray[Any], off: NDArray[Any]) -> None:
        """Count numbers in, and how far off they are. Several threads may call this at once."""
        largest = float(np.abs(off).max(initial=0))
        squares, of = (float(np.square(each, dtype="<f8").sum()) for each in (off, exact))
        with self._lock:
            self.largest = max(self.largest, largest)
            self._squares += squares
            self._of += of


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was quantised.

    Attributes:
        quantization_config: the section of that name which config.json must have.
        left_plain: names of matrices and larger tensors that stay as they are.
        errors: name of each quantised tensor -> its error, known once the result is saved.
    """

    quantization_config: Mapping[str, object]
    left_plain: tuple[str, ...] = field(metadata={"note": "not quantised"})
    errors: Mapping[str, Error] = field(metadata={"json": None})


@takes_checkpoint
def quantize(
    checkpoint: Checkpoint, scheme: str, *, state: str | None = None
) -> tuple[Checkpoint, Quantized]:
    """Return a checkpoint with the matrices of its layers in fp8, each with its scales behind it.

    Embeddings, the output layer, routers, GPT-2's Conv1D and matrices of fewer than 64 rows or columns stay,
    and so does what is tied to one of them. Other ties stay ties.
    The largest magnitudes are read when the first code or scale is written.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        scheme: `fp8` for a scale per tensor, `fp8-channel` per row, `fp8-block` per 128 × 128.
        state: dotted path of the model's state; found when None.

    Raises:
        UsageFault: there is no such scheme.
        NothingToDo: no matrix is to be quantised.
        Refused: a tensor is packed already; or once it is written, a matrix holds a NaN, an infinity or more
            than float32 does.
        Collision: the name of a scale is taken.
        NoState: there is no state, or none at `state`.
    """
    if scheme not in SCHEMES:
        raise UsageFault(f"'{scheme}' is no scheme", hint=f"one of {', '.join(SCHEMES)}")
    target = checkpoint.state(state)
    require_plain(checkpoint.path, target.likes, "can't be quantised")
    require_unpacked(checkpoint, target, "nothing would say of which scheme each tensor is")
    turned = {parent for parent, is_turned in orientations(target.tensors) if is_turned}
    stays = {t.view for name, t in target.tensors.items() if not _is_chosen(name, t, turned)}
    matrices = {name: tensor for name, tensor in target.tensors.items() if tensor.view not in stays}
    made = {t.view: _Matrix(name, t, SCHEMES[scheme]) for name, t in reversed(matrices.items())}
    chosen = {name: made[tensor.view] for name, tensor in matrices.items()}  # tied ones share them
    if not chosen:
        what = f"no matrix of a linear layer, of {SMALLEST} rows and columns or more, is of a float type"
        raise NothingToDo(f"{checkpoint.path}: {what}")
    end = "_scale_inv" if scheme == "fp8-block" else "_scale"
    for name in chosen:
        if f"{name}{end}" in target.container:
            raise Collision(f"'{name}{end}' would hold the scales of '{name}', but already exists")

    def entries(old: dict[Any, Any]) -> Iterator[tuple[Any, object]]:
        for key, value in old.items():
            if (matrix := chosen.get(str(key))) is None:
                yield key, value
            else:
                yield key, with_plain_tensor(value, matrix.codes)
                yield f"{key}{end}", matrix.scales

    new = replace_state(checkpoint, target, lambda old: dict(entries(old)))
    kept = tuple(n for n, t in target.tensors.items() if n not in chosen and len(t.shape) > 1)
    errors = {name: matrix.error for name, matrix in chosen.items()}
    return new, Quantized(_config(scheme, kept), kept, errors)


def _is_chosen(name: str, tensor: TensorRef, turned: Collection[str]) -> bool:
    """Return whether a tensor is the matrix of a linear layer, and not of a Conv1D beside others of them."""
    path, _, end = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    is_matrix = len(tensor.shape) == 2 and min(tensor.shape) >= SMALLEST and tensor.dtype.name in PLAIN_FLOATS
    is_kept = module in EMBEDDINGS | POSITIONS | KEPT or "emb" in module or parent in turned
    return is_matrix and end == "weight" and not is_kept


def _config(scheme: str, kept: tuple[str, ...]) -> dict[str, object]:
    """Return the settings by which vLLM and transformers know the scheme."""
    # An output layer that is tied stands in no file; transformers would make a quantised one, of nothing.
    modules = [*dict.fromkeys([*(name.removesuffix(".weight") for name in kept), "lm_head"])]
    if scheme == "fp8-block":
        how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return {**how, "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": modules}
    each = {"num_bits": 8, "type": "float", "symmetric": True}
    by_row = scheme == "fp8-channel"
    weights = {**each, "strategy": "channel" if by_row else "tensor", "dynamic": False}
    inputs = {**each, "strategy": "token" if by_row else "tensor", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": modules}
    return {**said, "quantization_status": "compressed", "config_groups": {"group_0": group}}


class _Matrix:
    """A matrix as codes and scales, both made when they are read."""

    def __init__(self, name: str, tensor: TensorRef, block: tuple[int | None, int | None]) -> None:
        self.tensor, self.name, self.error = tensor, name, Error()
        self.block: Sizes = tuple(size or n for size, n in zip(block, tensor.shape, strict=True))
        self.shape: Sizes = tuple(-(-n // size) for n, size in zip(tensor.shape, self.block, strict=True))
        self._numbers, self._lock = numbers(elements(tensor)), Lock()
        self._is_one = block == (None, None)

    @cached_property
    def codes(self) -> TensorRef:
        """Return the matrix in fp8."""
        return self._made(FP8, self.tensor.shape, self._fill)

    @cached_property
    def scales(self) -> TensorRef:
        """Return the scales in float32: one, one per row, or one per block."""

        def fill(start: int, out: memoryview) -> None:
            out[:] = memoryview(self._scales.tobytes())[start : start + len(out)]

        return self._made(FLOAT, (1,) if self._is_one else self.shape, fill)

    def _made(self, dtype: DType, shape: Sizes, fill: Any) -> TensorRef:
        origin = self.tensor.storage
        data = Computed.filling(origin.data.path, math.prod(shape) * dtype.itemsize, fill)
        return TensorRef.of_bytes(data, dtype, shape, origin, location=origin.location)

    @property
    def _scales(self) -> Any:
        with self._lock:  # the first of several threads reads the matrix
            return self._found

    @cached_property
    def _found(self) -> NDArray[Any]:
        largest = np.zeros(self.shape, "<f4")
        for begin, size in boxes_in(self.tensor.shape, 0, self.tensor.numel, PIECE):
            values = np.abs(self._numbers.read(begin, size))
            first = [at // block for at, block in zip(begin, self.block, strict=True)]
            for axis in (1, 0):  # along rows first, which numpy does fifteen times as fast
                at, n, block = begin[axis], size[axis], self.block[axis]
                starts = np.maximum(np.arange(first[axis] * block, at + n, block) - at, 0)
                values = np.maximum.reduceat(values, starts, axis)
            place = largest[_box(first, values.shape)]
            np.maximum(place, values, out=place)
        if not np.isfinite(largest).all():
            what = f"'{self.name[:200]}' holds a NaN, an infinity or more than float32 does: no scale helps"
            raise Refused(self.tensor.storage.data.path, what)
        scales: NDArray[Any] = np.maximum(largest / np.float32(LARGEST), np.float32(LEAST))
        scales[largest == 0] = 1
        return scales

    def _fill(self, start: int, out: memoryview) -> None:
        scales = self._scales
        origins = (self.tensor.storage,)
        field = Field(self.shape, lambda begin, size: scales[_box(begin, size)], origins, FLOAT)
        grid = Grid(self.name, field, self.block)
        codes, levels = np.frombuffer(out, np.uint8), levels_of(FP8)
        for begin, size in boxes_in(self.tensor.shape, start, len(codes), PIECE):
            exact = self._numbers.read(begin, size)
            values = exact.copy()
            grid.apply(np.divide, values, begin)
            made, codes = codes[: exact.size].reshape(size), codes[exact.size :]
            rounded_to_fp8(values, made)
            levels(made, values)
            grid.apply(np.multiply, values, begin)
            self.error.note(exact, np.subtract(values, exact, out=values))


def _box(begin: Iterable[int], size: Sizes) -> tuple[slice, ...]:
    return tuple(slice(i, i + n) for i, n in zip(begin, size, strict=True))
