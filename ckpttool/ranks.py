"""What the ranks of a process group do together: decide, broadcast, sum, compare, fail. Imports torch.

Each function is a collective: every rank calls it, in the same order. Without a process group there is one
rank, and each does what it would do there. Tensors travel as bytes, so every dtype does (bool, bfloat16,
complex64, ...), over gloo and over NCCL, which carries only what lies on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .errors import CkptToolError, RanksDiffer

T = TypeVar("T")


class RankFailed(CkptToolError):
    """Another rank failed, and this one stops with it; bears that rank's message, hint and exit code."""

    kind = "rank-failed"
    exit_code = 1


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """How many ranks there are, 1 without a process group."""
    return dist.get_world_size() if _grouped() else 1


def decide(fn: Callable[[], T]) -> T:
    """What `fn` returns on rank 0, on every rank; elsewhere it is not called.

    The value must be picklable. If `fn` raises, rank 0 raises that error and the others RankFailed.
    """
    return _from_rank(0, fn)


def broadcast(read: Callable[[], T]) -> T:
    """What `read` returns on rank 0, on every rank: dicts, lists and tuples of plain values and tensors.

    As `decide`, with each tensor sent by itself and never pickled; the others receive them on the CPU.
    """
    tensors: list[torch.Tensor] = []
    skeleton = decide(lambda: _take_out(read(), tensors))
    arrived = [
        _send(place, tensors[index] if rank() == 0 else None) for index, place in enumerate(_places(skeleton))
    ]
    return _put_back(skeleton, iter(arrived))  # type: ignore[no-any-return]


def broadcast_into(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites each tensor, in place, with rank 0's."""
    if world_size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            received = _send(_Place(tensor.dtype, tuple(tensor.shape)), tensor if rank() == 0 else None)
            if rank() != 0:
                tensor.copy_(received)


def total(values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum over ranks, on the CPU. Of int64 or float64 alone: other sums are not exact
    enough to be divided afterwards."""
    if values.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"sums over ranks are int64 or float64, not {values.dtype}")
    if world_size() == 1:
        return values.detach().cpu().clone()
    summed = values.detach().to(_device(), copy=True)
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    return summed.cpu()


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. The values must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Runs the block on every rank; if it fails on any, it fails on all.

    The first rank that failed raises its own error, the others RankFailed, so nobody waits for a rank that
    is gone. The block itself must hold no collective: one rank may leave it early.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    first = min((index for index, failed in enumerate(_flags(failure is not None)) if failed), default=None)
    if first is not None:
        _from_rank(first, lambda: _raise(failure))


def compare(values: Mapping[str, Any], when: str = "") -> str:
    """Checks that all ranks hold the same names and values, bit for bit.

    Only one digest a rank is exchanged, unless they differ: then the digests of all names are, to say which.

    Args:
        values: tensors, or plain values with a `repr` that tells them apart.
        when: ends the message, e.g. "before saving".
    Returns:
        the SHA-256 of names, dtypes, shapes and values.
    Raises:
        RanksDiffer: on every rank, naming the tensor and the ranks that differ from most.
    """
    digests = {name: digest(value) for name, value in values.items()}
    whole = _combined(digests)
    if len(set(_digest_of_each_rank(whole))) > 1:
        raise _difference(gather(digests), when)
    return whole.hex()


def digest_all(values: Mapping[str, Any]) -> str:
    """What `compare` returns for these values, without asking the other ranks."""
    return _combined({name: digest(value) for name, value in values.items()}).hex()


def digest(value: Any) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes, whatever its device and strides; or of a plain value."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).digest()
    whole = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    data = _as_bytes(value).cpu()
    if data.numel():
        whole.update(_memory(data))
    return whole.digest()


# ---- how it travels ------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Stands for a tensor in a structure that is sent without its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    """Where a tensor must lie to be sent."""
    if _grouped() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _from_rank(source: int, fn: Callable[[], T]) -> T:
    """What `fn` returns on one rank, or its failure, on all."""
    if world_size() == 1:
        return fn()
    failure: Exception | None = None
    payload = b""
    if rank() == source:
        try:
            payload = pickle.dumps((fn(), None))
        except Exception as error:
            failure = error
            payload = pickle.dumps((None, _described(error, source)))
    payload = _send_bytes(payload, source)
    if failure is not None:
        raise failure
    value, described = pickle.loads(payload)
    if described is not None:
        message, hint, exit_code = described
        stopped = RankFailed(message, hint=hint)
        stopped.exit_code = exit_code
        raise stopped
    return value  # type: ignore[no-any-return]


def _described(error: Exception, source: int) -> tuple[str, str | None, int]:
    if isinstance(error, CkptToolError):
        return f"rank {source} failed: {error}", error.hint, error.exit_code
    return f"rank {source} failed: {type(error).__name__}: {error}", None, 1


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _send_bytes(payload: bytes, source: int) -> bytes:
    length = torch.tensor([len(payload)], dtype=torch.int64, device=_device())
    dist.broadcast(length, src=source)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    if rank() == source:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    data = data.to(_device())
    dist.broadcast(data, src=source)
    return payload if rank() == source else _copied(data)


def _send(place: _Place, tensor: torch.Tensor | None) -> torch.Tensor:
    """One tensor from rank 0, which gives it, to the others, which receive it on the CPU."""
    if world_size() == 1:
        assert tensor is not None
        return tensor
    if tensor is not None:
        dist.broadcast(_as_bytes(tensor).to(_device()), src=0)
        return tensor
    received = torch.empty(place.shape, dtype=place.dtype)
    data = received.reshape(-1).view(torch.uint8).to(_device())
    dist.broadcast(data, src=0)
    return data.cpu().view(place.dtype).reshape(place.shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a flat uint8 tensor on their own device, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _memory(data: torch.Tensor) -> Any:
    """A buffer over a uint8 tensor's memory. Torch's own way to one needs numpy, which may be absent."""
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr())


def _copied(data: torch.Tensor) -> bytes:
    local = data.cpu()
    return bytes(_memory(local)) if local.numel() else b""


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with a _Place for each tensor, which is moved to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(value.dtype, tuple(value.shape))
    if isinstance(value, Mapping):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _places(value: Any) -> Iterator[_Place]:
    if isinstance(value, _Place):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _places(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _places(item)


def _put_back(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


# ---- who differs ---------------------------------------------------------------------------------------


def _combined(digests: Mapping[str, bytes]) -> bytes:
    whole = hashlib.sha256()
    for name, one in digests.items():
        whole.update(f"{len(name)}:{name}".encode() + one)
    return whole.digest()


def _flags(flag: bool) -> list[bool]:
    """Every rank's flag, in rank order."""
    if world_size() == 1:
        return [flag]
    own = torch.tensor([int(flag)], dtype=torch.int64, device=_device())
    flags = [torch.zeros_like(own) for _ in range(world_size())]
    dist.all_gather(flags, own)
    return [bool(one.item()) for one in flags]


def _digest_of_each_rank(own: bytes) -> list[bytes]:
    if world_size() == 1:
        return [own]
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(_device())
    gathered = [torch.zeros_like(data) for _ in range(world_size())]
    dist.all_gather(gathered, data)
    return [_copied(one) for one in gathered]


def _difference(digests: list[dict[str, bytes]], when: str) -> RanksDiffer:
    """The error for the first name on which ranks differ. Ranks that hold what most hold are right; where
    as many hold one as the other, rank 0 is."""
    names = list(dict.fromkeys(name for of_rank in digests for name in of_rank))
    differing = [name for name in names if len({of_rank.get(name) for of_rank in digests}) > 1]
    if not differing:  # the same names and values, in another order
        return RanksDiffer(f"ranks hold the same tensors in different orders{_after(when)}")
    first = [of_rank.get(differing[0]) for of_rank in digests]
    held_by = Counter(first)
    right = max(held_by, key=lambda one: (held_by[one], one == first[0]))
    wrong = [index for index, one in enumerate(first) if one != right]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    verb = "hold" if len(wrong) > 1 else "holds"
    return RanksDiffer(
        f"{ranks} {verb} another {differing[0]} than rank {first.index(right)}{_after(when)}{more}",
        hint="look for code that changes weights, buffers or the optimizer on some ranks only",
    )


def _after(when: str) -> str:
    return f", {when}" if when else ""
