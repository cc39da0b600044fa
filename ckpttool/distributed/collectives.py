"""What the ranks of a process group do together: decide, broadcast, sum, compare, fail. Imports torch.

Every function is a collective: all ranks call it, in the same order. Only digests and `report_once` send
nothing. Without a process group there is one rank. Tensors travel as bytes, so any dtype works over gloo and
over NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CkptToolError, RanksDiffer
from . import transport
from .transport import rank as rank
from .transport import world_size as world_size


def digest_all(values: Mapping[str, Any]) -> str:
    """Return what `compare` returns for these values, without asking the other ranks."""
    return combined(digest_each(values)).hex()


def digest_each(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the `digest` of each value by name. Raises as `digest`."""
    return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> bytes:
    """Return the SHA-256 of a tensor's or an array's dtype, shape and bytes, or of another value's `repr`.

    The `repr` of a tensor or an array leaves out most of its values: in a container its digest stands for it.

    Raises:
        TypeError: a tensor is sparse, quantized or on the meta device.
    """
    # torch may be installed without numpy. Arrays exist only once numpy was imported.
    array: Any = sys.modules["numpy"].ndarray if "numpy" in sys.modules else torch.Tensor
    if isinstance(value, torch.Tensor):
        data = transport.as_bytes(value).cpu()
        memory = transport.memory_of(data) if len(data) else b""
        return _sha256(f"{value.dtype} {tuple(value.shape)} ", memory)
    if isinstance(value, array):
        if value.dtype.hasobject:
            return digest([value.shape, value.tolist()])
        return _sha256(f"{value.dtype.str} {value.shape} ", value.tobytes())
    kinds = (torch.Tensor, array)
    holds_any = any(True for _ in transport.found(value, kinds))
    return _sha256(repr(transport.mapped(value, digest, kinds=kinds) if holds_any else value))


def _sha256(text: str, data: Any = b"") -> bytes:
    sha256 = hashlib.sha256(text.encode())
    sha256.update(data)
    return sha256.digest()


def combined(digests: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 of names and their digests: in hexadecimal, what `digest_all` returns."""
    sha256 = hashlib.sha256()
    for name, value in digests.items():
        sha256.update(f"{len(name)}:{name}".encode() + value)
    return sha256.digest()


T = TypeVar("T")

LENGTH = struct.Struct("<q")
NUMBER_AND_DIGEST = struct.Struct("<q32s")

# A message is sent before it grows beyond this many bytes.
MESSAGE = 1 << 24


class RankFailed(CkptToolError, kind="rank-failed", exit_code=1):
    """Another rank failed, and this one stops with it, with that rank's message, hint and exit code."""


class RankLost(RankFailed, kind="rank-lost"):
    """Another rank is gone or does not answer; `watch` has written which one to stderr."""


# ---- One rank for all


def from_rank_zero(fn: Callable[[], T]) -> T:
    """Call `fn` on rank 0 only, and return its value, which must be picklable, on every rank.

    Raises:
        Exception: on rank 0, whatever `fn` or pickling raised; RankFailed on the others.
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

    As `from_rank_zero`, but tensors are sent without pickling; the other ranks get them on the CPU.

    Raises:
        TypeError: on rank 0, for a sparse, quantized or meta tensor; RankFailed on the others.
        Exception: on rank 0, whatever `read` or pickling raised; RankFailed on the others.
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
        value = transport.ReceivingTensors(io.BytesIO(payload)).load()
    return value  # type: ignore[no-any-return]


def broadcast_into(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite each tensor in place with rank 0's, of the same dtype and shape; few messages for many."""
    if world_size() == 1:
        return
    message: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if message and size + tensor.nbytes > MESSAGE:  # a large one goes alone, and needs no copy
            _broadcast_together(message)
            message, size = [], 0
        message.append(tensor)
        size += tensor.nbytes
    if message:
        _broadcast_together(message)


def _broadcast_together(tensors: list[torch.Tensor]) -> None:
    if rank() == 0:
        pieces = [transport.as_bytes(tensor).to(transport.device()) for tensor in tensors]
        dist.broadcast(torch.cat(pieces) if len(pieces) > 1 else pieces[0], src=0)
        return
    sizes = [tensor.nbytes for tensor in tensors]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=transport.device())
    dist.broadcast(data, src=0)
    with torch.no_grad():
        for tensor, piece in zip(tensors, torch.split(data, sizes), strict=True):
            # Bytes at an odd place can't be viewed as numbers.
            even = piece.clone() if len(sizes) > 1 else piece
            tensor.copy_(even.view(tensor.dtype).view(tensor.shape))


# ---- All ranks for all


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the elementwise sum over ranks of an int64 or float64 tensor, on the CPU.

    Raises:
        TypeError: another dtype, whose sums are not exact enough to be divided afterwards.
    """
    return begin_total(values)()


def begin_total(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Send what `total` sums; return a function that waits for the sum and returns it, to be called once.

    What every rank sends in between, such as the gradients of a backward pass, hides the time of the message.
    """
    if values.dtype not in (torch.int64, torch.float64):
        raise TypeError(f"sums over ranks are int64 or float64, not {values.dtype}")
    summed = values.detach().to(transport.device(), copy=True, non_blocking=True)
    work = dist.all_reduce(summed, op=dist.ReduceOp.SUM, async_op=True) if world_size() > 1 else None

    def wait() -> torch.Tensor:
        if work is not None:
            work.wait()
        return summed.cpu()

    return wait


def gather(value: T) -> list[T]:
    """Return every rank's value, which must be picklable, in rank order, on every rank.

    Raises:
        Exception: what pickle raised on a rank; RankFailed on the others.
    """
    if world_size() == 1:
        return [value]
    with _together(LENGTH.size) as notes:
        payload = pickle.dumps(value)
        notes.own = LENGTH.pack(len(payload))
    lengths = [LENGTH.unpack(note)[0] for note in notes.of_ranks]
    padded = transport.gather_bytes(payload.ljust(max(lengths), b"\0"))
    return [pickle.loads(value[:length]) for value, length in zip(padded, lengths, strict=True)]


# ---- Failing


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, fail on all, so that none waits for another.

    Work of rank 0 alone (writing a file) belongs here too: `with fail_together(): if rank() == 0: ...`. The
    block must not contain a collective: a rank that fails leaves it early.

    Raises:
        Exception: on the first rank that failed, its own error; RankFailed on all others.
    """
    with _together():
        yield


def report_once(fn: Callable[[], T]) -> T:
    """Call `fn`, whose outcome is the same on every rank, and report its failure from rank 0 only.

    Nothing is sent, so `fn` may use only what all ranks have received or compared: a rank that fails alone
    would leave the others waiting. If in doubt, use `fail_together`.

    Raises:
        CkptToolError: what `fn` raised, on rank 0; RankFailed on the others.
    """
    try:
        return fn()
    except CkptToolError as error:
        if rank() == 0:
            raise
        raise _rank_failed(0, error) from error


class _Notes:
    """What each rank tells the others at the end of a block: as many bytes on every rank."""

    def __init__(self, own: bytes) -> None:
        self.own = own
        self.of_ranks: list[bytes] = []


@contextlib.contextmanager
def _together(size: int = 0) -> Iterator[_Notes]:
    """`fail_together`, after which every rank has the note of `size` bytes that each rank set."""
    notes = _Notes(bytes(size))
    failure: Exception | None = None
    try:
        yield notes
    except Exception as error:
        failure = error
    answers = transport.gather_bytes(bytes([failure is not None]) + notes.own)
    first = next((number for number, answer in enumerate(answers) if answer[0]), None)
    if first is not None:
        told = b"" if failure is None else pickle.dumps(_rank_failed(first, failure))
        told = transport.broadcast_bytes(told, first)
        if failure is not None and rank() == first:
            raise failure
        raise pickle.loads(told) from failure
    notes.of_ranks = [answer[1:] for answer in answers]


def _rank_failed(source: int, error: Exception) -> RankFailed:
    """Return the error that the other ranks raise after one of rank `source`."""
    if not isinstance(error, CkptToolError):
        return RankFailed(f"rank {source} failed: {type(error).__name__}: {error}")
    failed = RankFailed(f"rank {source} failed: {error.message}", hint=error.hint)
    failed.exit_code = error.exit_code
    return failed


# ---- Comparing


def compare(values: Mapping[str, Any], when: str = "", *, hint: str | None = None) -> str:
    """Check that all ranks have the same names and values, bit for bit; return the SHA-256 of these.

    One digest per rank is exchanged, and those of all names only if these differ, to say which value it is.

    Args:
        values: tensors, or plain values with a `repr` that distinguishes them.
        when: ends the message, e.g. "before saving".
        hint: what to do if they differ.

    Raises:
        RanksDiffer: on every rank if values differ; names the first one, and the ranks that differ from most.
        TypeError: on a rank with a sparse, quantized or meta tensor; RankFailed on the others.
    """
    return _compare(lambda: (digest_each(values), 0), when, hint)[0].hex()


def compare_digests(
    look: Callable[[], Mapping[str, bytes]], when: str = "", *, hint: str | None = None
) -> None:
    """`compare` of what `digest_each` has returned already, as in another thread."""
    _compare(lambda: (dict(look()), 0), when, hint)


def agree(
    look: Callable[[], tuple[Mapping[str, Any], int]], when: str = "", *, hint: str | None = None
) -> list[int]:
    """`fail_together`, `compare` and `gather` of a number in one message; return each rank's number.

    Args:
        look: returns what must be the same on all ranks, as `compare` takes it, and a number of this rank.
        when, hint: as for `compare`.

    Raises:
        RanksDiffer: on every rank if values differ.
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
    numbers, digests_of_all = zip(*map(NUMBER_AND_DIGEST.unpack, notes.of_ranks), strict=True)
    if len(set(digests_of_all)) > 1:
        raise _difference(gather(digests), when, hint)
    return digests_of_all[0], list(numbers)


def _difference(digests: list[dict[str, bytes]], when: str, hint: str | None) -> RanksDiffer:
    """Return the error for the first name on which ranks differ."""
    # Those that have what most ranks have are right; of equally many, those that have what rank 0 has.
    after = f", {when}" if when else ""
    names = list(dict.fromkeys(name for of_rank in digests for name in of_rank))
    differing = [name for name in names if len({of_rank.get(name) for of_rank in digests}) > 1]
    if not differing:  # the same names and values, in another order
        return RanksDiffer(f"ranks have the same names in different orders{after}", hint=hint)
    first = [of_rank.get(differing[0]) for of_rank in digests]
    votes = Counter(first)
    right = max(votes, key=lambda digest: (votes[digest], digest == first[0]))
    wrong = [number for number, digest in enumerate(first) if digest != right]
    more = f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
    ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    other = f"{'have' if len(wrong) > 1 else 'has'} a different {differing[0]} than rank {first.index(right)}"
    return RanksDiffer(f"{ranks} {other}{after}{more}", hint=hint)
