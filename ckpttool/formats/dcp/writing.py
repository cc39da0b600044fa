"""Writing DCP folders with torch's own library, each tensor read from its file when it is written.

A file that is mapped would kill the process with SIGBUS if another one cut it short meanwhile.
"""

from __future__ import annotations

import shlex
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Entry, dotted
from ...errors import Refused
from ...inert_pickle.reader import PickleFault
from ...inert_pickle.values import MAX_DEPTH, Global, OrderedDict_, Record, in_brief, tensor_of, walk
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Storage, TensorRef
from ...tensors.to_torch import live_tensors
from .reading import torch_size

# What messages call the outermost dict, which has no name.
TOP = "the dict at the top"

SIZE = Global("torch", "Size")

WITH_FULL = "keep everything with convert --full"
# How many objects an error names one by one.
MOST_TOLD = 4

# The most values that are written: what appears in several places is written in each.
MAX_VALUES = 10_000_000


def write(checkpoint: Checkpoint, folder: str) -> None:
    """Write the whole tree with torch's own library. Imports torch."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from .tensors import OneFile, TensorsRead

    check(checkpoint)
    assert isinstance(checkpoint.tree, dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without a process group, and of experimental types
        planner = TensorsRead()
        live = _Live(checkpoint, planner.placeholder)
        state = {_name(key): live.value(item, (_name(key),)) for key, item in checkpoint.tree.items()}
        try:
            save(state, storage_writer=OneFile(folder), planner=planner, no_dist=True)
        except CheckpointException as failed:
            fault = next(fault for fault, _ in failed.failures.values())
            if isinstance(fault, RuntimeError):  # of torch: it has no memory left, say
                said = f"torch could not write it as DCP: {str(fault).splitlines()[0]}"
                raise Refused(checkpoint.path, said) from None
            if not isinstance(fault, ValueError):
                raise fault from None
            # Two paths that are one when they are joined with dots.
            raise Refused(checkpoint.path, str(fault), hint="write a .pt file instead") from None


def check(checkpoint: Checkpoint) -> None:
    """Check that DCP can hold a checkpoint. Needs no torch, unlike `write`."""
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
    """Return the dotted names of what DCP does not keep."""
    # These are empty dicts, the module versions of a state dict, and of a pickled model its class.
    plain = without_models(checkpoint)
    names: list[str] = []
    for name, value in _dicts(plain.tree):
        names += [] if value else [name]
        if isinstance(value, OrderedDict_) and isinstance(value.attributes, dict):
            names += [f"{name}.{attribute}" if name else attribute for attribute in value.attributes]
    return (*names, *plain.opened)


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


def _in_tuples(tree: object) -> list[TensorRef]:
    """Return the tensors in tuples and sets, which DCP pickles whole."""
    tensors: dict[int, TensorRef] = {}
    seen: set[int] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        if tensor_of(value) is not None or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list):
            stack.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple | set | frozenset):
            inside = (tensor_of(inner) for inner in walk(value))
            tensors.update((id(tensor), tensor) for tensor in inside if tensor is not None)
    return list(tensors.values())


class _Live:
    """Makes of inert values what torch's library takes, of a tensor that it names one without values."""

    def __init__(self, checkpoint: Checkpoint, placeholder: Callable[[str, TensorRef], object]) -> None:
        self.path = checkpoint.path
        self.named = {id(tensor): placeholder(name, tensor) for name, tensor in checkpoint.tensors()}
        pickled = _in_tuples(checkpoint.tree)
        made = live_tensors({str(number): each for number, each in enumerate(pickled)}, mapped=False)
        self.pickled = {id(each): made[str(number)] for number, each in enumerate(pickled)}
        self.visits = 0

    def value(self, value: object, path: tuple[str, ...], *, pickled: bool = False) -> object:
        tensor = tensor_of(value)
        if tensor is not None:
            return (self.pickled if pickled else self.named)[id(tensor)]
        self.visits += 1
        if len(path) > MAX_DEPTH or self.visits > MAX_VALUES:
            raise Refused(self.path, f"'{'.'.join(path[:4])}…' is nested too deeply, or holds too much")
        pickled = pickled or isinstance(value, tuple | set | frozenset)
        if isinstance(value, dict):
            items = {
                key: self.value(item, (*path, _name(key)), pickled=pickled) for key, item in value.items()
            }
            return OrderedDict(items) if isinstance(value, OrderedDict_) else items
        if isinstance(value, list | tuple):
            inside = (self.value(item, (*path, str(i)), pickled=pickled) for i, item in enumerate(value))
            return type(value)(inside)
        if isinstance(value, set | frozenset):
            return type(value)(self.value(item, path, pickled=pickled) for item in value)
        return self.known(value) if isinstance(value, Global | Record) else value

    def known(self, value: Global | Record) -> object:
        """Return the element type or size that a value names; `check` lets nothing else pass."""
        import torch

        return getattr(torch, value.name) if isinstance(value, Global) else torch.Size(torch_size(value))
