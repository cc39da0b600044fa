"""Tensors that are not one strided view of a storage: sharded, sparse, quantised, nested, without values."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import Refused
from ..inert_pickle.values import Global, Record
from ..tensors.dtypes import DTYPES, DType
from ..tensors.ref import MAX_AXES, MAX_BYTES, Computed, Storage, TensorRef, extent, is_count

Shape = tuple[int, ...]

# Kinds of which a file usually holds one rank's piece.
SHARDED = ("DTensor", "ShardedTensor")

# The most names that a hint lists, each with its flag.
MAX_NAMED = 8

PLACEHOLDER = "ZeRO-3 placeholder"


@dataclass(frozen=True, slots=True)
class SpecialTensor:
    """A tensor that a file describes by other tensors and settings."""

    # `DTensor`, `ShardedTensor`, `sparse COO`, `quantised`, `nested`, `meta`, `uninitialised`, `ZeRO-3
    # placeholder`, or the name of a class that is not known here
    kind: str
    dtype: DType | None = None  # the element type; None when the file does not say
    # the shape of the whole tensor; None when the file does not say, or rows differ in length
    shape: Shape | None = None
    # the tensors of the file that its values are made of, by what they are
    parts: Mapping[str, TensorRef] = field(default_factory=dict)
    # settings that its values also depend on, as text that is the same for the same tensor: the scale of a
    # quantised tensor, the place of a shard
    form: str = ""
    # the shape of the piece that this file holds; None when it holds all of the tensor
    local_shape: Shape | None = None
    known: bool = True  # whether `parts` and `form` determine the values

    @property
    def nbytes(self) -> int:
        """Bytes of the parts that the file holds."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_piece(self) -> bool:
        """Whether other files hold the rest of the tensor, or may do so."""
        return self.local_shape is not None or (self.kind in SHARDED and not self.known)

    def __str__(self) -> str:
        # DTensor float32 [7, 5], here [3, 5], Shard(0), rank 1 of 2
        words = f"{self.kind}{f' {self.dtype.name}' if self.dtype else ''}"
        words += f" {list(self.shape)}" if self.shape is not None else ""
        here = None if self.local_shape is None else f"here {list(self.local_shape)}"
        return ", ".join(filter(None, (words, here, self.form)))

    def as_tensor(self) -> TensorRef:
        """Return a tensor of the same dtype and shape without values, to list with others."""
        nothing = Storage(Computed("", 0, lambda start, nbytes: iter(())), "UntypedStorage", "meta")
        return TensorRef.contiguous(nothing, self.dtype or DTYPES["uint8"], self.shape or (0,))


def placeholders(tree: object) -> dict[str, Shape]:
    """Return the shapes of the parameters that DeepSpeed keeps in other files, by their names in `module`."""
    # ZeRO stage 3 cuts each parameter over the ranks and writes an empty tensor in its place. `param_shapes`
    # has the names and shapes, also in the stages that write whole parameters.
    listed = [tree.get("param_shapes"), tree.get("frozen_param_shapes")] if isinstance(tree, dict) else []
    groups = [group for groups in listed for group in (groups if isinstance(groups, list) else [groups])]
    pairs = [pair for group in groups if isinstance(group, dict) for pair in group.items()]
    shapes = ((name, shape_of(size)) for name, size in pairs if isinstance(name, str))
    return {name: shape for name, shape in shapes if shape is not None and 0 not in shape}


def placeholder(tensor: TensorRef, shape: Shape | None) -> SpecialTensor:
    """Return the description of an empty tensor in the place of a parameter that ZeRO-3 keeps elsewhere."""
    return SpecialTensor(PLACEHOLDER, tensor.dtype, shape, local_shape=tensor.shape)


def attributes(value: object) -> Mapping[Any, Any]:
    """Return an object's state as a dict: a dict, the second of (dict, slots), or nothing."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    return state if isinstance(state, dict) else {}


def torch_dtype(value: object) -> DType | None:
    """Return the dtype that a name of torch's means, as `torch.float32`; None for any other value."""
    return DTYPES.get(value.name) if isinstance(value, Global) and value.module == "torch" else None


def shape_of(value: object) -> Shape | None:
    """Return a tuple, list or torch.Size as a shape; None when it is not one that a tensor can have."""
    if (
        isinstance(value, Record)
        and value.callable == Global("torch", "Size")
        and isinstance(value.args, tuple)
    ):
        value = value.args[0] if value.args else ()
    if not isinstance(value, tuple | list) or len(value) > MAX_AXES:
        return None
    sizes = tuple(size for size in value if is_count(size))
    return sizes if len(sizes) == len(value) and extent(sizes) <= MAX_BYTES else None


def _in_words(likes: Mapping[str, SpecialTensor], most: int = 3) -> str:
    """Return some tensors by name: `'w' (sparse COO float32 [3, 3]) and 2 more`."""
    named = [f"'{name[:80]}' ({like})" for name, like in list(likes.items())[:most]]
    return ", ".join(named) + (f" and {len(likes) - most} more" if len(likes) > most else "")


def _ways_out(path: str, likes: Mapping[str, SpecialTensor], holds: bool) -> str:
    """Return the next command for tensors that are no plain ones."""
    folder, path = shlex.quote(os.path.dirname(path) or "."), shlex.quote(path)
    kinds = {like.kind for like in likes.values() if like.is_piece}
    if PLACEHOLDER in kinds:
        return f"the values are in the files of all ranks: ckpttool merge {folder} out.safetensors"
    if kinds:
        keep = f"or keep this rank's piece: ckpttool convert {path} out.pt"
        return f"join the files of all ranks: ckpttool merge FOLDER out.pt; {keep}"
    few = len(likes) <= MAX_NAMED
    names = (
        " ".join(f"--exclude {shlex.quote(glob.escape(name))}" for name in likes) if few else "--exclude GLOB"
    )
    keep = "" if holds else f"keep them: ckpttool convert {path} out.pt; or "
    return f"{keep}leave them out: ckpttool convert {path} plain.pt {names}"


def require_plain(path: str, likes: Mapping[str, SpecialTensor], why: str, *, holds: bool = True) -> None:
    """Refuse tensors that are not plain ones: `why` says what can't be done with them."""
    # `holds`: the output's format could hold them, so that another format is no way out.
    if likes:
        raise Refused(path, f"{_in_words(likes)} {why}", hint=_ways_out(path, likes, holds))
