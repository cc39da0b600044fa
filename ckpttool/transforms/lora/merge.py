"""Add a LoRA adapter to the model that it was trained on, as PEFT's `merge_and_unload` does.

A weight W of a layer gets W + scale · B·A, with scale = alpha / r, or alpha / √r with rslora; embeddings and
layers of `fan_in_fan_out` (Conv1D) get the transposed product. What the adapter holds whole is copied into
the model's own, in the model's type. Source: PEFT's `LoraConfig`, `tuners/lora/layer.py` and
`utils/save_and_load.py`, 0.21.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.rebuilt_tensors import with_plain_tensor
from ...checkpoint.special_tensors import require_plain
from ...checkpoint.state import State
from ...errors import Damaged, Refused, Unsupported
from ...inert_pickle.values import remade
from ...tensors.cast import Caster
from ...tensors.ref import TensorRef
from ..selection import replace_state
from .adapter import CONFIG, IN_PYTHON, Adapter
from .low_rank import Update, updated

FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Merged:
    """What an adapter changed.

    Attributes:
        updated: names of the weights that a product was added to.
        replaced: names of tensors that the adapter holds whole, as `modules_to_save` and biases.
        cast: those of them that the adapter has in another type than the model, which keeps its own.
        added: names that only the adapter has.
    """

    updated: tuple[str, ...]
    replaced: tuple[str, ...]
    cast: tuple[str, ...]
    added: tuple[str, ...]


@takes_checkpoint
def merge_lora(
    checkpoint: Checkpoint, adapter: Adapter, *, state: str | None = None
) -> tuple[Checkpoint, Merged]:
    """Return a checkpoint in which an adapter's updates are added to the weights.

    Values are computed in float64 when they are written, a few rows at a time, and rounded once to the
    weight's type. Tensors that share the memory of an updated one stay tied to it.

    Args:
        checkpoint: the base model; it stays as it is.
        adapter: what `open_adapter` returned; open until the result is saved.
        state: dotted path of the model's state; found when None.

    Raises:
        Unsupported: the adapter is no LoRA, or of a kind that computes something else, such as DoRA.
        Refused: a tensor of it has no place in the model, or does not fit it.
        Damaged: one of two factors is missing, or has another rank than the configuration says.
        NoState: there is no state, or none at `state`.
    """
    found = checkpoint.state(state)
    require_plain(checkpoint.path, found.likes, "can't be added to")
    merging = _Merging(checkpoint, found, adapter)
    new = replace_state(checkpoint, found, merging.container)
    return new, merging.report


class _Merging:
    """Pairs the tensors of an adapter with those of a model.

    Args:
        checkpoint: the base.
        state: of the model in it.
        adapter: the adapter.
    """

    def __init__(self, checkpoint: Checkpoint, state: State, adapter: Adapter) -> None:
        self.adapter, self.path, self.config = adapter, adapter.checkpoint.path, adapter.config
        self.state, self.base = state, checkpoint.path
        adapter.require_known()
        factors, self.whole = adapter.parts()
        self._against: str | None = None
        self._square: str | None = None
        self._beside = _orientations(state.tensors)
        self.updates = {f"{module}.weight": self._update(module, those) for module, those in factors.items()}
        self._require_places()
        held = state.tensors
        replaced = tuple(name for name in self.whole if name in held)
        self.report = Merged(
            tuple(self.updates),
            replaced,
            tuple(name for name in replaced if held[name].dtype is not self.whole[name].dtype),
            tuple(name for name in self.whole if name not in held),
        )

    def _update(self, module: str, those: Mapping[str, TensorRef]) -> Update:
        names = ("embedding_A", "embedding_B") if "embedding_A" in those else ("A", "B")
        if {*those} != {*names}:
            raise Damaged(self.path, f"holds one of both factors of '{module[:80]}'")
        a, b = (those[name] for name in names)
        rank = self.adapter.setting("rank_pattern", "r", module)
        if not a.shape or len(b.shape) < 2 or a.shape[0] != rank or prod(b.shape[1:]) != rank:
            raise Damaged(
                self.path,
                f"has factors of '{module[:80]}' of shapes {list(a.shape)} and {list(b.shape)}, and {CONFIG} "
                f"says rank {rank}",
            )
        if {a.dtype.name, b.dtype.name} - {*FLOATS}:
            raise Unsupported(self.path, f"has factors of '{module[:80]}' of type {a.dtype.name}")
        alpha = self.adapter.setting("alpha_pattern", "lora_alpha", module)
        turned = "embedding_A" in those or self._is_turned(module, prod(a.shape[1:]), b.shape[0])
        return Update(a, b, alpha / (sqrt(rank) if self.config.get("use_rslora") else rank), turned)

    def _is_turned(self, module: str, columns: int, rows: int) -> bool:
        """Return whether a product fits a weight of two axes transposed, which the shape says unless square.

        PEFT tells Conv1D from Linear layer by layer, and saves what the last of them was for all.
        """
        said = bool(self.config.get("fan_in_fan_out"))
        weight = self.state.tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            return False  # a convolution's never is
        if rows == columns:
            self._square = self._square or module
            self._against = self._against or self._beside.get((module.rpartition(".")[0], not said))
            return said
        found = weight.shape == (columns, rows)
        if found is not said and weight.shape in ((columns, rows), (rows, columns)):
            self._against = self._against or module
        return found

    def _require_places(self) -> None:
        tensors = self.state.tensors
        saved = self.adapter.saved_modules()
        for name, update in self.updates.items():
            weight = tensors.get(name)
            if weight is None:
                raise self._missing(name, "weight")
            if weight.dtype.name not in FLOATS:
                raise self._misfit(name, f"the weight is {weight.dtype.name}")
            sizes = (weight.shape[0], prod(weight.shape[1:])) if weight.shape else ()
            if sizes != update.sizes:
                raise self._misfit(name, f"{list(update.sizes)} is to be added to {list(weight.shape)}")
        for name, tensor in self.whole.items():
            old = tensors.get(name)
            if old is None and not any(f".{name}".rpartition(".")[0].endswith(f".{each}") for each in saved):
                raise self._missing(name, "tensor")
            if old is not None and old.shape != tensor.shape:
                raise self._misfit(
                    name, f"its shape is {list(tensor.shape)}, and {list(old.shape)} in the model"
                )
            types = {each.dtype.name for each in (tensor, old or tensor)}
            if len(types) > 1 and types - {*FLOATS}:
                raise self._misfit(name, f"its type is {tensor.dtype.name}, and the model's another")
        if self._against and self._square:
            raise Unsupported(
                self.path,
                f"does not say whether the product of '{self._square[:80]}' is transposed: its weight is "
                f"square, and '{self._against[:80]}' is not as fan_in_fan_out in {CONFIG} says",
                hint=IN_PYTHON,
            )
        changed: dict[tuple[object, ...], str] = {}
        for name in (*self.updates, *(name for name in self.whole if name in tensors)):
            other = changed.setdefault(tensors[name].view, name)
            if other != name:
                raise self._misfit(
                    name, f"the model ties it to '{other[:80]}', which the adapter changes too"
                )

    def _missing(self, name: str, kind: str) -> Refused:
        """Return the error for a name that the model does not have, with what may be the cause."""
        reason, names = f"the model has no such {kind}", list(self.state.tensors)
        longer = next((each for each in names if each.endswith(f".{name}")), name)
        prefix = longer.removesuffix(name)
        if prefix and all(each.startswith(prefix) for each in names):
            base = shlex.quote(self.base)
            hint = (
                f"take its prefix off first: ckpttool strip-prefix {base} OUT --prefix {shlex.quote(prefix)}"
            )
            return self._misfit(name, f"{reason}; it has '{longer[:80]}'", hint)
        if f".{name}".endswith(".lm_head.weight"):
            hint = "save the model with an output layer of its own (config: tie_word_embeddings = false)"
            return self._misfit(name, f"{reason}, and may tie its output layer to the embeddings", hint)
        return self._misfit(name, reason)

    def _misfit(self, name: str, reason: str, hint: str = "") -> Refused:
        first = next(iter(self.state.tensors), "")
        return Refused(
            self.path,
            f"does not fit {self.base}: '{name[:80]}': {reason}",
            hint=hint or f"is it the adapter's own base model? Its first name is '{first[:80]}'",
        )

    def container(self, old: dict[object, object]) -> dict[object, object]:
        """Return the model's dict with the changed tensors; what was tied to one of them still is."""
        tensors = self.state.tensors
        casters = {tensors[name].dtype: Caster(tensors[name].dtype) for name in self.report.replaced}
        made = {
            tensors[name].view: casters[tensors[name].dtype].cast(self.whole[name])
            for name in self.report.replaced
        }
        for name, update in self.updates.items():  # a targeted embedding is saved whole, too: both count
            old_weight = tensors[name]
            weight = self.whole.get(name, old_weight)
            made[old_weight.view] = updated(self.base, weight, update, old_weight.dtype)

        def value(key: object, was: object) -> object:
            tensor = tensors.get(str(key))
            new = made.get(tensor.view) if tensor is not None else None
            return was if new is None else with_plain_tensor(was, new)

        pairs = [(key, value(key, was)) for key, was in old.items()]
        return remade(old, [*pairs, *((name, self.whole[name]) for name in self.report.added)])


def _orientations(tensors: Mapping[str, TensorRef]) -> dict[tuple[str, bool], str]:
    """Return layers by their parent and whether a bias says that they are Conv1D, not Linear."""
    found: dict[tuple[str, bool], str] = {}
    for name, bias in tensors.items():
        layer = name.removesuffix(".bias")
        weight = tensors.get(f"{layer}.weight") if layer != name else None
        if weight is not None and len(weight.shape) == 2 and weight.shape[0] != weight.shape[1]:
            sizes = ((weight.shape[0],), (weight.shape[1],))
            if bias.shape in sizes:
                found.setdefault((layer.rpartition(".")[0], bias.shape == sizes[1]), layer)
    return found
