"""Cases in which several ranks save parts of one checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def whole() -> dict[str, torch.Tensor]:
    """Tensors of which no size divides evenly by two or four."""
    return {
        "rows": torch.arange(35.0).reshape(7, 5),
        "columns": torch.arange(35, dtype=torch.int64).reshape(5, 7),
        "both": torch.arange(45.0).reshape(5, 9).to(torch.bfloat16),
        "middle": torch.arange(3 * 5 * 4.0).reshape(3, 5, 4),
        "short": torch.arange(2.0),
        "alike": torch.arange(3.0),
    }


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of CPUs, in which torch's warnings of what it does are passed over."""
    warnings.simplefilter("ignore")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def save_whole(rank: int, value: object, path: str) -> None:
    """Save on rank 0 what no rank holds alone."""
    if rank == 0:
        torch.save(value, path)


def save_files(rank: int, world_size: int, folder: str, **states: object) -> None:
    """Save the files of a rank, each of a kind."""
    for kind, state in states.items():
        torch.save(state, f"{folder}/{file_of(kind, rank, world_size)}")


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    """Saves `whole()` by `torch.distributed.checkpoint`, cut in various ways."""
    line = mesh_of(world_size)
    plane = mesh_of(world_size // 2, 2)
    tensors = whole()
    state = {
        "model": {
            "rows": distribute_tensor(tensors["rows"], line, [Shard(0)]),
            "columns": distribute_tensor(tensors["columns"], line, [Shard(1)]),
            "both": distribute_tensor(tensors["both"], plane, [Shard(0), Shard(1)]),
            "middle": distribute_tensor(tensors["middle"], plane, [Replicate(), Shard(1)]),
            "short": distribute_tensor(tensors["short"], line, [Shard(0)]),
            "alike": tensors["alike"],
        },
        "epoch": 3,
    }
    dcp.save(state, checkpoint_id=folder)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def sharded_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return `net()` under FSDP2, with its optimizer."""
    warnings.simplefilter("ignore")
    model = net()
    fsdp.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the whole states of a model and its optimizer, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


def file_of(kind: str, rank: int, world_size: int) -> str:
    """Return the name of a rank's file, as trainers built on FSDP give it."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def save_fsdp(rank: int, world_size: int, folder: str) -> None:
    """Trains a step under FSDP2 and saves model and optimizer; rank 0 also keeps the whole beside it."""
    model, optimizer = sharded_net()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    weights, moments = gathered(model, optimizer)
    save_whole(rank, {"model": weights, "optimizer": moments}, f"{folder}.pt")


def save_pieces(rank: int, world_size: int, folder: str) -> None:
    """Save each rank's own file with torch.save: FSDP2's DTensors, placed DTensors, and ShardedTensors."""
    mesh = mesh_of(world_size)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    fsdp.fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), f"{folder}/fsdp2-{rank}.pt")
    rows = torch.arange(24.0).reshape(6, 4)
    placed = {
        "cut": distribute_tensor(rows, mesh, [Shard(1)]),
        "copied": distribute_tensor(rows, mesh, [Replicate()]),
        "plain": torch.ones(2),
    }
    torch.save(placed, f"{folder}/placed-{rank}.pt")
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(world_size)])
    torch.save({"w": sharded_tensor.ones(spec, 6, 4), "b": rows}, f"{folder}/sharded-{rank}.pt")


def save_placed(rank: int, world_size: int, folder: str) -> None:
    """Save each rank's file of tensors placed in many ways on 4 ranks; rank 0 also keeps the whole."""
    line = mesh_of(world_size)
    plane = mesh_of(2, world_size // 2, names=("dp", "tp"))
    tensors = whole() | {
        "float8": torch.arange(35).reshape(7, 5).to(torch.float8_e4m3fn),
        "flags": torch.arange(35).reshape(5, 7) % 3 == 0,
        "numbers": torch.complex(torch.arange(12.0), -torch.arange(12.0)).reshape(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(77.0).reshape(11, 7).t(),
        "large": torch.arange(300 * 1100.0).reshape(300, 1100),
    }
    placements: dict[str, tuple[Any, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "both": (plane, [Shard(0), Shard(1)]),
        "middle": (plane, [Replicate(), Shard(1)]),
        "short": (line, [Shard(0)]),
        "float8": (line, [Shard(0)]),
        "flags": (plane, [Shard(1), Shard(1)]),
        "numbers": (plane["tp"], [Shard(0)]),
        "empty": (line, [Shard(0)]),
        "turned": (plane, [Shard(1), Replicate()]),
        "large": (plane, [Shard(1), Shard(0)]),
    }
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        mesh, placed = placements.get(name, (None, []))
        cut = mesh is not None
        state[name] = distribute_tensor(tensor, mesh, placed, src_data_rank=None) if cut else tensor
    state["tied"] = state["rows"]
    save_files(rank, world_size, folder, model=state)
    save_whole(rank, tensors | {"tied": tensors["rows"]}, f"{folder}-whole.pt")
    assert isinstance(state["rows"], DTensor)


def save_in_order(rank: int, world_size: int, folder: str) -> None:
    """Save tensors of which two axes cut one dimension, the second first; rank 0 also what torch gathers."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    plane = mesh_of(2, world_size // 2)
    state = {}
    for name, rows in (("even", 8), ("uneven", 7), ("short", 3)):
        tensor = torch.arange(rows * 5.0).reshape(rows, 5)
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        order = (ShardOrderEntry(0, (1, 0)),)
        ordered = DTensorSpec(plane, (Shard(0), Shard(0)), meta, shard_order=order)
        here = DTensorSpec(plane, (Replicate(), Replicate()), meta)
        local = redistribute_local_tensor(tensor, here, ordered).contiguous()
        state[name] = DTensor(local, ordered, requires_grad=False)
    save_files(rank, world_size, folder, model=state)
    gathered = {name: tensor.full_tensor() for name, tensor in state.items()}
    save_whole(rank, gathered, f"{folder}-whole.pt")


def save_fsdp_tp(rank: int, world_size: int, folder: str) -> None:
    """Train under FSDP2 over tensor parallelism on 2 x 2 ranks and save as trainers built on it do."""
    mesh = mesh_of(2, world_size // 2, names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["fsdp"])
    _train_and_save(model, rank, world_size, folder)


def save_hsdp(rank: int, world_size: int, folder: str) -> None:
    """Train under hybrid sharding on 2 x 2 ranks, with a frozen layer and buffers, and save rank by rank."""
    mesh = mesh_of(2, world_size // 2, names=("replicate", "shard"))
    model = net().append(nn.BatchNorm1d(3, affine=False, track_running_stats=True).eval())
    fsdp.fully_shard(model, mesh=mesh)
    model[0].bias.requires_grad_(False)
    _train_and_save(model, rank, world_size, folder)


def _train_and_save(model: nn.Module, rank: int, world_size: int, folder: str) -> None:
    """Train a step, save the files of this rank, and on rank 0 the whole beside the folder."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    extra = {"lr_scheduler": {"last_epoch": 1}, "rng": torch.get_rng_state()}
    states = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    save_files(rank, world_size, folder, **states)

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            new = type(value)((key, full(item)) for key, item in value.items())
            if hasattr(value, "_metadata"):
                new._metadata = value._metadata  # type: ignore[attr-defined]
            return new
        return value.full_tensor() if isinstance(value, DTensor) else value

    saved = {"model": full(model.state_dict()), "optimizer": full(optimizer.state_dict()), **extra}
    save_whole(rank, saved, f"{folder}-whole.pt")


def save_fsdp1(rank: int, world_size: int, folder: str) -> None:
    """Train a step under FSDP1 and save its sharded and its local state dicts; rank 0 also the whole."""
    warnings.simplefilter("ignore")
    FSDP = FullyShardedDataParallel
    model = FSDP(net(), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, moments = (file_of(kind, rank, world_size) for kind in ("model", "optim"))
    for name, kind in (("sharded", "SHARDED"), ("local", "LOCAL"), ("own", "SHARDED")):
        Path(folder, name).mkdir(exist_ok=True)
        with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            torch.save(model.state_dict(), f"{folder}/{name}/{weights}")
            if name == "sharded":
                torch.save(FSDP.optim_state_dict(model, optimizer), f"{folder}/{name}/{moments}")
    torch.save(optimizer.state_dict(), f"{folder}/own/{moments}")
    on_rank_0 = fsdp.FullStateDictConfig(rank0_only=True), fsdp.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *on_rank_0):
        saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    save_whole(rank, saved, f"{folder}/whole.pt")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train some steps on the same small batch."""
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 10).reshape(2, 5)).square().sum().backward()
        optimizer.step()


def save_straight(rank: int, world_size: int, folder: str, count: int) -> None:
    """Train under FSDP2, save rank by rank, train `count` more steps and save the whole of that on rank 0."""
    model, optimizer = sharded_net()
    steps(model, optimizer, 3)
    states = {"model": model.state_dict(), "optim": get_state_dict(model, optimizer)[1]}
    save_files(rank, world_size, folder, **states)
    steps(model, optimizer, count)
    ended = gathered(model, optimizer)
    save_whole(rank, ended, f"{folder}-ended.pt")


def load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def go_on_from_dcp(rank: int, world_size: int, folder: str, count: int) -> None:
    """Load a DCP folder under FSDP2, train `count` steps and save the whole on rank 0."""
    model, optimizer = sharded_net()
    load_dcp(model, optimizer, folder)
    steps(model, optimizer, count)
    ended = gathered(model, optimizer)
    save_whole(rank, ended, f"{folder}-ended.pt")


def save_as_hugging_face(rank: int, world_size: int, folder: str) -> None:
    """Save by HuggingFaceStorageWriter, each rank its pieces: in one file (`one`) and in two (`two`)."""
    line = mesh_of(world_size)
    tensors = whole() | {"scalar": torch.tensor(1.5)}
    cut = {"rows": 0, "columns": 1, "both": 0, "middle": 1, "short": 0}
    state = {
        name: distribute_tensor(tensor, line, [Shard(cut[name])]) if name in cut else tensor
        for name, tensor in tensors.items()
    }
    in_two = {name: 1 + number % 2 for number, name in enumerate(tensors)}
    for name, mapping in (("one", None), ("two", in_two)):
        path = Path(folder, name)
        path.mkdir(parents=True, exist_ok=True)
        given = {"fqn_to_index_mapping": mapping, "save_distributed": True}
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), **given))
    save_whole(rank, tensors, f"{folder}-whole.pt")


def of_accelerate(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    """Return accelerate's module of saving functions, and what they take for its plugin and its launcher."""
    import logging
    from types import SimpleNamespace

    import torch.distributed as dist
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    fsdp_utils.logger = logging.getLogger("accelerate")  # its own asks for a launcher
    launched = SimpleNamespace(process_index=rank, num_processes=world_size, is_main_process=rank == 0)
    launched.is_fsdp2, launched.wait_for_everyone = True, dist.barrier
    return fsdp_utils, FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True), launched


def save_as_accelerate(rank: int, world_size: int, folder: str) -> None:
    """Save by accelerate's functions, as DCP (`sharded`) and by rank (`local`); rank 0 also the whole."""
    model, optimizer = sharded_net()
    steps(model, optimizer, 2)
    fsdp_utils, plugin, launched = of_accelerate(rank, world_size)
    for name in ("sharded", "local"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        plugin.state_dict_type = StateDictType[f"{name.upper()}_STATE_DICT"]
        fsdp_utils.save_fsdp_model(plugin, launched, model, f"{folder}/{name}", 0)
        fsdp_utils.save_fsdp_optimizer(plugin, launched, optimizer, model, f"{folder}/{name}", 0)
    weights, moments = gathered(model, optimizer)
    save_whole(rank, {"model": weights, "optimizer": moments}, f"{folder}-whole.pt")


def save_fsdp1_on_a_mesh(rank: int, world_size: int, folder: str) -> None:
    """Save FSDP1's sharded state dict with a device mesh, which holds DTensors; rank 0 also the whole."""
    mesh = mesh_of(world_size)
    given = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    model = FullyShardedDataParallel(net(), **given)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        save_files(rank, world_size, folder, model=model.state_dict())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        saved = model.state_dict()
    save_whole(rank, saved, f"{folder}-whole.pt")
