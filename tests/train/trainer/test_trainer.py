"""Training and evaluation on several ranks, against plain PyTorch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import trainings
from train.model import builtin as models

SETTINGS: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}


def make_linear() -> nn.Module:
    return nn.Linear(10, 10, dtype=torch.float64)


def make_cnn() -> nn.Module:
    return models.simple_cnn(channels=1, height=8, width=8)


def small_resnet() -> nn.Module:
    return models.ResNet(1, 10, 3)


KINDS = {
    "linear": (make_linear, (10,), torch.float64, 1e-12),
    "cnn": (make_cnn, (1, 8, 8), torch.float32, 1e-6),
}


def assert_as_alone(
    run_ranks: Any, kind: str, size: int, samples: int, batch_size: int, epochs: int = 1, **more: Any
) -> None:
    """Raise AssertionError unless ranks train as plain PyTorch does in one process."""
    make, shape, dtype, bound = KINDS[kind]
    data = trainings.tensors(shape, samples, dtype=dtype)
    expected = trainings.alone(make, data, batch_size, epochs, **SETTINGS).state_dict()
    settings = {**SETTINGS, "batch_size": batch_size, "epochs": epochs, **more}
    for ours, _ in run_ranks(size, trainings.after_epochs, make, data, settings):
        assert trainings.farthest(ours.values(), expected.values()) <= bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("samples", [20, 18, 3], ids=["even", "uneven", "with an idle rank"])
def test_one_step_on_many_ranks_is_the_step_of_one_process(run_ranks, kind, size, samples):
    assert_as_alone(run_ranks, kind, size, samples, samples)


@pytest.mark.covered(
    lambda size, samples, accumulate: (
        accumulate in (1, 2 if samples == 21 else 7) or (size == 2 and accumulate < 3)
    )
)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [21, 23])
def test_epochs_with_a_short_last_batch_are_those_of_one_process(run_ranks, size, samples, accumulate):
    """The last batch has one sample, or three; accumulating changes nothing but memory."""
    assert_as_alone(run_ranks, "linear", size, samples, 10, 3, accumulate=accumulate)


# ---- ranks without samples -----------------------------------------------------------------------------


def take_a_step_with_idle_ranks(rank: int, world_size: int) -> Any:
    """One sample for all ranks, and a model with BatchNorm."""
    data, model = trainings.tensors((3, 8, 8), 1), trainings.seeded(small_resnet)
    trainer = trainings.trainer(rank, world_size, data, model, lr=0.1, batch_size=4, epochs=1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    score = trainings.finish_epoch(trainer)
    buffers = dict(model.named_buffers())
    changed = [name for name, buffer in buffers.items() if not torch.equal(buffer, before[name])]
    finite = all(torch.isfinite(t).all() for t in [*buffers.values(), *model.parameters()])
    modes = {module.training for module in model.modules()}
    return model.linear.weight.detach(), len(changed), (finite, score.samples, modes)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_without_samples_leaves_batchnorm_alone_and_gets_the_same_weights(run_ranks, size):
    busy, *idle = run_ranks(size, take_a_step_with_idle_ranks)
    assert busy[1] > 0
    for weight, changed, found in idle:
        assert torch.equal(weight, busy[0])
        assert changed == 0
        assert found == busy[2] == (True, 1, {True})


class Delicate(nn.Linear):
    """Counts its samples in a buffer, as layers with statistics do, fails on an empty batch, as `view(0, -1)`
    does, and makes NaN of zeros."""

    def __init__(self) -> None:
        super().__init__(10, 10)
        self.register_buffer("met", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met += len(x)
        x = x.view(x.size(0), -1)
        return super().forward(x / x.norm(dim=1, keepdim=True))


def train_delicate(rank: int, world_size: int) -> Any:
    data, model = trainings.tensors((2, 5), 6), trainings.seeded(Delicate)
    trainings.finish_epoch(trainings.trainer(rank, world_size, data, model, batch_size=4))
    return bool(torch.isfinite(model.weight).all()), model.met.item()


def test_passes_without_samples_change_no_buffer_and_need_no_model_that_takes_them(run_ranks):
    # Two steps on each of the first two ranks; the others met rank 0's count before the second, and had no
    # sample in it.
    assert run_ranks(4, train_delicate) == [(True, met) for met in (2, 2, 1, 1)]


# ---- what is counted -----------------------------------------------------------------------------------


def score_of_epoch_without_learning(rank: int, world_size: int) -> Any:
    data, model = trainings.tensors((10,), 7), trainings.seeded(lambda: nn.Linear(10, 10))
    trainer = trainings.trainer(rank, world_size, data, model, lr=1e-12, momentum=0.0, batch_size=5)
    score = trainings.finish_epoch(trainer)
    return score.loss, score.correct, score.samples, trainer.progress.samples


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_epochs_loss_is_the_mean_over_samples_not_over_ranks_or_steps(run_ranks, size):
    inputs, labels = trainings.tensors((10,), 7).train.tensors  # type: ignore[attr-defined]
    scores = trainings.seeded(lambda: nn.Linear(10, 10))(inputs)
    expected = pytest.approx(F.cross_entropy(scores, labels).item(), abs=1e-6)
    for found in run_ranks(size, score_of_epoch_without_learning):
        assert found == (expected, (scores.argmax(1) == labels).sum(), 7, 7)


def evaluate_on_ranks(rank: int, world_size: int, tests: int) -> Any:
    data, model = trainings.tensors((1, 8, 8), 1, tests=tests), trainings.seeded(make_cnn)
    score = trainings.trainer(rank, world_size, data, model).evaluate().score()
    assert score.pop("ranks") == world_size
    return score


@pytest.mark.covered(lambda tests: tests == 700)
@pytest.mark.parametrize("tests", [1, 128, 300, 700])
def test_evaluation_counts_each_sample_once_and_gives_the_same_bits_on_any_number_of_ranks(run_ranks, tests):
    data, model = trainings.tensors((1, 8, 8), 1, tests=tests), trainings.seeded(make_cnn)
    inputs, labels = data.test.tensors
    right = model(inputs).argmax(1) == labels
    alone = run_ranks(1, evaluate_on_ranks, tests)[0]
    assert (alone["correct"], alone["samples"]) == (right.sum(), tests)
    assert alone["loss"] == pytest.approx(F.cross_entropy(model(inputs), labels).item(), abs=1e-5)
    assert [(one["class"], one["correct"], one["samples"]) for one in alone["per_class"]] == [
        (str(label), right[labels == label].sum(), (labels == label).sum()) for label in range(10)
    ]
    for size in (2, 3, 4):
        assert run_ranks(size, evaluate_on_ranks, tests) == [alone] * size


def evaluate_after_steps(rank: int, world_size: int) -> Any:
    data, model = trainings.tensors((3, 8, 8), 16), trainings.seeded(small_resnet)
    trainer = trainings.trainer(rank, world_size, data, model, batch_size=8, lr=0.1)
    trainings.finish_epoch(trainer)
    before = model.bn1.running_mean.clone()
    score = trainer.evaluate()
    return before, model.bn1.running_mean.clone(), (score, model.training)


def test_ranks_evaluate_with_rank_0s_batchnorm_statistics(run_ranks):
    (before, after, found), (others_before, others_after, others) = run_ranks(2, evaluate_after_steps)
    assert not torch.equal(before, others_before)  # each has met other samples
    assert torch.equal(after, before) and torch.equal(others_after, before)
    assert found == others and found[1]


def train_with_a_label(rank: int, world_size: int, label: int) -> Any:
    data = trainings.tensors((10,), 8)
    data.train.tensors[1][5] = label  # type: ignore[attr-defined]
    trainer = trainings.trainer(rank, world_size, data, nn.Linear(10, 10), batch_size=8)
    return trainings.error_of(lambda: trainings.finish_epoch(trainer))


@pytest.mark.parametrize("label", [10, -1, -100])
def test_a_training_label_without_a_class_names_its_sample(run_ranks, label):
    """-100 is the label that torch's loss skips, so the mean would be over fewer samples than reported."""
    said = f"training sample 5 has the label {label}, which is not one of the 10 classes (0 to 9)"
    assert run_ranks(1, train_with_a_label, label) == [("CheckFailed", said)]


def epochs_and_draws(rank: int, world_size: int) -> Any:
    """Train; return the epochs that the data is told, and the random state before and after."""
    data, epochs = trainings.tensors((10,), 6), []
    data.train.set_epoch = epochs.append  # type: ignore[attr-defined]
    trainer = trainings.trainer(rank, world_size, data, nn.Linear(10, 10))
    before = torch.get_rng_state()
    for _ in range(3):
        trainings.finish_epoch(trainer)
    trainer.evaluate()
    return epochs, before, torch.get_rng_state()


def test_data_is_told_the_epoch_and_draws_nothing_from_random_states_which_are_each_ranks_own(run_ranks):
    answers = run_ranks(4, epochs_and_draws)
    for epochs, before, after in answers:
        assert epochs == [0, 1, 2]
        assert torch.equal(before, after)
    assert len({bytes(before.tolist()) for _, before, _ in answers}) == 4


# ---- complex parameters --------------------------------------------------------------------------------


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def train_phases(rank: int, world_size: int) -> Any:
    data = trainings.tensors((10,), 21)
    trainer = trainings.trainer(rank, world_size, data, trainings.seeded(Phases), batch_size=10, lr=0.1)
    trainings.finish_epoch(trainer)
    return trainer.ddp.module.weight.detach()


def test_complex_parameters_are_trained_equally_on_any_number_of_ranks(run_ranks):
    alone = run_ranks(1, train_phases)[0]
    assert not torch.equal(alone, trainings.seeded(Phases).weight)
    for weight in run_ranks(4, train_phases):
        assert torch.allclose(weight, alone, atol=1e-6, rtol=0)
