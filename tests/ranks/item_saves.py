"""Saves by torch_checkpointing on several ranks: real folders, as its CheckpointManager writes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks.shardings import mesh_of, whole


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model after one step of AdamW, the same on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_items(rank: int, world: int, folder: str, form: str) -> str:
    """Save tensors cut in several ways, an optimizer and a step; return the library's version."""
    import torch_checkpointing
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(_: object, data: Any, __: object = None) -> dict[int, Any]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, data)
        return dict(enumerate(found))

    # Its own gathers on CUDA devices alone; what is gathered stays the library's.
    DefaultMetadataManager._all_gather_pickled_data = gathered  # type: ignore[method-assign,assignment]
    mesh = mesh_of(world)
    cuts = {"columns": Shard(1), "middle": Shard(2), "alike": Replicate()}
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [cuts.get(name, Shard(0))]) for name, tensor in whole().items()
    }
    state["plain"] = torch.arange(3)
    model, optimizer = model_and_optimizer()
    plain = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    of_model = ItemSpec(resharder=DefaultResharder(), layout=plain if form == "safetensors" else None)
    manager = CheckpointManager.Config(
        items={"model": of_model, "optimizer": ItemSpec(resharder=DefaultResharder())},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # which not all file systems have
    ).build()
    state |= {name: cut_rows(tensor, mesh) for name, tensor in model.state_dict().items()}
    manager.save(folder, {"model": state, "optimizer": optimizer_of(optimizer, mesh), "step": 7})
    manager.close()
    dist.barrier()
    return str(torch_checkpointing.__version__)


def cut_rows(tensor: torch.Tensor, mesh: Any) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [Shard(0)])


def optimizer_of(optimizer: torch.optim.Optimizer, mesh: Any) -> dict[str, Any]:
    """Return an optimizer's state as the library's own transform keys it, the momenta cut."""
    from torch_checkpointing import optimizer_transform_pre

    state = optimizer.state_dict()
    state["state"] = {
        key: {name: cut_rows(value, mesh) if value.dim() else value for name, value in entry.items()}
        for key, entry in state["state"].items()
    }
    return dict(optimizer_transform_pre(state))


def expected() -> dict[str, torch.Tensor]:
    """Return the whole tensors that `save_items` cuts."""
    model, _ = model_and_optimizer()
    return whole() | {"plain": torch.arange(3)} | {name: t.detach() for name, t in model.state_dict().items()}
