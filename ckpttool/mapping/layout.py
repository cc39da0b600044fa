"""Tensors of a state in another layout: axes permuted, another shape, ties, complex numbers as real pairs.

Nothing is computed where a view does: a moved axis is a moved stride, a tie is a second name, and the parts
of a complex tensor are views of its storage. A format that can't hold a view gets its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from math import prod

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.settings import require_unpacked
from ..core.checkpoint.special_tensors import plain_tensor, with_plain_tensor
from ..core.checkpoint.state import State
from ..core.tensors.ref import DTYPES, MAX_AXES, REAL_TYPES, Computed, TensorRef
from ..core.tensors.values import CHUNK, FORMATS, require_bounded, stream, stretches, swap
from ..core.words import first_key
from ..errors import Collision, NothingToDo, UsageFault

Sizes = tuple[int, ...]
Rules = Iterable[tuple[str, Sizes]]  # a pattern of keys, and what their tensors get
Change = Callable[[str, TensorRef, Sizes], TensorRef]  # of a tensor by its key
Changed = tuple[Checkpoint, tuple[str, ...]]  # with the names of the tensors that changed


def permute(checkpoint: Checkpoint, rules: Rules, *, state: str | None = None) -> Changed:
    """Return a checkpoint with the axes of some tensors in another order, as `torch.permute` orders them."""

    def moved(key: str, tensor: TensorRef, axes: Sizes) -> TensorRef:
        if (new := tensor.permuted(axes)) is None:
            what = f"is not a permutation of the {len(tensor.shape)} axes of '{key}'"
            hint = "count axes from 0: 1,0 transposes a matrix"
            raise UsageFault(f"{checkpoint.path}: {_listed(axes)} {what}", hint=hint)
        return new

    return _by_pattern(checkpoint, rules, moved, state)


def reshape(checkpoint: Checkpoint, rules: Rules, *, state: str | None = None) -> Changed:
    """Return a checkpoint with some tensors in another shape, their elements in the same order."""

    def shaped(key: str, tensor: TensorRef, shape: Sizes) -> TensorRef:
        if len(shape) > MAX_AXES:
            raise UsageFault(f"a shape of {len(shape)} axes, and torch has at most {MAX_AXES}")
        if prod(shape) != tensor.numel:
            counts = f"has {tensor.numel} elements, and {_listed(shape)} {prod(shape)}"
            raise UsageFault(f"{checkpoint.path}: '{key}' {counts}")
        if (new := tensor.viewed(shape)) is None:
            hint = "make it contiguous first: convert to .safetensors, then convert that"
            what = f"is a strided view and can't be viewed as {_listed(shape)}"
            raise UsageFault(f"{checkpoint.path}: '{key}' {what}", hint=hint)
        return new

    return _by_pattern(checkpoint, rules, shaped, state)


def _by_pattern(checkpoint: Checkpoint, rules: Rules, change: Change, where: str | None) -> Changed:
    """Apply rules in order to every tensor whose key matches their pattern."""
    target = checkpoint.state(where)
    tensors = target.tensors
    changed: dict[str, TensorRef] = {}
    for pattern, sizes in rules:
        if not (fitting := [key for key in tensors if fnmatchcase(key, pattern)]):
            hint = first_key(tensors)
            raise NothingToDo(f"{checkpoint.path}: no tensor's key matches '{pattern}'", hint=hint)
        for key in fitting:
            changed[key] = change(key, changed.get(key, tensors[key]), sizes)
    require_unpacked(checkpoint, target, names=changed)
    return _with_tensors(checkpoint, target, changed), tuple(changed)


def _with_tensors(checkpoint: Checkpoint, state: State, tensors: dict[str, TensorRef]) -> Checkpoint:
    """Return the checkpoint with these tensors under their names; a Parameter of two names stays one."""
    done: dict[tuple[object, ...], object] = {}

    def put(key: object, value: object) -> object:
        new = tensors.get(key) if isinstance(key, str) and plain_tensor(value) is not None else None
        if new is None:
            return value
        return done.setdefault((id(value), *new.view), with_plain_tensor(value, new))

    return replace_state(checkpoint, state, lambda old: ((key, put(key, old[key])) for key in old))


def tie(checkpoint: Checkpoint, pairs: Iterable[tuple[str, str]], *, state: str | None = None) -> Checkpoint:
    """Return a checkpoint with further names for tensors that it has: ties, which share their memory."""
    target = checkpoint.state(state)
    more: dict[object, object] = {}
    for new, old in pairs:
        if old not in target.tensors:
            hint = first_key(target.tensors)
            raise NothingToDo(f"{checkpoint.path}: no tensor is named '{old}'", hint=hint)
        known = target.tensors.get(new)
        if new != old and known is not None and known.view == target.tensors[old].view:
            raise NothingToDo(f"{checkpoint.path}: '{new}' and '{old}' are one tensor already")
        if new in target.container or new in more:
            raise Collision(f"'{new}' would be another name of '{old}', but already exists")
        more[new] = target.container[old]
    return replace_state(checkpoint, target, lambda old: {**old, **more})


def _listed(sizes: Sizes) -> str:
    return ",".join(map(str, sizes))


# Complex types and those of their parts, but for bcomplex32, which few versions of torch have.
SPLIT = {name: part for name, part in REAL_TYPES.items() if name != "bcomplex32"}

WHOLES = {part.name: DTYPES[name] for name, part in SPLIT.items()}

Container = dict[object, object]


@takes_checkpoint
def split_complex(checkpoint: Checkpoint, *, state: str | None = None) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with each complex tensor of its state as two real ones: `NAME.real`, `NAME.imag`.

    The parts are views of the complex storage: nothing is computed but the sign of a conjugate.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, and the names of the tensors that were split.

    Raises:
        NothingToDo: no tensor is complex.
        Collision: the name of a part is taken.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("complex.pt") as checkpoint:
        ...     parts, names = ckpttool.split_complex(checkpoint)
        ...     names, sorted(parts.state())
        (('w',), ['w.imag', 'w.real'])
    """
    target = checkpoint.state(state)
    names = tuple(name for name, tensor in target.tensors.items() if tensor.dtype.name in SPLIT)
    if not names:
        raise NothingToDo(f"{checkpoint.path}: no tensor is complex")
    return replace_state(checkpoint, target, lambda old: _split(old, names)), names


@takes_checkpoint
def join_complex(checkpoint: Checkpoint, *, state: str | None = None) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a checkpoint with each pair `NAME.real`, `NAME.imag` as one complex tensor.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        state: dotted path of the model's state; found when None.

    Returns:
        The new checkpoint, and the names of the tensors that were joined.

    Raises:
        NothingToDo: there is no such pair of float tensors of the same shape.
        Collision: NAME already exists.
        NoState: the file holds no state, or none at `state`.

    Example:
        >>> with ckpttool.open("complex.pt") as checkpoint:
        ...     parts, names = ckpttool.split_complex(checkpoint)
        ...     joined, again = ckpttool.join_complex(parts)
        ...     joined.state()["w"].dtype.name
        'complex64'
    """
    target = checkpoint.state(state)
    if not (names := _pairs(target.tensors)):
        raise NothingToDo(f"{checkpoint.path}: no pair of tensors NAME.real and NAME.imag")
    return replace_state(checkpoint, target, lambda old: _join(old, target.tensors, names)), names


def _split(old: Container, names: Collection[str]) -> Container:
    """Return a state with each named tensor as two views of its storage. Raises Collision."""
    new: Container = {}
    for key, value in old.items():
        tensor = plain_tensor(value)
        parts = {str(key): value} if tensor is None or key not in names else _parts(str(key), tensor)
        for name, part in parts.items():
            if name in new or (name != key and name in old):
                raise Collision(f"'{key}' would be split into '{name}', which already exists")
            new[name] = part
    return new


def _parts(name: str, tensor: TensorRef) -> dict[str, object]:
    dtype, stride = SPLIT[tensor.dtype.name], tuple(2 * step for step in tensor.stride)
    real = replace(tensor, dtype=dtype, stride=stride, offset=2 * tensor.offset, conj=False)
    imag = replace(real, offset=real.offset + 1, neg=tensor.neg != tensor.conj)
    return {f"{name}.real": real, f"{name}.imag": imag}


def _pairs(tensors: Mapping[str, TensorRef]) -> tuple[str, ...]:
    """Return the names whose both parts are there, of one float type and one shape."""
    halves = ((key.removesuffix(".real"), real) for key, real in tensors.items() if key.endswith(".real"))
    return tuple(
        name
        for name, real in halves
        if (imag := tensors.get(f"{name}.imag")) is not None
        and real.dtype.name in WHOLES
        and (real.dtype, real.shape) == (imag.dtype, imag.shape)
    )


def _join(old: Container, tensors: Mapping[str, TensorRef], names: Collection[str]) -> Container:
    """Return a state with each named pair as one complex tensor. Raises Collision."""
    for name in names:
        if name in old:
            both = f"'{name}.real' and '{name}.imag'"
            raise Collision(f"{both} would be joined into '{name}', which already exists")
    joined: dict[object, TensorRef] = {}  # tied pairs become tied tensors
    new: Container = {}
    for key, value in old.items():
        name, _, part = str(key).rpartition(".")
        if name not in names or part not in ("real", "imag"):
            new[key] = value
        elif part == "real":
            real, imag = tensors[f"{name}.real"], tensors[f"{name}.imag"]
            pair = real.view, imag.view
            if pair not in joined:
                joined[pair] = _as_one(real, imag) or _whole(name, real, imag)
            new[name] = replace(joined[pair])
    return new


def _as_one(real: TensorRef, imag: TensorRef) -> TensorRef | None:
    """Return the complex tensor whose storage both parts are views of; None when they are not."""
    dtype, old = WHOLES[real.dtype.name], real.storage
    steps = [step if size > 1 else 0 for size, step in zip(real.shape, real.stride, strict=True)]
    if replace(imag, offset=real.offset, neg=real.neg).view != real.view or imag.offset != real.offset + 1:
        return None
    if any(step % 2 for step in (real.offset, *steps)) or old.nbytes % dtype.itemsize:
        return None
    stride = tuple(step // 2 for step in real.stride)
    return replace(real, dtype=dtype, stride=stride, offset=real.offset // 2, conj=real.neg != imag.neg)


def _whole(name: str, real: TensorRef, imag: TensorRef) -> TensorRef:
    """Return a complex tensor whose elements are computed from the two parts."""
    for part in (real, imag):
        require_bounded(name, part)
    dtype, old = WHOLES[real.dtype.name], real.storage
    path, width = old.data.path, real.dtype.itemsize

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        first, count = start // dtype.itemsize, nbytes // dtype.itemsize
        parts = (stretches(tensor, first, count) for tensor in (real, imag))
        streams = (chain.from_iterable(map(stream, pieces)) for pieces in parts)
        for pair in _in_step(*streams):
            both = bytearray(len(pair[0]) * 2)
            numbers = memoryview(both).cast(FORMATS[width])
            for side, part in enumerate(pair):
                numbers[side::2] = memoryview(part).cast(FORMATS[width])
            if old.byteorder == "big":
                swap(both, width)
            yield memoryview(both)

    data, origins = Computed(path, real.numel * dtype.itemsize, make), (old, imag.storage)
    where = {"location": old.location, "byteorder": old.byteorder}
    whole = TensorRef.of_bytes(data, dtype, real.shape, *origins, **where)
    return replace(whole, requires_grad=real.requires_grad)


def _in_step(*streams: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield two streams of the same length in pieces of the same size, of at most CHUNK bytes."""
    left, right = streams
    a = b = memoryview(b"")
    while (a := a or next(left, a)) and (b := b or next(right, b)):
        count = min(len(a), len(b), CHUNK)
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]
