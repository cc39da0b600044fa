"""Names as a tree of modules: leaves with their parameters, blocks with the number of elements below them.

The number of elements is what a change of architecture conserves: fused, split, stacked or transposed, a
block has as many as before. So blocks are paired by it, whatever they and their layers are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.checkpoint.special_tensors import require_plain
from ..core.checkpoint.state import State
from ..core.tensors.ref import PLAIN_FLOATS
from ..errors import Unsupported

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]
Parts = tuple[str, ...]
Signature = tuple[tuple[str, Sizes, str], ...]  # (kind, shape, class of type) of each parameter

NUMBER = re.compile("0|[1-9][0-9]{0,17}")  # a part that counts: `3`, but not `03` or `conv3`
MAX_PARTS = 24  # of a name; what follows is one part
MAX_NODES = 4_000_000

KINDS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
OF_NORMS = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}

# Names of the factors of an adapter, and what to do with them.
OF_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)\b")
ADAPTED = (
    "they are a LoRA adapter's weights: ckpttool merge-lora BASE ADAPTER OUT adds them to "
    "the model they were trained on"
)


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a model's state dict."""

    shape: tuple[int, ...] | None  # None where any value fits: `_extra_state`, and lazy parameters
    dtype: str  # as `float32`; "" where there is none
    first: str  # the first name of the same memory: another than its own for a tied parameter
    file: str = ""  # the file that it lies in, of those of a folder


Places = Mapping[str, StateEntry]


def places_of(path: str, state: State) -> dict[str, StateEntry]:
    """Return the places of a file's state, in its order. Raises Refused where a tensor is not a plain one."""
    require_plain(path, state.likes, "can't be brought under other names")
    first: dict[tuple[object, ...], str] = {}
    return {
        name: StateEntry(
            tensor.shape,
            tensor.dtype.name,
            first.setdefault(tensor.view, name) if tensor.numel else name,
            tensor.storage.data.path,
        )
        for name, tensor in state.tensors.items()
    }


@dataclass(slots=True, eq=False)
class Module:
    """A module without others inside: its parameters by kind."""

    parts: Parts
    number: int  # of its first parameter in the file
    names: dict[str, str] = field(default_factory=dict)  # kind -> name of the tensor
    shapes: dict[str, Sizes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> Signature:
        """What two modules must have in common for one to take the other's place unchanged."""
        return tuple(sorted((kind, shape, self.types[kind]) for kind, shape in self.shapes.items()))

    @property
    def path(self) -> str:
        """Its dotted name."""
        return ".".join(self.parts)


@dataclass(slots=True, eq=False)
class ModuleBlock:
    """A module with everything below it."""

    parts: Parts
    children: dict[str, ModuleBlock] = field(default_factory=dict)
    module: Module | None = None
    total: int = 0  # elements of all tensors below
    leaves: int = 0  # modules with parameters of their own below, itself included

    @property
    def is_composite(self) -> bool:
        """Whether it joins several things: a chain of single modules does not."""
        return len(self.children) + (self.module is not None) > 1

    @property
    def path(self) -> str:
        """Its dotted name."""
        return ".".join(self.parts)


def parameter(name: str, names: Mapping[str, StateEntry]) -> tuple[str, str]:
    """Return the module that a tensor belongs to, and its kind there: `attn.in_proj`, `weight`."""
    path, dot, last = name.rpartition(".")
    if last in KINDS and dot:
        return path, last
    if last in OF_NORMS and f"{path}.gamma" in names and f"{path}.beta" in names:
        return path, OF_NORMS[last]
    bare = name.removesuffix("_weight")
    if bare != name:  # torch.nn.MultiheadAttention's `in_proj_weight`
        return bare, "weight"
    bare = name.removesuffix("_bias")
    has_weight = bare in names or f"{bare}_weight" in names  # also the experts' `gate_up_proj`
    return (bare, "bias") if has_weight and bare != name else (name, "weight")


def tree(path: str, places: Mapping[str, StateEntry]) -> ModuleBlock:
    """Return the modules of a state. Raises Unsupported for names of more parts than memory is for."""
    root, nodes = ModuleBlock(()), 1
    for number, (name, place) in enumerate(places.items()):
        where, kind = parameter(name, places)
        block, parts = root, tuple(where.split(".", MAX_PARTS))
        chain = [root]
        for depth, part in enumerate(parts, 1):
            if (below := block.children.get(part)) is None:
                below = block.children[part] = ModuleBlock(parts[:depth])
                nodes += 1
            block = below
            chain.append(block)
        if nodes > MAX_NODES:
            raise Unsupported(path, f"its names have more than {MAX_NODES} parts")
        if block.module is None:
            block.module = Module(parts, number)
            for above in chain:
                above.leaves += 1
        if kind in block.module.names:  # `a.weight` beside `a_weight`: each is a module of its own
            kind = name
        shape = place.shape or ()
        block.module.names[kind], block.module.shapes[kind] = name, shape
        block.module.types[kind] = class_of(place.dtype)
        for above in chain:
            above.total += prod(shape)
    return root


def class_of(dtype: str) -> str:
    """Return what a type has to share with another for a cast between them to keep the meaning."""
    return "float" if dtype in PLAIN_FLOATS else dtype


@lru_cache(1 << 16)  # names repeat the same few words
def _bare(part: str) -> str:
    return re.sub(r"\d+", "#", part)


@lru_cache(1 << 16)
def _numbers(part: str) -> tuple[int, ...]:
    return tuple(int(digits[:18]) for digits in re.findall(r"\d+", part))


def pattern(parts: Parts) -> Parts:
    """Return a name with # for each run of digits, also within words."""
    return tuple(map(_bare, parts))


def counted(parts: Parts) -> tuple[int, ...]:
    """Return the numbers of a name, also those within words."""
    return tuple(chain.from_iterable(map(_numbers, parts)))


def without_numbers(parts: Iterable[str]) -> Parts:
    """Return a name with # for each part that is a number."""
    return tuple("#" if part.isdecimal() else part for part in parts)


def by_numbers(names: list[Parts]) -> list[int] | None:
    """Return the order of names that differ in one number alone; None where more differs."""
    if len({*map(pattern, names)}) != 1:
        return None
    columns = [*zip(*map(counted, names), strict=True)]
    varying = [column for column in columns if len({*column}) > 1]
    if len(varying) != 1 or len({*varying[0]}) != len(names):
        return None
    return sorted(range(len(names)), key=varying[0].__getitem__)


def paired_by_numbers(left: Sequence[Parts], right: Sequence[Parts]) -> list[tuple[int, int]]:
    """Return the places of names that have the same rank by one number on both sides; [] where none has."""
    orders = by_numbers([*left]), by_numbers([*right])
    return [] if orders[0] is None or orders[1] is None else [*zip(orders[0], orders[1], strict=True)]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The names, shapes and types of a model's state dict."""

    places: Mapping[str, StateEntry]  # in the order of `state_dict()`
    parameters: tuple[str, ...]  # in the order in which optimizers number them; () where it is not known
    norms: tuple[str, ...]  # paths of the BatchNorm layers of any kind

    @classmethod
    def like(cls, path: str, state: State) -> Blueprint:
        """Return the blueprint of whatever a reference's state loads into. Raises Refused for odd tensors."""
        places = places_of(path, state)
        ends = ".running_mean"
        return cls(places, (), tuple(name.removesuffix(ends) for name in places if name.endswith(ends)))

    @classmethod
    def of(cls, model: torch.nn.Module) -> Blueprint:
        """Return the blueprint of a live module. Imports torch."""
        from torch.nn.modules.batchnorm import _NormBase

        places: dict[str, StateEntry] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            shape, dtype = _shape(value), str(getattr(value, "dtype", "")).removeprefix("torch.")
            places[name] = StateEntry(shape, dtype, first.setdefault(_memory(name, value), name))
        norms = tuple(path for path, module in model.named_modules() if isinstance(module, _NormBase))
        return cls(places, tuple(name for name, _ in model.named_parameters()), norms)


def _shape(value: Any) -> tuple[int, ...] | None:
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _memory(name: str, value: Any) -> tuple[object, ...]:
    """Return a key that is equal for two names of one tensor; on the meta device there is no address."""
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value) or not value.numel():
        return (name,)
    if value.is_meta:
        return (id(value),)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
