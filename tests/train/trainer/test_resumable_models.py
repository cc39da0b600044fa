"""What a model keeps from pass to pass: saved, refused by name, or said to be lost on a resume."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.tasks import builtin as tasks
from train.trainer import preflight


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
    data, place = trainings.tensors(runs.SHAPE, 20), trainings.place(0, 1)
    config = TrainConfig.of(model="own.py:model", batch_size=5)
    preflight.check(
        config,
        data,
        trainings.seeded(make),
        place,
        task or tasks.build(config, data),
    )


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unread, "_extra_state holds more than tensors and plain values"),
        (Unloaded, "does not load its own state_dict: KeyError: 'lost'"),
    ],
)
def test_extra_state_that_no_resume_could_restore_is_refused(make, said):
    with pytest.raises(UsageFault, match=said):
        check(make)


@pytest.mark.parametrize(("make", "settings"), [(Kept, {}), (AsTensor, {"ema": 0.9})], ids=["", "with --ema"])
def test_a_run_with_extra_state_goes_on_bit_for_bit(run_ranks, tmp_path, make, settings):
    run_ranks(1, runs.run, make, str(tmp_path / "whole"), {**settings, **runs.OFTEN})
    stopped = {**settings, "resume": str(tmp_path / "whole" / "step-000002.pt")}
    assert "continues from" in run_ranks(1, runs.run, make, str(tmp_path / "rest"), stopped)[0]
    ends = [runs.read(tmp_path / name / "last.pt") for name in ("whole", "rest")]
    assert runs.different(*ends) == []
    kept = ends[0]["model"]["module._extra_state"]
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
