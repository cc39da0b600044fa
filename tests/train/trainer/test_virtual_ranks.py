"""`--virtual-ranks`: the same bits of weights and optimizer on every number of ranks that divides it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import batchnorm
from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from tests.ranks.programs import ROOT, start
from train.config import command_line
from train.trainer import shares

FOUR = {"virtual_ranks": 4}
STATES = ("model", "optimizer", "ema", "scheduler", "scaler")


def digests(path: Path) -> dict[str, bytes]:
    """Return the digest of each entry of a checkpoint that a training follows."""
    found = {name: one for name, one in runs.entries(runs.read(path)) if name.split("/")[1] in STATES}
    assert any(name.startswith("/optimizer/state") for name in found)
    return found


class Odd(nn.Module):
    """A network whose outputs depend on a buffer that it replaces, on random numbers, and on two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 8), nn.Linear(8, 10).double()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.flatten(1)).tanh() - 0.1 * self.seen
        if self.training:
            self.seen = 0.9 * self.seen + hidden.detach().float().mean(dim=0)
            self.passes += 1
        return self.second(nn.functional.dropout(hidden, 0.2, self.training).double()).float()


@pytest.mark.covered(
    lambda make, settings: make is not runs.restless or "augment" in settings or len(settings) < 2
)
@pytest.mark.parametrize(("make", "settings"), [
    (runs.restless, {}),
    (runs.restless, {"accumulate": 2}),
    (runs.restless, {"amp": "bf16"}),
    (runs.restless, {"clip_norm": 0.2, "ema": 0.7, "optimizer": "adamw", "momentum": 0.0}),
    (runs.restless, {"augment": "crop-flip", "mixup": 0.4}),
    (runs.restless, {"zero": True, "grad_checkpoint": True}),
    (runs.steady, {"batch_size": 5, "accumulate": 3}),  # the last batch, of 4, has no share of two passes
    (Odd, {}),
], ids=["plain", "accumulate", "bf16", "clip, ema, adamw", "augment", "zero", "short", "odd"])  # fmt: skip
def test_one_two_and_four_ranks_end_with_the_same_bits(run_ranks, tmp_path, make, settings):
    found = []
    for size in (1, 2, 4):
        said = run_ranks(size, runs.run, make, str(tmp_path / str(size)), {**settings, **FOUR})
        assert "Error" not in "".join(said), said
        assert " on virtual ranks, " in said[0]
        found.append(digests(tmp_path / str(size) / "last.pt"))
    assert found[0] == found[1] == found[2]


def test_virtual_ranks_without_samples_in_the_last_batch_add_nothing(run_ranks, tmp_path):
    settings = {"batch_size": 32, "virtual_ranks": 4}  # the last batch has two samples
    for size in (1, 4):
        said = run_ranks(size, runs.run, runs.steady, str(tmp_path / str(size)), settings)
        assert "Error" not in "".join(said), said
    said = run_ranks(1, runs.run, runs.steady, str(tmp_path / "plain"), {"batch_size": 32})
    states = [runs.read(tmp_path / name / "last.pt") for name in ("1", "4", "plain")]
    assert digests(tmp_path / "1" / "last.pt") == digests(tmp_path / "4" / "last.pt")
    assert 0 < runs.largest_difference(states[0], states[2]) < 2e-6


@pytest.mark.covered(lambda settings: not settings)
@pytest.mark.parametrize("settings", [{}, {"ema": 0.7, "accumulate": 2, "zero": True}], ids=["plain", "more"])
def test_a_run_stopped_on_four_ranks_goes_on_with_the_same_bits_on_others(run_ranks, tmp_path, settings):
    settings = {**settings, **FOUR}
    run_ranks(4, runs.run, runs.restless, str(tmp_path / "whole"), {**settings, **runs.OFTEN})
    whole = digests(tmp_path / "whole" / "last.pt")
    for size, stop in ((2, 2), (1, 4), (4, 3)):
        resumed = {**settings, "resume": str(tmp_path / "whole" / f"step-{stop:06d}.pt")}
        said = run_ranks(size, runs.run, runs.restless, str(tmp_path / str(size)), resumed)[0]
        assert "continues from" in said, said
        assert (size == 4) or "the same samples in the same steps, and the same bits" in said
        assert digests(tmp_path / str(size) / "last.pt") == whole


def test_more_ranks_without_virtual_ranks_give_other_bits(run_ranks, tmp_path):
    for size in (1, 2):
        run_ranks(size, runs.run, runs.steady, str(tmp_path / str(size)), {"max_steps": 2})
    assert digests(tmp_path / "1" / "last.pt") != digests(tmp_path / "2" / "last.pt")


def test_a_resume_with_other_virtual_ranks_is_another_training(run_ranks, tmp_path):
    run_ranks(1, runs.run, runs.steady, str(tmp_path), {"virtual_ranks": 2, "max_steps": 2})
    resumed = {"virtual_ranks": 4, "resume": str(tmp_path / "last.pt")}
    said = run_ranks(1, runs.run, runs.steady, str(tmp_path / "rest"), resumed)[0]
    assert "belongs to a run with --virtual-ranks 2" in said


def sum_of_rows(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the sums of gradients that eight virtual ranks draw, gathered in pieces of seven numbers."""
    whole, shares.PIECE = shares.PIECE, 7
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape, dtype in (((3, 5), torch.float32), ((), torch.float32), ((9,), torch.complex64))
    ]
    each = 8 // world_size
    gradients = shares.OrderedSum(parameters, each)
    for row in range(each):
        torch.manual_seed(rank * each + row)
        for one in parameters:
            one.grad = torch.randn(one.shape, dtype=one.dtype)
        gradients.take(row)
    gradients.sum_over_ranks()
    shares.PIECE = whole
    return [one.grad for one in parameters if one.grad is not None]


def test_gradients_of_any_dtype_and_size_are_added_in_one_order(run_ranks):
    alone = run_ranks(1, sum_of_rows)[0]
    expected = torch.zeros(3, 5)
    for virtual in range(8):
        torch.manual_seed(virtual)
        expected = expected + torch.randn(3, 5)
    assert torch.equal(alone[0], expected)
    for size in (2, 4):
        for found in run_ranks(size, sum_of_rows):
            assert len(found) == 3
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def test_the_program_gives_the_same_bits_with_and_without_a_launcher_that_sets_threads(tmp_path):
    training = "--virtual-ranks 2 --model resnet20 --data fake:12 --batch-size 10 --max-steps 2 --out"
    for out, more, threads in (("one", [], "2"), ("two", ["--spawn", "2"], "1")):
        command = [sys.executable, str(ROOT / "train" / "main.py"), *training.split(), out, *more]
        assert start(command, tmp_path, OMP_NUM_THREADS=threads).returncode == 0
    assert digests(tmp_path / "one" / "last.pt") == digests(tmp_path / "two" / "last.pt")


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "said"), [
    ("--spawn 3", "--virtual-ranks 4: does not divide by 3 ranks"),
    ("--batch-size 3", "--virtual-ranks 4: more than the 3 samples in a batch"),
    ("--batchnorm sync", "--virtual-ranks 4 and --batchnorm sync: virtual ranks compute apart"),
    ("--batchnorm pooled", "--virtual-ranks 4 and --batchnorm pooled: virtual ranks compute apart"),
    ("--spawn 2 --rank-share auto", "--virtual-ranks 4 and --rank-share: virtual ranks have equal shares"),
    ("--sampler torch", "--virtual-ranks 4 and --sampler torch: its repeats depend"),
    ("--find-unused", "--virtual-ranks 4 and --find-unused: every virtual rank needs"),
    ("--compile", "--virtual-ranks 4 and --compile: code that each rank compiles"),
    ("--preview", "--virtual-ranks 4 and --preview: it shows ranks"),
])  # fmt: skip
def test_what_can_not_be_combined_is_refused_by_name_before_any_rank_starts(given, said):
    with pytest.raises(UsageFault, match="^" + said) as refused:
        command_line.parse(["--virtual-ranks", "4", *given.split()])
    assert refused.value.exit_code == 2
    assert refused.value.hint


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 8, sparse=True), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.flatten(1).long()).mean(dim=1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.BatchNorm1d(10))


@pytest.mark.parametrize(("make", "said"), [
    (lambda: batchnorm.to_sync(runs.with_batchnorm()), "synchronised over ranks"),
    (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(runs.with_batchnorm()), "synchronised over ranks"),
    (Sparse, "'table' of simple-cnn has sparse gradients"),
    (normalised, "a single sample, and BatchNorm"),
], ids=["ours", "torch's", "sparse", "a single sample"])  # fmt: skip
def test_a_model_whose_gradients_can_not_be_computed_apart_is_refused(make, said):
    with pytest.raises(UsageFault, match=said):
        trainings.check(make(), runs.images(), virtual_ranks=8, batch_size=12)


# ---- what it costs -------------------------------------------------------------------------------------


def seconds_of_an_epoch(rank: int, world_size: int, settings: dict[str, Any]) -> float:
    """Return the CPU time of five steps of a network of half a million parameters, after as many others."""
    wide = trainings.seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2500), nn.Linear(2500, 10)))
    data = trainings.tensors(runs.SHAPE, 64 * 5)
    trainer = trainings.trainer(rank, world_size, data, wide, batch_size=64, log_every=99, **settings)
    trainings.finish_epoch(trainer)
    began = time.process_time()
    trainings.finish_epoch(trainer)
    return time.process_time() - began


@pytest.mark.long
def test_the_cost_is_bounded(run_ranks):
    for size in (1, 2):
        usual, virtual = [max(run_ranks(size, seconds_of_an_epoch, one)) for one in ({}, FOUR)]
        assert virtual < 50 * usual
