"""Ties of a base model that an adapter parts: PEFT saves a module whole as a copy that nothing is tied to.

With the embedding alone in `modules_to_save`, the output layer of a tied model keeps the base's values, and
PEFT's `merge_and_unload` writes it under a name of its own, with `tie_word_embeddings` false. A base that is
saved by transformers does not name it. Measured with PEFT 0.21 and transformers 5.23.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product

from ..core.checkpoint.module_tree import is_embedding, is_output
from ..core.checkpoint.prefixes import MAX_LEVELS
from ..core.checkpoint.settings import config_of
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import same_values
from ..errors import Refused
from .adapter import Adapter

# Modules whose embedding transformers ties to a layer named `lm_head`.
ROOTS = {"model", "transformer", "model.decoder", "model.language_model"}
FEW = 8  # layers of words, of which a model has one each, or one for each of its parts
WITH_OUTPUT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")
TASKS = {
    **dict.fromkeys(("CAUSAL_LM", "SEQ_2_SEQ_LM"), True),
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"), False),
}


def saved_module(name: str, saved: Collection[str]) -> str:
    """Return the path of the module in `modules_to_save` that a tensor is of; "" for none."""
    parts = name.split(".")[: MAX_LEVELS + 1]
    for end in range(len(parts) - 1, 0, -1):
        if any(".".join(parts[start:end]) in saved for start in range(end)):
            return ".".join(parts[:end])
    return ""


def tying(base: str, output: str, embedding: str) -> str:
    """Return the command that gives the output layer of a tied model its name."""
    pair = shlex.quote(f"{output}={embedding}")
    return f"ckpttool convert {shlex.quote(base)} tied.safetensors --tie {pair}, and merge into that"


@dataclass
class Ties:
    """Which of a model's tensors take what an adapter holds whole."""

    base: str
    tensors: Mapping[str, TensorRef]
    adapter: Adapter
    whole: dict[str, TensorRef]
    updates: Collection[str]

    def __post_init__(self) -> None:
        tensors, saved = self.tensors, self.adapter.saved_modules()
        self.config = config_of(self.base)
        self.names: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            self.names[tensor.view].append(name)
        # Where PEFT ties the copies (Llama, but not GPT-2), both are in the file.
        asked = bool(self.adapter.config.get("ensure_weight_tying"))
        keeps_ties = (asked or self._ties_words()) and self._join_copies()
        replaced = [name for name in self.whole if name in tensors and name not in self.updates]
        # Names that leave their ties -> the adapter's tensor that they take.
        self.alone = {name: name for name in replaced if keeps_ties or saved_module(name, saved)}
        for name in tuple(self.alone):
            module = saved_module(name, saved)
            for other in self.names[tensors[name].view]:
                if keeps_ties or saved_module(other, saved) == module:  # ties inside the module stay
                    self.alone.setdefault(other, name)
        # The adapter's tensors that all names of the same memory take.
        self.by_view = [name for name in replaced if name not in self.alone]
        # Matrices of words in memory of their own that only the settings tie to one that changes.
        self.copies: dict[str, str] = {}
        for name in (*self.updates, *self.by_view):
            self.copies.update((other, name) for other in self._equal_to(name))
        # Layers that the base ties and does not name, with its values.
        outputs = [] if keeps_ties else [(self._unnamed(name), tensors[name]) for name in self.alone]
        self.unnamed = {output: tensor for output, tensor in outputs if output}

    def untied(self) -> tuple[str, ...]:
        """Return the names of layers that the base ties to others, and the result does not."""
        views = {self.tensors[name].view for name in self.alone}
        parted = [name for view in views for name in self.names[view] if name not in self.alone]
        added = [name for name in self.whole if name not in self.tensors and is_output(name)]
        return tuple(sorted({*parted, *added, *self._parted(), *self.unnamed}))

    def _parted(self) -> Iterator[str]:
        """Yield of a tied base's matrices of words which keeps its values alone, or gets others."""
        for name, output in self._pairs() if self._said() is not False else ():
            first, second = (self.whole.get(self.alone.get(each, each)) for each in (name, output))
            leaves = self.alone.keys() & {name, output}
            if not leaves and (first is None or second is None):
                continue
            if not self._said() and not same_values(self.tensors[name], self.tensors[output]):
                continue
            if first is None or second is None:
                yield from {name, output}.difference(leaves)
            elif not same_values(first, second):
                yield output

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each pair of an input and an output layer that the base names."""
        embeddings, outputs = ([*filter(kind, self.tensors)][:FEW] for kind in (is_embedding, is_output))
        return product(embeddings, outputs)

    def _ties_words(self) -> bool:
        """Return whether the base ties its output layer: by its settings, in memory, or as it names none."""
        if not any(map(is_output, self.tensors)):
            return bool(self._is_tied())
        shared = (self.tensors[name].view == self.tensors[output].view for name, output in self._pairs())
        return self._said() is True or any(shared)

    def _equal_to(self, name: str) -> Iterator[str]:
        """Yield the copies of a matrix of words that the settings tie to it; refuse if none say so."""
        is_known = name in self.tensors and (is_embedding(name) or is_output(name))
        if not is_known or name in self.copies:
            return
        tensor = self.tensors[name]
        for other, copy in self.tensors.items():
            is_held = other in self.whole and other not in self.updates
            is_other = copy.view != tensor.view and copy.shape == tensor.shape and not is_held
            if not (is_other and (is_embedding(other) or is_output(other)) and same_values(tensor, copy)):
                continue
            if self._said() is None:
                what = f"changes '{name[:80]}', and '{other[:80]}' is equal to it in {self.base}: tied?"
                hint = 'say it in a config.json beside BASE: "tie_word_embeddings": true or false'
                raise Refused(self.adapter.checkpoint.path, what, hint=hint)
            if self._said() or (is_embedding(name) and is_embedding(other)):  # T5's are tied in any case
                yield other

    def following(self) -> tuple[str, ...]:
        """Return the names that are tied to updated weights, and change with them."""
        changed = (*self.updates, *(other for other in self.copies if other not in self.whole))
        names = dict.fromkeys(other for name in changed for other in self.names[self.tensors[name].view])
        return tuple(name for name in names if name not in self.updates and name not in self.alone)

    def changed_with(self, name: str) -> tuple[object, ...]:
        """Return a key that the names share which change together: a view, that of the original of a copy."""
        return self.tensors[self.copies.get(name, name)].view

    def _join_copies(self) -> bool:
        """Make equal copies in the adapter one, unnamed where the base has no such name; say if any were."""
        embeddings, outputs = ([*filter(kind, self.whole)][:FEW] for kind in (is_embedding, is_output))
        joined = False
        for output in outputs:
            layer = self.whole[output]
            if same := next((name for name in embeddings if same_values(self.whole[name], layer)), None):
                joined, self.whole[output] = True, self.whole[same]
                if output not in self.tensors:
                    del self.whole[output]
        return joined

    def _unnamed(self, name: str) -> str | None:
        """Return the name of the layer that the base ties to a replaced one without naming it."""
        tensor = self.tensors[name]
        is_input = is_embedding(name)
        if len(tensor.shape) != 2 or not (is_input or is_output(name)):
            return None
        new = self.whole[self.alone[name]]
        pairs = chain(product([new], self.whole.items()), product([tensor], self.tensors.items()))
        if any(_may_be_tied(one, other, known) for one, (known, other) in pairs if known != name):
            return None
        tied = self._is_tied()
        if tied is False:
            return None
        root = name.removesuffix(".weight").rpartition(".")[0]
        if tied and is_input and root in ROOTS:
            return "lm_head.weight"
        other = "lm_head.weight" if is_input else "model.embed_tokens.weight"
        config = "keep the model's config.json next to it, with tie_word_embeddings false where it isn't tied"
        what = f"holds '{name[:80]}' whole, and {self.base} does not name the layer that it may tie to it"
        hint = f"name it: {tying(self.base, other, name)}; or {config}"
        raise Refused(self.adapter.checkpoint.path, what, hint=hint)

    def _said(self) -> bool | None:
        """Return what the settings say of the tie; None where they say nothing."""
        nested = self.config.get("text_config")
        both = (self.config, nested if isinstance(nested, dict) else {})
        said = (settings.get("tie_word_embeddings") for settings in both)
        return next((each for each in said if isinstance(each, bool)), None)

    def _is_tied(self) -> bool | None:
        """Return whether the base ties its output layer to the embeddings; None if nothing says so."""
        task = TASKS.get(str(self.adapter.config.get("task_type")))
        classes = self.config.get("architectures")
        if isinstance(classes, list) and classes and task is None:
            task = any(str(name).endswith(WITH_OUTPUT) for name in classes)
        if (said := self._said()) is not None:
            return said and task is not False
        # A language model without an output layer in its file is tied: the settings of GPT-2 don't say so.
        return task


def _may_be_tied(tensor: TensorRef, other: TensorRef, name: str) -> bool:
    """Return whether a tensor has the shape of an input or output layer, and is in no block."""
    return tensor.shape == other.shape and not any(part.isdecimal() for part in name.split("."))
