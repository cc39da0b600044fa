"""Add an adapter to the model that it was trained on, as PEFT's `merge_and_unload` does.

A weight gets what `formulas` says of the layer's kind, with scale = alpha / r, or alpha / √r with rslora;
embeddings and layers of `fan_in_fan_out` (Conv1D) get the transposed product. What the adapter holds
whole is copied into the model's own, in the model's type. Source: PEFT's `LoraConfig`,
`tuners/lora/layer.py` and `utils/save_and_load.py`, 0.21.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod, sqrt

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.module_tree import is_embedding, is_output, orientations
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.settings import config_of, require_unpacked, said_of
from ..core.checkpoint.special_tensors import require_plain, with_plain_tensor
from ..core.checkpoint.state import State
from ..core.inert_pickle.values import remade
from ..core.tensors.cast import Caster, CastReport, CastReports
from ..core.tensors.ref import PLAIN_FLOATS, TensorRef
from ..core.words import noted
from ..errors import Damaged, NothingToDo, Refused, Unsupported
from .adapter import CONFIG, IN_PYTHON, Adapter, misfit
from .formulas import PRODUCTS, Update, block_size, difference, kind_of, of_weight, rotation, sum_of, tokens
from .other_names import in_peft_names
from .ties import Ties, saved_module, tying


@dataclass(frozen=True, slots=True)
class Merged:
    """What an adapter changed.

    Attributes:
        updated: names of the weights and biases that were changed.
        replaced: names of tensors that the adapter holds whole, as `modules_to_save` and biases.
        cast: those of them that the adapter has in another type than the model, which keeps its own.
        added: names that only the adapter has.
        resized: matrices of words that the adapter holds whole, for another number of tokens.
        untied: names that the base ties to a tensor which the adapter replaces: they keep the base's values
            under a name of their own, and the model must be loaded with `tie_word_embeddings` false.
        followed: names that the base ties to an updated weight, and that changed with it.
        casting: which numbers became infinite, 0 or NaN, complete once the result is saved.
    """

    updated: tuple[str, ...]
    casting: CastReports = field(metadata={"json": None})
    replaced: tuple[str, ...] = noted("replaced by the adapter's")
    cast: tuple[str, ...] = noted("of other types in the adapter, and cast to the model's")
    added: tuple[str, ...] = noted("added")
    resized: tuple[str, ...] = noted("of another number of tokens: vocab_size in config.json must say it")
    followed: tuple[str, ...] = noted("tied to an updated weight, and changed with it as in PEFT's merge")
    untied: tuple[str, ...] = noted('no longer tied: set "tie_word_embeddings": false in config.json')

    def settings(self, base: str) -> dict[str, object]:
        """Return what a config.json must say of the result, by that beside the base."""
        said = said_of(config_of(base), name := "tie_word_embeddings")
        return dict.fromkeys(said or (name,), False) if self.untied else {}


@takes_checkpoint
def merge_lora(
    checkpoint: Checkpoint, adapter: Adapter, *, state: str | None = None
) -> tuple[Checkpoint, Merged]:
    """Return a checkpoint in which an adapter is added to the weights: LoRA, DoRA, LoHa, LoKr or OFT.

    Values are computed in float64 when they are written, a few rows at a time, and rounded once to the
    weight's type. What is tied to an updated weight stays tied; what is tied to a module that the adapter
    saved whole keeps the base's values, as in PEFT.

    Args:
        checkpoint: the base model; it stays as it is. A `config.json` next to it says whether it is tied.
        adapter: what `open_adapter` returned; open until the result is saved.
        state: dotted path of the model's state; found when None.

    Raises:
        Unsupported: the adapter is of a type whose formula is not known, or has a setting that changes it.
        Refused: a tensor of it has no place in the model, does not fit it, or may be tied to an output layer
            that the base does not name.
        Damaged: one of two factors is missing, or has another rank than the configuration says.
        NothingToDo: the adapter is empty.
        NoState: there is no state, or none at `state`.

    Example:
        >>> with ckpttool.open("model.safetensors") as base:
        ...     merged, done = ckpttool.merge_lora(base, ckpttool.open_adapter("adapter"))
        ...     saved = ckpttool.save(merged, "merged.safetensors")
        >>> ckpttool.diff("merged.safetensors", "tuned.safetensors", atol=1e-6).same
        True
    """
    target = checkpoint.state(state)
    require_plain(checkpoint.path, target.likes, "can't be added to")
    require_plain(adapter.checkpoint.path, adapter.checkpoint.state().likes, "can't be added")
    merging = _Merging(checkpoint, target, adapter)
    return replace_state(checkpoint, target, merging.container), merging.report


class _Merging:
    """Pairs the tensors of an adapter with those of a model."""

    def __init__(self, checkpoint: Checkpoint, state: State, adapter: Adapter) -> None:
        if not adapter.is_of_peft:
            adapter = in_peft_names(adapter, state.tensors)
        self.adapter, self.path, self.config = adapter, adapter.checkpoint.path, adapter.config
        self.checkpoint, self.state, self.base = checkpoint, state, checkpoint.path
        adapter.require_known()
        factors, self.whole = adapter.parts()
        if not (factors or self.whole):
            raise NothingToDo(f"{self.path}: holds no tensor, so nothing would be added")
        self._against: str | None = None
        self._squares: list[str] = []
        self._kinds = orientations(state.tensors)
        scaled = {module for module, those in factors.items() if kind_of(of_weight(those)) in PRODUCTS}
        self.ranks = adapter.settings("rank_pattern", "r", scaled)
        self.alphas = adapter.settings("alpha_pattern", adapter.alpha_name, scaled)
        self.updates = dict(chain(*(self._updates(module, those) for module, those in factors.items())))
        tensors = state.tensors
        self.ties = Ties(self.base, tensors, adapter, self.whole, self.updates)
        self._require_places()
        replaced = tuple(name for name in self.whole if name in tensors)
        self.report = Merged(
            tuple(self.updates),
            CastReports(),
            replaced,
            tuple(name for name in replaced if tensors[name].dtype is not self.whole[name].dtype),
            tuple(name for name in self.whole if name not in tensors),
            tuple(name for name in replaced if tensors[name].shape != self.whole[name].shape),
            self.ties.following(),
            self.ties.untied(),
        )

    def _updates(self, module: str, those: Mapping[str, TensorRef]) -> Iterator[tuple[str, Update]]:
        """Yield what a layer's parts do to its tensors, by name."""
        if odd := {each.dtype.name for each in those.values()} - {*PLAIN_FLOATS}:
            raise Unsupported(self.path, f"has factors of '{module[:80]}' of type {odd.pop()}")
        parts, rank = of_weight(those), self.ranks.get(module, 1)
        if what := misfit(module, parts, rank, self.adapter.said_in):
            raise Damaged(self.path, what)
        scale = self.alphas.get(module, 1) / (sqrt(rank) if self.config.get("use_rslora") else rank)
        for name, times in (("lora_B.bias", scale), ("lora_diff_b", 1.0)):
            if name in those:
                yield f"{module}.bias", difference(those[name], times)
        if parts:
            held = those.get("lora_magnitude_vector")
            update = replace(self._update(module, parts, scale), magnitude=held)
            self._require_magnitude(module, update, is_lora="lora_A" in parts or "lora_embedding_A" in parts)
            yield f"{module}.weight", update

    def _update(self, module: str, parts: Mapping[str, TensorRef], scale: float) -> Update:
        weight = self.state.tensors.get(name := f"{module}.weight")
        if weight is None:
            raise self._missing(name, "weight")
        rows = (*weight.shape, 1)[0]
        match kind_of(parts), next(iter(parts.values())):
            case "lora_diff", tensor:
                return difference(tensor)
            case "oft_R", blocks if len(blocks.shape) == 2 and block_size(blocks.shape[1]):
                said = self.config.get("num_cayley_neumann_terms")
                is_series = self.config["use_cayley_neumann"]
                return rotation(blocks, rows, int(self.adapter.number(said, "terms")) if is_series else 0)
            case "trainable_tokens_delta", new if len(new.shape) == 2:
                return tokens(new, self._token_indices(module, new.shape[0], rows), rows)
            case "lora_embedding", _:
                return sum_of(parts, scale, turned=True)
            case kind, _ if PRODUCTS.get(kind):
                update = sum_of(parts, scale)
                is_turned = kind == "lora" and self._is_turned(module, *reversed(update.sizes))
                return sum_of(parts, scale, turned=True) if is_turned else update
        names = ", ".join(parts)
        raise Unsupported(self.path, f"has for '{module[:80]}' together: {names[:80]}", hint=IN_PYTHON)

    def _require_magnitude(self, module: str, update: Update, *, is_lora: bool) -> None:
        """Refuse norms of another number than rows, and those of which the settings say otherwise."""
        held, count = update.magnitude, update.sizes[update.turned]
        says = bool(self.config.get("use_dora"))
        if is_lora and self.adapter.numbers is None and says is (held is None):
            said = f"{self.adapter.said_in} says use_dora = {str(says).lower()}"
            raise Damaged(self.path, f"has {'a' if held else 'no'} magnitude of '{module[:80]}', and {said}")
        if held is not None and held.numel != count:
            raise Damaged(self.path, f"has {held.numel} magnitudes of '{module[:80]}', which needs {count}")

    def _token_indices(self, module: str, count: int, rows: int) -> list[int]:
        """Return which rows of an embedding are trained, by the settings."""
        said = self.config.get("trainable_token_indices") or self.config.get("token_indices")
        if isinstance(said, dict):
            said = next((each for name, each in said.items() if f".{module}".endswith(f".{name}")), None)
        places = said if isinstance(said, list) else []
        are_rows = all(type(each) is int and 0 <= each < rows for each in places)
        if not are_rows or not len({*places}) == len(places) == count:
            what = f"does not say which {count} of {rows} rows of '{module[:80]}' are trained"
            raise Damaged(self.path, f"{self.adapter.said_in} {what}")
        return places

    def _is_turned(self, module: str, columns: int, rows: int) -> bool:
        """Return whether a product fits a matrix transposed, which the shape says unless it is square."""
        # PEFT tells Conv1D from Linear layer by layer, and saves what the last of them was for all.
        is_said_turned = bool(self.config.get("fan_in_fan_out"))
        weight = self.state.tensors[f"{module}.weight"]
        if len(weight.shape) != 2:
            return False  # a convolution's never is
        parent = module.rpartition(".")[0]
        if rows == columns:
            self._squares.append(module)
            self._against = self._against or self._kinds.get((parent, not is_said_turned))
            return is_said_turned
        fits_turned = weight.shape == (columns, rows)
        if fits_turned:
            self._kinds.setdefault((parent, True), module)
        if fits_turned is not is_said_turned and weight.shape in ((columns, rows), (rows, columns)):
            self._against = self._against or module
        return fits_turned

    def _require_places(self) -> None:
        tensors = self.state.tensors
        saved = self.adapter.saved_modules()
        for name, update in self.updates.items():
            if name not in tensors:
                raise self._missing(name, name.rpartition(".")[2])
            weight = self.whole.get(name, tensors[name])
            if weight.dtype.name not in PLAIN_FLOATS:
                require_unpacked(self.checkpoint, self.state, "nothing can be added to codes", names=[name])
                raise self._misfit(name, f"the weight is {weight.dtype.name}")
            sizes = (weight.shape[0], prod(weight.shape[1:])) if weight.shape else ()
            if sizes != update.sizes:
                raise self._misfit(name, f"{list(update.sizes)} is to be added to {list(weight.shape)}")
        for name, tensor in self.whole.items():
            old = tensors.get(name)
            if old is None and not saved_module(name, saved):
                raise self._missing(name, "tensor")
            if old is None and is_output(name) and not self._fits_words(tensor):
                raise self._misfit(
                    name, f"its shape is {list(tensor.shape)}, and no matrix of words has as many rows"
                )
            if old is not None and old.shape != tensor.shape and not self._has_grown(name):
                shapes = f"{list(tensor.shape)}, and {list(old.shape)} in the model"
                raise self._misfit(name, f"its shape is {shapes}")
            types = {tensor.dtype.name, (old or tensor).dtype.name}
            if len(types) > 1 and types - {*PLAIN_FLOATS}:
                raise self._misfit(name, f"its type is {tensor.dtype.name}, and the model's another")
        self._require_known_squares()
        changed: dict[tuple[object, ...], str] = {}
        for name in (*self.updates, *self.ties.by_view):
            if (other := changed.setdefault(self.ties.changed_with(name), name)) != name:
                tied = f"the model ties it to '{other[:80]}', which the adapter changes too"
                raise self._misfit(name, tied)

    def _has_grown(self, name: str) -> bool:
        """Return whether a tensor is for another vocabulary, as is all that the model has for each token."""
        tensors, whole = self.state.tensors, self.whole
        ours = [
            each
            for each in tensors
            if is_embedding(each) or f".{each}".rpartition(".")[0].endswith(".lm_head")
        ]
        ours = [each for each in ours if tensors[each].shape[:1] == tensors[name].shape[:1]]
        if name not in ours or not whole.keys() >= {*ours} or self.ties.unnamed:
            return False
        are_alike = all(whole[each].shape[1:] == tensors[each].shape[1:] for each in ours)
        return are_alike and len({whole[each].shape[:1] for each in ours}) == 1

    def _fits_words(self, output: TensorRef) -> bool:
        """Return whether an output layer that the base does not name is for as many tokens as its words."""
        words = (self.whole.get(name, tensor) for name, tensor in self.state.items() if is_embedding(name))
        rows = {tensor.shape[:1] for tensor in words}
        return not rows or output.shape[:1] in rows

    def _require_known_squares(self) -> None:
        """Refuse square weights where layers are of both kinds, or nothing beside one shows a Conv1D."""
        what = "does not say whether the product of '{:.80}' is transposed: its weight is square, and"
        if self._against and self._squares:
            why = f"'{self._against[:80]}' is not as fan_in_fan_out in {CONFIG} says"
            raise Unsupported(self.path, f"{what.format(self._squares[0])} {why}", hint=IN_PYTHON)
        for module in self._squares if self.config.get("fan_in_fan_out") else ():
            if (module.rpartition(".")[0], True) not in self._kinds:
                why = f"no Conv1D is beside it, as fan_in_fan_out in {CONFIG} says of the last layer"
                raise Unsupported(self.path, f"{what.format(module)} {why}", hint=IN_PYTHON)

    def _missing(self, name: str, kind: str) -> Refused:
        """Return the error for a name that the model does not have, with what may be the cause."""
        reason, names = f"the model has no such {kind}", list(self.state.tensors)
        longer = next((each for each in names if each.endswith(f".{name}")), name)
        prefix = longer.removesuffix(name)
        if prefix and all(each.startswith(prefix) for each in names):
            strip = f"ckpttool strip-prefix {shlex.quote(self.base)} OUT --prefix {shlex.quote(prefix)}"
            hint = f"take its prefix off first: {strip}"
            return self._misfit(name, f"{reason}; it has '{longer[:80]}'", hint)
        if f".{name}".endswith(".lm_head.weight"):
            embedding = next((each for each in names if is_embedding(each)), "model.embed_tokens.weight")
            hint = f"name it: {tying(self.base, name, embedding)}"
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
        """Return the model's dict with the changed tensors; what was tied to an updated one still is."""
        tensors, overflows = self.state.tensors, self.report.casting
        casters = {tensors[name].dtype: Caster(tensors[name].dtype) for name in self.report.replaced}
        overflows.reports += [caster.report for caster in casters.values()]
        cast = {name: casters[tensors[name].dtype].cast(self.whole[name]) for name in self.report.replaced}
        alone = {name: cast[source] for name, source in self.ties.alone.items()}
        by_view = {tensors[name].view: cast[name] for name in self.ties.by_view}
        for name, update in self.updates.items():  # a targeted embedding is saved whole, too: both count
            weight = self.whole.get(name, tensors[name])
            overflows.reports.append(report := CastReport())
            by_view[tensors[name].view] = update.applied(self.base, weight, tensors[name].dtype, report)
        for other, name in self.ties.copies.items():
            by_view[tensors[other].view] = by_view[tensors[name].view]

        def value(key: object, was: object) -> object:
            tensor = tensors.get(str(key))
            new = alone.get(str(key)) or (by_view.get(tensor.view) if tensor is not None else None)
            return was if new is None else with_plain_tensor(was, new)

        pairs = [(key, value(key, was)) for key, was in old.items()]
        more = {name: self.whole[name] for name in self.report.added} | self.ties.unnamed
        return remade(old, [*pairs, *more.items()])
