"""Tensors of a state with their axes permuted, in another shape, or under a second name.

Nothing is computed: a moved axis is a moved stride, and a tie is a second name. A format that can't hold such
a view gets its bytes when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.rebuilt_tensors import plain_tensor, with_plain_tensor
from ..checkpoint.state import State
from ..errors import Collision, NothingToDo, UsageFault
from ..tensors.ref import MAX_AXES, TensorRef
from .selection import replace_state

Sizes = tuple[int, ...]


def permute(
    checkpoint: Checkpoint, rules: Iterable[tuple[str, Sizes]], *, state: str | None = None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with the axes of some tensors in another order, as `torch.permute` orders them.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: (shell pattern of keys, axes) pairs, applied in order: `("*.c_attn.weight", (1, 0))`
            transposes a matrix.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, and the keys that changed.

    Raises:
        NothingToDo: a pattern matches no key.
        UsageFault: the axes are not a permutation of a tensor's axes.
        NoState: the file holds no state, or none at `state`.
    """

    def moved(key: str, tensor: TensorRef, axes: Sizes) -> TensorRef:
        if sorted(axes) != list(range(len(tensor.shape))):
            raise UsageFault(
                f"{checkpoint.path}: {_listed(axes)} is not a permutation of the "
                f"{len(tensor.shape)} axes of '{key}'",
                hint="count axes from 0: 1,0 transposes a matrix",
            )
        return replace(
            tensor, shape=tuple(tensor.shape[a] for a in axes), stride=tuple(tensor.stride[a] for a in axes)
        )

    return _by_pattern(checkpoint, rules, moved, state)


def reshape(
    checkpoint: Checkpoint, rules: Iterable[tuple[str, Sizes]], *, state: str | None = None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with some tensors in another shape, their elements in the same order.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: (shell pattern of keys, shape) pairs, applied in order: `("head.weight", (10, 64, 1, 1))`
            makes a matrix a 1×1 convolution.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, and the keys that changed.

    Raises:
        NothingToDo: a pattern matches no key.
        UsageFault: the shape has another number of elements or too many axes, or a strided tensor can't be
            viewed in it.
        NoState: the file holds no state, or none at `state`.
    """

    def shaped(key: str, tensor: TensorRef, shape: Sizes) -> TensorRef:
        if len(shape) > MAX_AXES:
            raise UsageFault(f"a shape of {len(shape)} axes, and torch has at most {MAX_AXES}")
        if prod(shape) != tensor.numel:
            raise UsageFault(
                f"{checkpoint.path}: '{key}' has {tensor.numel} elements, and {_listed(shape)} {prod(shape)}"
            )
        stride = _strides(tensor, shape)
        if stride is None:
            raise UsageFault(
                f"{checkpoint.path}: '{key}' is a strided view and can't be viewed as {_listed(shape)}",
                hint="make it contiguous first: convert to .safetensors, then convert that",
            )
        return replace(tensor, shape=shape, stride=stride)

    return _by_pattern(checkpoint, rules, shaped, state)


def _strides(tensor: TensorRef, shape: Sizes) -> Sizes | None:
    """Return the strides that show a tensor's elements in another shape; None when no strides do."""
    if tensor.is_contiguous:
        return TensorRef.contiguous(tensor.storage, tensor.dtype, shape).stride
    kept = [(size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in shape if size != 1]:
        return None
    steps = iter(step for _, step in kept)
    return tuple(1 if size == 1 else next(steps) for size in shape)


def _by_pattern(
    checkpoint: Checkpoint,
    rules: Iterable[tuple[str, Sizes]],
    change: Callable[[str, TensorRef, Sizes], TensorRef],
    where: str | None,
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Apply rules in order to every tensor whose key matches their pattern."""
    found = checkpoint.state(where)
    tensors = dict(found.tensors)
    changed: dict[str, None] = {}
    for pattern, sizes in rules:
        fitting = [key for key in tensors if fnmatchcase(key, pattern)]
        if not fitting:
            raise NothingToDo(
                f"{checkpoint.path}: no tensor's key matches '{pattern}'",
                hint=f"the first key is '{next(iter(tensors), '')}'",
            )
        for key in fitting:
            tensors[key] = change(key, tensors[key], sizes)
            changed[key] = None
    return _with_tensors(checkpoint, found, {key: tensors[key] for key in changed}), tuple(changed)


def _with_tensors(checkpoint: Checkpoint, state: State, tensors: dict[str, TensorRef]) -> Checkpoint:
    """Return the checkpoint with these tensors under their names; a Parameter of two names stays one."""
    done: dict[tuple[object, ...], object] = {}

    def put(key: object, value: object) -> object:
        if not isinstance(key, str) or key not in tensors or plain_tensor(value) is None:
            return value
        new = tensors[key]
        return done.setdefault((id(value), *new.view), with_plain_tensor(value, new))

    return replace_state(
        checkpoint, state, lambda old: type(old)({key: put(key, value) for key, value in old.items()})
    )


def tie(checkpoint: Checkpoint, pairs: Iterable[tuple[str, str]], *, state: str | None = None) -> Checkpoint:
    """Return a checkpoint with further names for tensors that it has: ties, which share their memory.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        pairs: (new name, existing name) pairs.
        state: dotted path of the model's state; found when None.

    Raises:
        NothingToDo: there is no tensor of the existing name, or both names are one tensor already.
        Collision: the new name is taken.
        NoState: the file holds no state, or none at `state`.
    """
    found = checkpoint.state(state)
    more: dict[object, object] = {}
    for new, old in pairs:
        if old not in found.tensors:
            raise NothingToDo(
                f"{checkpoint.path}: no tensor is named '{old}'",
                hint=f"the first key is '{next(iter(found.tensors), '')}'",
            )
        known = found.tensors.get(new)
        if new != old and known is not None and known.view == found.tensors[old].view:
            raise NothingToDo(f"{checkpoint.path}: '{new}' and '{old}' are one tensor already")
        if new in found.container or new in more:
            raise Collision(f"'{new}' would be another name of '{old}', but already exists")
        more[new] = found.container[old]
    return replace_state(checkpoint, found, lambda kept: type(kept)({**kept, **more}))


def _listed(sizes: Sizes) -> str:
    return ",".join(map(str, sizes))
