"""The process group of a run: how ranks find each other, also after torchrun has started them again.

    with distributed.process_group() as place:
        model = DistributedDataParallel(model.to(place.device))

The same script then runs under torchrun, and by `python` alone as one rank.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..core.words import counted
from ..errors import CheckFailed, RanksDiffer, UsageFault

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks."""

    rank: int  # from 0
    world_size: int
    backend: str  # gloo or nccl
    device: torch.device


def given_rank() -> int:
    """Return this process's rank as set by torchrun, 0 without it. Needs no torch."""
    return int(os.environ.get("RANK", "0"))


def given_world_size() -> int:
    """Return the number of ranks as set by torchrun, 1 without it. Needs no torch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def started_by_launcher() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def find_place(backend: str = "auto") -> Place:
    """Return this process's place: with NCCL if each rank here can have its own GPU, else gloo on the CPU.

    Args:
        backend: `auto`, `nccl` or `gloo`.

    Raises:
        UsageFault: `nccl` was asked for, and this machine has fewer GPUs than ranks.
    """
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus >= wanted else "gloo"
    if backend == "gloo":
        return Place(given_rank(), given_world_size(), "gloo", torch.device("cpu"))
    if gpus < wanted:
        have = f"{counted(wanted, 'rank')} on this machine, which has {counted(gpus, 'usable GPU')}"
        raise UsageFault(f"{backend}: {have}", hint="start fewer ranks, or use gloo (--backend gloo)")
    return Place(given_rank(), given_world_size(), backend, torch.device("cuda", local_rank))


# Seconds that a rank waits for the others to join, and then for their addresses.
JOIN_TIMEOUT = 60.0

# Seconds between two reads of what the other ranks have written.
POLL = 0.05


@contextlib.contextmanager
def process_group(
    place: Place | None = None, timeout: float = 600.0, join_timeout: float = JOIN_TIMEOUT
) -> Iterator[Place]:
    """Keep the default process group during the block, and destroy it however the block ends.

    A single process gets one too (its store is in memory: no port, no network), so DDP and its `module.`
    keys are the same however a run was started. After a failure no thread of the group is left that could
    abort the process at its end, and the other ranks are not left waiting.

    Args:
        place: of this rank; by default as torchrun set it, with NCCL if each rank can have a GPU.
        timeout: seconds that this rank waits for the others in each collective.
        join_timeout: seconds that it waits for them to join; more if ranks load their data before.

    Yields:
        The place.

    Raises:
        UsageFault: there is a process group already, which is left alone.
        CheckFailed: this rank could not join, or others have not within `join_timeout`.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        hint = "remove the other init_process_group"
        raise UsageFault("this process already has a process group", hint=hint)
    place = place or find_place()
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        options["device_id"] = place.device
    try:
        try:
            dist.init_process_group(place.backend, **options, **_store(place, join_timeout))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # below it are frames of C++
            raise CheckFailed(f"rank {place.rank} could not join the others: {reason}") from error
        yield place
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # frames hold the model, which holds the group
        raise
    finally:
        # A reference cycle (in a model, in hooks) keeps DDP alive, DDP the group, and the group its threads.
        # A thread that needs the interpreter while it shuts down ends the process with SIGABRT.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(place: Place, timeout: float) -> dict[str, Any]:
    """Return the arguments of `init_process_group` that say where ranks meet."""
    # torchrun serves one store and keeps it over restarts, with the addresses of dead ranks: a rank that is
    # started again may read those and wait for them (torch 2.15). So each attempt has its own keys.
    from torch.distributed import HashStore, PrefixStore, rendezvous  # type: ignore[attr-defined]

    if not started_by_launcher():
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous("env://", place.rank, place.world_size, timeout=wait))
    store = PrefixStore(agree_on_attempt(store, place, timeout), store)
    store.set_timeout(wait)
    return {"store": store, "rank": rank, "world_size": world_size}


def agree_on_attempt(store: Store, place: Place, timeout: float) -> str:
    """Return a name that all live ranks of this attempt agree on, and no earlier attempt has used.

    Raises:
        CheckFailed: a rank has not come within `timeout` seconds.
        RanksDiffer: on every rank, if their backends differ; they would wait for each other in vain.
    """
    # torchrun's own count of restarts will not do, as each machine counts its own. So each rank writes a
    # random number, rank 0 lists all of them, and a rank that finds its own in the list counts itself in. A
    # list with the number of a dead rank never completes; rank 0 replaces it when the restarted rank has
    # written its own.
    rank, world_size = place.rank, place.world_size
    own, name, deadline = f"{place.backend}:{uuid.uuid4().hex}", "", time.monotonic() + timeout
    store.set(f"ckpttool/rank/{rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            _list_ranks(store, world_size)
        listed = _read(store, "ckpttool/ranks")
        numbers = json.loads(listed) if listed else []
        if len(numbers) == world_size and numbers[rank] == own:
            given = f"ckpttool/attempt/{hashlib.sha256(listed).hexdigest()[:16]}"
            if given != name:
                name = given
                store.set(f"{name}/rank/{rank}", own)
                store.add(f"{name}/joined", 1)
            if store.add(f"{name}/joined", 0) == world_size:
                _require_one_backend(store, name, [number.partition(":")[0] for number in numbers], rank)
                return name
        time.sleep(POLL)
    raise _late(store, name, place, timeout)


def _require_one_backend(store: Store, name: str, backends: list[str], rank: int) -> None:
    other = next((number for number, backend in enumerate(backends) if backend != backends[0]), None)
    if other is None:
        return
    store.add(f"{name}/told", 1)
    until = time.monotonic() + 5
    # Rank 0 ends last, as the store may end with it.
    while rank == 0 and store.add(f"{name}/told", 0) < len(backends) and time.monotonic() < until:
        time.sleep(POLL)
    what = f"the backend is {backends[0]} on rank 0, and {backends[other]} on rank {other}"
    hint = "give all ranks one --backend; auto takes gloo on a machine with fewer usable GPUs than ranks"
    raise RanksDiffer(f"ranks can't meet: {what}", hint=hint)


def _late(store: Store, name: str, place: Place, timeout: float) -> CheckFailed:
    """Return the error that names the ranks that have joined neither the list nor this attempt."""
    key = f"{name}/rank" if name else "ckpttool/rank"
    ranks = [rank for rank in range(place.world_size) if not store.check([f"{key}/{rank}"])] or [0]
    shown = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
    who = f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
    hint = "it died, or is still loading its data: then wait longer (--timeout)"
    # Where ranks share torchrun's own store, torch 2.15 gives new machines no address of it, and the others
    # that of a machine that is gone.
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and is_shared:
        hint += "; so that machines can be replaced, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return CheckFailed(f"rank {place.rank}: {who} not joined within {timeout:g} s", hint=hint)


def _list_ranks(store: Store, world_size: int) -> None:
    """Write the list of all ranks' numbers, if each has one and any has changed."""
    numbers = [_read(store, f"ckpttool/rank/{rank}").decode() for rank in range(world_size)]
    listed = json.dumps(numbers)
    if all(numbers) and listed.encode() != _read(store, "ckpttool/ranks"):
        store.set("ckpttool/ranks", listed)


def _read(store: Store, key: str) -> bytes:
    """Return a value without waiting for it; empty if no rank has set it."""
    return bytes(store.get(key)) if store.check([key]) else b""
