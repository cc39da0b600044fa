"""Changed checkpoints: fewer keys, other dtypes, more metadata, the state alone, or an average with names.

Averages without names: `ExponentialMovingAverage.state_dict()` of torch_ema and `EMAModel.state_dict()` of
diffusers keep `shadow_params`, a list in the order of the parameters; LitEma of latent diffusion registers
buffers under the parameters' names without their dots, mmcv's EMAHook with `_` in their place.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, NamedTuple

from ...errors import CkptToolError, Mismatch, NothingToDo, UsageFault
from ..inert_pickle.values import OrderedDict_, remade, walk
from ..tensors.cast import Caster, CastReport
from ..tensors.ref import DType, Storage, TensorRef
from ..words import first_key
from . import full
from .checkpoint import OF_TORCH, Checkpoint, takes_checkpoint
from .dotted_names import follow
from .module_tree import moved_kinds
from .settings import require_unpacked
from .special_tensors import PLACEHOLDER, plain_tensor, require_plain, with_plain_tensor
from .state import State, make_state, path_of


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model, in the order of `model.parameters()`.

    Attributes:
        shapes: shape by name.
        trainable: names of those with `requires_grad`; some averages list only these.
    """

    shapes: Mapping[str, tuple[int, ...]]
    trainable: tuple[str, ...]


class NamedAverage(NamedTuple):
    """An average under the names of a model's parameters."""

    checkpoint: Checkpoint
    left_out: tuple[str, ...]


def with_names(checkpoint: Checkpoint, where: str | None, parameters: Parameters) -> NamedAverage | None:
    """Return the average at a place under the names of a model's parameters."""
    path = path_of(checkpoint.tree, where) if where is not None else None
    listed = None if path is None else follow(checkpoint.tree, path)
    if isinstance(listed, list | tuple) and listed and where is not None and path is not None:
        tensors = [tensor for item in listed if (tensor := plain_tensor(item)) is not None]
        if len(tensors) < len(listed):
            return None
        named = _by_position(checkpoint, where, tensors, parameters)
        return _named(checkpoint, named, make_state(path, {}))
    try:
        state = checkpoint.state(where)
    except CkptToolError:
        return None  # whoever loads it says why
    for dot in ("", "_"):
        if (without_dots := _without_dots(state.container, parameters, dot)) is not None:
            return _named(checkpoint, without_dots, state)
    return None


def _named(checkpoint: Checkpoint, tensors: Mapping[str, object], state: State) -> NamedAverage:
    new = replace(checkpoint, tree=OrderedDict_(tensors), opened=(), full=False)
    return NamedAverage(new, checkpoint.outside(state))


def _by_position(
    checkpoint: Checkpoint, where: str, listed: Sequence[TensorRef], parameters: Parameters
) -> dict[str, TensorRef]:
    choices = ([*parameters.shapes], parameters.trainable)
    names = next((names for names in choices if len(names) == len(listed)), None)
    what = f"{checkpoint.path}: '{where}' lists {len(listed)} tensors by position, and"
    if names is None:
        counts = f"{len(parameters.shapes)} parameters, {len(parameters.trainable)} of them trainable"
        raise Mismatch(f"{what} the model has {counts}")
    named = dict(zip(names, listed, strict=True))
    shapes = ((name, tensor.shape, parameters.shapes[name]) for name, tensor in named.items())
    wrong = tuple((name, str([*theirs]), str([*mine])) for name, theirs, mine in shapes if theirs != mine)
    if wrong:
        name, theirs, mine = wrong[0]
        reason = f"the one at the place of '{name}' has shape {theirs}, not {mine}"
        raise Mismatch(f"{what} {reason}", mismatched=wrong)
    return named


def _without_dots(
    container: Mapping[object, object], parameters: Parameters, dot: str
) -> dict[str, object] | None:
    """Return a state under the parameters' names; None unless it has all trainable ones, with other dots."""
    names = {name.replace(".", dot): name for name in parameters.trainable}
    if len(names) < len(parameters.trainable) or not any("." in name for name in names.values()):
        return None
    first = next(iter(names), "")
    keys = [key for key in container if isinstance(key, str)]
    for outer in (key.removesuffix(first) for key in keys if first and key.endswith(first)):
        if all(outer + short in container for short in names):
            if any(name in container for name in names.values()):  # the model's own, beside the average
                return None
            return {names.get(key.removeprefix(outer), key): container[key] for key in keys}
    return None


# ---- Changed checkpoints.
#
# Each function returns a new Checkpoint whose tensors still lie in the old file.


WIDEST = 16  # bytes of the widest element: storages are cut at its multiples, so that no element is cut


def replace_state(
    checkpoint: Checkpoint, state: State, change: Callable[[dict[Any, Any]], Any]
) -> Checkpoint:
    """Return a checkpoint with other entries in its state's dict, which keeps its module versions."""
    new = remade(state.container, change(state.container))
    return checkpoint.changed(state, lambda value: new if value is state.container else value)


@dataclass(frozen=True, slots=True)
class KeySelection:
    """The keys that stayed, and those that were left out."""

    kept: tuple[str, ...]
    left_out: tuple[str, ...]


@takes_checkpoint
def select(
    checkpoint: Checkpoint, *, only: Iterable[str] = (), exclude: Iterable[str] = (), state: str | None = None
) -> tuple[Checkpoint, KeySelection]:
    """Return a checkpoint with fewer keys in its state.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        only: shell patterns (`layer1.*`); when there are any, a key must match one of them.
        exclude: shell patterns; a key that matches one is left out.
        state: dotted path of the model's state; found when None.

    Raises:
        NothingToDo: a pattern matches no key, or no key is left.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     part, selection = ckpttool.select(checkpoint, only=["0.*"])
        ...     sorted(part.state())
        ['0.bias', '0.weight']
    """
    target = checkpoint.state(state)
    keys = [key for key in target.container if isinstance(key, str)]
    fitting: dict[str, set[str]] = {"--only": set(), "--exclude": set()}
    for flag, patterns in (("--only", only := tuple(only)), ("--exclude", tuple(exclude))):
        for pattern in patterns:
            if not (matches := {key for key in keys if fnmatchcase(key, pattern)}):
                what = f"{checkpoint.path}: no key matches '{pattern}'"
                raise NothingToDo(what, hint=_wider(flag, pattern, keys))
            fitting[flag] |= matches
    kept = (fitting["--only"] if only else set(keys)) - fitting["--exclude"]
    if not kept:
        raise NothingToDo(f"{checkpoint.path}: no key would be left", hint="give fewer patterns")
    rest = set(keys) - kept
    new = replace_state(checkpoint, target, lambda old: {k: v for k, v in old.items() if k not in rest})
    new = replace(new, metadata=moved_kinds(checkpoint.metadata, keys, kept))
    return new, KeySelection(tuple(k for k in keys if k in kept), tuple(k for k in keys if k in rest))


def _wider(flag: str, pattern: str, keys: list[str]) -> str:
    """Return a hint for a pattern that no key matches, and that some key would behind its first modules."""
    modules = [f"{part}." for part in accumulate(keys[0].split(".")[:-1], "{}.{}".format)] if keys else []
    common = [module for module in modules if all(key.startswith(module) for key in keys)][-1:]
    for wider in (*(glob.escape(module) + pattern for module in common), f"*.{pattern}"):
        count = sum(fnmatchcase(key, wider) for key in keys)
        if count:
            return f"{flag} {shlex.quote(wider)} matches {count} of {len(keys)} keys"
    return first_key(keys)


def cast(checkpoint: Checkpoint, to: DType, *, state: str | None = None) -> tuple[Checkpoint, CastReport]:
    """Return a checkpoint with the floating-point tensors of its state in another type; others stay.

    Values are computed when they are written: only then does the report count losses. Raises Refused where
    a tensor is packed.
    """
    target = checkpoint.state(state)
    require_plain(checkpoint.path, target.likes, "can't be cast")
    require_unpacked(checkpoint, target, "its codes can't be cast", to.name)
    caster = Caster(to)
    new = replace_state(checkpoint, target, lambda old: _map_tensors(old, caster.cast))
    if not caster.report.tensors:
        what = f"no tensor to cast: none has a float dtype other than {to.name}"
        raise NothingToDo(f"{checkpoint.path}: {what}")
    return new, caster.report


def _map_tensors(container: dict[Any, Any], change: Callable[[TensorRef], TensorRef]) -> dict[Any, Any]:
    """Return the same dict with each tensor changed, inside a Parameter too; ties stay ties."""
    values = {id(value): value for value in container.values()}
    done = {
        name: with_plain_tensor(value, change(tensor)) if (tensor := plain_tensor(value)) else value
        for name, value in values.items()
    }
    return remade(container, ((key, done[id(value)]) for key, value in container.items()))


@takes_checkpoint
def with_metadata(
    checkpoint: Checkpoint, texts: Mapping[str, str], *, state: str | None = None
) -> Checkpoint:
    """Return a checkpoint with these texts added to its safetensors header.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        texts: name -> text; replaces an existing text of that name.
        state: dotted path of the model's state; found when None.

    Raises:
        UsageFault: a reader would take a text for the tie of a tensor, or for the contents of `--full`.
        NoState: there is no state at `state`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     noted = ckpttool.with_metadata(checkpoint, {"note": "tuned"})
        ...     saved = ckpttool.save(noted, "noted.safetensors")
        >>> ckpttool.inspect("noted.safetensors").metadata["note"]
        'tuned'
    """
    tensors = checkpoint.state(state).tensors if checkpoint.states() else {}
    for name, text in texts.items():
        if name == full.ENTRY:
            raise UsageFault(f"the metadata '{name}' is what --full keeps", hint="choose another name")
        if text in tensors and name not in tensors and name not in OF_TORCH:
            what = f"the metadata '{name}' would be read as another name of the tensor '{text}'"
            hint = f"choose another text, or tie them: convert --tie {shlex.quote(f'{name}={text}')}"
            raise UsageFault(what, hint=hint)
    return replace(checkpoint, metadata={**checkpoint.metadata, **texts})


@takes_checkpoint
def drop(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """Return a checkpoint without the entries of these dotted names (`optimizer`, `config.lr`).

    A dict that is in other places too stays whole there.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        names: dotted names of entries of dicts.

    Raises:
        NothingToDo: no dict has such an entry.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     list(ckpttool.drop(checkpoint, ["optimizer"]).tree)
        ['model', 'epoch']
    """
    paths: list[Keys] = []
    for name in names:
        if not (path := _path(checkpoint.tree, name)):
            hint = f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}"
            raise NothingToDo(f"{checkpoint.path}: holds nothing named '{name}'", hint=hint)
        paths.append(path)
    return replace(checkpoint, tree=_without(checkpoint.tree, paths))


Keys = tuple[Any, ...]  # of dicts, and places in lists


def _path(tree: object, name: str) -> Keys:
    """Return the keys that a dotted name leads along; none if it leads nowhere."""
    # Keys may contain dots, or be numbers.
    tried: set[tuple[int, str]] = set()
    stack: list[tuple[Keys, object, str]] = [((), tree, name)]
    while stack:
        path, value, rest = stack.pop()
        if (id(value), rest) in tried or not isinstance(value, dict | list | tuple):
            continue
        tried.add((id(value), rest))
        if isinstance(value, dict) and (found := [key for key in value if str(key) == rest]):
            return (*path, found[0])
        items = value.items() if isinstance(value, dict) else enumerate(value)
        below = ((key, item, f"{key}.") for key, item in items)
        stack += [((*path, key), item, rest[len(s) :]) for key, item, s in below if rest.startswith(s)]
    return ()


def _without(value: Any, paths: Sequence[Keys]) -> Any:
    """Return a container without what paths in it lead to. What else refers to it still has that."""
    below: dict[Any, list[Keys]] = {}
    for first, *rest in paths:
        below.setdefault(first, []).append((*rest,))
    gone = {key for key, rests in below.items() if () in rests}
    items = [*(value.items() if isinstance(value, dict) else enumerate(value))]
    kept = [
        (key, _without(item, below[key]) if key in below else item) for key, item in items if key not in gone
    ]
    return remade(value, kept) if isinstance(value, dict) else type(value)(item for _, item in kept)


@takes_checkpoint
def slim(checkpoint: Checkpoint, *, state: str | None = None) -> Checkpoint:
    """Return the model's state alone, without the bytes of storages that none of its tensors uses.

    Ties, overlapping views and module versions stay.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        state: dotted path of the model's state; found when None.

    Raises:
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     list(ckpttool.slim(checkpoint).tree)[:1]
        ['module.0.weight']
    """
    target = checkpoint.state(state)
    absent = {name: like for name, like in target.likes.items() if like.kind == PLACEHOLDER}
    require_plain(checkpoint.path, absent, "can't be taken out of this file")
    return replace(checkpoint, tree=_map_tensors(target.container, _Trimmer(target)), opened=(), full=False)


class _Trimmer:
    """Cuts storages to the bytes that the tensors of a state use; tensors that shared one still do."""

    def __init__(self, state: State) -> None:
        self.spans: dict[int, tuple[int, int]] = {}
        self.done: dict[int, Storage] = {}
        for tensor in (tensor for tensor in state.tensors.values() if tensor.numel):
            begin, end = tensor.span
            begin, end = begin - begin % WIDEST, min(end + -end % WIDEST, tensor.storage.nbytes)
            known = self.spans.get(id(tensor.storage), (begin, end))
            self.spans[id(tensor.storage)] = min(begin, known[0]), max(end, known[1])
        for value in walk(state.others):  # nested tensors keep their whole storages, and their ties
            if isinstance(value, TensorRef | Storage):
                old = value if isinstance(value, Storage) else value.storage
                self.spans[id(old)] = 0, old.nbytes

    def __call__(self, tensor: TensorRef) -> TensorRef:
        old = tensor.storage
        begin, end = self.spans.get(id(old), (0, 0))
        if (begin, end) == (0, old.nbytes):
            return tensor
        if id(old) not in self.done:
            part = old.data.part(begin, end - begin)
            self.done[id(old)] = replace(old, data=part, crc32=None, digest=None, origins=(old,))
        offset = tensor.offset - begin // tensor.dtype.itemsize if tensor.numel else 0
        return replace(tensor, storage=self.done[id(old)], offset=offset)
