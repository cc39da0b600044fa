"""One rank of one way of `python -m benchmarks.training`: `training_turns.py PORT STEPS BATCH FOLDER WAY`.

Each way is a program of its own, as for its users. They take turns of a few steps, so that all are measured
within seconds of each other, on whatever else the machine does.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
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
    """Takes some steps when told to by a line from the benchmark, and rank 0 answers with what they took."""

    def __init__(self, port: int, rank: int, steps: int) -> None:
        self.rank, self.steps, self.left = rank, steps, 0
        self.lines = socket.create_connection(("127.0.0.1", port)).makefile("rw")
        print(rank, file=self.lines, flush=True)

    def begin(self) -> None:
        if not self.lines.readline():
            os._exit(0)  # the last one: the program would train on
        dist.barrier()
        self.left, self.began, self.busy = self.steps, time.perf_counter(), time.process_time()

    def after_step(self) -> None:
        self.left -= 1
        if self.left:
            return
        busy = time.process_time() - self.busy
        dist.barrier()
        if self.rank == 0:
            print(time.perf_counter() - self.began, busy, file=self.lines, flush=True)
        self.begin()


def main(port: int, steps: int, batch: int, folder: str, way: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    out = os.path.join(folder, way)
    made: dict[str, Callable[[Callable[[], None], int], None]] = {
        "bare": loops.bare,
        "again": loops.bare,
        "accelerate": loops.with_accelerate,
        "fabric": loops.with_fabric,
        "ours": partial(loops.ours, out=out),
        "nanogpt": partial(loops.nanogpt, folder=folder),
        "nanogpt-again": partial(loops.nanogpt, folder=folder),
        "nanogpt-exact": partial(loops.nanogpt, folder=folder, exact=True),
        "tokens": partial(loops.tokens, folder=folder),
        "fully_shard": loops.bare_fully_shard,
        "fully_shard_again": loops.bare_fully_shard,
        "fully_shard_buffers": partial(loops.bare_fully_shard, same_buffers=True),
        "ours_shard": partial(loops.ours, out=out, flags=["--shard"]),
    }
    torch.set_num_threads(1)
    with distributed.process_group() as place:
        turns = Turns(port, place.rank, steps)
        turns.begin()
        made[way](turns.after_step, batch)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:6])
