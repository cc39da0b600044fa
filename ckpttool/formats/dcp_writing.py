"""DCP folders written through torch's own library, from tensors mapped from their files."""

from __future__ import annotations

import warnings
from collections import OrderedDict

from ..checkpoint import Checkpoint
from ..dtypes import DTYPES
from ..errors import Refused
from ..inert import MAX_DEPTH, Global, OrderedDict_, Record, in_brief, tensor_of, walk
from ..live import live_tensors
from ..modules import SETS
from ..tensor import Storage
from .dcp import torch_size

MAX_VALUES = 10_000_000
"""Values that are written: what stands in several places is written in each, and places can multiply."""


def write(checkpoint: Checkpoint, folder: str) -> None:
    """Writes the whole tree by torch's own library, its tensors mapped from their files.

    Args:
        folder: a new or empty one.

    Raises:
        Refused: the tree holds objects that only their own code could make, or no names to save under.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if not isinstance(checkpoint.tree, dict):
        raise Refused(checkpoint.path, "is no dict at the top, as DCP needs", hint="write a .pt file instead")
    live = _Live(checkpoint)
    state = {str(key): live.value(item, (str(key),)) for key, item in checkpoint.tree.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wonders at a save without a process group, and it is meant
        try:
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        except CheckpointException as failed:
            fault = next(fault for fault, _ in failed.failures.values())
            if not isinstance(fault, ValueError):
                raise fault from None
            # Two paths that are one when they are joined with dots.
            raise Refused(checkpoint.path, str(fault), hint="write a .pt file instead") from None


def lost(tree: object) -> list[str]:
    """What DCP does not keep, in words that begin with a dotted name: empty dicts, the module versions of a
    state dict, and the type of keys that are no text.
    """
    names: list[str] = []
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", tree)]
    while stack:
        name, value = stack.pop()
        if not isinstance(value, dict | list) or id(value) in seen:
            continue
        seen.add(id(value))
        inside = f"{name}." if name else ""
        if isinstance(value, list):
            apart = enumerate(value) if _is_taken_apart(value) else ()
            stack.extend(reversed([(f"{inside}{number}", item) for number, item in apart]))
            continue
        names += [] if value else [name]
        names += [] if all(isinstance(key, str) for key in value) else [f"{name} (keys that are no text)"]
        if isinstance(value, OrderedDict_) and isinstance(value.attributes, dict):
            names += [f"{inside}{attribute}" for attribute in value.attributes]
        stack.extend((f"{inside}{in_brief(key)}", item) for key, item in reversed(value.items()))
    return names


def _is_taken_apart(value: list[object]) -> bool:
    """Whether DCP gives the items of a list names of their own, as it does where a tensor is inside."""
    return any(tensor_of(inner) is not None for inner in walk(value))


class _Live:
    """Inert values as torch's library takes them: one tensor each, containers as they were."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        tensors = [tensor for _, tensor in checkpoint.tensors()]
        made = live_tensors({str(number): tensor for number, tensor in enumerate(tensors)})
        self.made = {id(tensor): made[str(number)] for number, tensor in enumerate(tensors)}
        self.visits = 0

    def value(self, value: object, path: tuple[str, ...]) -> object:
        tensor = tensor_of(value)
        if tensor is not None:
            return self.made[id(tensor)]
        self.visits += 1
        if len(path) > MAX_DEPTH or self.visits > MAX_VALUES:
            raise Refused(self.path, f"'{'.'.join(path[:4])}…' is nested too deeply, or holds too much")
        if isinstance(value, dict):
            items = {key: self.value(item, (*path, str(key))) for key, item in value.items()}
            return OrderedDict(items) if isinstance(value, OrderedDict_) else items
        if isinstance(value, list | tuple):
            return type(value)(self.value(item, (*path, str(i))) for i, item in enumerate(value))
        if isinstance(value, set | frozenset):
            made = [self.value(item, (*path, str(i))) for i, item in enumerate(value)]
            return set(made) if isinstance(value, set) else frozenset(made)
        if isinstance(value, Global | Record | Storage):
            return self.known(value, ".".join(path))
        return value

    def known(self, value: object, name: str) -> object:
        """The few names and objects that are data: element types, sizes, devices."""
        import torch

        if isinstance(value, Global) and value.module == "torch" and value.name in DTYPES:
            return getattr(torch, value.name)
        plain = value.args if isinstance(value, Record) and isinstance(value.args, tuple) else ()
        if isinstance(value, Record) and value.callable == Global("torch", "Size"):
            return torch.Size(torch_size(value))
        if isinstance(value, Record) and value.callable in SETS and plain and isinstance(plain[0], list):
            return set(plain[0])
        what = value.type_name if isinstance(value, Record) else str(value)
        raise Refused(
            self.path,
            f"'{name}' is an object ({what}), and objects are not made from a file here",
            hint=f"write a .pt file, which keeps it as it is, or leave it out: --drop {name}",
        )
