"""Which tensors of a state are packed: by their names, types, shapes, and the settings beside the file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from ...errors import CkptToolError, Refused, Unsupported
from ...remote import reads
from ...tensors.dtypes import DTYPES
from ...tensors.ref import TensorRef
from ...words import counted
from . import codebooks, fp4, integers, scaled
from .groups import Group, PackedParts
from .settings import QuantizationSettings, packing_beside
from .strips import Strips
from .subclasses import Subclass, subclasses

# Methods whose tensors are known here; a checkpoint of another is named as what it is.
KNOWN = {
    *(
        "",
        "fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "compressed_tensors",
        "modelopt",
        "modelopt_fp4",
        "mxfp4",
    ),
    *("awq", "bitsandbytes", "torchao", "deepspeedfp", "quark", "mxfp8", *integers.OF_GPTQ),
}
# Layouts of compressed-tensors whose tensors are known here.
FORMATS = {
    *("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
}

# Ends of names that belong to a packed tensor and to nothing else.
PARTS = (
    *(".qweight", ".qzeros", ".g_idx", ".SCB", ".absmax", ".quant_map"),
    *(".nested_absmax", ".nested_quant_map", ".scale_weight", ".qscale_weight"),
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
)
# Ends of names of what only quantised layers have, for their activations and the cache of keys and values.
ACTIVATIONS = re.compile(
    r"(.*\.)?(input|output|activation|act|[qkv]|prob)(_proj)?_(scale|scale_inv|zero_point|global_scale)"
    r"|(.*\.)?(scale_input|qscale_act|weight_format|input_g_idx|scaled_fp8)"
)


# Names of tensors whose values are read to know how others are packed.
READ = re.compile(rf"[._]g_idx$|_shape$|_format$|quant_map$|{re.escape(codebooks.STATE)}")

NONE = QuantizationSettings()

# Types of what holds codes, or the settings of bitsandbytes
HOLDING = {"int32", "uint8", "int8", *(name for name in DTYPES if name.startswith("float8"))}

Make = Callable[[PackedParts], Group]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way in which tensors are packed, in words, and how many tensors and layers are packed so."""

    scheme: str
    tensors: int
    layers: int  # numbered modules; 0 where none is

    def __str__(self) -> str:
        layers = f", {counted(self.layers, 'layer')}" if self.layers else ""
        return f"{self.scheme}{layers} ({counted(self.tensors, 'tensor')})"


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
    makers |= {lead: partial(_of_torchao, each) for lead, each in apart.items()}
    parts = {name for name in tensors if name.endswith(PARTS) or codebooks.STATE in name}
    bare = {name: tensor.dtype.name for name, tensor in tensors.items() if "float8" in tensor.dtype.name}
    if not makers and not parts:
        return PackedState(bare=(*bare,))
    settings, faults = NONE, list[CkptToolError]()
    try:
        settings = packing_beside(path)
        faults += unknown(path, settings)
    except CkptToolError as fault:  # which the caller raises or shows
        faults.append(fault)
    reads.expect(tensor.storage for name, tensor in tensors.items() if READ.search(name))
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
    bare = {name: kind for name, kind in bare.items() if name not in used}
    if groups and bare:
        name, kind = next(iter(bare.items()))
        faults.append(Refused(path, f"'{name[:200]}' is of {kind}, and has no scale"))
    of_packed = frozenset(used | parts | {name for name in tensors if _module(name) in broken})
    return PackedState(tuple(groups), unused if groups else (), (*bare,), tuple(faults), settings, of_packed)


def require_unpacked(
    checkpoint: Checkpoint,
    state: State,
    why: str = "its codes can't be laid out without their scales",
    dtype: str = "bfloat16",
    names: Collection[str] | None = None,
) -> None:
    """Raise Refused where a tensor of a state is packed: its codes and scales are numbers only together.

    Args:
        names: those that are asked about, codes or scales; None for all of the state.
    """
    if names is None:
        leads = (lead for lead, _ in _leads(state.tensors))
        name = next(chain(leads, (each.name for each in subclasses(state, checkpoint.metadata))), None)
    else:
        name = next(filter(recognise(checkpoint, state).used.__contains__, names), None)
    if name is not None:
        path = shlex.quote(checkpoint.path)
        hint = f"make it plain: ckpttool convert {path} plain.safetensors --dequantize --dtype {dtype}"
        raise Refused(checkpoint.path, f"'{name[:200]}' is packed, and {why}", hint=hint)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _made(make: Make, parts: PackedParts) -> Group | CkptToolError:
    try:
        return make(parts)
    except CkptToolError as fault:
        return fault


def _of_torchao(tensor: Subclass, parts: PackedParts) -> Group:
    return tensor.group(parts.path)


def unknown(path: str, settings: QuantizationSettings) -> Iterator[Unsupported]:
    """Yield what is wrong with the method that the settings name, if it is not known here."""
    if settings.method not in KNOWN:
        yield Unsupported(
            path, f"is quantised by '{settings.method[:40]}', which is none of the methods read here"
        )
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
    if codebooks.STATE in name:
        return lambda parts: codebooks.of_state(parts, name.partition(codebooks.STATE)[0])
    if name.endswith("_packed") and f"{(weight := name.removesuffix('_packed'))}_scale" in tensors:
        if tensor.dtype.name == "int32":
            return lambda parts: integers.of_rows(parts, weight)
        return lambda parts: fp4.of_rows(parts, weight, f"{weight}_scale")
    if name.endswith("_blocks") and f"{(experts := name.removesuffix('_blocks'))}_scales" in tensors:
        return lambda parts: fp4.of_experts(parts, experts)
    if tensor.dtype.name == "int8" and f"{stem}.SCB" in tensors:
        return lambda parts: scaled.by_largest(parts, f"{stem}.SCB")
    if tensor.dtype.name != "int32" and (scale := scaled.scale_of(tensors, name)) is not None:
        return lambda parts: scaled.scaled(parts, scale)
    return None
