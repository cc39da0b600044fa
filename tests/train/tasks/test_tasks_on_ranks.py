"""Each task trained on several ranks, against plain PyTorch in one process: the mean over all that count."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.data.data_set import Data
from train.data.samples import IGNORED
from train.tasks import builtin as tasks
from train.tasks.builtin import Task

SETTINGS: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}
SAMPLES, BATCH, EPOCHS = 13, 5, 2
BOUND = 1e-13


# ---- one of each task, in float64 ----------------------------------------------------------------------


def numbers() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2] ** 2)


def lines() -> TensorDataset:
    """Return sequences of 1 to 40 tokens, and one without any that counts."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(7, (SAMPLES, 41), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate([40, 1, 2, 1, 33, 1, 0, 5, 1, 40, 3, 1, 17]):
        targets[row, length:] = IGNORED
    return TensorDataset(tokens[:, :-1], targets)


class Named(Dataset[Any]):
    """Samples that are mappings with a tuple in them; the loss counts only where a mask says so."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets = numbers()[index]
        mask = torch.arange(6) <= index % 6
        return {"both": (inputs, [mask]), "wanted": {"all": targets.sum().expand(6), "name": str(index)}}


class OwnLoss(nn.Linear):
    """Returns the mean loss of its batch, as many models do."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        outputs = super().forward(inputs)
        return outputs, F.mse_loss(outputs, targets)


class OfNames(nn.Linear):
    def forward(self, both: Any, wanted: Any) -> Any:  # type: ignore[override]
        return {"outputs": super().forward(both[0])}


def of_names() -> Any:
    """Return a task of pixels: a loss and nothing else."""

    def loss(outputs: Any, batch: Any) -> Any:
        mask = batch["both"][1][0]
        errors = (outputs["outputs"] - batch["wanted"]["all"]).abs()
        return errors[mask].sum(), mask.sum()

    return types.SimpleNamespace(loss=loss)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def of_tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7)).double()


def own_loss() -> nn.Module:
    return OwnLoss(6, 2).double()


def by_names() -> nn.Module:
    return OfNames(6, 6).double()


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    total, count = of_names().loss(model(batch["both"], batch["wanted"]), batch)
    return total / count


def of_all_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


WEIGHTS = (0.3, 1.0, 0.0, 2.7, 0.1)


def labelled() -> TensorDataset:
    inputs = numbers().tensors[0]
    return TensorDataset(inputs, torch.arange(len(inputs)) % 5)


def classes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, dtype=torch.float64))


def weighted_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], torch.tensor(WEIGHTS, dtype=torch.float64))


def weighing() -> Any:
    """Return a user's task whose count is the sum of the weights, a float."""

    def loss(outputs: Any, batch: Any) -> Any:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        return F.cross_entropy(outputs, batch[1], weights, reduction="sum"), weights[batch[1]].sum()

    return types.SimpleNamespace(loss=loss)


# name: samples, model, and its mean loss over a whole batch, in plain PyTorch.
KINDS: dict[str, Any] = {
    "regression": (numbers, linear, lambda model, batch: F.mse_loss(model(batch[0]), batch[1])),
    "language-model": (lines, of_tokens, of_all_tokens),
    "model-loss": (numbers, own_loss, lambda model, batch: model(*batch)[1]),
    "own": (Named, by_names, masked),
    "classification": (labelled, classes, weighted_mean),
    "weighted": (labelled, classes, weighted_mean),
}
OWN = {"own": of_names, "weighted": weighing}


def data_of(kind: str) -> Data:
    samples = KINDS[kind][0]()
    names = tuple("abcde") if kind == "classification" else ()
    return Data(kind, samples, samples, names, (6,), kind, task=kind)


def task_of(kind: str, config: TrainConfig, data: Data) -> Task:
    return tasks.adapt(OWN[kind](), "own.py:make") if kind in OWN else tasks.build(config, data)


@functools.cache
def expected(
    kind: str, make: Any, epochs: int = EPOCHS, left_out: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """Return the parameters after plain training on whole batches: one process, no DDP.

    Args:
        left_out: steps of an epoch in which nothing counts.
    """
    loss, steps = KINDS[kind][2], math.ceil(SAMPLES / BATCH)
    whole = ignoring(left_out) if left_out else KINDS[kind][0]()

    def mean(model: nn.Module, indices: list[int]) -> torch.Tensor:
        return loss(model, default_collate([whole[index] for index in indices]))

    batches = enumerate(trainings.batches_of(SAMPLES, BATCH, epochs))
    losses = (functools.partial(mean, indices=batch) for n, batch in batches if n % steps not in left_out)
    model = trainings.descended(trainings.seeded(make), losses, **SETTINGS)
    return [parameter.detach() for parameter in model.parameters()]


def parameters_on_ranks(
    rank: int, world_size: int, kind: str, make: Any, settings: dict[str, Any]
) -> tuple[list[torch.Tensor], float]:
    data, model = data_of(kind), trainings.seeded(make)
    usual = {"batch_size": BATCH, "epochs": EPOCHS, "task": kind, **SETTINGS, **settings}
    if kind == "classification":
        usual["class_weights"] = WEIGHTS
    task = task_of(kind, TrainConfig.of(**usual), data)
    trainer = trainings.trainer(rank, world_size, data, model, task, **usual)
    for _ in range(EPOCHS):
        trained = trainings.finish_epoch(trainer)
    return trainings.wholes(trainer), trained.loss


@pytest.mark.covered(lambda kind, size, accumulate: size in (1, 2) or (size, accumulate) in ((3, 3), (4, 1)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_task_on_many_ranks_has_the_gradient_of_the_mean_over_all_that_counts(
    run_ranks, kind, size, accumulate
):
    """Batches of 5, 5 and 3 samples: uneven on several ranks, of which one of four then has none."""
    make = KINDS[kind][1]
    answers = run_ranks(size, parameters_on_ranks, kind, make, {"accumulate": accumulate})
    for ours, loss in answers:
        assert trainings.farthest(ours, expected(kind, make)) <= BOUND
        assert loss == answers[0][1] > 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_synchronised_batchnorm_and_another_count_than_samples_are_exact_together(run_ranks, size):
    """Two numbers per sample, so the factor after the reduction is not 1."""
    for ours, _ in run_ranks(size, parameters_on_ranks, "regression", normalised, {"batchnorm": "sync"}):
        assert trainings.farthest(ours, expected("regression", normalised)) <= BOUND


@pytest.mark.parametrize("kind", ["language-model", "own"])
def test_unequal_shares_and_clipping_are_those_of_one_process(run_ranks, kind):
    make = KINDS[kind][1]
    one = run_ranks(1, parameters_on_ranks, kind, make, {"clip_norm": 0.1})[0][0]
    for settings in ({"clip_norm": 0.1}, {"clip_norm": 0.1, "rank_share": (1, 3)}):
        for ours, _ in run_ranks(2, parameters_on_ranks, kind, make, settings):
            assert trainings.farthest(ours, one) <= BOUND
    assert trainings.farthest(one, expected(kind, make)) > 1e-3  # the norm was above the limit


# ---- nothing to count ----------------------------------------------------------------------------------


def ignoring(steps: tuple[int, ...]) -> TensorDataset:
    """Return sequences of which those of some steps of the first epoch have no target that counts."""
    samples = lines()
    batches = [*trainings.batches_of(SAMPLES, BATCH)]
    for step in steps:
        samples.tensors[1][batches[step]] = IGNORED
    return samples


class WithLoss(nn.Sequential):
    """Returns its own mean loss, NaN where nothing counts, and of how many tokens it is the mean."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        loss = F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())
        return {"loss": loss, "count": (targets != IGNORED).sum()}


def train_on_nothing(
    rank: int, world_size: int, steps: tuple[int, ...], settings: dict[str, Any], task: str
) -> tuple[list[torch.Tensor], float, int, int]:
    data = replace(data_of("language-model"), train=ignoring(steps), task=task)
    settings = {**SETTINGS, "batch_size": BATCH, "task": task, "epochs": 1, **settings}
    model = trainings.seeded(of_tokens)
    model = WithLoss(*model) if task == "model-loss" else model
    trainer = trainings.trainer(rank, world_size, data, model, **settings)
    loss, progress = trainings.finish_epoch(trainer).loss, trainer.progress
    return trainings.wholes(trainer), loss, progress.uncounted, progress.global_step


WHERE: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {}), (4, {})]
WHERE += [(2, {"accumulate": 2}), (2, {"virtual_ranks": 4})]


@pytest.mark.covered(lambda task, steps: (len(steps) < 3) == (task == "model-loss") or steps == (1,))
@pytest.mark.parametrize("task", ["language-model", "model-loss"])
@pytest.mark.parametrize("steps", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_step_in_which_nothing_counts_is_left_out_on_all_ranks(run_ranks, steps, task):
    for size, settings in WHERE:
        for ours, loss, uncounted, done in run_ranks(size, train_on_nothing, steps, settings, task):
            assert trainings.farthest(ours, expected("language-model", of_tokens, 1, steps)) <= BOUND
            assert (uncounted, done) == (len(steps), 3)
            assert math.isnan(loss) == (len(steps) == 3)


class OfSome(nn.Sequential):
    """Returns a mean loss over some of its samples; it and its gradient are NaN where there are none."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        counts = (targets[:, 0] > 0.5).double()
        losses = (super().forward(inputs) - targets).square().sum(dim=1)
        return {"loss": (losses * counts).sum() / counts.sum(), "count": counts.sum()}


def of_some(rank: int, world_size: int, settings: dict[str, Any]) -> list[torch.Tensor]:
    inputs, targets = numbers().tensors
    targets = targets.clone().clamp(max=0.5)
    targets[1::4] = 1.0
    data = replace(data_of("model-loss"), train=TensorDataset(inputs, targets), test=None)
    model = trainings.seeded(lambda: OfSome(*linear()))
    settings = {**SETTINGS, "batch_size": BATCH, "task": "model-loss", **settings}
    trainer = trainings.trainer(rank, world_size, data, model, **settings)
    trainings.finish_epoch(trainer)
    return trainings.wholes(trainer)


IN_BLOCKS: dict[str, Any] = {"shard": True, "shard_blocks": ("Linear",)}


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {"accumulate": 5}), (2, {"virtual_ranks": 4}), (2, {}), (4, {}), (2, IN_BLOCKS)],
)
def test_a_rank_or_a_pass_in_which_nothing_counts_adds_nothing(run_ranks, size, settings):
    (one,) = run_ranks(1, of_some, {})
    for ours in run_ranks(size, of_some, settings):
        assert trainings.farthest(ours, one) <= BOUND


# ---- whole runs ----------------------------------------------------------------------------------------


def run(rank: int, world_size: int, kind: str, folder: str, settings: dict[str, Any]) -> str:
    """Train three epochs; of the kind `left out`, in the first nothing counts in step 2."""
    usual = {"out": folder, "epochs": 3, "batch_size": BATCH, "lr": 0.05, **runs.OFTEN, "log_every": 1}
    name = "language-model" if kind == "left out" else kind
    data = data_of(name)
    if kind == "left out":
        data = replace(data, train=ignoring((1,)), test=lines())
        usual |= {"ema": 0.9, "clip_norm": 1.0}
    settings = {"task": name, **usual, **settings}
    task, model = task_of(name, TrainConfig.of(**settings), data), trainings.seeded(KINDS[name][1])
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        said = runs.outcome(rank, world_size, data, model, settings, task)
    return errors.getvalue() + said


@pytest.fixture(scope="module")
def straight(run_ranks, tmp_path_factory) -> Callable[[str], tuple[Path, list[str]]]:
    """`straight(kind)`: the folder of a run that never stops, and what its ranks say; each is run once."""

    @functools.cache
    def whole(kind: str) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("straight")
        return folder, run_ranks(2, run, kind, str(folder), {})

    return whole


def test_a_step_that_is_left_out_is_said_and_logged(straight):
    folder, said = straight("left out")
    assert said[0].count("warning: nothing counted in step 2") == 1 and said[1] == ""
    assert "skipped 1 step in which nothing counted" in said[0]
    events = [line for line in (folder / "log.jsonl").read_text().splitlines() if "event" in line]
    assert len(events) == 1 and '"step": 2' in events[0] and "nothing counted" in events[0]
    assert runs.read(folder / "last.pt")["progress"]["uncounted"] == 1


STOPS = [(kind, stop) for kind in KINDS for stop in (2, 6)] + [("left out", stop) for stop in (1, 2, 3)]
STOPPED = [("left out", 2), ("language-model", 6), ("model-loss", 2)]


@pytest.mark.covered(lambda kind, stop: (kind, stop) not in STOPPED)
@pytest.mark.parametrize(("kind", "stop"), STOPS)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    run_ranks, straight, tmp_path, kind, stop
):
    """In the middle of an epoch and at the end of one; before, at and after a step that is left out."""
    whole, _ = straight(kind)
    run_ranks(2, run, kind, str(tmp_path), {"resume": str(whole / f"step-{stop:06d}.pt")})
    one, other = (runs.read(folder / "last.pt") for folder in (whole, tmp_path))
    assert one["progress"] == other["progress"]
    for part in ("model", "optimizer"):
        assert one["digests"][part] == other["digests"][part]
