"""LoRA adapters under other names than PEFT's: kohya's, where a layer's dots are underscores, and diffusers'.

No settings come with them. Ranks are those of the factors, and alpha is in the file, or else the rank.
Which layer is meant is looked up in the model. A name may begin anywhere in the model's own, as a whole
pipeline has `model.diffusion_model.` before it, but at one place for all layers of a component. Sources:
sd-scripts, `networks/lora.py`; diffusers 0.42, `loaders/lora_conversion_utils.py` and
`utils/state_dict_utils.py`.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from ..core.inert_pickle.values import OrderedDict_
from ..core.tensors.ref import TensorRef
from ..errors import Damaged, Refused, Unsupported
from .adapter import PREFIX, Adapter

# The parts of a pipeline that adapters are for, as each begins its names.
KOHYA = re.compile(r"lora_(unet|te[123]?|transformer|t5xxl|prior_unet|prior_te)_(.+)")
DIFFUSERS = re.compile(
    r"(unet|transformer(?:_2)?|text_encoder(?:_[23])?|prior|diffusion_model|base_model\.model)\.(.+)"
)

# A factor of a layer; in the old form, `to_q_lora.down`, the last part of the layer's name runs into it.
FACTOR = re.compile(
    r"(?P<layer>.+?)(?:\.lora(?:_linear_layer)?\.|(?P<old>_lora)\.|\.lora_)(?P<which>down|up|A|B)\.weight"
)
LETTERS = {"down": "A", "up": "B", "A": "A", "B": "B"}

# What the old form calls layers -> what they may be called in a model.
OLD = {"to_q": ("to_q", "q_proj"), "to_k": ("to_k", "k_proj"), "to_v": ("to_v", "v_proj")}
OLD |= {"to_out": ("to_out.0", "out_proj")}

# Ends of names by which other kinds of adapters are known; what stands before is the layer's, whatever it is.
KINDS = {
    r"lora_mid": "LoCon with a third factor",
    r"hada_\w+": "LoHa",
    r"lokr_\w+": "LoKr",
    r"oft_\w+": "OFT",
    r"boft\w*": "BOFT",
    r"dora_scale|lora_magnitude_vector": "DoRA",
    r"on_input": "IA3",
    r"diff|diff_b": "a difference kept whole",
    r"w_norm|b_norm": "a norm kept whole",
    r"lora_[AB]\.bias": "a bias of a factor",
    r"lora_[abAB]|magnitude": "a factor as torchtune, MLX or litgpt names it",
}
ENDS = {re.compile(rf".+\.(?:{end})(?:\.weight)?"): kind for end, kind in KINDS.items()}

OTHER = "two factors for each layer are added; merge other adapters with the program that trained them"

MOST_PARTS = 6  # of a name in the model that may stand before the adapter's


@dataclass(slots=True)
class _Layer:
    """A layer as an adapter names it."""

    key: str  # the beginning of its keys
    component: str
    joint: str  # what is between the parts of its name
    names: tuple[str, ...]  # that it may have in the model, so joined
    factors: dict[str, TensorRef]
    alpha: TensorRef | None = None


def in_peft_names(adapter: Adapter, names: Collection[str]) -> Adapter:
    """Return an adapter under PEFT's names and the model's.

    Args:
        adapter: what has no settings of PEFT's.
        names: those of the model's tensors.

    Raises:
        Unsupported: it holds something else than two factors and an alpha for each layer.
        Refused: a layer is not in the model, or may be one of two.
        Damaged: a factor is missing, or an alpha is no positive number.
    """
    path = adapter.checkpoint.path
    layers = _layers(path, adapter.checkpoint.state().tensors)
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    tensors: dict[str, TensorRef] = {}
    numbers: dict[str, tuple[float, float]] = {}
    taken: dict[str, str] = {}
    for component, joint in dict.fromkeys((layer.component, layer.joint) for layer in layers.values()):
        those = [each for each in layers.values() if (each.component, each.joint) == (component, joint)]
        for layer, module in _found(path, component, those, modules):
            if (other := taken.setdefault(module, layer.key)) != layer.key:
                raise Refused(path, f"'{other[:80]}' and '{layer.key[:80]}' are both for '{module[:80]}'")
            if len(layer.factors) < 2:
                raise Damaged(path, f"has only one of the two factors of '{layer.key[:80]}'")
            tensors |= {f"{PREFIX}{module}.lora_{one}.weight": ref for one, ref in layer.factors.items()}
            rank = (layer.factors["A"].shape or (0,))[0]
            if layer.factors["A"].shape and not rank:
                raise Damaged(path, f"'{layer.key[:80]}' has factors of rank 0")
            numbers[module] = rank, _alpha(path, layer) or rank
    checkpoint = replace(adapter.checkpoint, tree=OrderedDict_(tensors))
    return Adapter(checkpoint, {"peft_type": "LORA"}, numbers=numbers)


def _layers(path: str, tensors: Mapping[str, TensorRef]) -> dict[str, _Layer]:
    """Return the layers of an adapter by the beginning of their keys."""
    layers: dict[str, _Layer] = {}
    alphas: dict[str, TensorRef] = {}
    for key, tensor in tensors.items():
        if key.endswith(".alpha"):
            alphas[key.removesuffix(".alpha")] = tensor
            continue
        match = FACTOR.fullmatch(key)
        if match is None:
            kind = next((kind for end, kind in ENDS.items() if end.fullmatch(key)), None)
            what = f"is {kind}" if kind else "is no factor of a product, nor an alpha"
            hint = OTHER
            if not any(map(FACTOR.fullmatch, tensors)) and not kind:
                hint = f"of a whole model: ckpttool extract-lora BASE {shlex.quote(path)} ADAPTER --rank 16"
            raise Unsupported(path, f"holds '{key[:80]}', which {what}", hint=hint)
        layer = layers.setdefault(match["layer"], _layer(path, match["layer"], old=bool(match["old"])))
        letter = LETTERS[match["which"]]
        if letter in layer.factors:
            raise Refused(path, f"has the factor {letter} of '{layer.key[:80]}' under two names")
        layer.factors[letter] = tensor
    for key, alpha in alphas.items():
        if key not in layers:
            raise Damaged(path, f"has '{key[:80]}.alpha', and no factors of that layer")
        layers[key].alpha = alpha
    return layers


def _layer(path: str, key: str, *, old: bool) -> _Layer:
    if match := KOHYA.fullmatch(key):
        return _Layer(key, match[1], "_", (match[2],), {})
    if key.startswith("lora_"):
        what = f"holds factors of '{key[:80]}', and what begins with 'lora_' is of lora_unet_ or lora_te_"
        raise Unsupported(path, what, hint=OTHER)
    match = DIFFUSERS.fullmatch(key)
    component, rest = (match[1], match[2]) if match else ("", key)
    before, _, last = rest.rpartition(".")
    ends = OLD.get(last, (last,)) if old else (last,)
    named = [f"{before}.{end}".lstrip(".") for end in ends]
    names = dict.fromkeys((*(name.replace(".processor.", ".") for name in named), *named))
    return _Layer(key, component, ".", (*names,), {})


def _found(
    path: str, component: str, layers: list[_Layer], modules: Collection[str]
) -> Iterator[tuple[_Layer, str]]:
    """Yield each layer of a component with the module that it is in the model."""
    wanted = {name for layer in layers for name in layer.names}
    by_place: dict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in modules:
        parts = module.split(".", MOST_PARTS)
        for depth in range(len(parts)):
            name = layers[0].joint.join(".".join(parts[depth:]).split("."))
            if name in wanted:
                by_place[".".join(parts[:depth])][name].append(module)

    def candidates(place: str, layer: _Layer) -> list[str]:
        return [module for name in layer.names for module in by_place[place][name]]

    counts = {place: sum(bool(candidates(place, layer)) for layer in layers) for place in [*by_place]}
    most = max(counts.values(), default=0)
    best = [place for place, count in counts.items() if count == most]
    whole = [place for place in best if place in ("", component)]  # a name is whole, if it can be
    best = whole if len(whole) == 1 else best
    if most < len(layers):
        absent = next(layer for layer in layers if not best or not candidates(best[0], layer))
        raise _absent(path, component, absent, layers)
    for layer in layers:
        found = [module for place in best for module in candidates(place, layer)]
        if len(found) > 1:
            names = " or ".join(f"'{module[:80]}'" for module in found[:2])
            hint = "merge into one part of the model: ckpttool convert BASE PART --only GLOB"
            raise Refused(path, f"'{layer.key[:80]}' may be {names} of the model", hint=hint)
        yield layer, found[0]


def _absent(path: str, component: str, absent: _Layer, layers: list[_Layer]) -> Refused:
    begin = absent.key[: len(absent.key) - len(absent.names[0])] if component else ""
    what = f"'{absent.key[:80]}' is no layer of the model"
    if not begin or not all(layer.key.startswith(begin) for layer in layers):
        return Refused(path, what, hint="is it the adapter's own base model?")
    exclude = shlex.quote(f"{begin}*")
    hint = f"if the model has no {component}, leave its part out: ckpttool convert {shlex.quote(path)} PART"
    return Refused(path, what, hint=f"{hint}.safetensors --exclude {exclude}")


def _alpha(path: str, layer: _Layer) -> float | None:
    if layer.alpha is None:
        return None
    value = float("nan")
    if layer.alpha.numel == 1 and "complex" not in layer.alpha.dtype.name:
        value = float(layer.alpha.numpy().reshape(())[()])
    if not isfinite(value) or value <= 0:
        raise Damaged(path, f"'{layer.key[:80]}.alpha' is no finite positive number")
    return value
