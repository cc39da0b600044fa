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
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import CheckFailed, UsageFault
from .place import Place, find_place, started_by_launcher

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

CONNECT_TIMEOUT = 60.0
"""Seconds that ranks have to exchange their addresses, once all of them have come."""

POLL = 0.05
"""Seconds between two looks at what the other ranks have written."""


@contextlib.contextmanager
def process_group(place: Place | None = None, timeout: float = 600.0) -> Iterator[Place]:
    """Hold the default process group during the block, and destroy it however the block ends.

    A single process gets one too (its store is in memory: no port, no network), so that DDP and its
    `module.` keys are the same however a run was started. After a failure no thread of the group is left
    that could abort the process at its end, and the other ranks are not left waiting.

    Args:
        place: of this rank; by default what torchrun has set, with NCCL if each rank can have a GPU.
        timeout: seconds that this rank waits for the others, to come and in each collective.

    Yields:
        The place.

    Raises:
        UsageFault: there is a process group already, which is left alone.
        CheckFailed: this rank could not join the others.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise UsageFault(
            "this process has a process group already", hint="take away the other init_process_group"
        )
    place = place or find_place()
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        options["device_id"] = place.device
    try:
        try:
            dist.init_process_group(place.backend, **options, **_store(place, timeout))
        except (RuntimeError, ValueError) as error:
            raise CheckFailed(f"rank {place.rank} could not join the others: {error}") from error
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
    """Return the arguments of `init_process_group` that say where ranks meet; none for torch's own way."""
    from torch.distributed import (  # type: ignore[attr-defined]
        HashStore,
        PrefixStore,
        rendezvous,
    )

    if not started_by_launcher():
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    # torchrun serves one store and keeps it over restarts, with the addresses of ranks that are dead: a rank
    # that is started again may read those and wait for them (torch 2.15). So each attempt has its own keys.
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous("env://", place.rank, place.world_size, timeout=wait))
    store = PrefixStore(agree_on_attempt(store, rank, world_size, timeout), store)
    store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT))
    return {"store": store, "rank": rank, "world_size": world_size}


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a name that all live ranks of this attempt agree on, and no earlier attempt has used.

    torchrun's own count of restarts is no such name, as each machine counts its own. Here each rank writes a
    number that nobody else has, rank 0 lists the numbers of all, and a rank that finds its own in the list
    counts itself in. A list with a number of a dead rank never becomes complete, and rank 0 replaces it when
    the rank that was started again has written its number.

    Args:
        store: outlives the attempts.
        timeout: seconds to wait for the other ranks.

    Raises:
        CheckFailed: some rank has not come within the timeout.
    """
    own, joined, deadline = uuid.uuid4().hex, "", time.monotonic() + timeout
    store.set(f"ckpttool/rank/{rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            _list_ranks(store, world_size)
        listed = _read(store, "ckpttool/ranks")
        numbers = json.loads(listed) if listed else []
        if len(numbers) == world_size and numbers[rank] == own:
            name = f"ckpttool/attempt/{hashlib.sha256(listed).hexdigest()[:16]}"
            if name != joined:
                store.add(f"{name}/joined", 1)
                joined = name
            if store.add(f"{name}/joined", 0) == world_size:
                return name
        time.sleep(POLL)
    raise CheckFailed(f"rank {rank}: no answer from another rank within {timeout:g} s")


def _list_ranks(store: Store, world_size: int) -> None:
    """Write the list of the numbers of all ranks, if each has one and any has changed."""
    numbers = [_read(store, f"ckpttool/rank/{rank}").decode() for rank in range(world_size)]
    listed = json.dumps(numbers).encode()
    if all(numbers) and listed != _read(store, "ckpttool/ranks"):
        store.set("ckpttool/ranks", listed.decode())


def _read(store: Store, key: str) -> bytes:
    """Return a value without waiting for it; empty if there is none."""
    return bytes(store.get(key)) if store.check([key]) else b""
