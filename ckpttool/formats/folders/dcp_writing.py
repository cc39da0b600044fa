"""DCP folders written through torch's own library, from tensors mapped from their files."""

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
"""What a dict is called that has no name."""

SIZE = Global("torch", "Size")

WITH_FULL = "keep everything with convert --full"
MOST_TOLD = 4
"""Objects that an error names one by one."""

MAX_VALUES = 10_000_000
"""Values that are written: what appears in several places is written in each, and places can multiply."""


def write(checkpoint: Checkpoint, folder: str) -> None:
    """Writes the whole tree by torch's own library, its tensors mapped from their files.

    Args:
        folder: a new or empty one.

    Raises:
        Refused: the tree holds objects that only their own code could make, or no names to save under; or
            torch's writer failed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    check(checkpoint)
    assert isinstance(checkpoint.tree, dict)
    live = _Live(checkpoint)
    state = {_name(key): live.value(item, (_name(key),)) for key, item in checkpoint.tree.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wonders at a save without a process group, and it is meant
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
    """Raises Refused for what DCP can't hold. Needs no torch, unlike `write`."""
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
    objects = [
        (dotted(path), in_brief(value))
        for path, value in checkpoint.named(_inside)
        if isinstance(value, Global | Record | Storage) and not _is_data(value)
    ]
    if objects:
        raise _objects_refused(checkpoint.path, objects)


def _objects_refused(path: str, objects: list[tuple[str, str]]) -> Refused:
    """The error for objects, given as their names and types; the first few are told."""
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
    """What DCP calls an entry of a dict: the key as text."""
    return in_brief(key) if isinstance(key, int) else str(key)


def _inside(value: object) -> Iterable[Entry] | None:
    """What is saved of a container, by name; None for what is no container."""
    if isinstance(value, dict):
        return ((_name(key), item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ((str(number), item) for number, item in enumerate(value))
    return None


def _is_data(value: Global | Record | Storage) -> bool:
    """Whether what a pickle names is data all the same: a tensor, an element type or a size."""
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
    """Every dict that DCP takes apart, with its dotted name."""
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
            items = {key: self.value(item, (*path, _name(key))) for key, item in value.items()}
            return OrderedDict(items) if isinstance(value, OrderedDict_) else items
        if isinstance(value, list | tuple):
            return type(value)(self.value(item, (*path, str(i))) for i, item in enumerate(value))
        if isinstance(value, set | frozenset):
            return type(value)(self.value(item, path) for item in value)
        return self.known(value) if isinstance(value, Global | Record) else value

    def known(self, value: Global | Record) -> object:
        """An element type or a size: `check` lets nothing else pass."""
        import torch

        return getattr(torch, value.name) if isinstance(value, Global) else torch.Size(torch_size(value))
