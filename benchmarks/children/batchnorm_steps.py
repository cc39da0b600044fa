"""Training steps of ResNet-20 on two ranks over gloo: `batchnorm_steps.py start|none|plain|sync STEPS`.

`start` joins the group and builds the model, but does not train: it is the baseline of the others. `none`
has no normalisation at all. Gradients are averaged in one message, as DistributedDataParallel does for a
model of this size; DDP itself is not used because importing it takes longer than the steps.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from ckpttool import batchnorm
from train.model.builtin import resnet20

RANKS, SAMPLES = 2, 32


def without_normalisation(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return model


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "start": lambda model: model,
    "none": without_normalisation,
    "plain": lambda model: model,
    "sync": batchnorm.to_sync,
}


def work(rank: int, kind: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    work_in_group(rank, RANKS, kind, steps)


def work_in_group(rank: int, _: int, kind: str, steps: int) -> None:
    torch.manual_seed(rank)
    model, batch = KINDS[kind](resnet20()), torch.randn(SAMPLES, 3, 32, 32)
    for _ in range(0 if kind == "start" else steps):
        model.zero_grad()
        model(batch).square().mean().backward()
        dist.all_reduce(parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None))
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
