"""Writing DCP folders with torch's own library, from tensors mapped from their files."""

from __future__ import annotations

import shlex
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Entry, dotted
from ...errors import Refused
from ...inert_pickle.reader import PickleFault
from ...inert_pickle.values import MAX_DEPTH, Global, OrderedDict_, Record, in_brief, tensor_of, walk
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Storage
from ...tensors.to_torch import live_tensors
from .dcp import torch_size

TOP = "the dict at the top"
"""What messages call the outermost dict, which has no name."""

SIZE = Global("torch", "Size")

WITH_FULL = "keep everything with convert --full"
MOST_TOLD = 4
"""How many objects an error names one by one."""

MAX_VALUES = 10_000_000
"""The most values that are written: what appears in several places is written in each."""


def write(checkpoint: Checkpoint, folder: str) -> None:
    """Write the whole tree with torch's own library. Imports torch.

    Args:
        checkpoint: what to write; its tensors are mapped from their files.
        folder: an empty folder.

    Raises:
        Refused: the tree is no dict, holds objects that only their own code could make, has two paths that
            are one when joined with dots, or is nested too deeply; or torch's writer failed.
        Unsupported: an element type that this torch does not have.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    check(checkpoint)
    assert isinstance(checkpoint.tree, dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without a process group, and of experimental types
        live = _Live(checkpoint)
        state = {_name(key): live.value(item, (_name(key),)) for key, item in checkpoint.tree.items()}
        try:
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        except CheckpointException as failed:
            fault = next(fault for fault, _ in failed.failures.values())
            if isinstance(fault, RuntimeError):  # torch's C++ writer has no other words for a full disk
                raise Refused(
                    checkpoint.path,
                    f"torch could not write it as DCP: {str(fault).splitlines()[0]}",
                    hint="see whether the disk is full",
                ) from None
            if not isinstance(fault, ValueError):
                raise fault from None
            # Two paths that are one when they are joined with dots.
            raise Refused(checkpoint.path, str(fault), hint="write a .pt file instead") from None


def check(checkpoint: Checkpoint) -> None:
    """Check that DCP can hold a checkpoint. Needs no torch, unlike `write`.

    Raises:
        Refused: it is no dict, holds objects, has a key that is another one's text, or a tensor of a type
            that torch's writer does not take.
    """
    tree = checkpoint.tree
    if not isinstance(tree, dict):
        raise Refused(
            checkpoint.path,
            "is not a dict at the top, as DCP needs",
            hint=f"{WITH_FULL}, or write a .pt file",
        )
    known: set[str] = set()
    for name in map(_name, tree):
        if name in known:
            raise Refused(
                checkpoint.path,
                f"'{name[:80]}' is a key as text and as something else, and all keys are text in DCP",
                hint=f"{WITH_FULL}, or write a .pt file",
            )
        known.add(name)
    for name, tensor in checkpoint.tensors():
        if tensor.dtype.name.startswith("bits"):  # torch asks for the bits of an integer type, and fails
            raise Refused(
                checkpoint.path,
                f"torch can't write '{name[:80]}' as DCP: its type is {tensor.dtype.name}",
                hint="write a .pt file instead, which keeps every type",
            )
    objects = [
        (dotted(path), in_brief(value))
        for path, value in checkpoint.named(_inside)
        if isinstance(value, Global | Record | Storage) and not _is_data(value)
    ]
    if objects:
        raise _objects_refused(checkpoint.path, objects)


def _objects_refused(path: str, objects: list[tuple[str, str]]) -> Refused:
    """Return the error for objects, given by name and type; it names the first few."""
    if len(objects) == 1:
        said = "'{}' is an object ({})".format(*objects[0])
    else:
        told = ", ".join(f"'{name}' ({kind})" for name, kind in objects[:MOST_TOLD])
        more = f" and {len(objects) - MOST_TOLD} more" if objects[MOST_TOLD:] else ""
        said = f"holds objects: {told}{more}"
    drops = " ".join(f"--drop {shlex.quote(name)}" for name, _ in objects[:MOST_TOLD])
    return Refused(
        path,
        f"{said}{';' if objects[1:] else ', and'} objects are never created from a file here",
        hint=f"{WITH_FULL}, or leave out what you can do without: {drops}",
    )


def _name(key: object) -> str:
    """Return what DCP calls an entry of a dict: its key as text."""
    return in_brief(key) if isinstance(key, int) else str(key)


def _inside(value: object) -> Iterable[Entry] | None:
    """Return the named items that are saved of a container; None for what is no container."""
    if isinstance(value, dict):
        return ((_name(key), item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ((str(number), item) for number, item in enumerate(value))
    return None


def _is_data(value: Global | Record | Storage) -> bool:
    """Return whether something that a pickle names is data: a tensor, an element type or a size."""
    if isinstance(value, Storage):
        return False
    if isinstance(value, Global):
        return value.module == "torch" and value.name in DTYPES
    if value.callable == SIZE:
        try:
            torch_size(value)
        except PickleFault:
            return False
        return True
    return tensor_of(value) is not None


def without_models(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with a dict of tensors in the place of a pickled model, which DCP can't hold."""
    state = checkpoint.found_state()
    return checkpoint if state is None or state.module is None else checkpoint.changed(state, lambda v: v)


def lost(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the dotted names of what DCP does not keep.

    These are empty dicts, the module versions of a state dict, and of a pickled model its class.
    """
    whole = without_models(checkpoint)
    names: list[str] = []
    for name, value in _dicts(whole.tree):
        names += [] if value else [name]
        if isinstance(value, OrderedDict_) and isinstance(value.attributes, dict):
            names += [f"{name}.{attribute}" if name else attribute for attribute in value.attributes]
    return (*names, *whole.opened)


def with_keys_made_text(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the dotted names of the dicts that have keys, such as numbers, of which DCP makes text."""
    dicts = _dicts(without_models(checkpoint).tree)
    return tuple(name or TOP for name, value in dicts if not all(isinstance(key, str) for key in value))


def _dicts(tree: object) -> Iterator[tuple[str, dict[Any, object]]]:
    """Yield every dict of which DCP names the entries one by one, with its dotted name."""
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
        yield name, value
        stack.extend((f"{inside}{in_brief(key)}", item) for key, item in reversed(value.items()))


def _is_taken_apart(value: list[object]) -> bool:
    """Return whether DCP names the items of a list one by one, as it does if one holds a tensor."""
    return any(tensor_of(inner) is not None for inner in walk(value))


class _Live:
    """Makes of inert values what torch's library takes: live tensors in containers of the same kinds."""

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
            items = {key: self.value(item, (*path, _name(key))) for key, item in value.items()}
            return OrderedDict(items) if isinstance(value, OrderedDict_) else items
        if isinstance(value, list | tuple):
            return type(value)(self.value(item, (*path, str(i))) for i, item in enumerate(value))
        if isinstance(value, set | frozenset):
            return type(value)(self.value(item, path) for item in value)
        return self.known(value) if isinstance(value, Global | Record) else value

    def known(self, value: Global | Record) -> object:
        """Return the element type or size that a value names; `check` lets nothing else pass."""
        import torch

        return getattr(torch, value.name) if isinstance(value, Global) else torch.Size(torch_size(value))
