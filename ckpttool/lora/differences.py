"""The best product of two thin matrices for a difference of two weights. Imports numpy.

A small matrix is decomposed whole. A larger one is passed over row by row, so that it need not fit into
memory: DᵀDQ of an orthonormal Q takes one pass, and repeating it turns Q towards the largest singular
vectors (subspace iteration: Halko, Martinsson and Tropp, SIAM Review 53, 2011). It ends when a pass hardly
adds to what the product captures of ‖D‖², which can only grow towards what an SVD captures.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.checksums import Checksums
from ..core.checkpoint.keys import stripping
from ..core.checkpoint.module_tree import EMBEDDINGS, POSITIONS, is_embedding, is_output, orientations
from ..core.checkpoint.settings import config_of
from ..core.checkpoint.special_tensors import require_plain
from ..core.checkpoint.state import State
from ..core.files.commit import Spool
from ..core.files.threads import Progress
from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, PLAIN_FLOATS, Storage, TensorRef
from ..core.tensors.rows import rows_of
from ..core.tensors.values import require_bounded, same_values
from ..core.words import counted, noted
from ..errors import NothingToDo, Refused, UsageFault
from .adapter import PREFIX

WHOLE = 1 << 20  # elements up to which a matrix is decomposed whole
HELD = 1 << 23  # elements up to which the difference stays in memory between passes
ROWS = 1 << 20  # elements of a block of rows
MORE = 16  # singular vectors that are iterated besides those that are wanted, which thus converge sooner
PASSES = 100
SLOW = 1e-6  # the part of the error's square by which a pass must reduce it to be worth another
LEAST = 1e-24  # the part of ‖D‖² that is rounding


@dataclass(slots=True)
class Difference:
    """What is between two weights, as a matrix of as many rows as the weights have."""

    base: TensorRef
    tuned: TensorRef
    _blocks: list[NDArray[Any]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows = self.base.shape[0]
        return rows, math.prod(self.base.shape[1:])

    def rows(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield blocks of rows in float64, each with its place."""
        count, columns = self.shape
        step = max(1, ROWS // columns)
        places = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
        if self._blocks:
            yield from zip(places, self._blocks, strict=True)
            return
        blocks = []
        for place in places:
            pair = (rows_of(tensor, place.start, place.stop) for tensor in (self.base, self.tuned))
            block = subtracted(*pair)
            if count * columns <= HELD:
                blocks.append(block)
            yield place, block
        self._blocks = blocks


def subtracted(base: NDArray[Any], tuned: NDArray[Any]) -> NDArray[Any]:
    """Return tuned - base; 0 where both are the same infinity or NaN."""
    with np.errstate(all="ignore"):
        same = (tuned == base) | (np.isnan(tuned) & np.isnan(base))
        return np.where(same, 0.0, tuned - base)


@dataclass(frozen=True, slots=True)
class Factors:
    """Two matrices in float32 whose product is nearest to a difference, and how near.

    Attributes:
        left: rows x rank.
        right: rank x columns.
        error: ‖D - left·right‖ / ‖D‖, in the Frobenius norm; NaN where float32 can't hold the factors.
        max_abs: the largest element of D - left·right.
    """

    left: NDArray[Any]
    right: NDArray[Any]
    error: float
    max_abs: float


def factors(difference: Difference, rank: int) -> Factors:
    """Return the factors of a rank, at most the smaller side; the singular values are shared evenly."""
    rows, columns = difference.shape
    if rows * columns <= WHOLE or 2 * (rank + MORE) >= min(rows, columns):
        whole = np.concatenate([block for _, block in difference.rows()])
        left, sizes, right = np.linalg.svd(whole, full_matrices=False)
    else:
        left, sizes, right = _largest(difference, rank)
    roots = np.sqrt(sizes[:rank])
    with np.errstate(over="ignore"):
        left = (left[:, :rank] * roots).astype("<f4")
        right = (roots[:, None] * right[:rank]).astype("<f4")
    return Factors(left, right, *_error(difference, left, right))


def _largest(difference: Difference, rank: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return singular vectors and values, of which the first `rank` are the largest."""
    rows, columns = difference.shape
    random = np.random.Generator(np.random.Philox(key=0))  # the same factors each time
    basis, _ = np.linalg.qr(random.standard_normal((columns, rank + MORE)))
    total = captured = 0.0
    for number in range(PASSES):
        image = np.zeros_like(basis)
        for _, block in difference.rows():
            image += block.T @ (block @ basis)
            total += float(np.vdot(block, block)) if not number else 0.0
        before, captured = captured, float(np.linalg.eigvalsh(basis.T @ image)[-rank:].sum())
        if captured - before <= max(SLOW * (total - captured), LEAST * total):
            break
        basis, _ = np.linalg.qr(image)
    projected = np.empty((rows, basis.shape[1]))
    for place, block in difference.rows():
        projected[place] = block @ basis
    left, sizes, right = np.linalg.svd(projected, full_matrices=False)
    return left, sizes, right @ basis.T


def _error(difference: Difference, left: NDArray[Any], right: NDArray[Any]) -> tuple[float, float]:
    """Return how far the product is from the difference: as a part of its norm, and in the worst element."""
    a, b = left.astype("<f8"), right.astype("<f8")
    missed = total = worst = 0.0
    with np.errstate(all="ignore"):
        for place, block in difference.rows():
            rest = block - a[place] @ b
            missed += float(np.vdot(rest, rest))
            total += float(np.vdot(block, block))
            worst = max(worst, float(np.abs(rest).max()))
    return math.sqrt(missed / total), worst


# ---- In which tensors two models differ, which of these can be factors of an adapter, and its settings.


class Differences:
    """Which tensors of two models differ, and which of them are the weights of layers."""

    def __init__(self, base: Checkpoint, a: State, tuned: Checkpoint, b: State) -> None:
        self.paths, self.a, self.b = (base.path, tuned.path), a.tensors, b.tensors
        self.compare = f"ckpttool diff --model-only {shlex.quote(base.path)} {shlex.quote(tuned.path)}"
        if absent := [name for name in self.a if name not in self.b]:
            hint = stripping(base.path, a, b) or stripping(tuned.path, b, a) or self.compare
            raise Refused(tuned.path, f"has no '{absent[0]}', which {base.path} has", hint=hint)
        self.modules: list[str] = []
        self.others: list[str] = []
        self.same: list[str] = []
        self.cast: list[str] = []
        self.ties: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, tensor in self.a.items():
            self.ties[tensor.view].append(name)
        for names in self.ties.values():
            self._sort(names)
        self.others += (name for name in self.b if name not in self.a)
        kinds = orientations(self.a)
        self.turned = {module for module in self.modules if self._is_turned(module, kinds)}
        self._require_one_kind()

    def _sort(self, names: list[str]) -> None:
        """Put a tensor of the base, under all of its names, where it belongs."""
        first = names[0]
        base, tuned = self.a[first], self.b[first]
        for name in names:
            other = self.b[name]
            if other.shape != base.shape:
                shapes = f"{list(base.shape)}, and {list(other.shape)} in {self.paths[1]}"
                raise Refused(self.paths[0], f"'{name}' has the shape {shapes}", hint=self.compare)
            require_bounded(name, other)
            if other.view != tuned.view and not same_values(other, tuned):
                what = f"ties '{first}' and '{name}', which are two tensors in {self.paths[1]}"
                hint = f"give each its own: ckpttool convert {shlex.quote(self.paths[0])} OUT --keep-copies"
                raise Refused(self.paths[0], what, hint=hint)
        require_bounded(first, base)
        is_layer = _is_layer(names, base, tuned)
        if not _differs(base, tuned, numbers=is_layer):
            self.same += names
        elif not is_layer:
            self.others += names
        else:
            self._require_finite(first)
            self.modules.append(first.removesuffix(".weight"))
            self.cast += [first] if base.dtype is not tuned.dtype else []

    def _require_finite(self, name: str) -> None:
        for _, block in Difference(self.a[name], self.b[name]).rows():
            if not np.isfinite(block).all():
                hint = f"see which: ckpttool verify {shlex.quote(self.paths[1])}"
                what = f"'{name}' has NaN or infinity, or differs by more than float64 holds"
                raise Refused(self.paths[1], what, hint=hint)

    def _is_turned(self, module: str, kinds: Mapping[tuple[str, bool], str]) -> bool:
        """Return whether a layer is a Conv1D, by its bias or that of a layer beside it."""
        rows, *more = self.a[f"{module}.weight"].shape
        if len(more) != 1:
            return False
        parent = module.rpartition(".")[0]
        bias = self.a.get(f"{module}.bias")
        if rows == more[0] or bias is None:
            return (parent, True) in kinds and (parent, False) not in kinds
        return bias.shape == (more[0],)

    def _require_one_kind(self) -> None:
        """Refuse square layers beside both kinds: an adapter has one setting for all."""
        matrices = [module for module in self.modules if len(self.a[f"{module}.weight"].shape) == 2]
        square = [m for m in matrices if len({*self.a[f"{m}.weight"].shape}) == 1]
        if self.turned and square and self.turned != {*matrices}:
            other = next(module for module in matrices if module not in self.turned)
            what = f"'{other}' is a Linear, others are Conv1D, and no adapter says which '{square[0]}' is"
            hint = "extract them apart: ckpttool convert TUNED PART --only GLOB, and the same of BASE"
            raise Refused(self.paths[1], f"{what}: its weight is square", hint=hint)

    def require(self, others: str | None) -> None:
        """Raise NothingToDo where no layer differs, and Refused where others do that nobody spoke of."""
        count = counted(len(self.others), "tensor")
        if not self.modules:
            what = f"{self.paths[1]}: no layer differs from {self.paths[0]}"
            do = "does" if len(self.others) == 1 else "do"
            rest = f"; {count} {do} that can't be factors" if self.others else ""
            raise NothingToDo(what + rest, hint=self.compare)
        if self.others and others is None:
            names = ", ".join(f"'{name}'" for name in self.others[:3]) + (", …" if self.others[3:] else "")
            differ = "differs" if len(self.others) == 1 else "differ"
            what = f"{count} {differ} from {self.paths[0]} and can't be factors: {names}"
            hint = "--others save puts them into the adapter whole, --others drop leaves them out"
            raise Refused(self.paths[1], what, hint=hint)

    def whole(self) -> dict[str, TensorRef]:
        """Return what the adapter holds whole, by its names behind PEFT's prefix."""
        layers = {*self.modules}
        named = {name: self.b[name] for name in self.others}
        if (tied := self._unnamed_output()) is not None:
            named["lm_head.weight"] = tied
        return {
            f"{module}.base_layer.bias" if kind == "bias" and module in layers else name: tensor
            for name, tensor in named.items()
            for module, _, kind in [name.rpartition(".")]
        }

    def _unnamed_output(self) -> TensorRef | None:
        """Return the embedding that an output layer without a name of its own may be tied to."""
        if config_of(self.paths[0]).get("tie_word_embeddings") is False or any(map(is_output, self.b)):
            return None
        return next((self.b[name] for name in self.others if is_embedding(name)), None)

    def config(self, rank: int, ranks: Mapping[str, int], whole: Mapping[str, TensorRef]) -> dict[str, Any]:
        """Return the settings of the adapter; alpha is the rank, so that nothing is scaled."""
        modules = {name.rpartition(".")[0] for name in whole if ".base_layer." not in name}
        settings: dict[str, Any] = {
            "peft_type": "LORA",
            "base_model_name_or_path": None,
            "task_type": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "target_modules": [*ranks],
            "fan_in_fan_out": bool(self.turned),
            "bias": "lora_only" if any(".base_layer." in name for name in whole) else "none",
            "modules_to_save": sorted(filter(None, modules)) or None,
            "init_lora_weights": True,
        }
        views = [tensor.view for tensor in whole.values()]
        if len({*views}) < len(views):
            settings["ensure_weight_tying"] = True
        usual = patterns(rank, ranks)
        return settings | {"rank_pattern": usual, "alpha_pattern": usual}


def patterns(usual: float, ranks: Mapping[str, float]) -> dict[str, float]:
    """Return the ranks of layers that have another. A key fits names that end in it; the first one wins."""
    lowered = {name for name, each in ranks.items() if each != usual}
    ends = {-len(name) for name in lowered}

    def is_fitted(name: str) -> bool:
        return any(name[end:] in lowered and name[end - 1 : end] in (".", "") for end in ends)

    needed = filter(is_fitted, ranks)
    return {name: ranks[name] for name in sorted(needed, key=len, reverse=True)}


def _is_layer(names: Iterable[str], *tensors: TensorRef) -> bool:
    """Return whether a tensor is the weight of a linear layer or a convolution, under all its names."""
    sizes = tensors[0].shape
    if len(sizes) < 2 or not prod(sizes) or any(tensor.dtype.name not in PLAIN_FLOATS for tensor in tensors):
        return False
    modules = [name.removesuffix(".weight").rpartition(".")[2] for name in names if name.endswith(".weight")]
    embeddings = (module in EMBEDDINGS | POSITIONS or "embed" in module for module in modules)
    return len(modules) == len([*names]) and not any(embeddings)


def _differs(base: TensorRef, tuned: TensorRef, *, numbers: bool) -> bool:
    """Return whether two tensors differ, bit for bit or as numbers."""
    if not numbers or base.dtype is tuned.dtype:
        is_same = same_values(base, tuned)
        if is_same or not numbers:
            return not is_same
    return any(block.any() for _, block in Difference(base, tuned).rows())


# ---- A LoRA adapter made of what lies between a model and the one it was trained from: `merge_lora`
# backwards.
#
# The weight of each layer gets the product of two thin matrices that is nearest to its difference. What
# can't be one (norms, biases, embeddings, parameters outside of layers) goes whole into the adapter, or
# is left out, as the caller says. Source: PEFT's `LoraConfig`, `tuners/lora/layer.py` and
# `utils/save_and_load.py`, 0.21.


OTHERS = ("save", "drop")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that got factors.

    Attributes:
        name: the module's.
        shape: of its weight.
        rank: of its factors, at most the smaller side of the weight as a matrix.
        error: ‖ΔW - B·A‖ / ‖ΔW‖, Frobenius.
        max_abs: the largest element of |ΔW - B·A|.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    error: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class Extracted:
    """What an adapter was made of.

    Attributes:
        rank: as asked for.
        layers: those that got factors.
        lowered: names of layers whose smaller side is less than the rank, and is their rank.
        same: names of tensors that do not differ.
        saved: names of tensors that can't be factors, and are in the adapter whole.
        dropped: names of those that differ, and are not in the adapter.
        cast: names of layers whose weight has another type in the tuned model: a merge has the base's.
        config: what `adapter_config.json` says.
    """

    rank: int
    layers: tuple[Layer, ...]
    same: tuple[str, ...]
    config: Mapping[str, Any] = field(metadata={"json": None})
    lowered: tuple[str, ...] = noted("of the rank of their smaller side, which is less")
    saved: tuple[str, ...] = noted("whole in the adapter")
    dropped: tuple[str, ...] = noted("left out, though they differ")
    cast: tuple[str, ...] = noted("of other types in the two models: a merge has BASE's")

    @property
    def worst(self) -> Layer:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error)


@takes_checkpoint
def extract_lora(
    checkpoint: Checkpoint,
    tuned: Checkpoint,
    rank: int,
    *,
    others: str | None = None,
    state: str | None = None,
    verify: bool | None = None,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> tuple[Checkpoint, Extracted]:
    """Return the LoRA adapter of a rank that comes closest to turning the base into the tuned model.

    Factors are computed in float64, one layer at a time, and kept as float32 in a temporary file. Errors are
    those of the stored factors. Both models must stay open until the adapter is saved.

    Args:
        checkpoint: the base model.
        tuned: the model that was trained from it.
        rank: of the factors, at least 1.
        others: what becomes of tensors that differ and can't be factors: `save` puts them into the adapter
            whole, `drop` leaves them out; they are refused when None.
        state: dotted path of the model's state in both; found when None.
        verify: False: do not compare what is read with the checksums that its file states.
        progress: called with the number of bytes of each weight that was decomposed.
        expect: called first, with the number of bytes of all of them.

    Returns:
        The adapter under PEFT's names, which `save_adapter` writes, and what it was made of.

    Raises:
        UsageFault: `rank` or `others` is none.
        NothingToDo: no layer differs.
        Refused: names or shapes differ; a difference is not finite; tensors differ that can't be factors.
        NoState: there is no state in one of both, or none at `state`.
        Damaged: what was read does not have its checksum.

    Example:
        >>> with ckpttool.open("model.safetensors") as base, ckpttool.open("tuned.safetensors") as tuned:
        ...     adapter, extracted = ckpttool.extract_lora(base, tuned, 1)
        ...     sorted(adapter.state())
        ['base_model.model.0.lora_A.weight', 'base_model.model.0.lora_B.weight']
    """
    if rank < 1:
        raise UsageFault(f"--rank {rank} is less than 1")
    if others not in (None, *OTHERS):
        raise UsageFault(f"others='{others}': is neither save nor drop")
    states = checkpoint.state(state), tuned.state(state)
    for each, chosen in zip((checkpoint, tuned), states, strict=True):
        require_plain(each.path, chosen.likes, "can't be compared")
    found = _compared((checkpoint, tuned), states, verify)
    found.require(others)
    spool = Spool("the factors")
    layers, tensors = [], {}
    if expect is not None:
        expect(sum(states[0].tensors[f"{module}.weight"].nbytes for module in found.modules))
    for module in found.modules:
        base, other = (each.tensors[f"{module}.weight"] for each in states)
        of_layer = min(rank, base.shape[0], prod(base.shape[1:]))
        made = factors(Difference(base, other), of_layer)
        if not isfinite(made.error):
            what = f"'{module}.weight' differs from {checkpoint.path} by more than factors of float32 hold"
            raise Refused(tuned.path, what)
        pair = _pair(base, made.left, made.right, turned=module in found.turned)
        for letter, values in pair.items():
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = _kept(values, spool)
        layers.append(Layer(module, base.shape, of_layer, made.error, made.max_abs))
        if progress is not None:
            progress(base.nbytes)
    whole = found.whole() if others == "save" else {}
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    report = Extracted(
        rank,
        tuple(layers),
        tuple(found.same),
        lowered=tuple(layer.name for layer in layers if layer.rank < rank),
        saved=tuple(found.others) if others == "save" else (),
        dropped=tuple(found.others) if others == "drop" else (),
        cast=tuple(found.cast),
        config=found.config(rank, {layer.name: layer.rank for layer in layers}, whole),
    )
    adapter = Checkpoint(
        tuned.source, "safetensors", tensors, metadata={"format": "pt"}, shards=checkpoint.sources
    )
    return adapter, report


def _compared(
    checkpoints: tuple[Checkpoint, Checkpoint], states: tuple[State, State], verify: bool | None
) -> Differences:
    """Return where the second model differs, of files that have their checksums."""
    (base, tuned), (a, b) = checkpoints, states
    read = [() if verify is False else [(n, t.storage) for n, t in each.items()] for each in states]
    with Checksums(base, read[0]) as of_base, Checksums(tuned, read[1]) as of_tuned:
        found = Differences(base, a, tuned, b)
        of_base.finish()
        of_tuned.finish()
    return found


def _pair(
    weight: TensorRef, left: NDArray[Any], right: NDArray[Any], *, turned: bool
) -> dict[str, NDArray[Any]]:
    """Return the factors A and B as PEFT has them for a layer of this weight."""
    if turned:
        return {"A": left.T, "B": right.T}
    rank, more = len(right), weight.shape[2:]
    return {
        "A": right.reshape(rank, *weight.shape[1:]),
        "B": left.reshape(len(left), rank, *(1 for _ in more)),
    }


def _kept(values: NDArray[Any], spool: Spool) -> TensorRef:
    """Return an array of float32 as a tensor in a temporary file."""
    data = spool.append(np.ascontiguousarray(values).tobytes())
    return TensorRef.contiguous(Storage(data, "FloatStorage"), DTYPES["float32"], values.shape)
