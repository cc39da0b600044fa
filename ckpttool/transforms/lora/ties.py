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
from typing import Any

from ...checkpoint.settings import settings_beside
from ...errors import CkptToolError, Refused
from ...tensors.ref import TensorRef
from ...tensors.values import same_values
from ..renaming import MAX_LEVELS
from .adapter import Adapter

EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared", "embeddings"}
# Modules whose embedding transformers ties to a layer named `lm_head`.
ROOTS = {"model", "transformer", "model.decoder", "model.language_model"}
FEW = 8  # layers of words, of which a model has one each, or one for each of its parts
WITH_OUTPUT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining")
TASKS = {
    **dict.fromkeys(("CAUSAL_LM", "SEQ_2_SEQ_LM"), True),
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"), False),
}


def is_embedding(name: str) -> bool:
    """Return whether a name is that of the weight of an embedding of tokens, as transformers names them."""
    return name.removesuffix(".weight").rpartition(".")[2] in EMBEDDINGS


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
        keeps_ties = bool(self.adapter.config.get("ensure_weight_tying")) and self._join_copies()
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
        # Layers that the base ties and does not name, with its values.
        outputs = [] if keeps_ties else [(self._unnamed(name), tensors[name]) for name in self.alone]
        self.unnamed = {output: tensor for output, tensor in outputs if output}

    def untied(self) -> tuple[str, ...]:
        """Return the names of layers that the base ties to others, and the result does not."""
        views = {self.tensors[name].view for name in self.alone}
        parted = [name for view in views for name in self.names[view] if name not in self.alone]
        added = [name for name in self.whole if name not in self.tensors and is_output(name)]
        copies = [name for pair in self._copies() for name in pair if name not in self.alone]
        return tuple(sorted({*parted, *added, *copies, *self.unnamed}))

    def _copies(self) -> Iterator[tuple[str, str]]:
        """Yield input and output layer of a tied base that saves both, if the adapter replaces any."""
        embeddings, outputs = ([*filter(kind, self.tensors)][:FEW] for kind in (is_embedding, is_output))
        tied = self.config.get("tie_word_embeddings")
        for name, output in product(embeddings, outputs):
            if tied is False or {name, output}.isdisjoint(self.alone):
                continue
            if tied or same_values(self.tensors[name], self.tensors[output]):
                yield name, output

    def following(self) -> tuple[str, ...]:
        """Return the names that are tied to updated weights, and change with them."""
        names = dict.fromkeys(other for name in self.updates for other in self.names[self.tensors[name].view])
        return tuple(name for name in names if name not in self.updates and name not in self.alone)

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
        named = chain(self.whole.items(), self.tensors.items())
        if any(_may_be_tied(tensor, other, known) for known, other in named if known != name):
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

    def _is_tied(self) -> bool | None:
        """Return whether the base ties its output layer to the embeddings; None if nothing says so."""
        task = TASKS.get(str(self.adapter.config.get("task_type")))
        classes = self.config.get("architectures")
        if isinstance(classes, list) and classes and task is None:
            task = any(str(name).endswith(WITH_OUTPUT) for name in classes)
        nested = self.config.get("text_config")
        for settings in (self.config, nested if isinstance(nested, dict) else {}):
            if isinstance(settings.get("tie_word_embeddings"), bool):
                return settings["tie_word_embeddings"] and task is not False
        # A language model without an output layer in its file is tied: the settings of GPT-2 don't say so.
        return task


def is_output(name: str) -> bool:
    return f".{name}".endswith(".lm_head.weight")


def _may_be_tied(tensor: TensorRef, other: TensorRef, name: str) -> bool:
    """Return whether a tensor has the shape of an input or output layer, and is in no block."""
    return tensor.shape == other.shape and not any(part.isdecimal() for part in name.split("."))


def config_of(base: str) -> Mapping[str, Any]:
    """Return the settings of the model in a file or folder, {} if there are none to read."""
    try:
        return settings_beside(base, "config.json")[1]
    except CkptToolError:
        return {}
