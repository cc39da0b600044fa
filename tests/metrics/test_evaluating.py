"""Evaluation of any model from a person's own loop: the same bits on any number of ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ckpttool import metrics
from ckpttool.errors import CheckFailed
from ckpttool.metrics.base import measures
from tests.support.running import ROOT, error_of

SAMPLES = 301


def numbers(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(samples, 10, generator=generator)
    noise = torch.randn(samples, 1, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True) + noise)


def linear(outputs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, outputs), nn.Dropout(0.5))


def squares(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.mse_loss(outputs, batch[1], reduction="sum"), batch[1].numel()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The number of threads that the ranks have: it changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def score(rank: int, world_size: int, samples: int, batch_size: int) -> Any:
    chosen = {"mae": metrics.MeanAbsoluteError, "r2": metrics.R2(), "values": (metrics.MeanVariance, first)}
    found = metrics.evaluate(linear(), numbers(samples), squares, chosen, batch_size=batch_size)
    return found.statement()


def first(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor]:
    return (batch[0],)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("samples", "batch_size"), [(SAMPLES, 32), (1, 128), (0, 128), (64, 32)])
def test_loss_and_metrics_have_the_same_bits_on_any_ranks(run_ranks, one_thread, samples, batch_size, size):
    alone = score(0, 1, samples, batch_size)
    assert (alone["samples"], alone["count"], alone["every_sample_once"]) == (samples, samples, True)
    assert alone["batch_size"] == batch_size
    apart = {"ranks": 0, "rank_samples": 0}
    for answer in run_ranks(size, score, samples, batch_size):
        assert sum(answer["rank_samples"]) == samples
        assert json.dumps(answer | apart) == json.dumps(alone | apart)


def test_loss_and_metrics_are_those_of_plain_pytorch_in_eval_mode():
    model, (features, targets) = linear(), numbers().tensors
    model.train()
    found = metrics.evaluate(model, numbers(), squares, {"mae": metrics.MeanAbsoluteError})
    assert model.training
    with torch.no_grad():
        outputs = model.eval()(features)
    assert found.loss == pytest.approx(F.mse_loss(outputs, targets).item(), rel=1e-6)
    assert found.metrics["mae"] == pytest.approx(F.l1_loss(outputs, targets).item(), rel=1e-6)


def test_a_loss_over_tokens_is_the_mean_over_all_tokens_of_all_batches():
    rows = TensorDataset(torch.arange(5.0).unsqueeze(1))

    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = batch[0].long()  # sample i has i tokens, each with the loss 3
        return 3.0 * tokens.sum(), tokens.sum()

    found = metrics.evaluate(nn.Identity(), rows, loss, batch_size=2)
    assert (found.loss, found.count, found.samples) == (3.0, 10, 5)


def test_nothing_counted_is_a_loss_of_nan_and_null_in_json():
    found = metrics.evaluate(linear(), numbers(3), lambda outputs, batch: (outputs.sum() * 0, 0))
    assert math.isnan(found.loss)
    assert found.score()["loss"] is None


def classify(rank: int, world_size: int) -> Any:
    features = numbers().tensors[0]
    labelled = TensorDataset(features, torch.arange(SAMPLES) % 3)
    found = metrics.evaluate_classes(linear(3), labelled, ["cat", "dog", "eel"], batch_size=64)
    return found.score() | {"ranks": 0}


def test_classes_are_counted_alike_on_any_number_of_ranks(run_ranks, one_thread):
    alone = classify(0, 1)
    assert [one["class"] for one in alone["per_class"]] == ["cat", "dog", "eel"]
    assert alone["samples"] == SAMPLES
    assert run_ranks(3, classify) == [alone] * 3


def test_a_label_beyond_the_classes_names_its_sample():
    labelled = TensorDataset(torch.zeros(3, 10), torch.tensor([0, 1, 2]))
    with pytest.raises(CheckFailed, match="sample 2 has the label 2, none of the 2 classes"):
        metrics.evaluate_classes(linear(3), labelled, ["cat", "dog"])


class Named(Dataset[Any]):
    """Samples that are mappings, with a tuple in them."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pair": (torch.full((2,), float(index)), index), "name": f"sample {index}"}


def test_a_count_may_be_a_sum_of_weights() -> None:
    """64 samples in batches of 32: 3 / 5 is no mean of the batches' means, and 2.5 is not cut to 2."""
    counts = iter([2.5, torch.tensor(0.5)])
    sums = iter([1.0, 0.8])
    result = metrics.evaluate(linear(), numbers(64), lambda *_: (next(sums), next(counts)), batch_size=32)
    assert (result.count, result.loss) == (3, pytest.approx(0.6, rel=1e-15))


@pytest.mark.parametrize("count", [math.nan, math.inf, -1, -0.5])
def test_a_count_that_is_none_is_refused(count: float) -> None:
    with pytest.raises(CheckFailed, match=f"loss returned a count of {count:g}"):
        metrics.evaluate(linear(), numbers(), lambda *_: (1.0, count))


def test_samples_may_be_nested():
    seen: list[str] = []

    def loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
        seen.extend(batch["name"])
        return outputs.sum(), len(batch["name"])

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch["pair"][0])

    found = metrics.evaluate(nn.Identity(), Named(), loss, forward=forward, batch_size=3)
    assert seen == [f"sample {index}" for index in range(7)]
    assert (found.loss, found.samples) == (6.0, 7)


def test_an_evaluation_draws_nothing_from_the_global_random_state():
    before = torch.get_rng_state()
    model = linear()
    torch.set_rng_state(before)
    metrics.evaluate(model, numbers(), squares)
    assert torch.equal(torch.get_rng_state(), before)


def fail_on_one(rank: int, world_size: int) -> tuple[str, str]:
    def loss(outputs: Any, batch: Any) -> Any:
        if rank == 1:
            raise ValueError("on purpose")
        return squares(outputs, batch)

    return error_of(lambda: metrics.evaluate(linear(), numbers(), loss, batch_size=16))


def test_a_loss_that_fails_on_one_rank_ends_all_ranks(run_ranks):
    other, own = run_ranks(2, fail_on_one)
    assert own == ("ValueError", "on purpose")
    assert other == ("RankFailed", "rank 1 failed: ValueError: on purpose")


def test_an_evaluation_leaves_frozen_layers_frozen_and_the_others_training():
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 1), nn.Dropout(0.5))
    model[0].eval()
    metrics.evaluate(model, numbers(), squares)
    assert [module.training for module in model.modules()] == [True, False, True, True]


class Caching(nn.Module):
    """Keeps a tensor for each size of batch that it has met, as positions and masks are often kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(10, 1), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.ones(len(x), 1)
        return self.linear(x) * self.kept[len(x)]


def test_a_model_that_keeps_tensors_of_an_evaluation_still_trains():
    model = Caching()
    metrics.evaluate(model, numbers(8), squares, batch_size=8)
    squares(model(numbers(8).tensors[0]), numbers(8).tensors)[0].backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([metrics.Accuracy], "metrics is a list, not a mapping"),
        ({"f1": lambda: 0.5}, r"metrics\['f1'\] makes a float, not a metric of ckpttool.metrics"),
        ({"f1": "accuracy"}, r"metrics\['f1'\] makes a str"),
        ({"mae": (metrics.MeanAbsoluteError, 3)}, "the second of a pair is a function"),
    ],
)
def test_what_is_no_metric_is_refused(given, said):
    with pytest.raises(TypeError, match=said):
        measures(given)


def test_a_metric_that_does_not_take_the_outputs_is_named():
    with pytest.raises(CheckFailed, match="metric 'right': TypeError: classes are integers") as fault:
        metrics.evaluate(linear(), numbers(), squares, {"right": metrics.Accuracy})
    assert "a pair of the metric and a function" in fault.value.hint


def test_a_metric_given_as_an_object_is_left_as_it_is():
    metric = metrics.MeanAbsoluteError()
    for _ in range(2):
        metrics.evaluate(linear(), numbers(5), squares, {"mae": metric})
    assert metric.counts[0] == 0


def test_a_loss_that_is_no_pair_is_refused():
    with pytest.raises(TypeError, match=r"loss returned a Tensor, not \(sum, count\)"):
        metrics.evaluate(linear(), numbers(5), lambda outputs, batch: outputs.mean())


def test_the_program_for_your_own_loop_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.partition("## A model in your own loop")[2]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    given = {"F": F, "model": linear(), "test_set": numbers(9), "device": "cpu", "rank": 0}
    exec("import json\nfrom pathlib import Path\n" + program, given)
    assert json.loads((tmp_path / "eval.json").read_text())["samples"] == 9
    assert capsys.readouterr().out.endswith(" 9\n")
