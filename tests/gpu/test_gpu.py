"""The trainer on GPUs, over NCCL: each test is a line of docs/gpu.md, and skips where there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import runs
from tests.ranks.programs import ROOT, start
from train.checkpoint.saver import Staging

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
BACKEND, DEVICE = "nccl", "cuda"
SMALL = [
    "--data",
    "fake:96",
    "--batch-size",
    "16",
    "--epochs",
    "2",
    "--log-every",
    "1",
    "--save-every",
    "1steps",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train(name, *flags)`: a run's folder; on all GPUs, or on `ranks` of them."""

    def run(name: str, *flags: str, ranks: int = GPUS) -> Path:
        folder = tmp_path / name
        spawn = ["--spawn", str(ranks)] if ranks > 1 else []
        flags = (*SMALL, "--backend", BACKEND, "--deterministic", "--keep", "99", *spawn, *flags)
        ran = start(
            [sys.executable, str(ROOT / "train" / "main.py"), *flags, "--out", str(folder)], patience=300
        )
        assert ran.returncode == 0, ran.stderr
        assert f"on {DEVICE}" in ran.stdout
        return folder

    return run


def last(folder: Path) -> dict[str, Any]:
    state = runs.read(folder / "last.pt")
    assert {value.device.type for value in state["model"].values()} == {"cpu"}
    return state


def same_after_a_resume(train: Train, *flags: str) -> dict[str, Any]:
    """Return the last state of a run that equals, in every bit, the same run resumed after its third step."""
    whole = train("whole", *flags)
    rest = train("rest", *flags, "--resume", str(whole / "step-000003.pt"))
    assert runs.different(last(whole), last(rest)) == []
    return last(whole)


PLAIN = {
    "over nccl": [],
    "in bfloat16": ["--amp", "bf16"],
    "in float16 with the scaler": ["--amp", "fp16"],
    "compiled": ["--compile"],
    "with gradient checkpoints": ["--model", "resnet20", "--grad-checkpoint"],
    "with averages and clipping": ["--ema", "0.9", "--clip-norm", "1"],
    "with sync batchnorm": ["--model", "resnet20", "--batchnorm", "sync"],
    "with pooled batchnorm": ["--model", "resnet20", "--batchnorm", "pooled"],
    "with virtual ranks": ["--virtual-ranks", str(4 * max(GPUS, 1))],
    "with zero": ["--zero"],
    "with loading processes and pinned memory": ["--workers", "2"],
    "with fsdp2": ["--shard"],
    "with fsdp2 in bfloat16": ["--shard", "bf16"],
    "with fsdp2 in float16 with the scaler": ["--shard", "--amp", "fp16"],
    "with fsdp2 offloaded to the cpu": ["--shard", "offload", "--clip-norm", "1"],
    "with fsdp2 compiled": ["--shard", "--compile"],
}


@pytest.mark.parametrize("way", PLAIN)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(train, way):
    state = same_after_a_resume(train, *PLAIN[way])
    if "scaler" in way:
        assert state["scaler"]["scale"] > 0
        steps = state["progress"]["global_step"]
        assert state["scheduler"]["last_epoch"] + state["scaler"]["skipped"] == steps


def test_asynchronous_saves_hold_the_state_of_their_step(train):
    states = [train(save, "--save", save) for save in ("async", "sync")]
    for step in (1, 5, 12):
        both = [runs.read(folder / f"step-{step:06d}.pt") for folder in states]
        assert runs.different(*both) == []


def test_a_copy_of_a_state_on_a_gpu_is_pinned_and_equal():
    state = {"weight": torch.arange(1000.0, device=DEVICE).view(10, 100).t(), "step": torch.tensor(3.0)}
    staging = Staging()
    for _ in range(2):
        state["weight"] += 1
        copied = staging.copy(state)
        assert copied["weight"].is_pinned()
        assert torch.equal(copied["weight"], state["weight"].cpu())


def test_a_gpu_and_the_cpu_train_alike_within_rounding(train):
    plain = ["--max-steps", "3", "--lr", "0.01"]
    folders = [
        train("gpu", *plain),
        train("sharded", *plain, "--shard"),
        train("cpu", *plain, "--backend", "gloo"),
    ]
    first, *others = (last(folder) for folder in folders)
    assert all(runs.largest_difference(first, other) < 1e-3 for other in others)


def test_the_log_measures_the_phases_of_a_step_without_waiting(train):
    lines = [json.loads(line) for line in (train("run") / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "forward_seconds" in line]
    assert all(line["forward_seconds"] > 0 and line["backward_seconds"] > 0 for line in steps)


def test_a_fused_optimizer_updates_as_the_plain_one():
    weights = [nn.Parameter(torch.linspace(-1, 1, 999, device=DEVICE)) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        optimizer = torch.optim.AdamW([weight], lr=0.01, fused=fused)
        for _ in range(5):
            weight.grad = weight.detach().sin()
            optimizer.step()
    assert torch.allclose(*weights, atol=1e-6)


@two_gpus
def test_groups_of_fsdp2_train_as_one_group(train):
    whole, groups = (
        train("whole", "--shard"),
        train("groups", "--shard", f"{GPUS // 2}x2", ranks=GPUS // 2 * 2),
    )
    assert runs.largest_difference(last(whole), last(groups)) < 1e-3


@two_gpus
def test_a_run_on_several_gpus_goes_on_with_one(train):
    for flags in ([], ["--shard"]):
        whole = train(f"whole{len(flags)}", *flags)
        rest = train(f"rest{len(flags)}", *flags, "--resume", str(whole / "step-000003.pt"), ranks=1)
        assert runs.largest_difference(last(whole), last(rest)) < 1e-3
