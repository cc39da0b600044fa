"""One rank of `python -m benchmarks.training`: `training_turns.py FOLDER ROUNDS STEPS BATCH WAY…`.

Each way is a whole program with a loop of its own, in a thread of its own that runs only in its turn. So all
are measured within seconds of each other, on whatever else the machine does. Rank 0 writes
the seconds and the CPU seconds of each way in each round to FOLDER/seconds.json.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from benchmarks.children import training_loops as loops
from ckpttool import distributed


class Turns:
    """A program that takes some steps when it is its turn, and waits for the next one after them."""

    def __init__(self, train: Callable[[Callable[[], None]], None]) -> None:
        self.train, self.left = train, 0
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, steps: int) -> None:
        self.left = steps
        self.go.release()
        self.done.acquire()
        if self.failure:
            raise self.failure

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread
        self.go.acquire()
        try:
            self.train(self._after_step)
        except BaseException as error:
            self.failure = error
        self.done.release()

    def _after_step(self) -> None:
        self.left -= 1
        if not self.left:
            self.done.release()
            self.go.acquire()


def main(folder: str, rounds: int, steps: int, batch: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    made = {
        "bare": loops.bare,
        "again": loops.bare,
        "accelerate": loops.with_accelerate,
        "fabric": loops.with_fabric,
        "ours": partial(loops.ours, out=os.path.join(folder, "run")),
        "nanogpt": partial(loops.nanogpt, folder=folder),
        "nanogpt-again": partial(loops.nanogpt, folder=folder),
        "nanogpt-exact": partial(loops.nanogpt, folder=folder, exact=True),
        "tokens": partial(loops.tokens, folder=folder),
        "fully_shard": loops.bare_fully_shard,
        "fully_shard_again": loops.bare_fully_shard,
        "fully_shard_buffers": partial(loops.bare_fully_shard, same_buffers=True),
        "ours_shard": partial(loops.ours, out=os.path.join(folder, "run"), flags=["--shard"]),
    }
    with distributed.process_group() as place:
        ways = {name: Turns(partial(made[name], batch=batch)) for name in names}
        for way in ways.values():
            way.take(max(3, steps))  # imports, buckets, memory
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for round_ in range(rounds):
            shift = round_ % len(names)
            for name in names[shift:] + names[:shift]:  # none is always first
                dist.barrier()
                began, busy = time.perf_counter(), time.process_time()
                ways[name].take(steps)
                busy = time.process_time() - busy
                dist.barrier()
                seconds[name].append((time.perf_counter() - began, busy))
            if place.rank == 0:
                print(f"round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
        if place.rank == 0:
            Path(folder, "seconds.json").write_text(json.dumps(seconds))
        dist.barrier()
    os._exit(0)  # the programs would wait for their next turn


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5:])
