"""Adapters of any dialect, read into one form: layers with their factors, rank and alpha."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.settings import settings_beside
from ..core.checkpoint.special_tensors import require_plain
from ..core.formats.shards import ADAPTERS
from ..core.remote.places import exists, open_source_at
from ..core.system import join
from ..core.tensors.ref import TensorRef
from ..errors import CkptToolError, Damaged, NothingToDo, Refused, Unsupported
from .adapter import CONFIG, PREFIX, Adapter
from .layouts import layouts, tables

METADATA = "lora_adapter_metadata"  # diffusers' entry with PEFT's settings, each below its component
SETTINGS_OF_LITGPT = "hyperparameters.yaml"
ALPHA_OF_LITGPT = re.compile(r"^\s*(lora_\w+):\s*(\S+)\s*$", re.MULTILINE)
SIGN = re.compile(r"lora_|hada_|lokr_|\.lora\.|_lora\.")  # what a name of a factor has in it
FACTORS = re.compile(r"[AB]|embedding_|hada_|lokr_")
OLD = re.compile(r"\.(to_(?:q|k|v|out)_lora)(?=\.(?:down|up)\.weight$)")
EXCLUDE = "leave it out: ckpttool convert IN PART.safetensors --exclude KEY"
NAMES = {"kohya": "kohya's", "comfy": "ComfyUI's", "peft": "PEFT's", "diffusers": "diffusers'"}


@dataclass(slots=True)
class AdapterLayer:
    """What an adapter has for one module.

    Attributes:
        key: the beginning of its keys.
        tag: what its dialect calls the component; "" where it does not say.
        name: the module's name within the component.
        parts: tensors by what they are: `A` [r, in, …], `B` [out, r, …], `magnitude` [out], `embedding_A`, …;
            `=weight` and the like are whole parameters.
        rank, alpha: its scale is alpha / rank.
        is_root: the scale is alpha / √rank.
    """

    key: str
    tag: str
    name: str
    parts: dict[str, TensorRef] = field(default_factory=dict)
    rank: int = 0
    alpha: float = 0.0
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """An adapter in no dialect's form.

    Attributes:
        path: its file, or folder.
        dialect: `peft`, `kohya`, `diffusers`, `comfy`, `mlx`, `torchtune` or `litgpt`.
        layers: by the beginning of their keys.
        configs: PEFT's settings of each component, by its tag.
        said: other settings of the program that trained it.
    """

    path: str
    dialect: str
    layers: Mapping[str, AdapterLayer]
    configs: Mapping[str, Mapping[str, Any]]
    said: Mapping[str, Any]


def dialect_of(adapter: Adapter) -> str | None:
    """Return whose names an adapter has; None if no tensor of it is a factor."""
    if adapter.is_of_peft:
        return "peft"
    keys = [*adapter.checkpoint.state().tensors]
    fits = (
        name
        for name, each in tables()["dialects"].items()
        if any(re.match(each["begin"], key) and FACTORS.match(_cut(name, key)[1]) for key in keys)
    )
    return next(fits, None)


def held(adapter: Adapter, alpha: float | None = None) -> HeldAdapter:
    """Read an adapter, whatever its dialect.

    Args:
        adapter: what `open_adapter` returned.
        alpha: of all layers, where the files do not say it (torchtune, litgpt).

    Raises:
        Unsupported: it is no LoRA, or holds something that no dialect has.
        Refused: a factor is there twice, or nothing says the alpha.
        Damaged: a factor is missing, a number is no positive one, or settings are malformed.
        NothingToDo: it is empty.
    """
    found = _parsed(adapter)
    _number(found, adapter, alpha, [*found.layers.values()])
    return found


def _parsed(adapter: Adapter) -> HeldAdapter:
    """Read all but the alphas, which may be tensors."""
    checkpoint = adapter.checkpoint
    state = checkpoint.state()
    require_plain(checkpoint.path, state.likes, "can't be written in another dialect")
    if not state.tensors:
        raise NothingToDo(f"{checkpoint.path}: holds no tensor")
    dialect = dialect_of(adapter)
    if dialect is None:
        what = f"holds '{next(iter(state.tensors))[:80]}', and no factor as a program known here names it"
        raise Unsupported(checkpoint.path, what, hint="an adapter of LoRA: inspect shows what is in the file")
    configs = component_configs(checkpoint) if dialect == "diffusers" else {}
    configs = {"": adapter.config} if adapter.is_of_peft else configs
    layers: dict[str, AdapterLayer] = {}
    for key, tensor in state.tensors.items():
        begin, part = _cut(dialect, key)
        layer = layers.get(begin) or layers.setdefault(begin, _layer(checkpoint.path, dialect, begin, key))
        if part in layer.parts:
            raise Refused(checkpoint.path, f"has the {part} of '{begin[:80]}' under two names")
        layer.parts[part] = _upright(tensor, dialect, part)
    found = HeldAdapter(checkpoint.path, dialect, layers, configs, _said(checkpoint.path, dialect))
    for layer in layers.values():
        _require_whole(found, layer)
    return found


@cache
def _ends(dialect: str) -> tuple[re.Pattern[str], Mapping[str, str]]:
    ends = tables()["dialects"][dialect]["ends"]
    parts = {end: part for part, those in ends.items() for end in those}
    return re.compile(rf"(.+?)\.({'|'.join(map(re.escape, sorted(parts, key=len, reverse=True)))})"), parts


def _cut(dialect: str, key: str) -> tuple[str, str]:
    """Return the beginning of a key, and which part of the layer it is."""
    if dialect == "diffusers" and (old := OLD.search(key)):
        those = tables()["old"]["text_encoder" if key.startswith("text_encoder") else "unet"]
        key = f"{key[: old.start(1)]}{those[old[1]]}{key[old.end(1) :]}".replace(".processor.", ".")
    pattern, parts = _ends(dialect)
    if match := pattern.fullmatch(key):
        is_odd = dialect == "kohya" and "." in match[1]
        return (key, "") if is_odd else (match[1], parts[match[2]])
    module, _, name = key.rpartition(".")
    if module.endswith(".base_layer"):
        module, name = module.removesuffix(".base_layer"), f"base_layer.{name}"
    return module, f"={name}"


def _layer(path: str, dialect: str, begin: str, key: str) -> AdapterLayer:
    if dialect in ("peft", "mlx", "torchtune", "litgpt"):
        return AdapterLayer(begin, "", begin.removeprefix(PREFIX))
    joint = tables()["dialects"][dialect]["joint"]
    tags = {each.tag(component, dialect) for each in layouts() for component in each.components}
    for tag in sorted(tags, key=len, reverse=True):
        if begin.startswith(f"{tag}{joint}"):
            return AdapterLayer(begin, tag, begin[len(tag) + 1 :])
    if dialect == "diffusers":
        return AdapterLayer(begin, "", begin)
    known = ", ".join(sorted(tags))
    raise Unsupported(
        path, f"holds '{key[:80]}', and {NAMES[dialect]} names begin with {known}", hint=EXCLUDE
    )


def _upright(tensor: TensorRef, dialect: str, part: str) -> TensorRef:
    """Return a tensor as PEFT has it: MLX's factors are turned, and a magnitude has one axis."""
    if dialect == "mlx" and part in ("A", "B"):
        return tensor.permuted((1, 0)) or tensor
    return (tensor.viewed((tensor.numel,)) or tensor) if part == "magnitude" else tensor


def _require_whole(found: HeldAdapter, layer: AdapterLayer) -> None:
    """Refuse a layer whose factors are no pair; note its rank."""
    for a, b in (("A", "B"), ("embedding_A", "embedding_B")):
        if not layer.parts.keys() & {a, b}:
            continue
        if not layer.parts.keys() >= {a, b}:
            raise Damaged(found.path, f"has only one of the two factors of '{layer.key[:80]}'")
        left, right = layer.parts[a].shape, layer.parts[b].shape
        inner = layer.parts["mid"].shape[:1] if "mid" in layer.parts else left[:1]
        is_pair = len(left) == len(right) > 1 and right[1] and left[0]
        is_pair = is_pair and "complex" not in layer.parts[a].dtype.name + layer.parts[b].dtype.name
        if not is_pair or (right[1:2] != inner and (found.dialect != "litgpt" or left[0] % right[1])):
            what = f"has factors of '{layer.key[:80]}' that are no pair: {list(left)} and {list(right)}"
            raise Damaged(found.path, what)
        layer.rank = right[1]
        magnitude = layer.parts.get("magnitude")
        if magnitude is not None and magnitude.numel != right[0]:
            what = f"has a magnitude of '{layer.key[:80]}' of {magnitude.numel} numbers for {right[0]} rows"
            raise Unsupported(found.path, what, hint="only DoRA's magnitude of each output is known")
    if layer.parts.keys() == {"alpha"}:
        raise Damaged(found.path, f"has '{layer.key[:80]}.alpha', and no factors of that layer")


# ---- Ranks and alphas: in settings, in tensors, or as a scale.


def component_configs(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, Any]]:
    """Return PEFT's settings that a file of diffusers' has in its metadata, by component; "" for the file.

    Raises Damaged where they are no JSON object.
    """
    text = checkpoint.metadata.get(METADATA)
    if text is None:
        return {}
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Damaged(checkpoint.path, f"has {METADATA} in its metadata that is no JSON object")
    names = {component for each in layouts() for component in each.components}
    found: dict[str, dict[str, Any]] = {}
    for key, value in said.items():
        component, dot, name = key.partition(".")
        is_below = bool(dot) and component in names
        found.setdefault(component if is_below else "", {})[name if is_below else key] = value
    return found


def _said(path: str, dialect: str) -> Mapping[str, Any]:
    """Return what the file beside an adapter of MLX's, torchtune's or litgpt's says."""
    if dialect in ("mlx", "torchtune"):
        return settings_beside(path, CONFIG)[1]
    if dialect != "litgpt" or not exists(place := join(os.path.dirname(path), SETTINGS_OF_LITGPT)):
        return {}
    source = open_source_at(place)
    text = source.read(0, min(source.size, 1 << 20)).decode("utf-8", "replace")
    return dict(ALPHA_OF_LITGPT.findall(text))


def _number(
    found: HeldAdapter, adapter: Adapter, alpha: float | None, layers: Sequence[AdapterLayer]
) -> None:
    """Set the alpha of layers, and compare their rank with what settings say."""
    for tag, config in found.configs.items():
        if all(each.tag != tag for each in found.layers.values()):
            raise Damaged(found.path, f"has settings of '{tag[:80]}' in its metadata, and no layers of that")
        those = [each for each in layers if each.tag == tag and each.rank]
        of_peft = replace(adapter, config=config, numbers=None)
        if config.get("peft_type", "LORA") != "LORA":
            of_peft.require_known()
        names = [each.name for each in those]
        ranks = of_peft.settings("rank_pattern", "r", names)
        alphas = of_peft.settings("alpha_pattern", "lora_alpha", names)
        for layer in those:
            if ranks[layer.name] != layer.rank:
                what = f"has '{layer.key[:80]}' of rank {layer.rank}, and settings say {ranks[layer.name]}"
                raise Damaged(found.path, what)
            layer.alpha, layer.is_root = alphas[layer.name], bool(config.get("use_rslora"))
    for layer in layers:
        if layer.rank and not layer.alpha:
            layer.alpha = _alpha(found, layer, alpha)


def _alpha(found: HeldAdapter, layer: AdapterLayer, given: float | None) -> float:
    said: Any = layer.rank
    if "alpha" in layer.parts:
        tensor = layer.parts["alpha"]
        is_number = tensor.numel == 1 and "complex" not in tensor.dtype.name
        said = float(tensor.numpy().reshape(())[()]) if is_number else None
    elif found.dialect in ("torchtune", "litgpt"):
        said = given or found.said.get("lora_alpha")
        if said is None:
            what = f"does not say the alpha of '{layer.key[:80]}', nor does a file beside it"
            raise Refused(found.path, what, hint="say what it was trained with: --alpha 16")
    elif found.dialect == "mlx":
        parameters = found.said.get("lora_parameters")
        scale: Any = (parameters if isinstance(parameters, dict) else found.said).get("scale")
        said = scale * layer.rank if type(scale) in (int, float) else None
        if said is not None and said / layer.rank != scale:
            what = f"has the scale {scale}, which is no alpha divided by the rank {layer.rank} exactly"
            raise Refused(found.path, what)
    try:
        value = float(said)
    except (TypeError, ValueError, OverflowError):
        value = 0.0
    if not isfinite(value) or value <= 0:
        raise Damaged(found.path, f"says no finite positive alpha or scale of '{layer.key[:80]}'")
    return value


# ---- An adapter at a glance


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """An adapter in short.

    Attributes:
        dialect: whose names it has.
        rank, alpha: of most of its layers, and the alpha of one of those; None for other factors than two.
        targets: the modules that it is for, as PEFT names targets.
        base: the model that it was trained on, if its settings say so.
    """

    dialect: str
    rank: int | None
    alpha: float | None
    targets: tuple[str, ...]
    base: str | None


def summary_of(checkpoint: Checkpoint) -> AdapterSummary | None:
    """Return an adapter in short; None for what is none, or can't be read as one."""
    state = checkpoint.found_state()
    if state is None or not any(map(SIGN.search, state.tensors)):
        return None
    try:
        name = os.path.basename(checkpoint.source.place)
        said = settings_beside(checkpoint.source.place, CONFIG)[1] if name in ADAPTERS else {}
        adapter = Adapter(checkpoint, said, is_of_peft=bool(said))
        found = _parsed(adapter)
        ranks = Counter(each.rank for each in found.layers.values() if each.rank)
        rank = ranks.most_common(1)[0][0] if ranks else None
        one = [each for each in found.layers.values() if each.rank == rank][:1]
        if 2 * sum(ranks.values()) < len(found.layers) and rank:
            return None  # a model with adapters inside
        is_silent = found.dialect in ("torchtune", "litgpt") and "lora_alpha" not in found.said
        _number(found, adapter, 1.0, one)
    except CkptToolError:
        return None
    config = next(iter(found.configs.values()), {})
    base = config.get("base_model_name_or_path") or checkpoint.metadata.get("ss_sd_model_name")
    alpha = one[0].alpha if one and not is_silent else None
    targets = tuple(sorted({*_ends_of(found)}))
    return AdapterSummary(found.dialect, rank, alpha, targets, str(base) if base else None)


def _ends_of(found: HeldAdapter) -> Iterable[str]:
    """Yield the last part of each layer's name, with a number that stands behind it."""
    joint = tables()["dialects"][found.dialect]["joint"]
    for layer in found.layers.values():
        places = [
            place.left
            for layout in layouts()
            for component in layout.components
            if not layout.is_any and layout.tag(component, found.dialect) == layer.tag
            for place in layout.places(
                component, joint, layer.name, right=layout.is_right(component, found.dialect)
            )
        ]
        yield re.sub(r"^.*\.(?=[^.]*[^.\d][^.]*(\.\d+)?$)", "", places[0] if places else layer.name)
