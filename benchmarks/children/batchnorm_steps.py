"""Training steps of ResNet-20 on two ranks over gloo: `batchnorm_steps.py plain|sync|start STEPS`.

`start` joins the group and builds the model, and trains nothing: what the others are compared beyond.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from train.models import resnet20

RANKS, SAMPLES = 2, 32


def work(rank: int, kind: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    model = resnet20()
    if kind == "sync":
        batchnorm.to_sync(model)
    ddp, batch = DistributedDataParallel(model), torch.randn(SAMPLES, 3, 32, 32)
    for _ in range(0 if kind == "start" else steps):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    dist.barrier()


def main(kind: str, steps: int) -> None:
    """The second rank is a fork, so that torch is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(1, kind, steps, folder)
                code = 0
            finally:
                os._exit(code)
        work(0, kind, steps, folder)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("the second rank failed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
