"""Record tiny folders that frameworks save: `python -m tests.support.framework_runs`. Imports torch.

Needs lightning and megatron-core (0.16), no accelerator, and two minutes. Each folder is of a model on two
gloo ranks:

| folder | written by | beside it, the oracle |
|---|---|---|
| `lightning-fsdp` | `Trainer` with `FSDPStrategy(state_dict_type="sharded")` | Lightning's own merger |
| `lightning-fsdp2` | `Trainer` with `ModelParallelStrategy` | the whole tensors, gathered by torch |
| `megatron` | `dist_checkpointing.save` of a GPTModel, tensor parallel over two ranks | loaded by one rank |

`FSDPStrategy` and Megatron ask for a GPU where none is needed: here the strategy wraps its model for the CPU,
and Megatron's waiting for a GPU does nothing. What is saved is the frameworks' own doing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.recording import pack

RECORDED = Path(__file__).parent / "recorded" / "frameworks.tar.xz"


def lightning(strategy: str, out: Path) -> None:
    """Train two steps on this rank, and save; rank 0 also the whole."""
    import lightning as L
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

        def configure_model(self) -> None:
            if strategy == "fsdp2":
                assert self.device_mesh is not None
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        def forward(self, batch: torch.Tensor) -> Any:
            return self.last(self.norm(self.first(batch)))

        def training_step(self, batch: Any, index: int) -> Any:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    class OnCpu(FSDPStrategy):
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    torch.manual_seed(0)
    fsdp2 = strategy == "fsdp2"
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(process_group_backend="gloo")
        if fsdp2
        else OnCpu(state_dict_type="sharded", process_group_backend="gloo"),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=out.parent,
    )
    model = Net()
    data = torch.utils.data.TensorDataset(torch.rand(8, 5))
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(out)
    if fsdp2:  # Lightning's own merger fails here: it asks for the key `model`
        options = StateDictOptions(full_state_dict=True)
        weights, moments = get_state_dict(model, trainer.optimizers[0], options=options)
        if trainer.global_rank == 0:
            torch.save({"state_dict": weights, "optimizer_states": [moments]}, f"{out}-whole.pt")


def megatron(ranks: int, out: Path) -> None:
    """Save a model and its optimizer's state as one of two ranks, or load the whole as one rank."""
    import torch.distributed as dist

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing import optimizer as sharding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    pieces, moments = model.sharded_state_dict(), optimizer.state_dict()
    numbered = sharding.get_param_id_to_sharded_param_map(pieces, model.parameters())
    sharding.optim_state_to_sharding_state(moments, numbered, exclude_keys=("step",))
    state = {"model": pieces, "optimizer": moments}
    if ranks == 1:
        places = {
            path: (piece.key, piece.global_offset[: piece.prepend_axis_num], piece.global_shape)
            for path, piece in leaves(state)
            if isinstance(piece, ShardedTensor)
        }
        tensors: dict[str, torch.Tensor] = {}
        for path, value in leaves(dist_checkpointing.load(state, str(out))):
            if path in places:  # the files have layers stacked, under a name of their own
                key, layer, shape = places[path]
                tensors.setdefault(key, torch.empty(shape))[layer] = value
        torch.save(tensors, f"{out}-whole.pt")
    else:
        out.mkdir(exist_ok=True)
        dist_checkpointing.save(state | {"iteration": 7, "checkpoint_version": 3.0}, str(out))
    dist.destroy_process_group()


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each leaf of a tree of dicts."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def main(arguments: list[str]) -> None:
    """Write the archive; with arguments, be one of the ranks that write a folder."""
    warnings.filterwarnings("ignore")
    if arguments:
        name, out = arguments[0], Path(arguments[1])
        if name == "megatron":
            megatron(int(os.environ["WORLD_SIZE"]), out)
        else:
            lightning(name.removeprefix("lightning-"), out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name, ranks in (("lightning-fsdp", 2), ("lightning-fsdp2", 2), ("megatron", 2), ("megatron", 1)):
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
            program = [*launch, "tests.support.framework_runs", name, f"{scratch}/{name}"]
            subprocess.run([sys.executable, "-m", *program], check=True)
        merger = "lightning.pytorch.utilities.consolidate_checkpoint"
        whole = f"{scratch}/lightning-fsdp-whole.pt"
        subprocess.run(
            [sys.executable, "-m", merger, f"{scratch}/lightning-fsdp", "--output_file", whole], check=True
        )
        pack(Path(scratch), RECORDED)
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
