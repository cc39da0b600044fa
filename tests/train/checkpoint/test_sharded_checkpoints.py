"""Checkpoints of `--shard`: the file is that of DDP, and goes on with other ranks and meshes, or without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ckpttool.files import chain
from tests.ranks import mortal, runs, trainings
from tests.support.run_log import entries_of, timeless
from train.checkpoint import files
from train.checkpoint.saver import Saver

SHARD = {"shard": True, "shard_blocks": ("Block",)}
EVERY = {"ema": 0.7, "clip_norm": 1.0, "optimizer": "adamw", "momentum": 0.0, "lr": 0.01}


@pytest.fixture(scope="module")
def whole(run_ranks, tmp_path_factory) -> Path:
    """An uninterrupted run on two ranks, with a checkpoint of each of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    said = run_ranks(2, runs.run, runs.steady, str(folder), {**SHARD, **EVERY, **runs.OFTEN})[0]
    assert "2 × Block, the rest" in said
    return folder


@pytest.mark.long
def test_a_run_without_clipping_writes_the_files_that_ddp_writes_on_two_ranks(run_ranks, tmp_path):
    for name, settings in {"ours": SHARD, "ddp": {}}.items():
        run_ranks(2, runs.run, runs.restless, str(tmp_path / name), {**settings, "ema": 0.7, **runs.OFTEN})
    for name in ("last.pt", "best.pt", "step-000002.pt"):
        ours, theirs = (runs.read(tmp_path / folder / name) for folder in ("ours", "ddp"))
        assert not runs.different(ours, theirs)
        assert ours["digests"] == {**theirs["digests"], "run": ours["digests"]["run"]}
        assert list(ours["model"]) == list(theirs["model"])
        assert {type(value) for value in ours["model"].values()} == {torch.Tensor}


@pytest.mark.long
def test_the_log_is_that_of_ddp_too(run_ranks, tmp_path):
    for name, settings in {"ours": SHARD, "ddp": {}}.items():
        run_ranks(2, runs.run, runs.steady, str(tmp_path / name), settings)
    ours, theirs = (timeless(entries_of(tmp_path / name)) for name in ("ours", "ddp"))
    norms = [[entry.pop("grad_norm", 0.0) for entry in entries] for entries in (ours, theirs)]
    assert any(norms[0]) and norms[0] == pytest.approx(norms[1], rel=1e-6)  # summed over the ranks' parts
    assert ours == theirs


@pytest.mark.long
def test_a_record_of_the_run_has_the_digests_that_ddp_gives_on_two_ranks(run_ranks, tmp_path):
    for name, settings in {"ours": SHARD, "ddp": {}}.items():
        run_ranks(2, runs.run, runs.steady, str(tmp_path / name), {**settings, "prove_every": 2})
    ours, theirs = (
        [link.entry for link in chain.read(str(tmp_path / name / chain.NAME))[0]] for name in ("ours", "ddp")
    )
    told = [
        [(entry["kind"], entry["step"], entry.get("weights"), entry.get("score")) for entry in record[1:]]
        for record in (ours, theirs)
    ]
    assert [kind for kind, *_ in told[0]].count("step") == 3
    # A save is recorded when its file is there, which may be after the next step.
    in_kinds = [sorted(record, key=lambda entry: str(entry[0])) for record in told]
    assert in_kinds[0] == in_kinds[1]
    assert ours[0]["weights"] == theirs[0]["weights"]


MOVES = {
    "the same ranks": (2, SHARD, 0.0),
    "other units and offloaded": (2, {"shard": True, "shard_offload": True}, 0.0),
    "without --shard": (2, {}, 2e-6),  # the norm that clips is summed in another order
    "one rank": (1, {}, 2e-6),
    "one rank with --shard": (1, SHARD, 2e-6),
    "three ranks": (3, SHARD, 2e-6),
    "groups": (4, {**SHARD, "mesh": "2x2"}, 2e-6),
}


@pytest.mark.covered(lambda move: move != "without --shard")
@pytest.mark.parametrize("move", MOVES)
def test_a_run_goes_on_with_other_ranks_units_and_meshes_and_without_shard(run_ranks, tmp_path, whole, move):
    size, settings, bound = MOVES[move]
    stopped = {"resume": str(whole / "step-000002.pt"), **EVERY, **settings}
    said = run_ranks(size, runs.run, runs.steady, str(tmp_path), stopped)[0]
    assert "continues from" in said, said
    ends = [runs.read(run / "last.pt") for run in (whole, tmp_path)]
    assert (runs.different(*ends) == []) if bound == 0.0 else (runs.largest_difference(*ends) <= bound)
    assert ("the last bits may differ: shard True -> False" in said) == (not settings)


def test_a_run_without_shard_goes_on_with_it(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.restless, str(tmp_path / "ddp"), {**runs.OFTEN})
    stopped = {"resume": str(tmp_path / "ddp" / "step-000002.pt"), **SHARD}
    run_ranks(2, runs.run, runs.restless, str(tmp_path / "rest"), stopped)
    ends = [runs.read(tmp_path / run / "last.pt") for run in ("ddp", "rest")]
    assert runs.different(*ends) == []


OWN = """
import torch

class Nested(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
    def own(self, tensor):
        return tensor
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                of_it, gradient = self.state[p], self.own(p.grad)
                if not of_it:
                    of_it["sums"] = [torch.zeros_like(gradient), {"sum": torch.zeros_like(gradient)}]
                first, second = of_it["sums"][0], of_it["sums"][1]["sum"]
                first.mul_(0.9).add_(gradient)
                second.add_(gradient)
                self.own(p).sub_(first + 0.1 * second, alpha=group["lr"])

class Local(Nested):  # its state is plain tensors, another on each rank
    def own(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
"""
PLAIN = {"lr": 0.01, "momentum": None, "weight_decay": None}


@pytest.mark.covered(lambda more: not more)
@pytest.mark.parametrize("more", [{}, {"save_parts": True}], ids=["whole", "parts"])
def test_tensors_in_the_lists_of_an_optimizers_state_are_divided_again(run_ranks, tmp_path, own, more):
    settings = {**SHARD, **PLAIN, "optimizer": f"{own}:Nested"}
    run_ranks(2, runs.run, runs.steady, str(tmp_path / "whole"), {**settings, **runs.OFTEN, **more})
    stopped = {**settings, "resume": str(tmp_path / "whole" / "step-000002.pt")}
    assert "continues from" in run_ranks(2, runs.run, runs.steady, str(tmp_path / "rest"), stopped)[0]
    gathered = str(tmp_path / "gathered")
    run_ranks(2, runs.run, runs.steady, gathered, settings)
    assert runs.different(runs.read(tmp_path / "rest" / "last.pt"), runs.read(f"{gathered}/last.pt")) == []


@pytest.mark.covered(lambda more: not more)
@pytest.mark.parametrize("more", [{}, {"save_parts": True}], ids=["whole", "parts"])
def test_a_state_that_is_another_on_each_rank_is_not_saved_as_that_of_rank_0(run_ranks, tmp_path, own, more):
    settings = {**SHARD, **PLAIN, "optimizer": f"{own}:Local", **more}
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path / "run"), settings)[0]
    assert "rank 1 has a different sums of module.stem.weight than rank 0, before saving" in said
    assert not (tmp_path / "run" / "last.pt").exists()


def test_another_model_is_refused_by_what_differs(run_ranks, tmp_path, whole):
    stopped = {"resume": str(whole / "step-000002.pt"), **EVERY, **SHARD}
    said = run_ranks(2, runs.run, wide, str(tmp_path), stopped)[0]
    assert "differs from the saved model" in said
    assert "size mismatch for module.head.weight" in said


def wide() -> torch.nn.Module:
    model = runs.steady()
    model.head = torch.nn.Linear(6, 11)
    return model


# ---- what goes wrong ------------------------------------------------------------------------------------


def save_after_a_change(rank: int, size: int, folder: str, value: float, name: str) -> Any:
    """Save after an epoch and a change of a part, or of a buffer, on rank 1 alone; return the error."""
    model, data = trainings.seeded(runs.restless), trainings.tensors(runs.SHAPE, 8)
    trainer = trainings.trainer(rank, size, data, model, batch_size=4, lr=0.1, **SHARD)
    trainings.finish_epoch(trainer)
    tensor = trainer.ddp.module.state_dict()[name]
    if rank == 1:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(value)
    saver = Saver(trainer, folder)

    def save() -> None:
        saver.save(last=True, best=False)
        saver.finish()

    return trainings.error_of(save)


def test_a_part_of_nan_on_another_rank_is_found_before_it_is_saved(run_ranks, tmp_path):
    first, second = run_ranks(2, save_after_a_change, str(tmp_path), torch.nan, "head.bias")
    assert first[0] == "CheckFailed"
    assert "after step 2 head.bias is NaN or infinite" in first[1]
    assert second[0] == "RankFailed"
    assert not (tmp_path / "last.pt").exists()


def test_buffers_are_rank_0s_as_under_ddp(run_ranks, tmp_path):
    name = "blocks.0.norm.num_batches_tracked"
    assert run_ranks(2, save_after_a_change, str(tmp_path), 77.0, name) == [None, None]
    assert runs.read(tmp_path / "last.pt")["model"][f"module.{name}"] == 2


def die_in_the_second_save(rank: int, folder: Path) -> None:
    written = files.write

    def write(*given: Any, **named: Any) -> None:
        if (folder / "last.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        written(*given, **named)

    files.write = write  # type: ignore[assignment]
    settings = {**SHARD, "save": "sync", "keep": 0, "save_every": runs.OFTEN["save_every"]}
    runs.run(rank, 2, runs.steady, str(folder), settings)


def test_a_rank_that_dies_in_a_save_leaves_the_file_before(run_ranks, tmp_path):
    mortal.run(die_in_the_second_save, tmp_path)
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == 1
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path), {**SHARD, "resume": "auto"})[0]
    assert "continues from" in said
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS
