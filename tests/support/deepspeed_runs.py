"""Record tiny folders by training with DeepSpeed: `python -m tests.support.deepspeed_runs`. Imports torch.

Needs deepspeed (`pip install -e '.[interop-ranks]'`), no accelerator, and about five minutes. Each case
of `CASES` is a real training on as many gloo ranks as it says. `recorded/deepspeed.tar.xz` gets the folder
that it saved, and beside each tag a file of what DeepSpeed's own tools make of it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support import recording
from tests.support.running import free_port

RECORDED = Path(__file__).parent / "recorded" / "deepspeed.tar.xz"

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class Case:
    """A training to record.

    Attributes:
        name: of its folder.
        ranks: the world size.
        config: of DeepSpeed, beside the batch size.
        groups: parameter groups: 1, or 2 for weights and vectors.
        tied: whether the output layer uses the embedding's weight.
        frozen: names of modules whose parameters are not trained.
        tiny: whether the model is one of three parameters, of 4, 1 and 2 elements.
        optimizer: `adamw` or `sgd`.
        steps: the numbers of the steps after which a checkpoint is saved.
    """

    name: str
    ranks: int
    config: Mapping[str, Any]
    groups: int = 1
    tied: bool = False
    frozen: tuple[str, ...] = ()
    tiny: bool = False
    optimizer: str = "adamw"
    steps: tuple[int, ...] = (2,)

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.config["zero_optimization"]["stage"])


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Return the entry of a configuration that asks for a stage."""
    return {"zero_optimization": {"stage": stage, **more}}


BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
FROZEN = ("middle",)

CASES = (
    Case("zero0-fp32", 2, zero(0), tied=True, frozen=FROZEN),
    Case("zero0-bf16", 2, zero(0) | BF16, groups=2, frozen=FROZEN),
    Case("zero1-fp32", 3, zero(1), groups=2, tied=True),
    Case("zero1-bf16-frozen", 2, zero(1) | BF16, tied=True, frozen=FROZEN),
    Case("zero1-bf16-sums-fp32", 2, zero(1) | BF16 | FP32_SUMS, groups=2),
    Case("zero1-sgd", 2, zero(1), optimizer="sgd"),
    Case("zero2-fp32-one-rank", 1, zero(2), tied=True, frozen=FROZEN),
    Case("zero2-fp32", 3, zero(2), groups=2, tied=True, frozen=FROZEN, steps=(2, 3)),
    Case("zero2-bf16", 2, zero(2) | BF16, groups=2, tied=True, frozen=FROZEN),
    Case("zero1-elastic", 2, zero(1, elastic_checkpoint=True)),
    Case("zero2-round-robin", 2, zero(2, round_robin_gradients=True), groups=2),
    Case("zero2-tiny", 4, zero(2), tiny=True),
    Case("zero3-fp32-one-rank", 1, zero(3), tied=True, frozen=FROZEN),
    Case("zero3-fp32", 3, zero(3), tied=True, frozen=FROZEN, steps=(2, 3)),
    Case("zero3-bf16", 2, zero(3) | BF16, groups=2, tied=True, frozen=FROZEN),
    Case("zero3-sub-groups", 2, zero(3, sub_group_size=20), groups=2),
    Case("zero3-tiny", 4, zero(3), tiny=True),
    Case("zero3-sgd", 2, zero(3), optimizer="sgd"),
)


class Net(nn.Module):
    """A model of odd sizes with an embedding, BatchNorm, a middle that may be frozen, and an output layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.middle = nn.Linear(5, 3)
        self.head = nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score of each word, [batch, 7]. Statistics are float32, as DeepSpeed keeps buffers."""
        found = self.body(self.embed(words))
        norm = self.norm
        scale, shift = norm.weight.float(), norm.bias.float()
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked += 1
        mean, variance = norm.running_mean, norm.running_var
        normed = F.batch_norm(found.float(), mean, variance, scale, shift, self.training)
        return self.head(self.middle(normed.to(found.dtype)))


class Tiny(nn.Module):
    """A model whose parameters have fewer elements than a run has ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 1)
        self.second = nn.Linear(1, 1, bias=False)
        self.third = nn.Linear(1, 2, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return two scores of each word, [batch, 2]."""
        return self.third(self.second(self.first(words % 4)))


def make_model(case: Case) -> nn.Module:
    """Return a case's model with its first weights, the same on every rank."""
    torch.manual_seed(0)
    model = Tiny() if case.tiny else Net(case.tied)
    for name in case.frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return a case's optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if case.groups == 2:
        weights, vectors = ([p for p in trained if (p.ndim > 1) is wide] for wide in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.1)


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the words of a rank in a step."""
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def train(case: Case, rank: int, out: Path) -> None:
    """Train a case on this rank and save its checkpoints.

    Args:
        case: the training.
        rank: this process's rank.
        out: the folder that gets `latest`, the tags and, from rank 0, `live.pt`.
    """
    import deepspeed

    given = {"train_batch_size": 4 * case.ranks, "zero_allow_untested_optimizer": True, **case.config}
    model = make_model(case)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(case, model), config=given)
    for step in range(1, max(case.steps) + 1):
        loss = engine(batch(step, rank)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if step in case.steps:
            engine.save_checkpoint(str(out), client_state={"epoch": step, "notes": ["tiny", 0.5]})
    live = _live(engine.module)
    if rank == 0:
        torch.save(live, out / "live.pt")
    engine.destroy()


def _live(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full fp32 parameters as DeepSpeed gathers them from the ranks; all ranks must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def _rank_main(rank: int, ranks: int, port: int, out: str, cases: tuple[str, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    for case in CASES:
        if case.ranks == ranks and (not cases or case.name in cases):
            train(case, rank, Path(out) / case.name)
    torch.distributed.destroy_process_group()


def train_all(out: Path, cases: tuple[str, ...] = ()) -> None:
    """Train cases, each into the folder of its name.

    Args:
        out: the folder for their folders.
        cases: their names; all when empty.
    """
    for ranks in sorted({case.ranks for case in CASES if not cases or case.name in cases}):
        torch.multiprocessing.spawn(_rank_main, (ranks, free_port(), str(out), cases), nprocs=ranks)


def expected(case: Case, folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed's own tools make of a folder.

    Returns:
        `fp32/NAME`: the model by `zero_to_fp32`; from `module` for stage 0; for BF16_Optimizer, which
        `zero_to_fp32` refuses, as the ranks gathered it. `exp_avg/NAME` and so on: the optimizer by
        `ds_to_universal`, in the stages and forms that it reads.
    """
    found: dict[str, torch.Tensor] = {}
    live = torch.load(folder / "live.pt") if tag == f"global_step{max(case.steps)}" else {}
    if case.stage == 0:
        module = torch.load(folder / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        found |= {f"fp32/{name}": value for name, value in module.items()}
    elif "data_types" in case.config:
        found |= {f"fp32/{name}": value for name, value in live.items()}
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
        found |= {f"fp32/{name}": value for name, value in whole.items()}
    if "round_robin_gradients" in case.config["zero_optimization"]:
        # DeepSpeed 0.19.8 takes its parameters for each other: both the gathered and the universal ones.
        module = torch.load(folder / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        assert all(torch.equal(module[name], found[f"fp32/{name}"]) for name in module)
        return found
    for name, value in live.items():
        if case.stage and f"fp32/{name}" in found:
            assert torch.equal(found[f"fp32/{name}"], value), (case.name, name)
    return {
        name: value.detach().clone().contiguous() for name, value in (found | _moments(folder, tag)).items()
    }


def _moments(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of each parameter by DeepSpeed's universal checkpoint; {} if it fails."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    with tempfile.TemporaryDirectory() as scratch:
        given = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        given |= {"strict": False, "inject_missing_state": True}
        try:
            main(Namespace(input_folder=str(folder / tag), output_folder=scratch, **given))
        except Exception as error:
            print(f"{folder.name} {tag}: no universal checkpoint: {type(error).__name__}: {error}")
            return {}
        files = [(path.parent, path.stem) for path in sorted(Path(scratch, "zero").rglob("*.pt"))]
        loaded = [(at, kind, torch.load(at / f"{kind}.pt", weights_only=False)) for at, kind in files]
        start = Path(scratch, "zero")
        return {
            f"{kind}/{at.relative_to(start)}": value["param"] if isinstance(value, dict) else value
            for at, kind, value in loaded
            if kind in MOMENTS
        }


def main(arguments: list[str]) -> None:
    """Train every case, ask DeepSpeed's tools, and write the archive; or train a few cases into a folder."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if arguments:
        train_all(Path(arguments[0]), OF_INSTALLED)
        ask_tools(Path(arguments[0]), OF_INSTALLED)
        return
    with tempfile.TemporaryDirectory() as scratch:
        train_all(Path(scratch))
        pack(Path(scratch))
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")


OF_INSTALLED = ("zero1-bf16-frozen", "zero2-bf16", "zero3-bf16")
"""The cases that a test trains with the DeepSpeed that is installed."""


def ask_tools(out: Path, cases: tuple[str, ...] = ()) -> None:
    """Write what DeepSpeed's tools make of each folder beside it; all cases when none are named."""
    from safetensors.torch import save_file

    for case in (case for case in CASES if not cases or case.name in cases):
        folder = out / case.name
        for tag in (f"global_step{step}" for step in case.steps):
            save_file(expected(case, folder, tag), folder / f"{tag}.safetensors")


def pack(out: Path) -> None:
    """Write the archive of the folders of all cases, with what DeepSpeed's tools make of each."""
    ask_tools(out)
    for folder in (out / case.name for case in CASES):
        for name in ("live.pt", "zero_to_fp32.py", "zero_to_torch.py"):  # the last are DeepSpeed's programs
            (folder / name).unlink(missing_ok=True)
    recording.pack(out, RECORDED)


if __name__ == "__main__":
    main(sys.argv[1:])
