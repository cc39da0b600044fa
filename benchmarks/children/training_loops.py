"""Loops that train the same model on the same data: a bare one, accelerate, Lightning Fabric, train/main.py.

`train(after_step)` of each calls `after_step()` after each optimizer step, for as many steps as there are.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
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


def bare_fully_shard(after_step: AfterStep, batch: int, *, same_buffers: bool = False) -> None:
    """Train as the tutorials of FSDP2 do: each block is sharded, and then the model.

    With `same_buffers` each pass begins with rank 0's buffers, as under DDP.
    """
    model = resnet20().to(device())
    for module in model.modules():
        if type(module).__name__ == "Block":
            fully_shard(module)
    if same_buffers:
        group, buffers = dist.distributed_c10d._get_default_group(), list(model.buffers())
        model.register_forward_pre_hook(lambda *_: dist._broadcast_coalesced(group, buffers, 1 << 20, 0))
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
    recipe = ["--lr", str(LR), "--momentum", str(MOMENTUM), "--weight-decay", str(DECAY), "--decay-norms"]
    _ours(after_step, batch, out, ["--data", f"{__file__}:pictures", "--model", "resnet20", *recipe, *flags])


def _ours(after_step: AfterStep, batch: int, out: str, arguments: list[str]) -> None:
    from train import main
    from train.config import command_line

    take_step = main.take_step

    def stepped(*given: Any) -> None:
        take_step(*given)
        after_step()

    always = ["--batch-size", str(batch), "--epochs", "999", "--out", out]
    job = main.prepare(command_line.parse([*arguments, *always]))
    main.take_step = stepped
    main.train(job)


# ---- token files ---------------------------------------------------------------------------------------

BLOCK, TOKENS = 128, 2_000_000


def language_model() -> torch.nn.Module:
    """Return a small transformer over 256 tokens."""
    from examples import character_lm

    character_lm.LENGTH = BLOCK
    torch.manual_seed(0)
    return character_lm.Transformer(256)


def token_file(folder: str) -> str:
    """Have rank 0 write random tokens, unless they are there; return the file."""
    path = os.path.join(folder, "tokens.bin")
    if dist.get_rank() == 0 and not os.path.exists(path):
        numpy.random.default_rng(0).integers(256, size=TOKENS).astype("<u2").tofile(path)
    dist.barrier()
    return path


def nanogpt(after_step: AfterStep, batch: int, folder: str, *, exact: bool = False) -> None:
    """Train in a bare loop, with blocks at random places of a mapped file, as nanoGPT's `get_batch` takes.

    If it is `exact`, ranks tell each other how many tokens they have, as where blocks are filled up.
    """
    path, share = token_file(folder), batch // dist.get_world_size()
    model = DistributedDataParallel(language_model().to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        tokens = numpy.memmap(path, dtype="<u2", mode="r")  # anew for each batch: it would leak otherwise
        begins = torch.randint(len(tokens) - BLOCK, (share,))
        inputs, targets = (
            torch.stack([torch.from_numpy(tokens[at : at + BLOCK].astype(numpy.int64)) for at in places]).to(
                device(), non_blocking=True
            )
            for places in (begins, begins + 1)
        )
        outputs, targets = model(inputs).flatten(0, 1), targets.flatten()
        if exact:
            count = (targets != -100).sum()
            told = dist.all_reduce(count, async_op=True)  # arrives with the gradients
            (F.cross_entropy(outputs, targets, reduction="sum") * dist.get_world_size()).backward()
            told.wait()
            torch._foreach_div_([parameter.grad for parameter in model.parameters()], count)
        else:
            F.cross_entropy(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()


def tokens(after_step: AfterStep, batch: int, folder: str) -> None:
    """Train on the same file with `--data tokens:`."""
    data = ["--data", f"tokens:{token_file(folder)}", "--block-size", str(BLOCK), "--task", "language-model"]
    model = ["--model", f"{__file__}:language_model"]
    recipe = [
        "--optimizer",
        "adamw",
        "--lr",
        "0.001",
        "--weight-decay",
        "0.01",
        "--decay-norms",
    ]  # AdamW's own
    _ours(after_step, batch, os.path.join(folder, "tokens"), [*data, *model, *recipe])
