"""An adapter in another dialect: its layers under other names, its numbers where that dialect keeps them.

Tensors keep their bits. Where one program fuses what another has apart (q, k and v of Flux), factors are
split and joined so that the same come back: B by rows, with one A for all, or block by block. What a dialect
can't hold is refused by name.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isqrt
from typing import Any

from ..core.checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..core.checkpoint.settings import config_of
from ..core.files.commit import Spool
from ..core.inert_pickle.values import OrderedDict_
from ..core.lazy import NDArray, np
from ..core.tensors.ref import DTYPES, DType, Storage, TensorRef
from ..core.words import first_few, noted
from ..errors import Refused, Unsupported, UsageFault
from .adapter import IN_PYTHON, PREFIX, Adapter
from .dialects import EXCLUDE, METADATA, NAMES, AdapterLayer, HeldAdapter, held
from .differences import patterns
from .layouts import WHOLE, LayerPlace, ModelLayout, layouts, tables

DIALECTS = ("peft", "kohya", "diffusers", "comfy")
OF_PEFT = ("peft", "diffusers")  # those that keep PEFT's settings
SPLIT = {"A", "B", "magnitude", "alpha"}  # parts of a layer that others may be fused with
WEIGHT = ".weight"
WHOLE_PARTS = ("=weight", "=bias")  # of a module that is saved whole
USUAL: dict[str, Any] = {"peft_type": "LORA", "task_type": None, "inference_mode": True, "bias": "none"}
USUAL["base_model_name_or_path"] = None
MODELS = "they are sd15, sdxl, flux, sd3, wan, qwen-image and llm"

# Settings of PEFT's that other dialects say by their tensors, or that mean nothing after training.
_CARRIED = (
    "peft_type r lora_alpha rank_pattern alpha_pattern target_modules use_rslora use_dora modules_to_save "
    "inference_mode init_lora_weights peft_version auto_mapping layers_to_transform layers_pattern bias "
    "exclude_modules eva_config corda_config loftq_config"
)
CARRIED = _CARRIED.split()

# torchtune has the rotary rows of a head in pairs, transformers in halves: tune_to_peft_adapter_weights.
IN_PAIRS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
OF_META = ("llama", "mistral")
OF_LITGPT = ("lora_query", "lora_key", "lora_value")  # settings: which rows of qkv have factors

Placed = list[tuple[AdapterLayer, list[LayerPlace]]]


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """What became of an adapter.

    Attributes:
        dialect: the one that it had.
        to: the one that it has now.
        model: the table of names that was used; `other-…` where names stayed.
        layers: how many modules have factors.
        left_out: layers of other components, and settings and texts that the dialect has no place for.
        config: PEFT's settings; {} for other dialects.
    """

    dialect: str
    to: str
    model: str
    layers: int
    left_out: tuple[str, ...] = noted("left out")
    config: Mapping[str, Any] = field(default_factory=dict, metadata={"json": None})


def convert_adapter(
    adapter: Adapter,
    to: str,
    *,
    base: Checkpoint | str | None = None,
    component: str | None = None,
    alpha: float | None = None,
) -> tuple[Checkpoint, ConvertedAdapter]:
    """Return an adapter under the names and with the settings of another dialect.

    Args:
        adapter: what `open_adapter` returned; open until the result is saved.
        to: `peft`, `kohya`, `diffusers` or `comfy`.
        base: the model, where names alone do not tell: an open checkpoint, whose names count, or the name of
            a table: `sd15`, `sdxl`, `flux`, `sd3`, `wan`, `qwen-image`, `llm`.
        component: the part of a pipeline that an adapter of PEFT's is for (`unet`, `transformer`,
            `text_encoder_2`), or the part that is taken from an adapter for several.
        alpha: of all layers, where the files do not say it.

    Returns:
        The adapter, whose factors have the bits that they had, and what became of it. `save` writes it with
        `keep_copies=True`; for `peft`, `save_adapter` with `.config`.

    Raises:
        Refused: the dialect has no place for something, or a name may be one of two; `base` and `component`
            can tell.
        Unsupported: it is no LoRA, or of a kind that is more than its factors.
        Damaged: a factor is missing, a number is no positive one, or settings are malformed.
        NothingToDo: it is empty. UsageFault: there is no such dialect.

    Example:
        >>> adapter = ckpttool.open_adapter("adapter")
        >>> converted, done = ckpttool.convert_adapter(adapter, "kohya", component="unet")
        >>> sorted(converted.state())
        ['lora_unet_0.alpha', 'lora_unet_0.lora_down.weight', 'lora_unet_0.lora_up.weight']
    """
    if to not in DIALECTS:
        raise UsageFault(f"'{to}' is no dialect that is written: {', '.join(DIALECTS)}")
    if (kind := adapter.config.get("peft_type", "LORA")) != "LORA":
        hint = "add it to its model: ckpttool merge-lora BASE ADAPTER OUTPUT"
        what = f"is of type {kind}; other dialects have LORA alone"
        raise Unsupported(adapter.checkpoint.path, what, hint=hint)
    found = held(adapter, alpha)
    layout, placed = _Search(found, to, base, component).placed()
    parts = [*dict.fromkeys(places[0].component for _, places in placed)]
    components = [each for each in parts if component in (None, each)]
    if not components or (to == "peft" and len(components) > 1):
        what = f"has layers of {first_few(parts)}, and a folder of PEFT's is for one model"
        raise Refused(found.path, what, hint="say for which: --component NAME")
    writing = _Writing(adapter, found, layout, to, base if isinstance(base, Checkpoint) else None)
    chosen = [pair for pair in placed if pair[1][0].component in components]
    writing.left_out += [layer.key for layer, places in placed if places[0].component not in components]
    for place, layer in writing.renamed(chosen):
        writing.add(place, layer)
    metadata, config = writing.settings(components)
    tensors = OrderedDict_(writing.tensors)
    source, shards = adapter.checkpoint.source, adapter.checkpoint.shards
    count = sum(bool(layer.rank) for layer, _ in chosen)
    done = ConvertedAdapter(found.dialect, to, layout.name, count, (*writing.left_out,), config)
    return Checkpoint(source, "safetensors", tensors, metadata=metadata, shards=shards), done


def _key(layout: ModelLayout, place: LayerPlace, dialect: str) -> str:
    """Return the beginning of a layer's keys in a dialect."""
    joint, tag = tables()["dialects"][dialect]["joint"], layout.tag(place.component, dialect)
    name = layout.named(place, dialect).replace(".", joint)
    return f"{tag}{joint}{name}" if tag else PREFIX + name


# ---- Which layer of which model each name is


class _Search:
    """Looks up the layers of an adapter in the tables of all models."""

    def __init__(
        self, found: HeldAdapter, to: str, base: Checkpoint | str | None, component: str | None
    ) -> None:
        self.found, self.to, self.component = found, to, component
        self.joint = tables()["dialects"][found.dialect]["joint"]
        known = layouts()
        if isinstance(base, str):  # `sdxl` is `sdxl-diffusers` too
            known = tuple(each for each in known if f"{each.name}-".startswith(f"{base}-"))
        if not known:
            raise UsageFault(f"base: '{base}' is no model whose names are known", hint=MODELS)
        self.layouts = [each for each in known if component in (None, *each.components)]
        self.modules: dict[str, list[str]] = defaultdict(list)  # of the base, by their names once joined
        for name in base.state().tensors if isinstance(base, Checkpoint) else ():
            module = name.removeprefix("model.").removeprefix("diffusion_model.").removesuffix(WEIGHT)
            for each in dict.fromkeys((module, name.removesuffix(WEIGHT))) if name.endswith(WEIGHT) else ():
                self.modules[each.replace(".", self.joint)].append(each)

    def placed(self) -> tuple[ModelLayout, Placed]:
        """Return the places of all layers; refuse names that no model has, or that two have differently."""
        tries = [*self._tries()]
        whole = [each for each in tries if all(places for _, places in each[1])]
        whole = [each for each in whole if not each[0].is_any] or whole
        if not whole:
            best = max(tries, key=lambda each: sum(bool(places) for _, places in each[1]), default=None)
            absent = next(layer.key for layer, places in best[1] if not places) if best else "a layer"
            what = f"holds '{absent[:80]}', which is no layer of a model whose names are known"
            hint = "--base MODEL says its names; or leave it out: ckpttool convert IN PART --exclude KEY"
            raise Refused(self.found.path, what, hint=hint)
        first, keys = whole[0], self._keys(*whole[0])
        for other in whole[1:]:
            if (others := self._keys(*other)) != keys:
                at = next(at for at, pair in enumerate(zip(keys, others, strict=True)) if pair[0] != pair[1])
                layer = first[1][at][0]
                ways = [f"{each[0].name} {each[1][at][1][0].component}" for each in (first, other)]
                what = f"'{layer.key[:80]}' is '{keys[at][0][:80]}' or '{others[at][0][:80]}'"
                hint = f"--base and --component say which: {' or '.join(ways)}"
                raise Refused(self.found.path, f"{what} in {NAMES[self.to]} files", hint=hint)
        return first

    def _keys(self, layout: ModelLayout, placed: Placed) -> list[list[str]]:
        return [[_key(layout, place, self.to) for place in places] for _, places in placed]

    def _tries(self) -> Iterator[tuple[ModelLayout, Placed]]:
        """Yield each model, and each of its components where names tell none, with the layers' places."""
        layers = [*self.found.layers.values()]
        are_tagged = all(each.tag for each in layers)
        for layout in self.layouts:
            if self.found.dialect in layout.only_from:
                components = [""] if are_tagged else [*layout.components]
                for component in components:
                    if not component or self.component in (None, component):
                        yield layout, [(each, self._places(layout, component, each)) for each in layers]

    def _places(self, layout: ModelLayout, component: str, layer: AdapterLayer) -> list[LayerPlace]:
        dialect, name = self.found.dialect, layer.name
        fits = [each for each in layout.components if layout.tag(each, dialect) == layer.tag != ""]
        component = fits[0] if fits else component if not layer.tag else ""
        if not component:
            return []
        own = self.modules.get(name, [])
        is_right = layout.is_right(component, dialect)
        if not layout.is_any:
            places = layout.places(component, self.joint, name, right=is_right)
            if not places and dialect == "peft":  # trained on the original's own code
                places = layout.places(component, self.joint, name, right=True)
            return [each for each in places if {each.left, each.right} & {*own}] or places
        if (self.joint == "_" and "_" in name) or layout.is_right(component, self.to) is not is_right:
            if len(own) > 1:
                names = " or ".join(f"'{each[:80]}'" for each in own[:2])
                raise Refused(self.found.path, f"'{layer.key[:80]}' may be {names} of the model")
            return [LayerPlace(component, each, each) for each in own]
        return [LayerPlace(component, name, name)]


# ---- Factors and settings as a dialect has them


class _Writing:
    """The tensors and settings of an adapter as a dialect has them."""

    def __init__(
        self, adapter: Adapter, found: HeldAdapter, layout: ModelLayout, to: str, base: Checkpoint | None
    ) -> None:
        self.adapter, self.found, self.layout, self.to = adapter, found, layout, to
        self.path, self.base = found.path, base
        self.tensors: dict[str, TensorRef] = {}
        self.left_out: list[str] = []
        self.layers: dict[str, dict[str, AdapterLayer]] = defaultdict(dict)  # by component and PEFT's name
        self.spool = Spool("the factors")

    def renamed(self, placed: Placed) -> Iterator[tuple[LayerPlace, AdapterLayer]]:
        """Yield each layer with its place, those split or joined that the dialect has otherwise."""
        groups: dict[str, list[tuple[LayerPlace, AdapterLayer]]] = defaultdict(list)
        for layer, places in placed:
            place = places[0]
            if layer.is_root and self.to not in OF_PEFT:
                layer = self._without_root(layer)
            if self.found.dialect == "torchtune":
                layer = self._in_halves(layer, place.left.rpartition(".")[2])
            if place.left.endswith(".qkv"):
                yield from self._of_litgpt(layer, place)
                continue
            is_right = self.layout.is_right(place.component, self.to)
            if place.rows == WHOLE or place.was_right is is_right:
                yield place, layer
            elif is_right:
                groups[place.right].append((place, layer))
            else:
                yield from self._split(layer, places)
        for name, those in groups.items():
            place = those[0][0]
            places = self.layout.places(place.component, ".", name, right=True)
            numbers = [places.index(replace(at, was_right=True)) for at, _ in those]
            yield place, self._joined(places, dict(zip(numbers, (of for _, of in those), strict=True)))

    def add(self, place: LayerPlace, layer: AdapterLayer) -> None:
        """Take the parts of a layer, under the names of the dialect; refuse what it has none for."""
        key, is_of_peft = _key(self.layout, place, self.to), self.to in OF_PEFT
        self.layers[place.component][self.layout.named(place, "peft")] = layer
        parts = {part: each for part, each in layer.parts.items() if part != "alpha" or not is_of_peft}
        if "A" in parts and not is_of_peft and "alpha" not in parts:
            parts |= self._alpha(layer)
        for part, tensor in parts.items():
            end = tables()["dialects"][self.to]["ends"].get(part, [""])[0]
            end = end or (part[1:] if part.startswith("=") and is_of_peft else "")
            if not end or f"{key}.{end}" in self.tensors:
                why = f"with {part.lstrip('=')}, which {NAMES[self.to]} files have no name for"
                why = "twice under one name" if end else why
                raise Refused(self.path, f"has '{layer.key[:80]}' {why}", hint=EXCLUDE)
            if part == "magnitude":
                ones = (1,) * (len(layer.parts["A"].shape) - 2)
                before, after = ((1,) if ones else (), ones) if is_of_peft else ((), (1, *ones))
                tensor = tensor.viewed((*before, tensor.numel, *after)) or tensor
            self.tensors[f"{key}.{end}"] = replace(tensor, storage=replace(tensor.storage))  # tied to none

    def _without_root(self, layer: AdapterLayer) -> AdapterLayer:
        root = isqrt(layer.rank)
        if root * root != layer.rank:
            raise self._inexact(layer)
        return replace(layer, alpha=layer.alpha * root, is_root=False)

    def _alpha(self, layer: AdapterLayer) -> dict[str, TensorRef]:
        """Return the alpha of a layer as a tensor: of its factors' type if that holds it, or float32."""
        if self.to == "comfy" and layer.alpha == layer.rank:
            return {}
        for dtype in (layer.parts["A"].dtype, DTYPES["float32"]):
            if (raw := _number_in(dtype, layer.alpha)) is not None:
                return {"alpha": self._kept(np.frombuffer(raw, "u1"), dtype, ())}
        raise self._inexact(layer)

    def _inexact(self, layer: AdapterLayer) -> Refused:
        scale = f"{layer.alpha!r} / {'√' * layer.is_root}{layer.rank}"
        what = f"scales '{layer.key[:80]}' by {scale}, and no alpha in float32 does so exactly"
        return Refused(self.path, what, hint="--to peft or --to diffusers keeps it")

    def _kept(self, values: NDArray[Any], dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """Return bits as a tensor in a temporary file."""
        data = self.spool.append(np.ascontiguousarray(values).tobytes())
        return TensorRef.contiguous(Storage(data, dtype.kind), dtype, shape)

    # ---- Fused layers

    def _split(
        self, layer: AdapterLayer, places: Sequence[LayerPlace]
    ) -> Iterator[tuple[LayerPlace, AdapterLayer]]:
        """Yield the layers that a fused one is."""
        b = layer.parts.get("B")
        if b is None or layer.parts.keys() - SPLIT or b.shape[0] % places[0].rows.of:
            what = f"has '{layer.key[:80]}', which is several layers in one, and no factors that come apart"
            raise Refused(self.path, what, hint="only the two factors of LoRA are split")
        for at, columns in _blocks(_bits(b), places).items():
            rows, rank = _rows(b.shape[0], places[at]), columns.stop - columns.start
            cuts = {"A": [columns], "B": [rows, columns], "magnitude": [rows]}
            parts = {part: _cut(layer.parts[part], cut) for part, cut in cuts.items() if part in layer.parts}
            alpha = layer.alpha * rank / layer.rank
            if alpha / rank != layer.alpha / layer.rank or (layer.is_root and rank != layer.rank):
                raise Refused(self.path, f"scales '{layer.key[:80]}' as no alpha of rank {rank} does exactly")
            yield places[at], replace(layer, parts=parts, rank=rank, alpha=alpha)

    def _joined(self, places: Sequence[LayerPlace], layers: Mapping[int, AdapterLayer]) -> AdapterLayer:
        """Return the fused layer that some are part of: with their common A, or block by block."""
        order = sorted(layers)
        those = [layers[at] for at in order]
        first, rank = those[0], those[0].rank
        names = first_few([each.key for each in those])
        kinds = {(each.alpha, *_kind(each, places[at])) for at, each in layers.items()}
        if len(kinds) > 1 or any(not {"A", "B"} <= each.parts.keys() <= SPLIT for each in those):
            what = f"has {names}, one layer in {NAMES[self.to]} files, of other ranks, alphas or kinds"
            raise Refused(self.path, what, hint="--to peft or --to diffusers keeps them apart")
        a, b = ([_bits(each.parts[part]) for each in those] for part in "AB")
        count = len(b[0]) // (places[order[0]].rows.end - places[order[0]].rows.begin) * places[0].rows.of
        for is_common in (True, False):
            if is_common and not all(np.array_equal(a[0], each) for each in a):
                continue
            starts = {at: 0 if is_common else n * rank for n, at in enumerate(order)}
            columns = {at: slice(start, start + rank) for at, start in starts.items()}
            fused = np.zeros((count, rank if is_common else rank * len(order), *b[0].shape[2:]), b[0].dtype)
            for at, values in zip(order, b, strict=True):
                fused[_rows(count, places[at]), columns[at]] = values
            if _blocks(fused, places) == columns:
                joined = {"A": a[0] if is_common else np.concatenate(a), "B": fused}
                if "magnitude" in first.parts:
                    joined["magnitude"] = np.concatenate([_bits(each.parts["magnitude"]) for each in those])
                    if len(joined["magnitude"]) != count:
                        break
                parts = {p: self._kept(v, first.parts[p].dtype, v.shape) for p, v in joined.items()}
                wide = len(joined["A"])
                return replace(first, parts=parts, rank=wide, alpha=first.alpha * (wide // rank))
        raise Refused(self.path, f"has {names}, which joined to one would not come apart the same again")

    def _in_halves(self, layer: AdapterLayer, name: str) -> AdapterLayer:
        """Return a layer of torchtune's with the rows of q and k as transformers has them."""
        if name not in IN_PAIRS or "B" not in layer.parts:
            return layer
        config, rows = config_of(self.base.path) if self.base else {}, layer.parts["B"].shape[0]
        heads = config.get(IN_PAIRS[name], config.get("num_attention_heads"))
        is_known = config.get("model_type") in OF_META and type(heads) is int and heads > 0
        if not is_known or rows % (2 * heads):
            what = f"has '{layer.key[:80]}', whose rows torchtune has in pairs, head by head"
            hint = "--base MODEL, a Llama or Mistral with its config.json, says how many heads there are"
            raise Refused(self.path, what, hint=hint)
        parts = dict(layer.parts)
        for part in parts.keys() & {"B", "magnitude"}:
            ref = parts[part]
            halves = _bits(ref).reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2)
            parts[part] = self._kept(halves, ref.dtype, ref.shape)
        return replace(layer, parts=parts)

    def _of_litgpt(self, layer: AdapterLayer, place: LayerPlace) -> Iterator[tuple[LayerPlace, AdapterLayer]]:
        """Yield q, k and v: B has their rows one after the other, and A those of each."""
        weights = self.base.state().tensors if self.base else {}
        names = [
            f"{place.left.removesuffix('qkv')}{each[5]}_proj" for each in OF_LITGPT if self._trains(each)
        ]
        sizes = [weights[f"{name}.weight"].shape[0] for name in names if f"{name}.weight" in weights]
        a, b = (layer.parts.get(part) for part in "AB")
        is_known = a and b and len(sizes) == len(names) and sum(sizes) == b.shape[0]
        if not (is_known and a and b) or len(names) * layer.rank != a.shape[0]:
            what = f"has '{layer.key[:80]}', which is q, k and v in one, of sizes that it does not say"
            raise Refused(self.path, what, hint="--base MODEL says them: a checkpoint of transformers' names")
        at = 0
        for n, (name, size) in enumerate(zip(names, sizes, strict=True)):
            columns = slice(n * layer.rank, (n + 1) * layer.rank)
            parts = {"A": _cut(a, [columns]), "B": _cut(b, [slice(at, at + size)])}
            yield replace(place, left=name, right=name), replace(layer, parts=parts)
            at += size

    def _trains(self, name: str) -> bool:
        return str(self.found.said.get(name, name != "lora_key")).lower() == "true"

    # ---- Settings

    def settings(self, components: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the metadata of the file, and PEFT's settings."""
        texts = {key: text for key, text in self.adapter.checkpoint.metadata.items() if key not in OF_TORCH}
        texts.pop(METADATA, None)
        lost = [key for key in texts if self.to == "peft" or key.startswith("sshs_")]  # hashes of the file
        self.left_out += [f"metadata: {key}" for key in lost]
        texts = {**OF_TORCH, **{key: text for key, text in texts.items() if key not in lost}}
        if self.to in OF_PEFT:
            configs = {each: self._config(each) for each in components}
            said = {f"{at}.{name}": value for at, each in configs.items() for name, value in each.items()}
            if self.to == "diffusers":
                texts[METADATA] = json.dumps(said, indent=2, sort_keys=True)
            return texts, configs[components[0]]
        for config in self.found.configs.values():
            replace(self.adapter, config={"peft_type": "LORA", **config, "use_dora": False}).require_known()
            if config.get("fan_in_fan_out"):
                what = f"is for transposed layers (fan_in_fan_out), which {NAMES[self.to]} files are not"
                raise Unsupported(self.path, what, hint=IN_PYTHON)
            self.left_out += [
                f"setting: {key}" for key, said in config.items() if said and key not in CARRIED
            ]
        layers = [layer for those in self.layers.values() for layer in those.values() if layer.rank]
        if self.to == "kohya" and layers:
            rank, alpha = Counter((each.rank, each.alpha) for each in layers).most_common(1)[0][0]
            numbers = {"ss_network_dim": f"{rank}", "ss_network_alpha": f"{alpha:g}"}
            texts = {"ss_network_module": "networks.lora", **self.layout.of, **texts, **numbers}
        return texts, {}

    def _config(self, component: str) -> dict[str, Any]:
        """Return PEFT's settings of a component: those that it had, or what its layers say."""
        layers, configs = self.layers[component], self.found.configs
        old = {**configs.get(self.layout.tag(component, "diffusers"), configs.get("", {}))}
        if old and all(layer.name == name for name, layer in layers.items()):
            return {"peft_type": "LORA", **old}
        ranked = {name: layer for name, layer in layers.items() if layer.rank}
        ranks = {name: layer.rank for name, layer in ranked.items()}
        alphas = {name: _plain(layer.alpha) for name, layer in ranked.items()}
        rank, alpha = (Counter(each.values()).most_common(1)[0][0] if each else 8 for each in (ranks, alphas))
        held_parts = {part for each in layers.values() for part in each.parts}
        whole = sorted(name for name, each in layers.items() if not ({*each.parts} - {*WHOLE_PARTS}))
        config = {
            **USUAL,
            **old,
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": sorted(ranked),
            "rank_pattern": patterns(rank, ranks),
            "alpha_pattern": patterns(alpha, alphas),
            "use_dora": "magnitude" in held_parts,
            "lora_bias": "bias_B" in held_parts,
            "modules_to_save": whole or None,
            "use_rslora": any(each.is_root for each in ranked.values()),
        }
        read = replace(self.adapter, config=config, numbers=None)
        if read.settings("rank_pattern", "r", ranks) != ranks or (
            read.settings("alpha_pattern", "lora_alpha", alphas) != alphas
        ):
            raise Refused(self.path, "has layers that no patterns of PEFT's tell apart by their names")
        return config


def _kind(layer: AdapterLayer, place: LayerPlace) -> Iterator[object]:
    """Yield what layers that are fused must have in common: types, and sizes for each share of the rows."""
    for part, tensor in sorted(layer.parts.items()):
        share = Fraction(tensor.shape[0], place.rows.end - place.rows.begin) if part != "A" else layer.rank
        yield from (part, tensor.dtype.name, share, tensor.shape[1:]) if part != "alpha" else ()


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _number_in(dtype: DType, value: float) -> bytes | None:
    """Return the bytes of a number in a type of floats; None where it has no such number."""
    forms = {"float64": "<d", "float32": "<f", "float16": "<e", "bfloat16": "<f"}
    try:
        raw = struct.pack(forms[dtype.name], value)
    except (KeyError, OverflowError):
        return None
    rest = raw[: -dtype.itemsize]  # a bfloat16 is the upper half of a float32
    return raw[len(rest) :] if struct.unpack(forms[dtype.name], raw)[0] == value and not any(rest) else None


# ---- The rows and columns of fused layers


def _bits(tensor: TensorRef) -> NDArray[Any]:
    return replace(tensor, dtype=DTYPES[f"int{8 * tensor.dtype.itemsize}"]).numpy()


def _rows(count: int, place: LayerPlace) -> slice:
    unit = count // place.rows.of
    return slice(place.rows.begin * unit, place.rows.end * unit)


def _cut(tensor: TensorRef, cuts: Sequence[slice]) -> TensorRef:
    """Return the view of some rows, or of their columns too."""
    shape = (*(cut.stop - cut.start for cut in cuts), *tensor.shape[len(cuts) :])
    steps = sum(cut.start * step for cut, step in zip(cuts, tensor.stride, strict=False))
    return replace(tensor, shape=shape, offset=tensor.offset + steps)


def _blocks(b: NDArray[Any], places: Sequence[LayerPlace]) -> dict[int, slice]:
    """Return the columns of a fused B that each of its layers has to itself, or that all of them share.

    Layers that B has only zeros for are not there, unless all have columns to themselves.
    """
    width = b.shape[1]
    others = (0, *range(2, b.ndim))
    used = [(b[_rows(len(b), each)] != 0).any(axis=others) for each in places]
    active = [at for at, columns in enumerate(used) if columns.any()]
    for those in ([*range(len(places))], active):
        share, odd = divmod(width, len(those) or 1)
        blocks = {at: slice(n * share, (n + 1) * share) for n, at in enumerate(those)}
        outside = any(np.delete(each, blocks.get(at, slice(0))).any() for at, each in enumerate(used))
        if len(those) > 1 and share and not odd and not outside:
            return blocks
    return {at: slice(0, width) for at in active or range(len(places))}
