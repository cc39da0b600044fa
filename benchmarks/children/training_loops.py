"""Loops that train the same model on the same data: a bare one, accelerate, Lightning Fabric, train/main.py.

`train(after_step)` of each calls `after_step()` after each optimizer step, for as many steps as there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from train.model.builtin import resnet20

SAMPLES, CLASSES, LR, MOMENTUM, DECAY = 4096, 10, 0.1, 0.9, 1e-4

AfterStep = Callable[[], None]


class Pictures(TensorDataset):
    """Random pictures of CIFAR's size, in memory."""

    classes = tuple("0123456789")

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, 3, 32, 32, generator=generator)
        super().__init__(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def pictures() -> tuple[Pictures, Pictures]:
    """Return the two sets for `--data`."""
    return Pictures(), Pictures(2)


def optimizer_for(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def bare(after_step: AfterStep, batch: int) -> None:
    """Train as the tutorials of DistributedDataParallel do."""
    _bare(DistributedDataParallel(resnet20().to(device())), after_step, batch)


def bare_fully_shard(after_step: AfterStep, batch: int) -> None:
    """Train as the tutorials of FSDP2 do: each block is sharded, and then the model."""
    model = resnet20().to(device())
    for module in model.modules():
        if type(module).__name__ == "Block":
            fully_shard(module)
    _bare(fully_shard(model), after_step, batch)


def device() -> torch.device:
    """Return this rank's GPU, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _bare(model: torch.nn.Module, after_step: AfterStep, batch: int) -> None:
    data, on = Pictures(), device()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    pinned = on.type == "cuda"
    loader = DataLoader(data, batch // dist.get_world_size(), sampler=sampler, pin_memory=pinned)
    optimizer = optimizer_for(model)
    model.train()
    for cpu_inputs, cpu_labels in epochs(loader):
        inputs, labels = (each.to(on, non_blocking=True) for each in (cpu_inputs, cpu_labels))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        after_step()


def with_accelerate(after_step: AfterStep, batch: int) -> None:
    """Train as accelerate's examples do."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Pictures(), batch_size=batch // accelerator.num_processes, shuffle=True)
    model = resnet20()
    model, optimizer, loader = accelerator.prepare(model, optimizer_for(model), loader)
    model.train()
    for inputs, labels in epochs(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        after_step()


def with_fabric(after_step: AfterStep, batch: int) -> None:
    """Train as Lightning Fabric's examples do."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    ranks = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp", plugins=[TorchElasticEnvironment()])
    fabric.launch()
    model = resnet20()
    model, optimizer = fabric.setup(model, optimizer_for(model))
    loader = fabric.setup_dataloaders(DataLoader(Pictures(), batch_size=batch // ranks, shuffle=True))
    model.train()
    for inputs, labels in epochs(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        optimizer.step()
        after_step()


def ours(after_step: AfterStep, batch: int, out: str, flags: Sequence[str] = ()) -> None:
    """Train as train/main.py does, in the group that there is, with its reports and limits."""
    from train import main
    from train.config import command_line

    take_step = main.take_step

    def stepped(*given: Any) -> None:
        take_step(*given)
        after_step()

    arguments = ["--data", f"{__file__}:pictures", "--model", "resnet20", "--batch-size", str(batch)]
    recipe = ["--lr", str(LR), "--momentum", str(MOMENTUM), "--weight-decay", str(DECAY), "--decay-norms"]
    job = main.prepare(command_line.parse([*arguments, *recipe, *flags, "--epochs", "999", "--out", out]))
    main.take_step = stepped
    main.train(job)
