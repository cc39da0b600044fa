"""Each task trained on several ranks, against plain PyTorch in one process: the mean over all that count."""

from __future__ import annotations

import contextlib
import io
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ckpttool.distributed.plan import Plan
from tests.ranks import runs, trainings
from train.config.training import TrainConfig
from train.data.data_set import Data
from train.tasks import builtin as tasks
from train.tasks.task import Task
from train.trainer.trainer import Trainer

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
        targets[row, length:] = tasks.IGNORED
    return TensorDataset(tokens[:, :-1], targets)


class Named(Dataset[Any]):
    """Samples that are mappings with a tuple in them; the loss counts only where a mask says so."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets = numbers()[index]
        mask = torch.arange(6) <= index % 6
        return {"both": (inputs, [mask]), "wanted": {"all": targets.sum().expand(6), "name": str(index)}}


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedded = nn.Embedding(7, 5, dtype=torch.float64)
        self.scores = nn.Linear(5, 7, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores(self.embedded(tokens).tanh())


class OwnLoss(nn.Module):
    """Returns the mean loss of its batch, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.linear(inputs)
        return outputs, F.mse_loss(outputs, targets)


class OfNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, both: Any, wanted: Any) -> dict[str, torch.Tensor]:
        return {"outputs": self.linear(both[0])}


def of_names() -> Any:
    """Return a task of pixels: a loss and nothing else."""

    def loss(outputs: Any, batch: Any) -> Any:
        mask = batch["both"][1][0]
        errors = (outputs["outputs"] - batch["wanted"]["all"]).abs()
        return errors[mask].sum(), mask.sum()

    return types.SimpleNamespace(loss=loss)


def linear() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.float64)
    )


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def masked(model: nn.Module, batch: Any) -> torch.Tensor:
    total, count = of_names().loss(model(batch["both"], batch["wanted"]), batch)
    return total / count


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
    "language-model": (
        lines,
        OfTokens,
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    ),
    "model-loss": (numbers, OwnLoss, lambda model, batch: model(*batch)[1]),
    "own": (Named, OfNames, masked),
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


def expected(kind: str, make: Any) -> list[torch.Tensor]:
    """Return the parameters after plain training on whole batches: one process, no DDP."""
    samples, _, loss = KINDS[kind]
    model, whole = trainings.seeded(make), samples()
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for epoch in range(EPOCHS):
        for batch in torch.tensor(Plan(SAMPLES, BATCH).order(epoch)).split(BATCH):
            optimizer.zero_grad()
            loss(model, torch.utils.data.default_collate([whole[int(index)] for index in batch])).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def parameters_on_ranks(
    rank: int, world_size: int, kind: str, make: Any, settings: dict[str, Any]
) -> tuple[list[torch.Tensor], float]:
    data = data_of(kind)
    usual = {"scheduler": "none", "decay_norms": True, "batch_size": BATCH, "epochs": EPOCHS, "task": kind}
    if kind == "classification":
        usual["class_weights"] = WEIGHTS
    config = TrainConfig(**usual, **SETTINGS, **settings)
    place = trainings.place(rank, world_size)
    trainer = Trainer(config, data, trainings.seeded(make), place, task_of(kind, config, data))
    for _ in range(EPOCHS):
        trained = trainings.finish_epoch(trainer)
    return [parameter.detach() for parameter in trainer.ddp.parameters()], trained.loss


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


def ignoring(steps: list[int]) -> TensorDataset:
    """Return sequences of which those of some steps of the first epoch have no target that counts."""
    samples = lines()
    batches = torch.tensor(Plan(SAMPLES, BATCH).order(0)).split(BATCH)
    for step in steps:
        samples.tensors[1][batches[step]] = tasks.IGNORED
    return samples


class OfTokensAndLoss(OfTokens):
    """Returns its own mean loss, NaN where nothing counts, and of how many tokens it is the mean."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())
        return {"loss": loss, "count": (targets != tasks.IGNORED).sum()}


def train_on_nothing(
    rank: int, world_size: int, steps: list[int], settings: dict[str, Any], model: Any = OfTokens
) -> tuple[list[torch.Tensor], float, int, int]:
    task = "language-model" if model is OfTokens else "model-loss"
    data = replace(data_of("language-model"), train=ignoring(steps), task=task)
    usual = {"scheduler": "none", "decay_norms": True, "batch_size": BATCH, "task": task, "epochs": 1}
    config = TrainConfig(**usual, **SETTINGS, **settings)
    place = trainings.place(rank, world_size)
    trainer = Trainer(config, data, trainings.seeded(model), place, tasks.build(config, data))
    trained = trainings.finish_epoch(trainer)
    progress = trainer.progress
    parameters = [parameter.detach() for parameter in trainer.ddp.parameters()]
    return parameters, trained.loss, progress.uncounted, progress.global_step


def without(steps: list[int]) -> list[torch.Tensor]:
    """Return the parameters after an epoch in which some steps are left out, in plain PyTorch."""
    model, samples = trainings.seeded(OfTokens), ignoring(steps)
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for number, batch in enumerate(torch.tensor(Plan(SAMPLES, BATCH).order(0)).split(BATCH)):
        inputs, targets = samples[batch]
        if number not in steps:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("model", [OfTokens, OfTokensAndLoss])
@pytest.mark.parametrize("steps", [[0], [1], [2], [0, 1], [0, 1, 2]])
def test_a_step_in_which_nothing_counts_is_left_out_on_all_ranks(run_ranks, steps, model):
    on_two: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"virtual_ranks": 4}]
    for size, settings in ((1, {}), *((2, given) for given in on_two), (3, {}), (4, {})):
        for ours, loss, uncounted, done in run_ranks(size, train_on_nothing, steps, settings, model):
            assert trainings.farthest(ours, without(steps)) <= BOUND
            assert (uncounted, done) == (len(steps), 3)
            assert (loss != loss) == (len(steps) == 3)  # NaN


def run_on_nothing(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    data = replace(data_of("language-model"), train=ignoring([1]), test=lines())
    usual = {"task": "language-model", "out": folder, "epochs": 2, "batch_size": BATCH, **runs.OFTEN}
    usual |= {"ema": 0.9, "clip_norm": 1.0, "log_every": 1}
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        said = runs.outcome(rank, world_size, data, trainings.seeded(OfTokens), {**usual, **settings})
    return errors.getvalue() + said


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_step_that_is_left_out_is_said_logged_and_kept_over_a_resume(run_ranks, tmp_path, stopped_at):
    said = run_ranks(2, run_on_nothing, str(tmp_path / "whole"), {})
    assert said[0].count("warning: nothing counted in step 2") == 1 and said[1] == ""
    assert "skipped 1 step in which nothing counted" in said[0]
    events = [line for line in (tmp_path / "whole/log.jsonl").read_text().splitlines() if "event" in line]
    assert len(events) == 1 and '"step": 2' in events[0] and "nothing counted" in events[0]
    saved = tmp_path / f"whole/step-{stopped_at:06d}.pt"
    run_ranks(2, run_on_nothing, str(tmp_path / "resumed"), {"resume": str(saved)})
    ends = [torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "resumed")]
    assert ends[0]["progress"] == ends[1]["progress"] and ends[0]["progress"]["uncounted"] == 1
    assert ends[0]["digests"]["model"] == ends[1]["digests"]["model"]


# ---- whole runs ----------------------------------------------------------------------------------------


def run(rank: int, world_size: int, kind: str, folder: str, settings: dict[str, Any]) -> None:
    settings = {"task": kind, "out": folder, "epochs": 3, "batch_size": BATCH, "lr": 0.05, **settings}
    data, config = data_of(kind), TrainConfig(**settings, **runs.OFTEN)
    task = task_of(kind, config, data)
    runs.outcome(rank, world_size, data, trainings.seeded(KINDS[kind][1]), {**settings, **runs.OFTEN}, task)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stopped_at", [2, 6])
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(run_ranks, tmp_path, kind, stopped_at):
    """In the middle of an epoch and at the end of one."""
    run_ranks(2, run, kind, str(tmp_path / "whole"), {})
    (saved,) = tmp_path.glob(f"whole/step-*{stopped_at}.pt")
    run_ranks(2, run, kind, str(tmp_path / "resumed"), {"resume": str(saved)})
    ends = [torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "resumed")]
    assert ends[0]["progress"] == ends[1]["progress"]
    for part in ("model", "optimizer"):
        assert ends[0]["digests"][part] == ends[1]["digests"][part]
