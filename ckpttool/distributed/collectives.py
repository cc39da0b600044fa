"""What the ranks of a process group do together: decide, broadcast, sum, compare, fail. Imports torch.

Each function is a collective: every rank calls it, in the same order; but `alike`, `digest` and `digest_all`
ask nobody. Without a process group there is one rank, and each does what it would do there. Tensors travel as
bytes, so every dtype does (bool, bfloat16, complex64, ...), over gloo and over NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CkptToolError, RanksDiffer
from .transport import Place, as_bytes, device, memory, of_all, places, put_back, send, take_out
from .transport import rank as rank
from .transport import world_size as world_size

T = TypeVar("T")

NOTE = struct.Struct("<?q32s")
"""What a rank sends the others before they do something together: that it failed, a number, a digest."""


class RankFailed(CkptToolError):
    """Another rank failed, and this one stops with it; bears that rank's message, hint and exit code."""

    kind = "rank-failed"
    exit_code = 1


def decide(fn: Callable[[], T]) -> T:
    """What `fn` returns on rank 0, on every rank; elsewhere it is not called.

    The value must be picklable. If `fn` raises, rank 0 raises that error and the others RankFailed.
    """
    return _from_rank(0, fn)


def alike(fn: Callable[[], T]) -> T:
    """What `fn` returns on this rank; nothing is sent, as it comes out the same on every rank: it uses
    nothing but what all have received, or compared. Else a rank that raises leaves the others waiting:
    `together` is for that.

    If it finds something wrong, so does each rank: rank 0 raises that error and the others RankFailed.
    """
    try:
        return fn()
    except CkptToolError as error:
        if rank() == 0:
            raise
        raise _stopped(*_described(error, 0)) from error


def broadcast(read: Callable[[], T]) -> T:
    """What `read` returns on rank 0, on every rank: dicts, lists and tuples of plain values and tensors.

    As `decide`, with each tensor sent by itself and never pickled; the others receive them on the CPU.
    """
    tensors: list[torch.Tensor] = []
    skeleton = decide(lambda: take_out(read(), tensors))
    arrived = [
        _send(place, tensors[index] if rank() == 0 else None) for index, place in enumerate(places(skeleton))
    ]
    return put_back(skeleton, iter(arrived))  # type: ignore[no-any-return]


def broadcast_into(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites each tensor, in place, with rank 0's."""
    if world_size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            received = _send(Place(tensor.dtype, tuple(tensor.shape)), tensor if rank() == 0 else None)
            if rank() != 0:
                tensor.copy_(received)


def total(values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum over ranks, on the CPU. Only of int64 or float64: other sums are not exact
    enough to be divided afterwards."""
    if values.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"sums over ranks are int64 or float64, not {values.dtype}")
    if world_size() == 1:
        return values.detach().cpu().clone()
    summed = values.detach().to(device(), copy=True)
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
    _fail_where_any_did(of_all(bytes([failure is not None])), failure)


def compare(values: Mapping[str, Any], when: str = "", *, hint: str | None = None) -> str:
    """Checks that all ranks hold the same names and values, bit for bit.

    Only one digest a rank is exchanged, unless they differ: then the digests of all names are, to say which.

    Args:
        values: tensors, or plain values with a `repr` that distinguishes them.
        when: ends the message, e.g. "before saving".
        hint: what to do where they differ.
    Returns:
        the SHA-256 of names, dtypes, shapes and values.
    Raises:
        RanksDiffer: on every rank, naming the tensor and the ranks that differ from most.
    """
    digests = {name: digest(value) for name, value in values.items()}
    whole = _combined(digests)
    if len(set(of_all(whole))) > 1:
        raise _difference(gather(digests), when, hint)
    return whole.hex()


def agree(
    look: Callable[[], tuple[Mapping[str, Any], int]], when: str = "", *, hint: str | None = None
) -> list[int]:
    """Whether all ranks can begin something, found out with one small message per rank: `together`, `compare`
    and the gathering of a number in one.

    Args:
        look: returns what must be the same on all ranks, as `compare` takes it, and a number of this rank.
        when: ends the message where ranks differ.
        hint: what to do there.
    Returns:
        each rank's number, in rank order.
    Raises:
        RanksDiffer: as `compare` does.
        Exception: what `look` raised, and RankFailed on the other ranks.
    """
    failure: Exception | None = None
    digests: dict[str, bytes] = {}
    number = 0
    try:
        values, number = look()
        digests = {name: digest(value) for name, value in values.items()}
    except Exception as error:
        failure = error
    notes = of_all(NOTE.pack(failure is not None, number, _combined(digests)))
    _fail_where_any_did(notes, failure)
    _, numbers, wholes = zip(*map(NOTE.unpack, notes), strict=True)
    if len(set(wholes)) > 1:
        raise _difference(gather(digests), when, hint)
    return list(numbers)


def digest_all(values: Mapping[str, Any]) -> str:
    """What `compare` returns for these values, without asking the other ranks."""
    return _combined({name: digest(value) for name, value in values.items()}).hex()


def digest(value: Any) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes, whatever its device and strides; or of a plain value."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).digest()
    whole = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    data = as_bytes(value).cpu()
    if data.numel():
        whole.update(memory(data))
    return whole.digest()


# ---- how it travels ------------------------------------------------------------------------------------


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
    payload = send(payload, source)
    if failure is not None:
        raise failure
    value, described = pickle.loads(payload)
    if described is not None:
        raise _stopped(*described)
    return value  # type: ignore[no-any-return]


def _fail_where_any_did(notes: list[bytes], failure: Exception | None) -> None:
    """Ends all ranks if the note of any begins with another byte than 0; `failure` is this rank's own."""
    first = next((number for number, note in enumerate(notes) if note[0]), None)
    if first is not None:
        _from_rank(first, lambda: _raise(failure))


def _described(error: Exception, source: int) -> tuple[str, str | None, int]:
    if isinstance(error, CkptToolError):
        return f"rank {source} failed: {error}", error.hint, error.exit_code
    return f"rank {source} failed: {type(error).__name__}: {error}", None, 1


def _stopped(message: str, hint: str | None, exit_code: int) -> RankFailed:
    error = RankFailed(message, hint=hint)
    error.exit_code = exit_code
    return error


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _send(place: Place, tensor: torch.Tensor | None) -> torch.Tensor:
    """One tensor from rank 0, which gives it, to the others, which receive it on the CPU."""
    if world_size() == 1:
        assert tensor is not None
        return tensor
    if tensor is not None:
        dist.broadcast(as_bytes(tensor).to(device()), src=0)
        return tensor
    received = torch.empty(place.shape, dtype=place.dtype)
    data = received.reshape(-1).view(torch.uint8).to(device())
    dist.broadcast(data, src=0)
    return data.cpu().view(place.dtype).reshape(place.shape)


# ---- who differs ---------------------------------------------------------------------------------------


def _combined(digests: Mapping[str, bytes]) -> bytes:
    whole = hashlib.sha256()
    for name, one in digests.items():
        whole.update(f"{len(name)}:{name}".encode() + one)
    return whole.digest()


def _difference(digests: list[dict[str, bytes]], when: str, hint: str | None) -> RanksDiffer:
    """The error for the first name on which ranks differ. Ranks that hold what most hold are right; where
    as many hold one as the other, rank 0 is."""
    names = list(dict.fromkeys(name for of_rank in digests for name in of_rank))
    differing = [name for name in names if len({of_rank.get(name) for of_rank in digests}) > 1]
    if not differing:  # the same names and values, in another order
        return RanksDiffer(f"ranks hold the same names in different orders{_after(when)}", hint=hint)
    first = [of_rank.get(differing[0]) for of_rank in digests]
    held_by = Counter(first)
    right = max(held_by, key=lambda one: (held_by[one], one == first[0]))
    wrong = [index for index, one in enumerate(first) if one != right]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    verb = "hold" if len(wrong) > 1 else "holds"
    return RanksDiffer(
        f"{ranks} {verb} another {differing[0]} than rank {first.index(right)}{_after(when)}{more}", hint=hint
    )


def _after(when: str) -> str:
    return f", {when}" if when else ""
