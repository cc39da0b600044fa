"""A LoRA adapter made of what lies between a model and the one it was trained from: `merge_lora` backwards.

The weight of each layer gets the product of two thin matrices that is nearest to its difference. What can't
be one (norms, biases, embeddings, parameters outside of layers) goes whole into the adapter, or is left out,
as the caller says. Source: PEFT's `LoraConfig`, `tuners/lora/layer.py` and `utils/save_and_load.py`, 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.checksums import Checksums
from ...checkpoint.special_tensors import require_plain
from ...checkpoint.state import State
from ...contract import noted
from ...errors import Refused, UsageFault
from ...files.pieces import Progress
from ...files.spool import Spool
from ...lazy import NDArray, np
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Storage, TensorRef
from .adapter import PREFIX
from .differences import Differences
from .low_rank import Difference, factors

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
    adapter = Checkpoint(tuned.source, "safetensors", tensors, metadata={"format": "pt"})
    return adapter, report


def _compared(
    checkpoints: tuple[Checkpoint, Checkpoint], states: tuple[State, State], verify: bool | None
) -> Differences:
    """Return where the second model differs, of files that have their checksums."""
    with ExitStack() as stack:
        sums = [
            stack.enter_context(Checksums(each, ((n, t.storage) for n, t in chosen.items())))
            for each, chosen in zip(checkpoints, states, strict=True)
            if verify is not False
        ]
        found = Differences(checkpoints[0], states[0], checkpoints[1], states[1])
        for each_sum in sums:
            each_sum.finish()
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
