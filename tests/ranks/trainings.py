"""Small trainings for tests, built in the same way on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import CkptToolError
from train.config.sections import TrainConfig
from train.data.data_set import Data
from train.main import steps_of_epoch
from train.tasks import builtin as tasks
from train.tasks.builtin import Task
from train.trainer import preflight
from train.trainer.trainer import Trainer


def place(rank: int, world_size: int) -> Place:
    return Place(rank, world_size, "gloo", torch.device("cpu"))


def tensors(
    shape: tuple[int, ...], samples: int, *, tests: int = 10, dtype: torch.dtype = torch.float32
) -> Data:
    """Return random samples of ten classes, the same ones each time."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand(samples + tests, *shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(10, (samples + tests,), generator=generator)
    train = TensorDataset(inputs[:samples], labels[:samples])
    test = TensorDataset(inputs[samples:], labels[samples:])
    return Data("tensors", train, test, tuple("0123456789"), shape, f"tensors {samples}")


def seeded(make: Any, seed: int = 3) -> nn.Module:
    """Return the module that `make` makes, with the same weights each time."""
    torch.manual_seed(seed)
    return make()


def descended(
    model: nn.Module,
    losses: Iterable[Callable[[nn.Module], torch.Tensor]],
    clip_norm: float | None = None,
    kind: Any = torch.optim.SGD,
    **settings: Any,
) -> nn.Module:
    """Return a model after a step of plain PyTorch along the gradient of each of these losses.

    Args:
        kind: of the optimizer, which gets the other settings.
    """
    optimizer = kind(model.parameters(), **settings)
    for loss in losses:
        optimizer.zero_grad()
        loss(model).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return model


def batches_of(samples: int, batch_size: int, epochs: int = 1) -> Iterator[list[int]]:
    """Yield the indices of each global batch, as the plan has them."""
    for epoch in range(epochs):
        for batch in torch.tensor(Plan(samples, batch_size).order(epoch)).split(batch_size):
            yield batch.tolist()


def alone(make: Any, data: Data, batch_size: int, epochs: int = 1, **settings: Any) -> nn.Module:
    """Return the model after plain training: one process, no DDP, the mean of whole batches.

    Args:
        settings: of `descended`.
    """
    inputs, labels = data.train.tensors  # type: ignore[attr-defined]
    batches = batches_of(len(inputs), batch_size, epochs)
    losses = (lambda model, at=at: F.cross_entropy(model(inputs[at]), labels[at]) for at in batches)
    return descended(seeded(make), losses, **settings)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's state."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def error_of(call: Callable[[], object], kind: type[Exception] = CkptToolError) -> tuple[str, str] | None:
    """Return the class and the message of the error in which a call ends; None if it ends well."""
    try:
        call()
    except kind as error:
        return type(error).__name__, getattr(error, "message", str(error))
    return None


def farthest(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors."""
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def trainer(
    rank: int, world_size: int, data: Data, model: nn.Module, own_task: Task | None = None, /, **settings: Any
) -> Trainer:
    config = TrainConfig.of(**{"scheduler": "none", "decay_norms": True, **settings})
    return Trainer(config, data, model, place(rank, world_size), own_task or tasks.build(config, data))


def check(
    model: nn.Module,
    data: Data,
    ranks: int = 1,
    /,
    *,
    rank: int = 0,
    device: str = "cpu",
    own_task: Task | None = None,
    **settings: Any,
) -> None:
    """Check a training of so many ranks as it is checked before it starts."""
    config, here = TrainConfig.of(**settings), Place(rank, ranks, "gloo", torch.device(device))
    preflight.check(config, data, model, here, own_task or tasks.build(config, data))


def wholes(trainer: Trainer) -> list[torch.Tensor]:
    """Return the parameters, whole on each rank also with `--shard`."""
    parameters = (parameter.detach() for parameter in trainer.ddp.parameters())
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]


def after_epochs(rank: int, size: int, make: Any, data: Data, settings: dict[str, Any]) -> Any:
    """Train the epochs of the settings; return the state of the model, and the score of the last epoch."""
    trained = trainer(rank, size, data, seeded(make), **settings)
    scores = [finish_epoch(trained) for _ in range(trained.config.training.epochs)]
    return state(trained.ddp.module), scores[-1]


def finish_epoch(trainer: Trainer) -> Any:
    for _ in steps_of_epoch(trainer):
        pass
    return trainer.finish_epoch()
