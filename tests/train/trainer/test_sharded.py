"""`--shard` against plain PyTorch in one process, on as many ranks as there are, and with fewer samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from ckpttool.distributed import transport
from ckpttool.errors import CkptToolError
from tests.ranks import runs, trainings
from train.config import command_line
from train.model import wrapping
from train.model.updater import Precision

SETTINGS: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Tower(nn.Module):
    """A small transformer's shape: a first and a last matrix that are one, frozen and trained blocks between.

    No size divides by 2, 3 or 4, and the offset has fewer rows than there are ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 13, bias=False, dtype=torch.float64)
        self.blocks = nn.ModuleList(Layer(13) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.last = nn.Linear(13, 10, bias=False, dtype=torch.float64)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.again = nn.Linear(10, 13, bias=False, dtype=torch.float64)
        self.again.weight = self.first.weight  # tied
        self.offset = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.again(x.flip(1))
        for block in self.blocks:
            y = block(y)
        return self.last(y) * (1 + self.offset)


def data(samples: int, tests: int = 10) -> Any:
    return trainings.tensors((10,), samples, tests=tests, dtype=torch.float64)


def after_epochs(
    rank: int, size: int, samples: int, batch: int, epochs: int, settings: dict[str, Any]
) -> Any:
    """Return the whole weights on rank 0, the numbers that each rank holds of them, and the last norm."""
    settings = {"batch_size": batch, "epochs": epochs, "log_every": 1, "shard": True, **SETTINGS, **settings}
    trainer = trainings.trainer(rank, size, data(samples), trainings.seeded(Tower), **settings)
    lines: list[dict[str, Any]] = []
    trainer.log.sinks = [Lines(lines)]
    for _ in range(epochs):
        trainings.finish_epoch(trainer)
    held = sum(p.to_local().numel() for p in trainer.ddp.parameters())  # type: ignore[attr-defined]
    blocks = sum(isinstance(module, FSDPModule) for module in trainer.ddp.module.modules())
    state = transport.whole(trainer.ddp.module.state_dict())
    return state, held, blocks, lines[-1]["grad_norm"]


class Lines:
    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    def write(self, entry: dict[str, Any], step: int) -> None:
        self.lines.append(entry)


def plain(samples: int, batch: int, epochs: int, **more: Any) -> dict[str, torch.Tensor]:
    model = trainings.alone(Tower, data(samples), batch, epochs, **more, **SETTINGS)
    return model.state_dict()


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return trainings.farthest(ours.values(), theirs.values())


QUICK = [(18, (4, "2x2")), (3, (2, None))]
MESHES = [(1, None), (2, None), (3, None), (4, None), (2, "2x1"), (4, "2x2")]


@pytest.mark.covered(lambda samples, mesh: (samples, mesh) not in QUICK)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("samples", [20, 18, 3], ids=["even", "uneven", "with an idle rank"])
def test_epochs_of_any_number_of_ranks_are_those_of_one_process(run_ranks, mesh, samples):
    size, groups = mesh
    (state, _, blocks, _), *others = run_ranks(size, after_epochs, samples, 20, 3, {"mesh": groups})
    assert farthest(state, plain(samples, 20, 3)) <= 1e-12
    assert blocks == 4
    assert all(of_rank[0] == {} for of_rank in others)


def test_each_rank_holds_its_part_of_the_parameters_alone(run_ranks):
    every = sum(parameter.numel() for parameter in Tower().parameters())
    held = [of_rank[1] for of_rank in run_ranks(4, after_epochs, 20, 20, 1, {})]
    assert sum(held) == every
    assert max(held) < 0.4 * every
    held = [of_rank[1] for of_rank in run_ranks(4, after_epochs, 20, 20, 1, {"mesh": "2x2"})]
    assert sum(held) == 2 * every


@pytest.mark.covered(lambda settings: "clip_norm" in settings)
@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"clip_norm": 0.05}, {"rank_share": (1, 3)}])
def test_accumulation_clipping_and_shares_are_those_of_one_process(run_ranks, settings):
    """The last batch has one sample: a rank passes the model in which it has none."""
    state, _, _, norm = run_ranks(2, after_epochs, 21, 10, 2, settings)[0]
    clip = {name: value for name, value in settings.items() if name == "clip_norm"}
    assert farthest(state, plain(21, 10, 2, **clip)) <= 1e-12
    (_, _, _, of_one) = run_ranks(
        1, after_epochs, 21, 10, 2, {**settings, "shard": True, "rank_share": None}
    )[0]
    assert norm == pytest.approx(of_one, rel=1e-12)


# ---- optimizers -----------------------------------------------------------------------------------------


def whole_after_steps(rank: int, size: int, name: str, shard: bool) -> Any:
    settings = {"optimizer": name, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.01, "batch_size": 20}
    model = trainings.seeded(Tower)
    trainer = trainings.trainer(rank, size, data(40), model, shard=shard, **settings)
    trainings.finish_epoch(trainer)
    whole = transport.whole(
        {"model": model.state_dict(), "optimizer": trainer.updater.optimizer.state_dict()}
    )
    return whole["model"], list(whole["optimizer"]["state"].values())


@pytest.mark.covered(lambda name: name not in ("adam", "rmsprop"))
@pytest.mark.parametrize("name", sorted(wrapping.OPTIMIZERS))
def test_every_optimizer_that_is_taken_updates_parts_as_wholes(run_ranks, name):
    ours, entries = run_ranks(2, whole_after_steps, name, True)[0]
    theirs, expected = run_ranks(1, whole_after_steps, name, False)[0]
    assert farthest(ours, theirs) <= 1e-12
    for entry, other in zip(entries, expected, strict=True):
        assert {n: v.shape for n, v in entry.items() if torch.is_tensor(v)} == {
            n: v.shape for n, v in other.items() if torch.is_tensor(v)
        }


def with_own_optimizer(rank: int, size: int, shard: bool) -> Any:
    own = {"optimizer": "tests.ranks.own_code:InGroups", "momentum": None, "weight_decay": None}
    settings = {"batch_size": 20, "lr": 0.1, "shard": shard, "decay_norms": False, **own}
    trainer = trainings.trainer(rank, size, data(20), trainings.seeded(Tower), **settings)
    return trainings.error_of(lambda: trainings.finish_epoch(trainer))


def test_tensors_of_a_users_optimizer_that_no_resume_could_divide_again_are_refused(run_ranks):
    first, second = run_ranks(2, with_own_optimizer, True)
    assert first[0] == "UsageFault" and "InGroups keeps 'averages', in parts of the ranks" in first[1]
    assert second[0] == "RankFailed" and "rank 0 failed" in second[1]
    assert run_ranks(2, with_own_optimizer, False) == [None, None]


def scaled_steps(rank: int, size: int) -> Any:
    """Three steps with the scaler of float16, where one number of one rank is infinite in the second."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [torch.distributed.tensor.Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precision, taken = Precision("fp16", torch.device("cpu")), []
    for step in range(3):
        whole = torch.ones(4, 3) * 2.0**16
        whole[0, 0] = torch.inf if step == 1 else whole[0, 0]
        weight.grad = distribute_tensor(whole, mesh, weight.placements)  # type: ignore[attr-defined]
        precision.scale(torch.tensor(1.0))
        precision.unscale(optimizer)
        taken.append(precision.step(optimizer))
    return taken, precision.skipped, weight.full_tensor().tolist()  # type: ignore[attr-defined]


def test_all_ranks_skip_a_step_in_which_a_number_of_one_rank_is_infinite(run_ranks):
    for taken, skipped, weight in run_ranks(2, scaled_steps):
        assert (taken, skipped) == ([True, False, True], 1)
        assert torch.tensor(weight).allclose(torch.full((4, 3), 1 - 0.1 - 0.2))


# ---- BatchNorm and buffers ------------------------------------------------------------------------------


def norms(rank: int, size: int, batchnorm: str, shard: bool) -> Any:
    model = trainings.seeded(runs.with_batchnorm)
    settings = {"batchnorm": batchnorm, "shard": shard, "batch_size": 12, "lr": 0.05}
    trainer = trainings.trainer(rank, size, trainings.tensors((3, 8, 8), 34), model, **settings)
    trainings.finish_epoch(trainer)
    score = trainer.evaluate()
    return transport.whole(trainer.ddp.module.state_dict()), score.loss


@pytest.mark.covered(lambda batchnorm: batchnorm == "pooled")
@pytest.mark.parametrize("batchnorm", ["plain", "sync", "pooled"])
def test_batchnorm_of_each_kind_gives_the_bits_that_it_gives_under_ddp(run_ranks, batchnorm):
    (ours, loss), *_ = run_ranks(2, norms, batchnorm, True)
    (theirs, expected), *_ = run_ranks(2, norms, batchnorm, False)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert loss == expected


# ---- evaluation -----------------------------------------------------------------------------------------


def scores(rank: int, size: int, tests: int, settings: dict[str, Any]) -> Any:
    trainer = trainings.trainer(
        rank, size, data(20, tests), trainings.seeded(Tower), eval_batch=4, **settings
    )
    first = trainer.evaluate()
    trainings.finish_epoch(trainer)
    trainer.evaluate()
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.ddp.module.parameters()]
    expected = sum(weight.sum() for weight in weights)
    loss = F.mse_loss(trainer.ddp(torch.ones(2, 10, dtype=torch.float64)), torch.zeros(2, 10).double())
    return first.loss, first.correct, float(loss.detach()), float(expected.detach())


@pytest.mark.covered(lambda size, tests: (size, tests) not in ((2, 17), (4, 1)))
@pytest.mark.parametrize("tests", [1, 4, 17], ids=["one rank has a batch", "one batch", "uneven"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_test_sample_is_scored_once_where_ranks_pass_the_model_in_step(run_ranks, size, tests):
    found = run_ranks(size, scores, tests, {"shard": True})
    alone = run_ranks(1, scores, tests, {})[0]
    assert all(of_rank[:2] == alone[:2] for of_rank in found)
    # After an evaluation a pass computes with the weights as they are, and not as they were put together.
    assert all(of_rank[2] == pytest.approx(alone[2], abs=1e-12) for of_rank in found)


def fail_in_an_evaluation(rank: int, size: int) -> Any:
    trainer = trainings.trainer(rank, size, data(20, 17), trainings.seeded(Tower), eval_batch=4, shard=True)
    check = trainer.task.check

    def refuse(batch: Any, indices: Any, part: str) -> None:
        if rank == 1:
            raise CkptToolError("sample 5 is broken")
        check(batch, indices, part)

    trainer.task.check = refuse  # type: ignore[method-assign]
    return trainings.error_of(trainer.evaluate)


def test_a_bad_test_sample_of_one_rank_ends_all_before_they_wait_in_a_pass(run_ranks):
    first, second = run_ranks(2, fail_in_an_evaluation)
    assert second == ("CkptToolError", "sample 5 is broken")
    assert first == ("RankFailed", "rank 1 failed: sample 5 is broken")


# ---- the ranks begin alike ------------------------------------------------------------------------------


def begin_apart(rank: int, size: int, shapes: bool) -> Any:
    model = nn.Sequential(nn.Linear(10, 10 + shapes * rank))
    with torch.no_grad():
        model[0].weight.fill_(float(rank))

    def build() -> Any:
        trainer = trainings.trainer(rank, size, trainings.tensors((10,), 4), model, shard=True)
        return trainer.ddp.module[0].weight.full_tensor().unique().tolist()

    return build() if not shapes else trainings.error_of(build)


def test_all_ranks_begin_with_rank_0s_weights_and_a_model_of_another_shape_is_named(run_ranks):
    assert run_ranks(2, begin_apart, False) == [[0.0], [0.0]]
    kind, message = run_ranks(2, begin_apart, True)[0]
    assert kind == "RanksDiffer"
    assert "rank 1 has a different 0.weight than rank 0, before training" in message


def test_a_mesh_of_one_group_is_all_ranks():
    assert command_line.mesh_sizes(None, 6) == (1, 6)
