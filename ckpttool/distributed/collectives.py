"""What the ranks of a process group do together: decide, broadcast, sum, compare, fail. Imports torch.

Every function is a collective: all ranks call it, in the same order. Only `alike`, `combined` and those that
begin with `digest` send nothing. Without a process group there is one rank, and each does what it would do
there. Tensors travel as bytes, so any dtype does (bool, bfloat16, complex64, ...), over gloo and over NCCL.
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
from . import transport
from .transport import rank as rank
from .transport import world_size as world_size

T = TypeVar("T")

LENGTH = struct.Struct("<q")
NUMBER_AND_DIGEST = struct.Struct("<q32s")


class RankFailed(CkptToolError):
    """Another rank failed, and this one stops with it. Has that rank's message, hint and exit code."""

    kind = "rank-failed"
    exit_code = 1


class RankLost(RankFailed):
    """Another rank has gone or does not answer; `watch` has written which one to stderr."""

    kind = "rank-lost"


# ---- one rank for all ----------------------------------------------------------------------------------


def from_rank_zero(fn: Callable[[], T]) -> T:
    """Call `fn` on rank 0 only, and return its value on every rank.

    Args:
        fn: returns a picklable value.

    Raises:
        Exception: on rank 0, whatever `fn` or pickling its value raised.
        RankFailed: on the other ranks, if rank 0 raised.
    """
    value: Any = None
    payload = b""
    with fail_together():
        if rank() == 0:
            value = fn()
            payload = pickle.dumps(value) if world_size() > 1 else b""
    payload = transport.broadcast_bytes(payload, 0)
    return value if rank() == 0 else pickle.loads(payload)  # type: ignore[no-any-return]


def broadcast(read: Callable[[], T]) -> T:
    """Call `read` on rank 0 only, and return its value, which may hold tensors, on every rank.

    As `from_rank_zero`, but each tensor is sent by itself and not pickled. The other ranks get CPU tensors.

    Args:
        read: returns a picklable value; tensors may be anywhere in it.

    Raises:
        TypeError: on rank 0, if a tensor is sparse, quantized or on the meta device.
        Exception: on rank 0, whatever `read` or pickling its value raised.
        RankFailed: on the other ranks, if rank 0 raised.
    """
    if world_size() == 1:
        return read()
    value: Any = None
    payload, tensors = b"", list[torch.Tensor]()
    with fail_together():
        if rank() == 0:
            value = read()
            payload, tensors = transport.pickle_without_tensors(value)
    payload = transport.broadcast_bytes(payload, 0)
    for tensor in tensors:
        transport.broadcast_tensor(tensor)
    if rank() != 0:
        value = transport.unpickle_with_tensors(payload, transport.receive_tensor)
    return value  # type: ignore[no-any-return]


def broadcast_into(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite each tensor in place with rank 0's.

    Args:
        tensors: of the same number, dtypes and shapes on every rank.
    """
    if world_size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            if rank() == 0:
                transport.broadcast_tensor(tensor)
            else:
                tensor.copy_(transport.receive_tensor(tensor.dtype, tuple(tensor.shape)))


# ---- all ranks for all ---------------------------------------------------------------------------------


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the elementwise sum over ranks, on the CPU.

    Args:
        values: int64 or float64, of the same shape on every rank.

    Raises:
        TypeError: another dtype, whose sums are not exact enough to be divided afterwards.
    """
    if values.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"sums over ranks are int64 or float64, not {values.dtype}")
    summed = values.detach().to(transport.device(), copy=True)
    if world_size() > 1:
        dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    return summed.cpu()


def gather(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank.

    Args:
        value: picklable.

    Raises:
        Exception: on a rank whose value can't be pickled, what pickle raised; RankFailed on the others.
    """
    if world_size() == 1:
        return [value]
    with _together(LENGTH.size) as notes:
        payload = pickle.dumps(value)
        notes.own = LENGTH.pack(len(payload))
    lengths = [LENGTH.unpack(note)[0] for note in notes.of_ranks]
    padded = transport.gather_bytes(payload.ljust(max(lengths), b"\0"))
    return [pickle.loads(one[:length]) for one, length in zip(padded, lengths, strict=True)]


# ---- failing -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, fail on all.

    No rank then waits for one that is gone. Work of rank 0 alone (writing a file, deleting old ones) belongs
    here too: `with fail_together(): if rank() == 0: ...`. The block must hold no collective: a rank that
    fails leaves it early.

    Raises:
        Exception: on the first rank that failed, its own error.
        RankFailed: on all other ranks, with that rank's message, hint and exit code.
    """
    with _together():
        yield


def alike(fn: Callable[[], T]) -> T:
    """Call `fn`, whose outcome is the same on every rank, and report its failure from rank 0 only.

    Nothing is sent, so `fn` may use only what all ranks have received or compared: a rank that fails alone
    would leave the others waiting. Where that is not certain, use `fail_together`.

    Raises:
        CkptToolError: what `fn` raised, on rank 0; RankFailed on the others.
    """
    try:
        return fn()
    except CkptToolError as error:
        if rank() == 0:
            raise
        raise _rank_failed(_described(error, 0)) from error


class _Notes:
    """What each rank tells the others at the end of a block: bytes, of the same length on every rank."""

    def __init__(self, own: bytes) -> None:
        self.own = own
        self.of_ranks: list[bytes] = []


@contextlib.contextmanager
def _together(size: int = 0) -> Iterator[_Notes]:
    """`fail_together`, in which each rank sets a note of `size` bytes that all ranks get."""
    notes = _Notes(bytes(size))
    failure: Exception | None = None
    try:
        yield notes
    except Exception as error:
        failure = error
    answers = transport.gather_bytes(bytes([failure is not None]) + notes.own)
    first = next((number for number, answer in enumerate(answers) if answer[0]), None)
    if first is not None:
        described = pickle.dumps(None if failure is None else _described(failure, first))
        described = transport.broadcast_bytes(described, first)
        if failure is not None and rank() == first:
            raise failure
        raise _rank_failed(pickle.loads(described)) from failure
    notes.of_ranks = [answer[1:] for answer in answers]


def _described(error: Exception, source: int) -> tuple[str, str | None, int]:
    """Return the message, hint and exit code with which other ranks report an error of rank `source`."""
    if isinstance(error, CkptToolError):
        return f"rank {source} failed: {error}", error.hint, error.exit_code
    return f"rank {source} failed: {type(error).__name__}: {error}", None, 1


def _rank_failed(described: tuple[str, str | None, int]) -> RankFailed:
    message, hint, exit_code = described
    error = RankFailed(message, hint=hint)
    error.exit_code = exit_code
    return error


# ---- comparing -----------------------------------------------------------------------------------------


def compare(values: Mapping[str, Any], when: str = "", *, hint: str | None = None) -> str:
    """Check that all ranks hold the same names and values, bit for bit.

    One digest per rank is exchanged. Only where these differ are the digests of all names exchanged too, to
    say which value differs.

    Args:
        values: tensors, or plain values with a `repr` that distinguishes them.
        when: ends the message, e.g. "before saving".
        hint: what to do if they differ.

    Returns:
        The SHA-256 of names, dtypes, shapes and values.

    Raises:
        RanksDiffer: on every rank if values differ; names the first one, and the ranks that differ from most.
        TypeError: on a rank with a sparse, quantized or meta tensor; RankFailed on the others.
    """
    return _compare(lambda: (digest_each(values), 0), when, hint)[0].hex()


def compare_digests(
    look: Callable[[], Mapping[str, bytes]], when: str = "", *, hint: str | None = None
) -> None:
    """Check that all ranks hold the same values, whose digests are known already, as by another thread."""
    _compare(lambda: (dict(look()), 0), when, hint)


def agree(
    look: Callable[[], tuple[Mapping[str, Any], int]], when: str = "", *, hint: str | None = None
) -> list[int]:
    """Check that all ranks can begin: `fail_together`, `compare` and a number of each, in one message.

    Args:
        look: returns what must be the same on all ranks, as `compare` takes it, and a number of this rank.
        when: ends the message, e.g. "in gather".
        hint: what to do if they differ.

    Returns:
        Each rank's number, in rank order.

    Raises:
        RanksDiffer: on every rank if values differ, as `compare` does.
        Exception: what `look` raised; RankFailed on the other ranks.
    """

    def digested() -> tuple[dict[str, bytes], int]:
        values, number = look()
        return digest_each(values), number

    return _compare(digested, when, hint)[1]


def _compare(
    look: Callable[[], tuple[dict[str, bytes], int]], when: str, hint: str | None
) -> tuple[bytes, list[int]]:
    """Return the digest of the values of all ranks, and each rank's number."""
    digests: dict[str, bytes] = {}
    with _together(NUMBER_AND_DIGEST.size) as notes:
        digests, number = look()
        notes.own = NUMBER_AND_DIGEST.pack(number, combined(digests))
    numbers, wholes = zip(*map(NUMBER_AND_DIGEST.unpack, notes.of_ranks), strict=True)
    if len(set(wholes)) > 1:
        raise _difference(gather(digests), when, hint)
    return wholes[0], list(numbers)


def digest_all(values: Mapping[str, Any]) -> str:
    """Return what `compare` returns for these values, without asking the other ranks."""
    return combined(digest_each(values)).hex()


def digest_each(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the `digest` of each value by name. Raises as `digest`."""
    return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> bytes:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, or of a plain value's `repr`.

    Raises:
        TypeError: the tensor is sparse, quantized or on the meta device.
    """
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).digest()
    whole = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    data = transport.as_bytes(value).cpu()
    if data.numel():
        whole.update(transport.memory_of(data))
    return whole.digest()


def combined(digests: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 of names and their digests: in hexadecimal, what `digest_all` returns."""
    whole = hashlib.sha256()
    for name, one in digests.items():
        whole.update(f"{len(name)}:{name}".encode() + one)
    return whole.digest()


def _difference(digests: list[dict[str, bytes]], when: str, hint: str | None) -> RanksDiffer:
    """Return the error for the first name on which ranks differ."""
    after = f", {when}" if when else ""
    names = list(dict.fromkeys(name for of_rank in digests for name in of_rank))
    differing = [name for name in names if len({of_rank.get(name) for of_rank in digests}) > 1]
    if not differing:  # the same names and values, in another order
        return RanksDiffer(f"ranks hold the same names in different orders{after}", hint=hint)
    first = [of_rank.get(differing[0]) for of_rank in digests]
    held_by = Counter(first)
    right = max(held_by, key=lambda one: (held_by[one], one == first[0]))
    wrong = [index for index, one in enumerate(first) if one != right]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    verb = "hold" if len(wrong) > 1 else "holds"
    return RanksDiffer(
        f"{ranks} {verb} another {differing[0]} than rank {first.index(right)}{after}{more}", hint=hint
    )
