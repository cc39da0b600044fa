"""Recognise the packed tensors of a state, torchao's tensor subclasses among them.

A pickle has the attributes of each subclass. In safetensors `layer.weight` is `layer._weight_qdata`,
`layer._weight_scale` and so on, and the header has the rest as JSON under the tensor's name. Source: torchao
0.18, `prototype/safetensors` and the `dequantize` of each class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.module_tree import COMFY_TEXT
from ..core.checkpoint.settings import Scheme
from ..core.checkpoint.special_tensors import attributes, torch_dtype
from ..core.checkpoint.state import State
from ..core.inert_pickle.values import FROM_TYPE, Global, Record, tensor_of
from ..core.remote import urls
from ..core.tensors.ref import DTYPES, DType, TensorRef
from ..errors import CkptToolError, Refused, Unsupported
from . import integers, micro
from .declared import MARK, declared
from .integers import scaled
from .lookup import Strips
from .mlx_groups import of_words
from .settings import Group, PackedParts, QuantizationSettings, packing_beside

ROOT = "torchao."
TYPES = "_type", "_data"  # the keys of what JSON has of a class
PLAIN = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
MICRO = ("MXTensor", "NVFP4Tensor")


@dataclass(frozen=True, slots=True)
class Subclass:
    """A tensor of one of torchao's classes.

    Attributes:
        name: of the tensor.
        kind: of the class, without its module.
        tensors: its attributes that are tensors, by name.
        settings: its other attributes.
        dtype: the type that it stands for; None where nothing says so.
        keys: the names in the state that it takes, the first being where it stands.
        needed: the names of the tensors that it must have.
    """

    name: str
    kind: str
    tensors: Mapping[str, TensorRef]
    settings: Mapping[str, Any]
    dtype: DType | None
    keys: tuple[str, ...]
    needed: tuple[str, ...] = ()

    def group(self, around: PackedParts) -> Group:
        """Return it as a group. Raises Refused where its parts don't fit, Unsupported for other classes."""
        for name in self.needed:
            around.require(name in self.tensors, f"{self.name}_{name}", "is missing, and the header names it")
        path = around.path
        beside = {f"{self.name}_{name}": tensor for name, tensor in self.tensors.items()}
        data = beside.pop(f"{self.name}_qdata", None)
        if (whole := beside.pop(f"{self.name}_per_tensor_scale", None)) is not None:
            beside[f"{self.name}_scale_2"] = whole
        if self.kind not in (*PLAIN, *MICRO) or data is None:
            what = f"'{self.name[:200]}' is torchao's {self.kind[:40]}, and none of those read here"
            raise Unsupported(path, f"{what}: {', '.join((*PLAIN, *MICRO))}")
        block = self._block()
        settings = QuantizationSettings(path, {"weight_block_size": block}) if block else NONE
        parts = PackedParts(path, {**beside, self.name: data}, self.name, settings)
        given = self.settings.get("act_pre_scale") or self.tensors.get("act_pre_scale")
        parts.require(not given, self.name, "has act_pre_scale, which is not read here")
        scale, is_swizzled = f"{self.name}_scale", bool(self.settings.get("is_swizzled_scales"))
        if self.kind in MICRO and data.dtype.name in ("uint8", "float4_e2m1fn_x2"):
            group = micro.fp4_rows(parts, self.name, scale, needs_whole=False, is_swizzled=is_swizzled)
        elif is_swizzled:
            formula = integers.in_tiles(parts, data, scale, parts.of(scale, "float8_e8m0fnu"))
            group = parts.group(self.name, "MXFP8", settings.dtype, data.shape, formula)
        else:
            group = scaled(parts, scale)
        words = f"torchao {self.kind}, {group.scheme}"
        return Group(self.name, words, self.dtype or group.dtype, group.shape, group.formula, self.keys)

    def _block(self) -> list[int] | None:
        """Return the sizes of a block along both axes, as settings have them."""
        block = self.settings.get("block_size")
        if not isinstance(block, list | tuple) or len(block) != 2 or 0 in block:
            return None
        return list(block)


def subclasses(state: State, metadata: Mapping[str, str]) -> Iterator[Subclass]:
    """Yield the tensors of torchao's classes in a state, pickled or taken apart."""
    for name in state.likes:
        if (found := _pickled(name, state.container.get(name))) is not None:
            yield found
    names = _json(metadata.get("tensor_names"))
    for name in names if isinstance(names, list) else ():
        said = _json(metadata.get(name)) if isinstance(name, str) else None
        if isinstance(said, dict) and said.get("_type") not in (None, "Tensor"):
            yield _apart(name, said, state.tensors)


def without_packing(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a header without those that describe packed tensors."""
    names = _json(metadata.get("tensor_names"))
    told = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    gone = {COMFY_TEXT, *(("tensor_names", *told) if told else ())}
    return {name: text for name, text in metadata.items() if name not in gone}


def _pickled(name: str, value: object) -> Subclass | None:
    match value:
        case Record(callable=function, args=(_, Global(module, kind), made, state)) if function in FROM_TYPE:
            if not module.startswith(ROOT):
                return None
            said = attributes(state)
            found = ((str(key), tensor_of(each)) for key, each in said.items())
            tensors = {key: tensor for key, tensor in found if tensor is not None}
            dtype = torch_dtype(made[1]) if isinstance(made, tuple) and len(made) > 1 else None
            return Subclass(name, kind, tensors, said, dtype, (name,))
    return None


def _apart(name: str, said: dict[str, Any], tensors: Mapping[str, TensorRef]) -> Subclass:
    module, _, attribute = name.rpartition(".")
    prefix = f"{module}._{attribute}_"
    full_names = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    data = said.get("_data")
    settings = data if isinstance(data, dict) else {}
    named = settings.get("dtype") or settings.get("orig_dtype")
    dtype = DTYPES.get(str(named.get("_data"))) if isinstance(named, dict) else None
    parts = {key: tensors[full] for key, full in full_names.items()}
    order = sorted(full_names.values(), key=lambda key: key != f"{prefix}qdata")
    named, keys = said.get("_tensor_data_names"), tuple(order) or (name,)
    needed = tuple(map(str, named)) if isinstance(named, list) else ()
    return Subclass(name, str(said.get("_type")), parts, settings, dtype, keys, needed)


def _json(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


# ---- Recognition by names, types, shapes, and the settings beside the file


# Methods whose tensors are known here; a checkpoint of another is named as what it is.
KNOWN = {
    *("", "fp8", "fbgemm_fp8", "compressed-tensors", "compressed_tensors", "modelopt", "modelopt_fp4"),
    *("modelopt_mxfp8", "modelopt_mixed"),
    *("mxfp4", "awq", "bitsandbytes", "torchao", "deepspeedfp", "quark", "mxfp8", *integers.OF_GPTQ),
}
# Layouts of compressed-tensors whose tensors are known here.
FORMATS = {
    *("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
}

# Algorithms of ModelOpt whose tensors are known here; with MIXED_PRECISION each layer has its own.
ALGORITHMS = {
    *("", "MIXED_PRECISION", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8"),
    *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"),
    *("W8A16", "W8A8_SQ_PER_CHANNEL"),
}

# Ends of names that belong to a packed tensor and to nothing else.
PARTS = (
    *(".qweight", ".qzeros", ".g_idx", ".SCB", ".absmax", ".quant_map"),
    *(".nested_absmax", ".nested_quant_map", ".scale_weight", ".qscale_weight"),
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    *(".pre_quant_scale", ".weight_s_rel", ".weight_s_channel", ".weight_codebook", MARK),
)
# Ends of names of what only quantised layers have, for their activations and the cache of keys and values.
ACTIVATIONS = re.compile(
    r"(.*\.)?(\w+_proj_)?(input|output|activation|act|[qkv]|prob)(_proj)?_(scale|scale_inv|zero_point|global_scale)"
    r"|(.*\.)?(scale_input|qscale_act|weight_format|input_g_idx|scaled_fp8)"
)


# Names of tensors whose values are read to know how others are packed.
READ = re.compile(rf"[._]g_idx$|_shape$|_format$|_quant$|quant_map$|{re.escape(integers.STATE)}")

NONE = QuantizationSettings()

# Types of what holds codes, or the settings of bitsandbytes
HOLDING = {
    "int32",
    "uint32",
    "uint8",
    "int8",
    "float4_e2m1fn_x2",
    *(name for name in DTYPES if name.startswith("float8")),
}

Make = Callable[[PackedParts], Group]


@dataclass(frozen=True, slots=True)
class PackedState:
    """What is packed in a state, and what is wrong with it.

    Attributes:
        groups: the packed tensors, in the file's order.
        unused: names of scales of activations and the like, which a plain model has not.
        bare: names of tensors of 8-bit floats that no scale belongs to.
        faults: why tensors that look packed can't be dequantised.
        settings: what the files beside the checkpoint say.
        used: names of all that packed tensors are made of, or may be: in the module of one that is unclear.
    """

    groups: tuple[Group, ...] = ()
    unused: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    faults: tuple[CkptToolError, ...] = ()
    settings: QuantizationSettings = NONE
    used: frozenset[str] = frozenset()

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Each way in which tensors are packed, with how many are."""
        names: dict[str, list[str]] = {}
        for group in self.groups:
            names.setdefault(group.scheme, []).append(group.name)
        return tuple(Scheme(scheme, len(each), _layers(each)) for scheme, each in names.items())


def _layers(names: list[str]) -> int:
    """Return how many numbered modules names lie in: `model.layers.0`, `model.layers.1`."""
    return len({found[0] for name in names if (found := re.match(r"(?:[^.]*\.)*?\d+(?=\.)", name))})


def recognise(checkpoint: Checkpoint, state: State) -> PackedState:
    """Return what is packed in a state."""
    tensors, path = state.tensors, checkpoint.path
    apart = {each.keys[0]: each for each in subclasses(state, checkpoint.metadata)}
    used = {key for each in apart.values() for key in each.keys}
    makers = {lead: make for lead, make in _leads(tensors) if lead not in used}
    makers |= {lead: each.group for lead, each in apart.items()}
    parts = {name for name in tensors if name.endswith(PARTS) or integers.STATE in name}
    bare = {name: tensor.dtype.name for name, tensor in tensors.items() if "float8" in tensor.dtype.name}
    settings, faults = NONE, list[CkptToolError]()
    try:
        said = declared(checkpoint, state)
    except CkptToolError as fault:  # which the caller raises or shows
        said, faults = {}, [fault]
    if not makers and not parts and not said and not faults:
        return PackedState(bare=(*bare,))
    for lead in makers if said is not None else ():
        why = f"what is in the file says how others are packed, and nothing of '{lead[:200]}'"
        makers[lead] = partial(_refuse, why)
    makers |= {name: each.group for name, each in (said or {}).items()}
    try:
        settings = packing_beside(path)
        faults += unknown(path, settings)
    except CkptToolError as fault:
        faults.append(fault)
    urls.expect(tensor.storage for name, tensor in tensors.items() if READ.search(name))
    groups: list[Group] = []
    broken: set[str] = set()  # modules
    strips = Strips()
    for lead, make in makers.items():
        made = _made(make, looking := PackedParts(path, tensors, lead, settings, strips))
        used |= {lead, *looking.used}
        if isinstance(made, Group):
            groups.append(made)
        else:
            faults.append(made)
            broken.add(_module(lead))
    unused = tuple(name for name in tensors if name not in used and ACTIVATIONS.fullmatch(name))
    alone = parts.difference(used, unused)
    faults += [Refused(path, f"'{name[:200]}' belongs to no packed tensor") for name in sorted(alone)]
    bare = {name: kind for name, kind in bare.items() if name not in used and name not in unused}
    if groups and bare:
        name, kind = next(iter(bare.items()))
        faults.append(Refused(path, f"'{name[:200]}' is of {kind}, and has no scale"))
    of_packed = frozenset(used | parts | {name for name in tensors if _module(name) in broken})
    return PackedState(tuple(groups), unused if groups else (), (*bare,), tuple(faults), settings, of_packed)


def first_packed(checkpoint: Checkpoint, state: State, names: Collection[str] | None) -> str | None:
    """Return the first tensor of a state that is packed; of some names, the first that belongs to one."""
    if names is not None:
        return next(filter(recognise(checkpoint, state).used.__contains__, names), None)
    leads = (lead for lead, _ in _leads(state.tensors))
    apart = (each.name for each in subclasses(state, checkpoint.metadata))
    return next(chain(leads, apart, declared(checkpoint, state) or ()), None)


def _refuse(why: str, parts: PackedParts) -> Group:
    raise Refused(parts.path, why)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _made(make: Make, parts: PackedParts) -> Group | CkptToolError:
    try:
        return make(parts)
    except CkptToolError as fault:
        return fault


def unknown(path: str, settings: QuantizationSettings) -> Iterator[Unsupported]:
    """Yield what is wrong with the method that the settings name, if it is not known here."""
    if settings.method not in KNOWN:
        what = f"is quantised by '{settings.method[:40]}', which is none of the methods read here"
        yield Unsupported(path, what)
    elif settings.method.startswith("modelopt"):
        for algorithm in {*settings.algorithms()} - ALGORITHMS:
            what = f"is of ModelOpt's algorithm '{algorithm[:40]}', which is none of those read here"
            yield Unsupported(settings.path or path, what)
    elif settings.method.startswith("compressed"):
        form = settings.text("format") or "dense"
        if form not in FORMATS:
            what = f"is of compressed-tensors' format '{form[:40]}', which is none of those read here"
            yield Unsupported(path, what)


def _leads(tensors: Mapping[str, TensorRef]) -> Iterator[tuple[str, Make]]:
    """Yield the tensor that tells a group from its names, with what makes the group."""
    for name, tensor in tensors.items():
        if (make := _scheme(tensors, name, tensor)) is not None:
            yield name, make


def _scheme(tensors: Mapping[str, TensorRef], name: str, tensor: TensorRef) -> Make | None:
    if tensor.dtype.name not in HOLDING:
        return None
    stem, _, end = name.rpartition(".")
    if end == "qweight":
        return lambda parts: integers.of_modules(parts, stem)
    if integers.STATE in name:
        return lambda parts: integers.of_state(parts, name.partition(integers.STATE)[0])
    if name.endswith("_packed") and f"{(weight := name.removesuffix('_packed'))}_scale" in tensors:
        if tensor.dtype.name == "int32":
            return lambda parts: integers.of_rows(parts, weight)
        return lambda parts: micro.fp4_rows(parts, weight, f"{weight}_scale")
    if name.endswith("_blocks") and f"{(experts := name.removesuffix('_blocks'))}_scales" in tensors:
        return lambda parts: micro.of_experts(parts, experts)
    if tensor.dtype.name == "int8" and f"{stem}.SCB" in tensors:
        return lambda parts: integers.by_largest(parts, f"{stem}.SCB")
    if tensor.dtype.name == "uint32":
        is_mlx = end == "weight" and f"{stem}.scales" in tensors
        return (lambda parts: of_words(parts, stem)) if is_mlx else None
    if tensor.dtype.name != "int32" and (scale := integers.scale_of(tensors, name)) is not None:
        return lambda parts: integers.scaled(parts, scale)
    return None
