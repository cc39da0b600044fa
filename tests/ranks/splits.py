"""Cases in which ranks save, load and continue a training under FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.ranks.shardings import file_of, load_dcp, mesh_of, of_accelerate, save_files


class Tied(nn.Module):
    """A model with buffers, a tied weight, a tensor of one row, and sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.out = nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.body(self.embed(x)) * self.scale)
        return found


def build(dtype: torch.dtype = torch.float32, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under `fully_shard` with its optimizer."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Tied().to(dtype)
    fsdp.fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """Train on the same batches on every rank, whatever their number."""
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(11, (6,), generator=batches)
        nn.functional.cross_entropy(model(x).float(), (x + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()


def load(folder: str, kind: str, rank: int, world_size: int, *, safely: bool = True) -> Any:
    return torch.load(f"{folder}/{file_of(kind, rank, world_size)}", weights_only=safely)


def save(rank: int, world_size: int, folder: str, dtype: str = "float32") -> None:
    """Train three steps; save each rank's files, and a DCP folder beside them."""
    model, optimizer = build(getattr(torch, dtype))
    train(model, optimizer, 3, 1)
    save_files(rank, world_size, folder, model=model.state_dict(), optim=optimizer.state_dict())
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}-dcp")


def _from_dcp(folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    load_dcp(model, optimizer, folder)
    return model, optimizer


def _from_files(folder: str, rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    of_torch.set_model_state_dict(model, load(folder, "model", rank, world_size))
    moments = load(folder, "optim", rank, world_size)
    if all(type(key) is int for key in moments["state"]):
        optimizer.load_state_dict(moments)
    else:
        of_torch.set_optimizer_state_dict(model, optimizer, moments)
    return model, optimizer


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    options = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state: Any = moments["state"]
    kept = [value for entry in state.values() for value in entry.values() if torch.is_tensor(value)]
    return [*weights.values(), *kept]


def continue_alike(rank: int, world_size: int, folder: str, files: str, *, as_dcp: bool = False) -> list[int]:
    """Go on for 20 steps from the framework's own DCP folder, and from what was split; compare every bit.

    Return on rank 0 the numbers of tensors compared before and after the steps.
    """
    compared = []
    ours = _from_dcp(files) if as_dcp else _from_files(files, rank, world_size)
    runs = [_from_dcp(f"{folder}-dcp"), ours]
    for steps in (0, 20):
        for model, optimizer in runs:
            train(model, optimizer, steps, 2)
        theirs, mine = (_whole(*run) for run in runs)
        assert len(theirs) == len(mine)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(theirs, mine, strict=True))
        compared.append(len(mine))
    return compared


def load_named(rank: int, world_size: int, folder: str, axis: str) -> None:
    """Load files of ranks into a model whose mesh has a name."""
    model = Tied()
    fsdp.fully_shard(model, mesh=mesh_of(world_size, names=(axis,)))
    of_torch.set_model_state_dict(model, load(folder, "model", rank, world_size))


def _require_as_merged(model: nn.Module, optimizer: torch.optim.Optimizer, merged: str) -> None:
    """Compare what was loaded with a merged file, bit by bit; then train a step with it."""
    whole = torch.load(merged, weights_only=True)
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    theirs = whole["optimizer"]["state"]
    names = [name for name, _ in model.named_parameters()]
    assert weights.keys() == whole["model"].keys() and len(theirs) == len(names)
    assert all(torch.equal(weights[name], whole["model"][name]) for name in weights)
    state: Any = moments["state"]
    for number, name in enumerate(names):
        kept = theirs[name] if name in theirs else theirs[number]
        assert kept.keys() == state[name].keys()
        assert all(torch.equal(state[name][key], kept[key]) for key in kept)
    train(model, optimizer, 1, 2)


# As verl's FSDPCheckpointManager saves and loads FSDP2: its files, its mesh and its calls.


def _of_verl(world_size: int) -> tuple[Any, Any, Any]:
    model, optimizer = build(mesh=mesh_of(world_size, names=("fsdp",)))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def save_as_verl(rank: int, world_size: int, folder: str) -> None:
    """Train three steps, and save as verl does."""
    model, optimizer, scheduler = _of_verl(world_size)
    train(model, optimizer, 3, 1)
    scheduler.step()
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.full((3,), rank)}}
    states = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    save_files(rank, world_size, folder, **states)


def load_as_verl(rank: int, world_size: int, folder: str, merged: str) -> None:
    """Load as verl does by default: the model, the optimizer and the scheduler."""
    model, optimizer, scheduler = _of_verl(world_size)
    kinds = ("model", "optim", "extra_state")
    weights, moments, extra = (load(folder, kind, rank, world_size, safely=False) for kind in kinds)
    model.load_state_dict(weights, strict=True)
    optimizer.load_state_dict(moments)
    assert "rng" not in extra
    scheduler.load_state_dict(extra["lr_scheduler"])
    assert scheduler.last_epoch == 1
    _require_as_merged(model, optimizer, merged)


# As accelerate saves and loads FSDP2 with SHARDED_STATE_DICT: by its functions, or by their calls of torch.


def save_as_accelerate(rank: int, world_size: int, folder: str, *, real: bool) -> None:
    """Train three steps, and save as accelerate does."""
    model, optimizer = build()
    train(model, optimizer, 3, 1)
    if real:
        utils, plugin, launched = _of_accelerate(rank, world_size)
        utils.save_fsdp_model(plugin, launched, model, folder, 0)
        utils.save_fsdp_optimizer(plugin, launched, optimizer, model, folder, 0)
        return
    for name, state in (
        ("pytorch_model_fsdp_0", {"model": of_torch.get_model_state_dict(model)}),
        ("optimizer_0", {"optimizer": of_torch.get_optimizer_state_dict(model, optimizer)}),
    ):
        writer = dcp.FileSystemWriter(f"{folder}/{name}")
        dcp.save(state, storage_writer=writer, planner=dcp.DefaultSavePlanner())


def _load_weights(model: nn.Module, folder: str) -> None:
    state: dict[str, Any] = {"model": of_torch.get_model_state_dict(model)}
    reader = dcp.FileSystemReader(f"{folder}/pytorch_model_fsdp_0")
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
    of_torch.set_model_state_dict(model, state["model"])


def load_as_accelerate(rank: int, world_size: int, folder: str, merged: str, *, real: bool) -> None:
    """Load as accelerate does."""
    model, optimizer = build()
    if real:
        utils, plugin, launched = _of_accelerate(rank, world_size)
        utils.load_fsdp_model(plugin, launched, model, folder, 0)
        utils.load_fsdp_optimizer(plugin, launched, optimizer, model, folder, 0)
    else:
        _load_weights(model, folder)
        state: dict[str, Any] = {"optimizer": of_torch.get_optimizer_state_dict(model, optimizer)}
        reader = dcp.FileSystemReader(f"{folder}/optimizer_0")
        dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner())
        of_torch.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    _require_as_merged(model, optimizer, merged)


def load_weights_as_accelerate(rank: int, world_size: int, folder: str, weights: str) -> None:
    """Load the model alone as accelerate does."""
    from safetensors.torch import load_file

    model, _ = build()
    _load_weights(model, folder)
    for name, tensor in load_file(weights).items():
        value = model.state_dict()[name]
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, tensor)


def _of_accelerate(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    utils, plugin, launched = of_accelerate(rank, world_size)
    plugin.state_dict_type = fsdp.StateDictType.SHARDED_STATE_DICT
    return utils, plugin, launched
