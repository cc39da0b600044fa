"""Tasks: losses as sums and counts, and one line for each mistake in a user's own."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ckpttool import metrics
from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.metrics.base import measures
from tests.ranks import trainings
from tests.support.run_log import epochs_of
from train import evaluate, main
from train.config.sections import TrainConfig
from train.tasks import builtin as tasks
from train.tasks.builtin import Task, UserTask

CLASSES = trainings.tensors((10,), 6)
SCORES = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(6)


def numbers(target: torch.Tensor) -> Any:
    return replace(CLASSES, test=TensorDataset(torch.zeros(len(target), 3), target), classes=())


def built(name: str, data: Any = CLASSES, **settings: Any) -> Task:
    return tasks.build(TrainConfig.of(task=name, **settings), data)


def measured(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Return a task's metrics after one batch."""
    found = {}
    for name, one in measures(task.metrics).items():
        found[name] = one.make()
        found[name].update(*one.arguments(outputs, (None, targets)))
    return found


# ---- classification ------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_is_the_cross_entropy_of_all_samples(smoothing):
    loss, count = built("classification", label_smoothing=smoothing).loss(SCORES, (None, LABELS))
    assert loss / count == pytest.approx(F.cross_entropy(SCORES, LABELS, label_smoothing=smoothing).item())
    assert count == 6


def test_soft_targets_are_understood_and_are_right_where_the_largest_is():
    soft = F.one_hot(LABELS, 10) * 0.7 + F.one_hot(LABELS.flip(0), 10) * 0.3
    loss, count = built("classification").loss(SCORES, (None, soft))
    both = [F.cross_entropy(SCORES, labels).item() for labels in (LABELS, LABELS.flip(0))]
    assert (loss / count).item() == pytest.approx(0.7 * both[0] + 0.3 * both[1], rel=1e-5)
    right = built("classification").correct(SCORES, (None, soft))
    assert right == (SCORES.argmax(1) == LABELS).sum()


def test_small_integers_are_labels():
    labels = LABELS.to(torch.uint8)
    assert torch.equal(*(built("classification").loss(SCORES, (None, one))[0] for one in (LABELS, labels)))


# ---- regression ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(20, 1), (20,), (20, 3), (20, 1, 2)])
def test_regression_is_the_mean_squared_error_over_all_numbers(shape):
    targets = torch.randn(shape, dtype=torch.float64)
    outputs = torch.randn_like(targets)
    found = built("regression", numbers(targets))
    loss, count = found.loss(outputs, (None, targets))
    assert count == targets.numel()
    assert loss / count == pytest.approx(F.mse_loss(outputs, targets).item())
    for name, metric in measured(found, outputs, targets).items():
        assert name in ("mae", "r2") or metric.compute() == pytest.approx(F.mse_loss(outputs, targets).item())


def test_a_target_may_lack_the_last_axis_of_length_1_and_be_an_integer():
    loss, count = built("regression", numbers(LABELS)).loss(torch.zeros(6, 1), (None, LABELS))
    assert (loss, count) == (55.0, 6)


def test_outputs_and_targets_of_other_shapes_are_not_broadcast():
    with pytest.raises(TypeError, match=r"outputs of the shape \[6, 2\] can't be compared .* \[6\]"):
        built("regression", numbers(LABELS)).loss(torch.zeros(6, 2), (None, LABELS))


def test_regression_asks_for_as_many_outputs_as_a_target_has_numbers():
    for shape, outputs in (((6, 3), 3), ((6,), 1), ((6, 2, 2), 4)):
        data = numbers(torch.zeros(shape))
        assert built("regression", data).outputs(data) == outputs


# ---- language models -----------------------------------------------------------------------------------


def test_a_language_models_loss_is_the_mean_over_the_tokens_that_count():
    scores = torch.randn(2, 5, 10, dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3, -100, -100], [9, -100, -100, -100, -100]])
    found = built("language-model")
    loss, count = found.loss(scores, (None, targets))
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert count == 4
    assert loss / count == pytest.approx(expected.item())
    made = measured(found, scores, targets)
    assert made["perplexity"].compute() == pytest.approx(expected.exp().item())
    assert made["perplexity"].counts[-1] == made["token_accuracy"].counts[-1] == 4


@pytest.mark.parametrize("token", [10, -1, -101])
def test_a_target_that_is_no_token_names_its_sample(token):
    targets = torch.tensor([[1, 2], [-100, token]])
    with pytest.raises(CheckFailed, match=rf"training sample 8 has the target {token}, .* 10 tokens"):
        built("language-model").check((None, targets), [4, 8], "training")


def test_scores_that_are_not_of_each_token_are_refused():
    with pytest.raises(TypeError, match=r"are not scores \[\.\.\., tokens\]"):
        built("language-model").loss(torch.zeros(2, 10), (None, torch.zeros(2, 5, dtype=torch.int64)))


# ---- models that return their own loss -----------------------------------------------------------------


@dataclass
class Output:
    loss: torch.Tensor
    count: int | None = None


MEAN = torch.tensor(2.5, requires_grad=True)
BOTH = torch.zeros(4, 2), torch.zeros(4)
MEANS = [MEAN, MEAN.reshape(1), {"loss": MEAN}, Output(MEAN), types.SimpleNamespace(loss=MEAN)]
MEANS += [(torch.zeros(4, 3), MEAN), (torch.zeros(1, 1), MEAN)]
COUNTED = [*((one, 4) for one in MEANS), ({"loss": MEAN, "count": 9}, 9), (Output(MEAN, 7), 7)]
NO_LOSSES = [torch.zeros(4), {"scores": MEAN}, (MEAN, MEAN), None, Output(torch.ones(2))]


@pytest.mark.parametrize(("returned", "count"), COUNTED)
def test_a_models_own_mean_loss_is_found_and_becomes_a_sum(returned, count):
    loss, found = built("model-loss").loss(returned, BOTH)
    assert (loss.item(), found, loss.dim()) == (2.5 * count, count, 0)


@pytest.mark.parametrize("returned", NO_LOSSES)
def test_a_model_that_returns_no_loss_is_refused(returned):
    with pytest.raises(TypeError, match="no loss, a tensor of one number"):
        built("model-loss").loss(returned, BOTH)


def test_a_model_that_counts_nothing_has_no_mean_loss():
    mean = torch.tensor(float("nan"), requires_grad=True)
    total, count = built("model-loss").loss(Output(mean, 0), BOTH)
    total.backward()
    assert (total.item(), count, mean.grad.item()) == (0.0, 0, 0.0)


def test_a_users_task_may_say_how_many_outputs_it_needs():
    made = types.SimpleNamespace(loss=lambda outputs, batch: (outputs.sum(), 1), outputs=lambda data: 7)
    assert UserTask(made, "own").outputs(CLASSES) == 7
    del made.outputs
    assert UserTask(made, "own").outputs(CLASSES) == len(CLASSES.classes)


def test_the_whole_batch_goes_to_a_model_that_returns_its_loss():
    found = built("model-loss")
    assert found.forward(lambda *parts: parts, (1, 2)) == (1, 2)
    assert found.forward(lambda **parts: parts, {"x": 1, "y": 2}) == {"x": 1, "y": 2}
    assert found.forward(lambda one: one, 3) == 3


# ---- batches of any structure --------------------------------------------------------------------------


def test_a_model_gets_inputs_keyword_arguments_or_the_batch_itself():
    plain = Task()
    assert plain.forward(lambda *parts: parts, ("x", "y")) == ("x",)
    assert plain.forward(lambda *parts: parts, ["x", "mask", "y"]) == ("x", "mask")
    assert plain.forward(lambda **parts: parts, {"x": 1}) == {"x": 1}
    assert plain.forward(lambda one: one, "x") == "x"


def test_nested_batches_are_moved_and_counted():
    batch = {"pair": (torch.zeros(5, 2), [torch.zeros(5)]), "names": ["a"] * 5, "size": 3}
    moved = Task().batch_to(batch, torch.device("meta"))
    assert moved["pair"][0].device.type == moved["pair"][1][0].device.type == "meta"
    assert (moved["names"], moved["size"], type(moved["pair"])) == (batch["names"], 3, tuple)
    assert Task().sample_count(batch) == 5
    assert Task().sample_count(torch.zeros(4)) == 4


# ---- a user's own --------------------------------------------------------------------------------------


class Absolute:
    metrics = {"mae": metrics.MeanAbsoluteError}  # noqa: RUF012

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.l1_loss(outputs, batch[1], reduction="sum"), len(batch[1])


class OfModule(Absolute, nn.Module):
    pass


class Subclass(Task):
    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return Absolute().loss(outputs, batch)


def module() -> types.ModuleType:
    made = types.ModuleType("made")
    made.loss, made.metrics = Absolute().loss, lambda: Absolute.metrics  # type: ignore[attr-defined]
    return made


NAMESPACE = types.SimpleNamespace(loss=Absolute().loss, metrics=Absolute.metrics)


@pytest.mark.parametrize("made", [Absolute(), Absolute, OfModule(), Subclass(), module(), NAMESPACE])
def test_an_instance_a_class_a_module_and_a_namespace_are_tasks(made):
    found = tasks.adapt(made, "own.py:make")
    batch = (torch.zeros(3, 2), torch.ones(3, 1))
    loss, count = found.loss(found.forward(nn.Linear(2, 1), batch), batch)
    assert (count, loss.dim()) == (3, 0)
    assert found.sample_count(batch) == 3


ONE = torch.tensor(1.0)
NO_PAIRS = [
    (ONE, r"a tensor of float32 with the shape \[\], not \(sum, count\)"),
    (None, "None, not"),
    ((ONE, 1, 2), "a tuple of 3, not"),
    ((1.0, 3), "a float as its sum"),
    ((torch.ones(3), 3), r"with the shape \[3\] as its sum"),
    ((torch.tensor(3), 3), "a tensor of int64 with the shape .* as its sum"),
]
NO_COUNTS = [
    (float("nan"), "a count of nan"),
    (True, "a bool as its count"),
    (torch.tensor(float("nan")), "a count of nan"),
    (math.inf, "a count of inf"),
    (10**400, "a count of 1000"),
    (-0.5, "a count of -0.5"),
    (torch.tensor(3j), "a tensor of complex64 with the shape .* as its count"),
    (torch.tensor([1, 2]), r"with the shape \[2\] as its count"),
    (-1, "a count of -1"),
    (torch.tensor(-2), "a count of -2"),
    (0, "a count of 0 for a sum of 1"),
]


@pytest.mark.parametrize(("returned", "said"), [*NO_PAIRS, *(((ONE, one), said) for one, said in NO_COUNTS)])
def test_a_loss_that_is_no_sum_and_count_says_what_to_return(returned, said):
    found = tasks.adapt(types.SimpleNamespace(loss=lambda outputs, batch: returned), "own.py:make")
    with pytest.raises(UsageFault, match=said) as fault:
        found.loss(None, None)
    assert str(fault.value).startswith("--task own.py:make: loss returned ")
    assert fault.value.hint.startswith("return (sum, count)")


COUNTS = [0, torch.tensor(0), torch.tensor([4]), 4, 0.0, 2.5, torch.tensor(0.1), numpy.float32(0.1)]


@pytest.mark.parametrize("count", COUNTS)
def test_honest_counts_are_taken(count):
    made = types.SimpleNamespace(loss=lambda outputs, batch: (ONE * 0, count))
    assert float(tasks.adapt(made, "own").loss(None, None)[1]) == float(count)


def test_weighted_classes_give_the_loss_that_torch_gives():
    weights = (0.5, 2.0, 0.0, 1.0, 0.1, 3.0, 1.0, 1.0, 1.0, 1.0)
    found = built("classification", class_weights=weights, label_smoothing=0.1)
    loss, count = found.loss(SCORES, (None, LABELS))
    expected = F.cross_entropy(SCORES, LABELS, torch.tensor(weights), label_smoothing=0.1)
    assert (loss / count).item() == pytest.approx(expected.item())
    assert not found.counts_samples


UNWEIGHTED = [((1.0, 2.0), "2 numbers for 10 classes"), ((0.0,) * 10, "all are 0")]
UNWEIGHTED += [((1.0,) * 9 + (-2.0,), "-2 is not a weight")]


@pytest.mark.parametrize(("weights", "said"), UNWEIGHTED)
def test_weights_that_do_not_fit_are_refused(weights, said):
    with pytest.raises(UsageFault, match=f"--class-weights: {said}"):
        built("classification", class_weights=weights)


# ---- through the programs ------------------------------------------------------------------------------

OWN = """
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ckpttool import metrics

def pairs(inputs):
    return TensorDataset(inputs, inputs[:, :1])

def empty_first():
    inputs = torch.randn(16, 3)
    inputs[:3] = 0
    return pairs(inputs), pairs(inputs)

class Made(Dataset):
    def __init__(self, make):
        self.make = make
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return self.make(torch.full((3,), index / 16), index)

sound = Made(lambda x, _: {"x": x, "extra": {"sign": (torch.tensor(1.0), [x * 2])}, "y": x.sum()})
data = lambda: (pairs(torch.randn(16, 3)), pairs(torch.randn(8, 3)))
named = lambda: (sound, sound)
ragged = lambda: (Made(lambda _, index: {"x": torch.zeros(3 + (index == 15)), "y": 1.0}), sound)
lost = lambda: (Made(lambda x, _: {"x": x, "y": None}), sound)

class Keywords(nn.Linear):
    def forward(self, x, extra, y):
        return super().forward(x) * extra["sign"][0].unsqueeze(1)

class Itself(nn.Linear):
    def forward(self, x, y):
        return {"loss": F.mse_loss(super().forward(x), y)}

net = lambda: nn.Linear(3, 1)
keywords = lambda: Keywords(3, 1)
itself = lambda: Itself(3, 1)

def absolute(outputs, batch):
    y = batch["y"].unsqueeze(1) if isinstance(batch, dict) else batch[1]
    return F.l1_loss(outputs, y, reduction="sum"), len(y)

fine = lambda: SimpleNamespace(loss=absolute, metrics={})
measured = lambda: SimpleNamespace(loss=absolute, metrics={"mae": metrics.MeanAbsoluteError})
by_module = lambda: sys.modules[__name__]
loss = absolute

def returns(loss):
    return lambda: SimpleNamespace(loss=loss)

mean = returns(lambda outputs, batch: absolute(outputs, batch)[0] / len(batch[1]))
mean_and_count = returns(lambda outputs, batch: (F.l1_loss(outputs, batch[1]), len(batch[1])))
mean_and_one = returns(lambda outputs, batch: (F.l1_loss(outputs, batch[1]), 1))
sum_and_one = returns(lambda outputs, batch: (absolute(outputs, batch)[0], 1.0))
without_gradient = returns(lambda outputs, batch: (absolute(outputs, batch)[0].detach(), len(batch[1])))
broken = returns(lambda outputs, batch: (outputs.nonsense, 1))

def of_later_samples():  # a mean, in which the first sample has nothing that counts
    def loss(outputs, batch):
        counted = batch[0][:, 0] != 0
        errors = (outputs - batch[1]).abs()[counted]
        return (errors.mean() if len(errors) else outputs.sum() * 0), len(errors)
    return SimpleNamespace(loss=loss)

def weighted():
    def loss(outputs, batch):
        weights = batch[0][:, :1].abs()
        return (weights * (outputs - batch[1]).abs()).sum(), weights.sum()
    return SimpleNamespace(loss=loss)

nothing = lambda: SimpleNamespace()
function = lambda: absolute
other_metrics = lambda: SimpleNamespace(loss=absolute, metrics={"f1": lambda: 0.5})
second_loss = lambda: SimpleNamespace(loss=absolute, metrics={"loss": metrics.MeanAbsoluteError})
wrong_metric = lambda: SimpleNamespace(loss=absolute, metrics={"right": metrics.Accuracy})

def raising():
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def run(tmp_path: Path, own: str, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """`run(task, *flags)`: the exit code, the output and the errors of a short training."""

    def start(name: str, *flags: str) -> tuple[int, str, str]:
        capsys.readouterr()
        usual = ["--data", f"{own}:data", "--model", f"{own}:net", "--epochs", "1", "--batch-size", "8"]
        name = f"{own}:{name}" if name not in tasks.TASKS else name
        code = main.main([*usual, "--task", name, "--out", str(tmp_path / "run"), "--force", *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return start


GOOD = [
    ("regression", "", "mse"),
    ("fine", "", ""),
    ("measured", "", "mae"),
    ("weighted", "", ""),
    ("by_module", "", ""),
    ("fine", "--data {own}:named --model {own}:keywords", ""),
    ("model-loss", "--model {own}:itself", ""),
]


@pytest.mark.covered(lambda name, flags, shown: name in ("fine", "weighted"))
@pytest.mark.parametrize(("name", "flags", "shown"), GOOD)
def test_a_task_is_trained_logged_and_evaluated(run, own, tmp_path, capsys, name, flags, shown):
    given = flags.format(own=own).split()
    code, said, errors = run(name, *given)
    assert (code, errors) == (0, "")
    assert shown in said
    task = name if name in tasks.TASKS else f"{own}:{name}"
    usual = ["--model", f"{own}:net", "--data", f"{own}:data", "--task", task]
    assert evaluate.main([str(tmp_path / "run/last.pt"), *usual, *given, "--json"]) == 0

    found, logged = json.loads(capsys.readouterr().out), epochs_of(tmp_path / "run")[-1]
    same = ("loss", "samples", "count", "metrics", "batch_size")
    assert [found[one] for one in same] == [logged[one] for one in same]
    assert "accuracy" not in logged


WRONG = {
    "mean": "not (sum, count)",
    "mean_and_count": "for one sample and for two copies of it",
    "mean_and_one": "with counts of 1 and 1: a mean, not a sum",
    "sum_and_one": "a count of 1 for one sample and for two copies of it",
    "nothing": "a SimpleNamespace has no method loss",
    "function": "a function has no method loss",
    "without_gradient": "does not depend on the model's parameters",
    "broken": "AttributeError: 'Tensor' object has no attribute 'nonsense' (at ",
    "other_metrics": "metrics['f1'] makes a float, not a metric of ckpttool.metrics",
    "second_loss": "a metric is named 'loss', as a part of each score is",
    "wrong_metric": "metric 'right': TypeError",
    "raising": "RuntimeError: no such thing",
    "absent": "has no factory 'absent'",
}
UNFIT = {
    "--task no-such": "--task no-such: no such task (one of classification, regression",
    "--label-smoothing 0.1": "--label-smoothing: --task regression has no labels",
    "--data {own}:empty_first --task {own}:of_later_samples": "counts of 1 and 2: a mean",
    "--class-weights 1,2": "--class-weights: --task regression has no labels",
    "--model simple-cnn": "takes images",
    "--task classification": "not a class number",
    "--task model-loss": "does not take the 3 samples",
    "--task language-model": "--task language-model: ",
    "--data {own}:ragged": "training sample 15['x'] has the shape 4, and sample 0 has 3",
    "--data {own}:lost": "training sample 0 holds None, which can't be put into a batch",
    "--data {own}:named": "does not take the 3 samples",
}


@pytest.mark.parametrize("what", [*WRONG, *UNFIT])
def test_a_wrong_task_or_what_does_not_fit_it_is_one_line_before_any_process_group(
    run, own, monkeypatch, what
):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("started"))
    name, flags = (what, "") if what in WRONG else ("regression", what.format(own=own))
    code, _, errors = run(name, *flags.split())
    assert (code, errors.count("\n")) == (2, 1), errors
    assert {**WRONG, **UNFIT}[what] in errors
    assert own in errors or what in UNFIT
