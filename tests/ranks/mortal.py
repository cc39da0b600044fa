"""Ranks that may hang, stop or die: each is a process of its own, forked from a server that has torch.

A case is an importable function `case(rank, folder)`. It runs in a gloo process group whose store is in this
process, as torchrun's is in its agent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.ranks.pool import PRELOADED

# Starting a process asks all others how they ended. Of two threads that ask one, only the first is told, and
# the second one takes it for 255.
_asking = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: its exit code; minus the signal that killed it; None if it had to be killed by the test.
        said: its stderr.
        at: when, on the clock of `time.time`.
    """

    code: int | None
    said: str
    at: float


def run(
    case: Callable[[int, Path], object], folder: Path, size: int = 2, patience: float = 60.0
) -> list[Ended]:
    """Run a case on ranks that may end in any way."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [
        context.Process(target=_live, args=(case, rank, size, store.port, folder), daemon=True)
        for rank in range(size)
    ]
    with _asking:
        for rank in ranks:
            rank.start()
    ends: dict[int, tuple[int | None, float]] = {}
    deadline = time.time() + patience
    while len(ends) < size and time.time() < deadline:
        with _asking:
            for number, rank in enumerate(ranks):
                if number not in ends and rank.exitcode is not None:
                    ends[number] = rank.exitcode, time.time()
        time.sleep(0.02)
    with _asking:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
    logs = [(folder / f"{number}.log").read_text() for number in range(size)]
    return [
        Ended(ends[number][0] if number in ends else None, said, ends.get(number, (None, 0.0))[1])
        for number, said in enumerate(logs)
    ]


def _live(case: Callable[[int, Path], Any], rank: int, size: int, port: int, folder: Path) -> None:
    with open(folder / f"{rank}.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    case(rank, folder)
    os._exit(0)


def note_now(folder: Path, name: str = "when") -> None:
    """Write down the time, for `noted`."""
    (folder / name).write_text(str(time.time()))


def noted(folder: Path, name: str = "when") -> float:
    return float((folder / name).read_text())
