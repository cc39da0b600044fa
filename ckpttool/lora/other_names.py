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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt

from ..core.inert_pickle.values import OrderedDict_
from ..core.tensors.ref import TensorRef
from ..errors import Damaged, Refused, Unsupported
from .adapter import PREFIX, Adapter
from .dialects import component_configs
from .formulas import of_weight, products_of

# The parts of a pipeline that adapters are for, as each begins its names.
KOHYA = re.compile(r"lora_(unet|te[123]?|transformer|t5xxl|prior_unet|prior_te)_(.+)")
DIFFUSERS = re.compile(
    r"(unet|transformer(?:_2)?|text_encoder(?:_[23])?|prior|diffusion_model|base_model\.model)\.(.+)"
)

# A factor of a layer; in the old form, `to_q_lora.down`, the last part of the layer's name runs into it.
FACTOR = re.compile(
    r"(?P<layer>.+?)(?:\.lora(?:_linear_layer)?\.|(?P<old>_lora)\.|\.lora_)(?P<which>down|up|A|B)\.weight"
)
PARTS = {"down": "lora_A", "up": "lora_B", "A": "lora_A", "B": "lora_B"}

# Other parts of a layer, as LyCORIS and ComfyUI name them, and what some of them are called here.
PART = re.compile(
    r"(?P<layer>.+?)\.(?P<which>lora_mid(?=\.weight)|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)"
    r"|(?:diff|diff_b|w_norm|b_norm)(?!\.weight)|dora_scale|lora_magnitude_vector)(?P<old>)(?:\.weight)?"
)
PARTS |= dict.fromkeys(("diff", "w_norm"), "lora_diff") | dict.fromkeys(("diff_b", "b_norm"), "lora_diff_b")
PARTS["dora_scale"] = "lora_magnitude_vector"

# What the old form calls layers -> what they may be called in a model.
OLD = {"to_q": ("to_q", "q_proj"), "to_k": ("to_k", "k_proj"), "to_v": ("to_v", "v_proj")}
OLD |= {"to_out": ("to_out.0", "out_proj")}

FOREIGN = "a factor as torchtune, MLX or litgpt names it"

# Ends of names by which other kinds of adapters are known; what stands before is the layer's, whatever it is.
KINDS = {
    r"lokr_\w+": "LoKr with a core for its first factor",
    r"oft_\w+": "OFT",
    r"boft\w*": "BOFT",
    r"on_input": "IA3",
    r"lora_[AB]\.bias": "a bias of a factor",
    r"lora_[abAB]|magnitude": FOREIGN,
}
ENDS = {re.compile(rf".+\.(?:{end})(?:\.weight)?"): kind for end, kind in KINDS.items()}

OTHER = "merge adapters of other kinds with the program that trained them"

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
    said: float | None = None  # alpha, by the settings in the file


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
    _take_settings(adapter, layers.values())
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    tensors: dict[str, TensorRef] = {}
    numbers: dict[str, tuple[float, float]] = {}
    taken: dict[str, str] = {}
    for component, joint in dict.fromkeys((layer.component, layer.joint) for layer in layers.values()):
        those = [each for each in layers.values() if (each.component, each.joint) == (component, joint)]
        for layer, module in _found(path, component, those, modules):
            if (other := taken.setdefault(module, layer.key)) != layer.key:
                raise Refused(path, f"'{other[:80]}' and '{layer.key[:80]}' are both for '{module[:80]}'")
            parts = _upright(path, layer)
            if (products := products_of(of_weight(parts))) is None:
                raise Damaged(path, f"has only one of the two factors of '{layer.key[:80]}'")
            tensors |= {f"{PREFIX}{module}.{one}": ref for one, ref in parts.items()}
            ranks = {rank for each in products for rank in each.ranks}
            if ranks == {0} and all(part.shape for part in layer.factors.values()):
                raise Damaged(path, f"'{layer.key[:80]}' has factors of rank 0")
            rank, alpha = min(ranks, default=1), layer.said or _alpha(path, layer)
            numbers[module] = rank, alpha if alpha and ranks else rank  # what is whole is not scaled
    checkpoint = replace(adapter.checkpoint, tree=OrderedDict_(tensors))
    return Adapter(checkpoint, {"peft_type": "LORA"}, numbers=numbers)


def _upright(path: str, layer: _Layer) -> dict[str, TensorRef]:
    """Return a layer's parts as PEFT has them: norms of rows, and beside a core B with the rank first."""
    parts, norms = dict(layer.factors), layer.factors.get("lora_magnitude_vector")
    if norms is not None and norms.shape[:1] != (norms.numel,):
        raise Unsupported(path, f"holds norms of '{layer.key[:80]}' that are not of its outputs", hint=OTHER)
    up = parts.get("lora_B")
    if "lora_mid" in parts and up is not None:
        flat = up.viewed(up.shape[:2])
        parts["lora_B"] = (flat.permuted((1, 0)) if flat else None) or up
    return parts


def _take_settings(adapter: Adapter, layers: Iterable[_Layer]) -> None:
    """Set the alphas that diffusers has in the metadata of its file."""
    for component, config in component_configs(adapter.checkpoint).items():
        of_peft = replace(adapter, config={"peft_type": "LORA", **config})
        of_peft.require_known()
        those = {layer.names[0]: layer for layer in layers if layer.component == component}
        ranks = of_peft.settings("rank_pattern", "r", those)
        for name, alpha in of_peft.settings("alpha_pattern", "lora_alpha", those).items():
            held = those[name].factors.get("lora_A")
            if held is not None and held.shape[:1] != (ranks[name],):
                said = f"is of rank {ranks[name]} by the settings in the header, and not by its factors"
                raise Damaged(adapter.checkpoint.path, f"'{those[name].key[:80]}' {said}")
            those[name].said = alpha * (sqrt(ranks[name]) if config.get("use_rslora") else 1)


def _layers(path: str, tensors: Mapping[str, TensorRef]) -> dict[str, _Layer]:
    """Return the layers of an adapter by the beginning of their keys."""
    layers: dict[str, _Layer] = {}
    alphas: dict[str, TensorRef] = {}
    for key, tensor in tensors.items():
        if key.endswith(".alpha"):
            alphas[key.removesuffix(".alpha")] = tensor
            continue
        match = FACTOR.fullmatch(key) or PART.fullmatch(key)
        if match is None:
            kind = next((kind for end, kind in ENDS.items() if end.fullmatch(key)), None)
            what = f"is {kind}" if kind else "is no factor of a product, nor an alpha"
            hint = OTHER
            if kind == FOREIGN:
                hint = f"under PEFT's names: ckpttool adapter {shlex.quote(path)} ADAPTER --to peft"
            if not any(map(FACTOR.fullmatch, tensors)) and not kind:
                hint = f"of a whole model: ckpttool extract-lora BASE {shlex.quote(path)} ADAPTER --rank 16"
            raise Unsupported(path, f"holds '{key[:80]}', which {what}", hint=hint)
        layer = layers.setdefault(match["layer"], _layer(path, match["layer"], old=bool(match["old"])))
        part = PARTS.get(match["which"], match["which"])
        if part in layer.factors:
            what = f"has the factor {part.removeprefix('lora_')} of '{layer.key[:80]}' under two names"
            raise Refused(path, what)
        layer.factors[part] = tensor
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
