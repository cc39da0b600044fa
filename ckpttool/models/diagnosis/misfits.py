"""Describe what no command can fix: another architecture, other sizes, files of another kind."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .case import Case
from .fit import Fit, shortened

# (kind, regular expression of the names, what they are and what to do)
KINDS = (
    (
        "fsdp-flat",
        r"(^|\.)_?flat_param$",
        "they are FSDP's flat parameters, one rank's part of many: save with FULL_STATE_DICT, or with DCP",
    ),
    (
        "adapter",
        r"\.lora_(A|B|embedding_A|embedding_B)\b",
        "they are a LoRA adapter's weights: load the model it was trained on, then the adapter with peft",
    ),
    (
        "quantised",
        r"\.(qweight|qzeros|absmax|quant_map|SCB|_packed_params\S*)$",
        "they are quantised weights: load them with the library that quantised them",
    ),
)


def in_words(case: Case) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for everything that keeps a state from fitting and that no command fixes."""
    fit = case.fit
    known = [
        (kind, words) for kind, names, words in KINDS if any(map(re.compile(names).search, fit.unexpected))
    ]
    if known:
        kind, words = known[0]
        yield kind, f"{len(fit.unexpected)} names are not the model's ({shortened(fit.unexpected)}): {words}"
    elif _is_weight_norm(fit):
        yield (
            "weight-norm",
            "the file keeps weights as direction and magnitude, the model does not: apply "
            "torch.nn.utils.parametrizations.weight_norm to the model, load, then remove_parametrizations",
        )
    elif (head := _head(fit)) is not None:
        layer, theirs, ours = head
        yield (
            "head",
            f"'{layer}' has {theirs} outputs in the file and {ours} in the model: build it as "
            f"SPEC(num_classes={theirs}) or similar; "
            f"or, for a new head, convert with --exclude '{layer}.*' and load with strict=False",
        )
    else:
        yield from _otherwise(case)


def _is_weight_norm(fit: Fit) -> bool:
    ends = (".parametrizations.weight.original0", ".weight_g")
    there = {
        name.removesuffix(end) + ".weight" for name in fit.unexpected for end in ends if name.endswith(end)
    }
    return bool(there & set(fit.missing))


def _head(fit: Fit) -> tuple[str, str, str] | None:
    """Return the one layer whose number of outputs differs, and both numbers; None if more is wrong."""
    layers = {name.rpartition(".")[0] for name, *_ in fit.mismatched}
    if fit.missing or fit.unexpected or len(layers) != 1:
        return None
    outputs = {tuple(shape.strip("[]").split(", ", 1)[0] for shape in both) for _, *both in fit.mismatched}
    inputs = {tuple(shape.strip("[]").partition(", ")[2] for shape in both) for _, *both in fit.mismatched}
    if len(outputs) != 1 or any(theirs != ours for theirs, ours in inputs):
        return None
    theirs, ours = outputs.pop()
    return layers.pop(), theirs, ours


def is_alike(case: Case) -> bool:
    """Return whether a state is of the model's architecture: it has most of the names, and few others."""
    size = len(case.blueprint.places)
    return (2 * len(case.fit.missing) < size and len(case.fit.unexpected) < size) or not size


def _otherwise(case: Case) -> Iterator[tuple[str, str]]:
    fit, places = case.fit, case.blueprint.places
    if not is_alike(case):
        fitting = len(places) - len(fit.missing) - len(fit.mismatched) - len(fit.added)
        message = f"another architecture: {fitting} of the model's {len(places)} names fit by name and shape"
        yield "architecture", f"{message}; {fit}"
        return
    if fit.missing:
        yield "missing", f"the file lacks {len(fit.missing)} of the model's names ({shortened(fit.missing)})"
    if fit.unexpected:
        message = f"the model has no place for {len(fit.unexpected)} names ({shortened(fit.unexpected)})"
        yield "unexpected", message
    if fit.mismatched:
        sizes = tuple(
            f"{name} {theirs} in the file, {ours} in the model" for name, theirs, ours in fit.mismatched
        )
        yield "size", f"{len(sizes)} tensors are of another size or type ({shortened(sizes)})"
