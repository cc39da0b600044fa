"""Ranks on which nothing counts, whose samples are in the statistics of all: against one process."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ckpttool import batchnorm
from ckpttool.distributed.plan import Plan
from tests.ranks import trainings
from train.config.sections import TrainConfig
from train.data.data_set import Data
from train.data.samples import IGNORED
from train.tasks import builtin as tasks
from train.trainer.exact import Exact

SAMPLES, BATCH, LENGTH = 26, 8, 3  # the last batch is of two, which leaves a third rank idle
SETTINGS: dict[str, Any] = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
BOUND = 1e-12
WEIGHTS = (1.0, 0.5, 0.0, 2.0, 0.3)


# ---- models with two normalising layers, the second also passed by -----------------------------------------


class Net(nn.Module):
    """Scores [n, 5] of [n, 6]."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)
        self.norms, self.head = nn.ModuleList([norm(4), norm(4)]), nn.Linear(4, 5)

    def forward(self, inputs: torch.Tensor, *_: torch.Tensor) -> Any:
        hidden = self.norms[0](self.first(inputs))
        return self.head(torch.tanh(hidden + self.norms[1](self.second(torch.tanh(hidden)))))


class OfTokens(nn.Module):
    """Scores [n, length, 5] of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.net = nn.Embedding(5, 6), Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(self.tokens(tokens).flatten(0, 1))
        return scores.unflatten(0, tokens.shape)


class Frozen(Net):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norms[0].eval()
        return self


class WithLoss(Net):
    """Returns its mean loss and its scores; the mean of nothing is NaN, and so is its gradient."""

    def forward(self, inputs: torch.Tensor, *others: torch.Tensor) -> Any:
        scores, (labels,) = super().forward(inputs), others
        total, count = unweighted(scores, labels)
        return {"loss": total / count, "count": count.long(), "scores": scores}


class OnlyLoss(WithLoss):
    def forward(self, inputs: torch.Tensor, *others: torch.Tensor) -> Any:
        found = super().forward(inputs, *others)
        return {"loss": found["loss"], "count": found["count"]}


# ---- tasks: (sum, count) of outputs and labels, in which labels of 2 do not count --------------------------


def weighted(outputs: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> Any:
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    how: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
    return F.cross_entropy(outputs, labels, weights, **how), weights[labels].sum()


def unweighted(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    counts = (labels != 2).double()  # multiplied, so that each sample has its part of a mean's NaN
    return (F.cross_entropy(outputs, labels, reduction="none") * counts).sum(), counts.sum()


def of_sequences(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != IGNORED).sum()


def of_dict(outputs: Any, labels: torch.Tensor) -> Any:
    return unweighted(outputs["scores"], labels)


def trapped(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """As `unweighted`; where nothing counts the sum is 0, and its gradient 0 / 0."""
    total, count = unweighted(outputs, labels)
    return torch.where(count > 0, total / count * count, 0.0), count


def own(loss: Any) -> Any:
    return types.SimpleNamespace(loss=lambda outputs, batch: loss(outputs, batch[-1]))


# name: model, task, its settings, and the loss.
KINDS: dict[str, Any] = {
    "class weights": (Net, "classification", {"class_weights": WEIGHTS}, weighted),
    "smoothed": (
        Net,
        "classification",
        {"class_weights": WEIGHTS, "label_smoothing": 0.1},
        lambda outputs, labels: weighted(outputs, labels, 0.1),
    ),
    "language model": (OfTokens, "language-model", {}, of_sequences),
    "own": (Net, own(weighted), {}, weighted),
    "masks": (Net, own(unweighted), {}, unweighted),
    "0 / 0": (Net, own(trapped), {}, unweighted),
    "own loss": (WithLoss, "model-loss", {}, of_dict),
    "frozen": (Frozen, "classification", {"class_weights": WEIGHTS}, weighted),
}


def silent_samples(plan: Plan, size: int, silent: tuple[int, ...]) -> list[int]:
    """Return the samples of ranks on which nothing counts."""
    steps = [step for rank in silent for step in plan.of_rank(0, rank, size)]
    return [index for step in steps for passed in step.micro_batches for index in passed]


def data_of(kind: str, plan: Plan, size: int, silent: tuple[int, ...]) -> Data:
    generator = torch.Generator().manual_seed(4)
    quiet, tokens = silent_samples(plan, size, silent), kind == "language model"
    inputs: torch.Tensor = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 3, 4])[torch.randint(4, (SAMPLES,), generator=generator)]
    if tokens:
        inputs = torch.randint(5, (SAMPLES, LENGTH), generator=generator)
        labels = inputs.roll(1, dims=1)
    labels[quiet] = IGNORED if tokens else 2
    samples = TensorDataset(inputs, labels)
    return Data(kind, samples, samples, tuple("abcde"), (6,), kind)


def plan_of(settings: dict[str, Any]) -> Plan:
    return Plan(
        SAMPLES, BATCH, accumulate=settings.get("accumulate", 1), rank_share=settings.get("rank_share", ())
    )


def expected(kind: str, size: int, silent: tuple[int, ...], settings: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters after an epoch of plain PyTorch; a pass is of the samples of all ranks."""
    make, _, _, loss = KINDS[kind]
    plan = plan_of(settings)
    inputs, labels = data_of(kind, plan, size, silent).train.tensors  # type: ignore[attr-defined]
    model = trainings.seeded(make).double()
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for of_ranks in zip(*(plan.of_rank(0, rank, size) for rank in range(size)), strict=True):
        sums = []
        for number in range(max(len(step.micro_batches) for step in of_ranks)):
            at = [
                i for step in of_ranks for passed in step.micro_batches[number : number + 1] for i in passed
            ]
            outputs = model(inputs[at], labels[at]) if "own loss" in kind else model(inputs[at])
            sums.append(loss(outputs, labels[at]))
        count = sum(float(each) for _, each in sums)
        if count:
            optimizer.zero_grad()
            (sum(total for total, _ in sums) / count).backward()  # type: ignore[union-attr]
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def on_ranks(
    rank: int,
    size: int,
    kind: str,
    silent: tuple[int, ...],
    settings: dict[str, Any],
    make: Any = None,
    data: Any = None,
) -> Any:
    usual, task, of_task, _ = KINDS[kind]
    data = data or data_of(kind, plan_of(settings), size, silent)
    given = {**SETTINGS, "batchnorm": "sync", "batch_size": BATCH, "epochs": 1, **of_task, **settings}
    is_own = not isinstance(task, str)
    given["task"] = "own.py:make" if is_own else task
    made = tasks.adapt(task, "own.py:make") if is_own else tasks.build(TrainConfig.of(**given), data)
    data = replace(data, task=given["task"])
    model = trainings.seeded(make or usual).double()
    trainer = trainings.trainer(rank, size, data, model, made, **given)
    trainings.finish_epoch(trainer)
    return trainings.wholes(trainer), trainer.progress.uncounted


IN_BLOCKS: dict[str, Any] = {"shard": True, "shard_blocks": ("Linear",)}
# ranks, those on which nothing counts, settings
WHERE: list[tuple[int, tuple[int, ...], dict[str, Any]]] = [
    (2, (1,), {}),
    (2, (0,), {"accumulate": 2}),
    (2, (1,), {"shard": True}),
    (2, (1,), {**IN_BLOCKS, "accumulate": 3}),
    (3, (0, 2), {"accumulate": 3}),
    (3, (1,), {"rank_share": (5, 1, 2)}),
    (2, (0, 1), {}),
    (2, (1,), {"find_unused": True}),
]


@pytest.mark.covered(lambda kind, where: where in (0, 1) or kind in ("class weights", "own loss"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", range(len(WHERE)), ids=str)
def test_a_rank_on_which_nothing_counts_has_the_gradients_of_the_others_losses(run_ranks, kind, where):
    """Its samples are in the statistics by which the others normalise."""
    size, silent, settings = WHERE[where]
    for ours, uncounted in run_ranks(size, on_ranks, kind, silent, settings):
        assert uncounted == (4 if len(silent) == size else 0)
        assert trainings.farthest(ours, expected(kind, size, silent, settings)) <= BOUND


OWN_LAYERS: dict[str, Any] = {"batchnorm": "plain", "accumulate": 3}


def of_own_layers() -> nn.Module:
    return Net(batchnorm.SyncBatchNorm)


def test_synchronised_layers_of_the_models_own_are_passed_equally_often(run_ranks):
    """Shares of 3, 3 and 2 samples in 3 passes."""
    for ours, _ in run_ranks(3, on_ranks, "own", (1,), OWN_LAYERS, of_own_layers):
        assert trainings.farthest(ours, expected("own", 3, (1,), OWN_LAYERS)) <= BOUND


def without_layers() -> nn.Module:
    return Net(lambda _: nn.Identity())


def test_a_class_of_weight_0_is_smoothed_on_each_rank_as_in_one_process(run_ranks):
    for kind, silent in (("smoothed", (1,)), ("class weights", (0,))):
        data = data_of(kind, plan_of({}), 2, silent)
        (one, _), *_ = run_ranks(1, on_ranks, kind, silent, {"batchnorm": "plain"}, without_layers, data)
        for ours, _ in run_ranks(2, on_ranks, kind, silent, {"batchnorm": "plain"}, without_layers, data):
            assert trainings.farthest(ours, one) <= BOUND


def refused(rank: int, size: int, silent: tuple[int, ...], settings: dict[str, Any]) -> Any:
    return trainings.error_of(lambda: on_ranks(rank, size, "own loss", silent, settings, OnlyLoss))


def test_a_mean_of_nothing_is_not_sent_through_a_synchronised_layer(run_ranks):
    """Where the scores are not returned, its gradient is NaN when it comes to the layer."""
    for rank, (kind, said) in enumerate(run_ranks(2, refused, (0, 1), {})):
        what = f"in step 1 the loss of rank {rank} is a mean of nothing, whose gradient is NaN"
        assert (kind, said) == ("CheckFailed", f"--task model-loss: {what} in a synchronised layer")
    assert run_ranks(2, refused, (1,), {"batchnorm": "plain", "drop_last": True}) == [None, None]


class Far(torch.Tensor):
    """Says that it lies on a GPU, where a count is not waited for."""

    device = torch.device("cuda")


@pytest.mark.parametrize(("label", "left"), [(2, 0.0), (1, None)])
def test_a_count_on_a_gpu_is_asked_there_whether_anything_counts(label, left):
    exact = object.__new__(Exact)
    exact.task = tasks.adapt(own(trapped), "own.py:make")
    scores = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    outputs = scores * 1.0
    loss, count = trapped(outputs, torch.full((3,), label))
    with exact.backward_of(loss, {"scores": outputs}, count.as_subclass(Far)):
        loss.backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad == 0, torch.full((3, 5), left == 0.0))
