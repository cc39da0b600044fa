"""torchao's tensor subclasses: as `torch.save` pickles them, and as its safetensors support takes them apart.

A pickle has the attributes of each subclass. In safetensors `layer.weight` is `layer._weight_qdata`,
`layer._weight_scale` and so on, and the header has the rest as JSON under the tensor's name. Source: torchao
0.18, `prototype/safetensors` and the `dequantize` of each class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...checkpoint.special_tensors import attributes, torch_dtype
from ...checkpoint.state import State
from ...errors import Unsupported
from ...inert_pickle.values import FROM_TYPE, Global, Record, tensor_of
from ...tensors.dtypes import DTYPES, DType
from ...tensors.ref import TensorRef
from . import fp4
from .groups import Group, PackedParts
from .scaled import scaled
from .settings import QuantizationSettings

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
    """

    name: str
    kind: str
    tensors: Mapping[str, TensorRef]
    settings: Mapping[str, Any]
    dtype: DType | None
    keys: tuple[str, ...]

    def group(self, path: str) -> Group:
        """Return it as a group. Raises Refused where its parts don't fit, Unsupported for other classes."""
        beside = {f"{self.name}_{name}": tensor for name, tensor in self.tensors.items()}
        data = beside.pop(f"{self.name}_qdata", None)
        if (whole := beside.pop(f"{self.name}_per_tensor_scale", None)) is not None:
            beside[f"{self.name}_scale_2"] = whole
        if self.kind not in (*PLAIN, *MICRO) or data is None:
            what = f"'{self.name[:200]}' is torchao's {self.kind[:40]}, and none of those read here"
            raise Unsupported(path, f"{what}: {', '.join((*PLAIN, *MICRO))}")
        block = self._block()
        settings = (
            QuantizationSettings(path, {"weight_block_size": block}) if block else QuantizationSettings()
        )
        parts = PackedParts(path, {**beside, self.name: data}, self.name, settings)
        for name in ("act_pre_scale", "is_swizzled_scales"):
            given = self.settings.get(name) or self.tensors.get(name)
            parts.require(not given, self.name, f"has {name}, which is not read here")
        scale = f"{self.name}_scale"
        if self.kind in MICRO and data.dtype.name in ("uint8", "float4_e2m1fn_x2"):
            group = fp4.of_rows(parts, self.name, scale, needs_whole=False)
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


def without_subclasses(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a header without those that describe tensors taken apart."""
    names = _json(metadata.get("tensor_names"))
    told = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    gone = {"tensor_names", *told} if told else ()
    return {name: text for name, text in metadata.items() if name not in gone}


def _pickled(name: str, value: object) -> Subclass | None:
    match value:
        case Record(callable=function, args=(_, Global(module, kind), made, state)) if function in FROM_TYPE:
            if not module.startswith(ROOT):
                return None
            said = attributes(state)
            tensors = {
                str(key): tensor for key, each in said.items() if (tensor := tensor_of(each)) is not None
            }
            dtype = torch_dtype(made[1]) if isinstance(made, tuple) and len(made) > 1 else None
            return Subclass(name, kind, tensors, said, dtype, (name,))
    return None


def _apart(name: str, said: dict[str, Any], tensors: Mapping[str, TensorRef]) -> Subclass:
    module, _, attribute = name.rpartition(".")
    prefix = f"{module}._{attribute}_"
    keys = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    data = said.get("_data")
    settings = data if isinstance(data, dict) else {}
    named = settings.get("dtype") or settings.get("orig_dtype")
    dtype = DTYPES.get(str(named.get("_data"))) if isinstance(named, dict) else None
    parts = {key: tensors[full] for key, full in keys.items()}
    order = sorted(keys.values(), key=lambda key: key != f"{prefix}qdata")
    return Subclass(name, str(said.get("_type")), parts, settings, dtype, tuple(order) or (name,))


def _json(text: str | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
