"""Record tiny DeepSpeed runs that cut the model: `python -m tests.support.deepspeed_cut_runs`. Imports torch.

Needs deepspeed (`pip install -e '.[interop-ranks]'`), no accelerator, and about two minutes. Each case of
`CASES` is a real training on as many gloo ranks as it says, with experts, stages of a pipeline or tensor
parallelism. `recorded/deepspeed-cut.tar.xz` gets the folder that it saved, beside its tag a file of the
weights and momenta as the ranks gathered them, and of some runs what `ds_to_universal` makes of them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import recording
from tests.support.deepspeed_runs import BF16, FP32_SUMS, batch, zero
from tests.support.running import free_port

RECORDED = Path(__file__).parent / "recorded" / "deepspeed-cut.tar.xz"

MOMENTS = ("exp_avg", "exp_avg_sq")

STEPS = 2

EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Case:
    """A training to record.

    Attributes:
        name: of its folder.
        kind: `experts`, `pipeline` or `tensor`: what cuts the model.
        ranks: the world size; two of them share each part where there are four.
        config: of DeepSpeed, beside the batch size.
        universal: whether `ds_to_universal` reads it too.
    """

    name: str
    kind: str
    ranks: int
    config: Mapping[str, Any]
    universal: bool = False


DATA_FIRST = {"use_data_before_expert_parallelism": True}
LAYERS: tuple[dict[str, Any], ...] = (
    {"patterns": [r".*\.fc_in\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.fc_out\.weight$"], "partition_type": "row"},
    {
        "patterns": [r".*\.fused\.weight$"],
        "partition_type": "column",
        "shape": ((4, 2, 2), -1),
        "partition_dim": 0,
    },
)
AUTOTP = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": list(LAYERS)}}}

CASES = (
    Case("experts-zero0", "experts", 2, zero(0)),
    Case("experts-zero1", "experts", 4, zero(1)),
    Case("experts-zero2-bf16", "experts", 4, zero(2) | BF16),
    Case("experts-data-first", "experts", 4, zero(2) | DATA_FIRST),
    Case("pipeline-zero0", "pipeline", 2, zero(0)),
    Case("pipeline-zero1", "pipeline", 4, zero(1), universal=True),
    Case("pipeline-bf16", "pipeline", 4, zero(1) | BF16 | FP32_SUMS),
    Case("tensor-zero1", "tensor", 2, zero(1) | AUTOTP, universal=True),
    Case("tensor-zero3", "tensor", 4, zero(3) | AUTOTP, universal=True),
)


class Experts(nn.Module):
    """An embedding, two layers of four experts each, one frozen layer, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = nn.Embedding(7, 6)
        made = [MoE(6, nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)), 4, ep_size=2) for _ in range(2)]
        self.layers = nn.ModuleList(made)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score of each word, [batch, 7]."""
        found = self.embed(words)
        for layer in self.layers:
            found = found + layer(found.unsqueeze(0))[0].squeeze(0)
        return self.head(self.frozen(found))


class Scale(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        """Return it at half the size."""
        return found * self.factor.to(found.dtype)


def _scores(embed: nn.Embedding, found: torch.Tensor) -> torch.Tensor:
    return found @ embed.weight.t()


def make_pipeline() -> nn.Module:
    """Return this rank's stage of two: a tied embedding, a function, a buffer, and linear layers."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", nn.Embedding, 7, 4),
        LayerSpec(nn.Linear, 4, 4),
        torch.tanh,
        LayerSpec(Scale),
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(nn.LayerNorm, 4),
        TiedLayerSpec("embed", nn.Embedding, 7, 4, forward_fn=_scores),
    ]
    loss: Callable[..., Any] = lambda found, wanted: nn.functional.cross_entropy(found.float(), wanted)  # noqa: E731
    made = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    # As Megatron-DeepSpeed states it: without it `ds_to_universal` joins both copies of the embedding.
    made.universal_checkpoint_info = {
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"]
    }
    return made


class Block(nn.Module):
    """Linear layers that AutoTP cuts: by columns, by rows, and by columns within three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in = nn.Linear(4, 8)
        self.fc_out = nn.Linear(8, 4)
        self.fused = nn.Linear(4, 8)

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and what the layers make of it."""
        return found + self.fc_out((self.fc_in(found) + self.fused(found)).tanh())


class Blocks(nn.Module):
    """An embedding, two blocks, a norm and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score of each word, [batch, 8]."""
        found = self.embed(words)
        for block in self.blocks:
            found = block(found)
        return self.lm_head(self.norm(found))


def make_model(case: Case) -> nn.Module:
    """Return a case's model, or this rank's part of it."""
    torch.manual_seed(0)
    return {"experts": Experts, "pipeline": make_pipeline, "tensor": Blocks}[case.kind]()


def train(case: Case, rank: int, out: Path) -> None:
    """Train a case on this rank, save its checkpoint in `out`, and what this rank sees in `live-RANK.pt`."""
    import deepspeed

    model = make_model(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = trained
    if case.kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        groups = split({"params": trained, "name": "all"})
    copies = case.ranks if case.kind == "experts" else case.ranks // 2
    given: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    given |= {"zero_allow_untested_optimizer": True, **case.config}
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    for number in range(1, STEPS + 1):
        words = batch(number, rank // 2 if case.kind == "tensor" else rank % copies)
        if case.kind == "pipeline":
            engine.train_batch(iter([(words, words)]))
            continue
        loss = engine(words).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out), client_state={"epoch": 1})
    torch.save(_live(engine, case), out / f"live-{rank}.pt")
    engine.destroy()


def _live(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and momenta as DeepSpeed gathers them; all ranks must call it."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state as link
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    wrapper = engine.optimizer
    if hasattr(wrapper, "single_partition_of_fp32_groups") and hasattr(wrapper, "bit16_groups"):
        for group, flat in zip(wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups, strict=True):
            link(group, flat, wrapper.optimizer.state)
    found: dict[str, torch.Tensor] = {}
    for local, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        name = _of_all_ranks(engine.module, local)
        if case.config["zero_optimization"]["stage"] == 0:
            kept = engine.optimizer.state[parameter]
            found |= {f"fp32/{name}": parameter.detach(), **{f"{key}/{name}": kept[key] for key in MOMENTS}}
            continue
        found[f"fp32/{name}"] = safe_get_full_fp32_param(parameter)
        found |= {f"{key}/{name}": safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    return {name: value.detach().clone() for name, value in found.items()}


def _of_all_ranks(model: nn.Module, name: str) -> str:
    """Return a parameter's name with its expert's number among those of all ranks."""
    if (match := EXPERT.fullmatch(name)) is None:
        return name
    from deepspeed.utils import groups

    layer = model.get_submodule(name.split(".deepspeed_moe")[0])
    rank = groups._get_expert_parallel_rank(layer.expert_group_name)
    return f"{match[1]}{rank * layer.num_local_experts + int(match[2])}{match[3]}"


def _rank_main(rank: int, ranks: int, port: int, out: str, case: Case) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo")
    train(case, rank, Path(out) / case.name)
    torch.distributed.destroy_process_group()


def convert(folder: Path) -> None:
    """Write the universal folder of a tag beside it, as `ds_to_universal` does."""
    import functools
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    load, torch.load = torch.load, functools.partial(torch.load, weights_only=False)
    given = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    given |= {"inject_missing_state": True}
    places = {"input_folder": str(folder), "output_folder": f"{folder}_universal"}
    ds_to_universal.main(SimpleNamespace(**places, **given))
    torch.load = load


def expected(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters and momenta as the ranks gathered them; those that AutoTP cut, as converted.

    Returns:
        `fp32/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`, each whole.
    """
    if case.kind == "tensor":
        kinds = {"fp32", *MOMENTS}
        files = [path for path in sorted(folder.glob("*_universal/zero/*/*.pt")) if path.stem in kinds]
        loaded = [(path, torch.load(path, weights_only=False)) for path in files]
        return {f"{path.stem}/{path.parent.name}": kept["param"].contiguous() for path, kept in loaded}
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("live-*.pt")):
        for name, value in torch.load(path).items():
            assert torch.equal(found.setdefault(name, value), value), (case.name, name)
    return found


def record(case: Case, out: Path) -> None:
    """Train a case and leave its tag, its universal folder, and the file of what is expected."""
    from safetensors.torch import save_file

    given = (case.ranks, free_port(), str(out), case)
    torch.multiprocessing.start_processes(_rank_main, given, nprocs=case.ranks, start_method="fork")
    folder = out / case.name
    if case.universal:
        convert(folder / f"global_step{STEPS}")
    save_file(expected(case, folder), folder / f"global_step{STEPS}.safetensors")
    for path in [*folder.glob("live-*.pt"), folder / "zero_to_fp32.py", folder / "zero_to_torch.py"]:
        path.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    """Record all cases as the archive; or those named after a folder, into it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  # once for all ranks

    with tempfile.TemporaryDirectory() as scratch:
        out, *chosen = arguments or [scratch]
        for case in CASES:
            if not chosen or case.name in chosen:
                record(case, Path(out))
        if not arguments:
            recording.pack(Path(out), RECORDED)
            print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
