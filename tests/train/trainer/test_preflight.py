"""What a trainer finds in its first steps: state that no resume has, other functions, unused parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckpttool.distributed import randomness
from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.data.data_set import Data
from train.tasks import builtin as tasks


class Counting(nn.Module):
    """Its outputs grow with the passes that it has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.scores, self.passes = nn.Flatten(), nn.Linear(192, 10), 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, images: torch.Tensor) -> Any:
        self.passes += self.training
        return self.scores(self.flat(images)) * (1 + self.passes / 10)


class Kept(Counting):
    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


class AsTensor(Counting):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state)


class Unread(Kept):
    def get_extra_state(self) -> Any:
        return {"passes": Counting}


class Unloaded(Kept):
    def set_extra_state(self, state: Any) -> None:
        self.passes = state["lost"]


class InBuffer(Counting):
    def forward(self, images: torch.Tensor) -> Any:
        self.seen += self.training
        return self.scores(self.flat(images)) * (1 + self.seen / 10)


class Typed(nn.Module):
    """A network whose parameters are of a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = runs.steady().to(dtype), dtype

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images.to(self.dtype)).float()


class Fading:
    """A task whose loss gets smaller with each call."""

    weight = 1.0

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.weight *= 0.9
        return self.weight * nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


def check(make: Any, task: Any = None) -> None:
    data = trainings.tensors(runs.SHAPE, 20)
    trainings.check(trainings.seeded(make), data, own_task=task, model="own.py:model", batch_size=5)


@pytest.mark.parametrize("make", [Counting, InBuffer])
def test_what_no_state_dict_has_is_said_to_make_a_resume_inexact(capsys, make):
    check(make)
    assert "outside of its state_dict, so a resume will not be exact" in capsys.readouterr().err


def test_a_loss_that_depends_on_its_calls_is_said_to_make_a_resume_inexact(capsys):
    check(runs.steady, tasks.adapt(Fading(), "own.py:Fading"))
    assert (
        "--task own.py:Fading: the loss of the same outputs is another each time" in capsys.readouterr().err
    )


@pytest.mark.parametrize("make", [Kept, runs.restless])
def test_nothing_is_said_of_a_model_whose_state_dict_has_all(capsys, make):
    check(make)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("make", "said"), [
    (Unread, "_extra_state holds more than tensors and plain values"),
    (Unloaded, "does not load its own state_dict: KeyError: 'lost'"),
])  # fmt: skip
def test_extra_state_that_no_resume_could_restore_is_refused(make, said):
    with pytest.raises(UsageFault, match=said):
        check(make)


@pytest.mark.parametrize(("make", "settings"), [(Kept, {}), (AsTensor, {"ema": 0.9})], ids=["", "with --ema"])
def test_a_run_with_extra_state_goes_on_bit_for_bit(run_ranks, tmp_path, make, settings):
    last, differences = run_ranks(1, runs.straight_and_resumed, make, str(tmp_path), settings, (2,))[0]
    assert differences == {2: []}
    kept = last["model"]["module._extra_state"]
    assert (kept["passes"] if make is Kept else int(kept)) >= runs.STEPS


def test_a_resume_rounds_no_weights_to_another_type(run_ranks, tmp_path):
    make = [partial(Typed, dtype) for dtype in (torch.float32, torch.bfloat16)]
    run_ranks(1, runs.run, make[0], str(tmp_path / "whole"), {"max_steps": 1})
    resumed = {"resume": str(tmp_path / "whole" / "last.pt")}
    (said,) = run_ranks(1, runs.run, make[1], str(tmp_path / "rest"), resumed)
    named = "UsageFault: --model simple-cnn: net.stem.weight is bfloat16, and float32 in the saved model"
    assert said.startswith(named) and said.endswith(" 2")


class OwnLoading(Kept):
    """Loads whole states alone, in a way of its own."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        assert len(state) > 1
        return super().load_state_dict(state)


def begin_apart(rank: int, size: int, make: Any) -> Any:
    """Return the extra state with which a rank begins, of which rank 0 has another, as from its --init."""
    model = make()
    model.passes = 5 * (rank == 0)
    trainer = trainings.trainer(rank, size, trainings.tensors(runs.SHAPE, 20), model)
    return trainer.ddp.module.get_extra_state()


def test_all_ranks_begin_with_the_extra_state_of_rank_0(run_ranks):
    one, other = run_ranks(2, begin_apart, OwnLoading)
    assert one == other and one["passes"] >= 5
    one, other = run_ranks(2, begin_apart, AsTensor)
    assert one == other >= 5


# ---- a model that is another function on a rank is seen in the loss of a sample ------------------------


class Scaled(nn.Module):
    """A network with an attribute of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.net, self.scale = runs.restless(), scale

    def forward(self, x: Any) -> Any:
        return self.net(x) * self.scale


def compared(rank: int, size: int, scales: list[float], shard: bool) -> str:
    randomness.seed_all(rank)
    model = trainings.seeded(lambda: Scaled(scales[rank]))
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.trainer(rank, size, data, model, shard=shard).differing


@pytest.mark.parametrize("shard", [False, True])
def test_a_model_that_is_another_function_on_a_rank_is_named(run_ranks, shard):
    assert run_ranks(2, compared, [1.0, 1.0], shard) == ["", ""]
    first, second = run_ranks(2, compared, [1.0, 2.0], shard)
    assert first == second and first.startswith(
        "by --model simple-cnn and --task classification a sample has"
    )
    assert " on rank 1, with the same weights" in first


def made(rank: int, size: int) -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10, dtype=[torch.float32, torch.float64][rank]))
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.error_of(lambda: trainings.trainer(rank, size, data, model))


def test_models_of_other_types_are_named_before_they_are_sent(run_ranks):
    for kind, said in run_ranks(2, made):
        assert (kind, said) == (
            "RanksDiffer",
            "rank 1 has a different 1.weight than rank 0, before training (1 more differ)",
        )


OWN = """
import random

class Task:
    def __init__(self):
        self.scale = random.random()

    def loss(self, outputs, batch):
        return outputs.sum() * self.scale, len(outputs)

def make():
    return Task()
"""


@pytest.mark.parametrize("name", ["Task", "make"])
def test_a_task_draws_the_same_numbers_on_every_rank_and_after_a_resume(own, name):
    config, scales = TrainConfig.of(task=f"{own}:{name}"), []
    for seed in (1, 2):
        randomness.seed_all(seed)
        scales.append(tasks.users(config.data.task).scale)
    assert scales[0] == scales[1]


# ---- what no rank uses in a step -----------------------------------------------------------------------


SAMPLES = 22
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.5}


class Experts(nn.Module):
    """Layers that are used for the samples of their kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(4, 10, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(4, 10, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.all(x)
        for kind, expert in enumerate(self.experts):
            its = x[:, 0] == kind
            out = out + its[:, None] * expert(x) if its.any() else out
        return out


def of_kinds(inputs: torch.Tensor, labels: torch.Tensor) -> Data:
    return Data("kinds", TensorDataset(inputs, labels), None, tuple("0123456789"), (4,), "kinds")


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(SAMPLES, 4, generator=generator, dtype=torch.float64)
    inputs[:, 0] = torch.randint(4, (SAMPLES,), generator=generator)
    return inputs, torch.randint(10, (SAMPLES,), generator=generator)


@pytest.mark.parametrize(("size", "settings"), [
    (1, {"batch_size": 5, "accumulate": 2}),
    (2, {"batch_size": 1}),  # one rank has no samples
    (2, {"batch_size": 5, "accumulate": 2}),
    (4, {"batch_size": 3, "zero": True}),
])  # fmt: skip
def test_neither_momentum_nor_decay_changes_what_no_rank_uses(run_ranks, size, settings):
    data = of_kinds(*samples())
    expected = trainings.alone(Experts, data, settings["batch_size"], 2, kind=torch.optim.AdamW, **ADAMW)
    settings = {"find_unused": True, "optimizer": "adamw", "momentum": 0.0, "epochs": 2, **ADAMW, **settings}
    for found, _ in run_ranks(size, trainings.after_epochs, Experts, data, settings):
        assert trainings.farthest(found.values(), expected.state_dict().values()) < 1e-12


class OfOneKind(Experts):
    """Uses one layer alone in a pass whose samples are all of its kind, and else all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1 and bool((x[:, 0] == x[0, 0]).all()):
            return super().forward(x)
        return self.all(x) + sum(expert(x) * 0 for expert in self.experts) + super().forward(x) * 0


def pass_by_pass(rank: int, size: int, settings: dict[str, Any]) -> Any:
    """Take a step of two passes: in the second each rank has samples of a kind of its own."""
    inputs = torch.rand(8 * size, 4, dtype=torch.float64)
    for number in range(size):
        (step,) = Plan(len(inputs), len(inputs), accumulate=2).of_rank(0, number, size)
        first, second = map(list, step.micro_batches)
        inputs[first, 0], inputs[second, 0] = torch.arange(4.0, dtype=torch.float64), float(number)
    data = of_kinds(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    settings = {"batch_size": len(inputs), "accumulate": 2, **settings}
    trainer = trainings.trainer(rank, size, data, trainings.seeded(OfOneKind), **settings)
    return trainings.error_of(lambda: trainings.finish_epoch(trainer))


@pytest.mark.parametrize("settings", [{}, {"shard": True}], ids=["DDP", "--shard"])
def test_a_parameter_that_only_an_earlier_pass_uses_is_named(run_ranks, settings):
    """Each has a gradient, which was averaged with that of another one, or not at all."""
    for kind, said in run_ranks(2, pass_by_pass, settings):
        assert kind == "CheckFailed"
        assert "did not affect the output in step 1" in said
    assert run_ranks(2, pass_by_pass, {"find_unused": True}) == [None, None]
