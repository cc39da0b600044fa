"""Exact metrics equal scikit-learn's, with the same bits for any division of the samples, in any loop."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ckpttool import metrics
from ckpttool.errors import CheckFailed, install
from ckpttool.metrics.base import PIECE, ExactSum, measures
from tests.support.running import ROOT, error_of

# Only the tests that need scikit-learn import it: the ranks import this file too.

SAMPLES, CLASSES = 500, 7
RANDOM = np.random.default_rng(3)
LABELS = RANDOM.integers(CLASSES - 1, size=SAMPLES)  # the last class has no sample
SCORES = RANDOM.normal(size=(SAMPLES, CLASSES)).astype(np.float32)
SCORES[np.arange(SAMPLES), LABELS] += 0.8
PREDICTIONS = SCORES.argmax(axis=1)
BINARY = (LABELS > 2).astype(np.int64)
COARSE = np.round(SCORES[:, 0], 1).astype(np.float64)  # with many ties
CONFIDENCES = RANDOM.random(SAMPLES).astype(np.float32)
LOSSES = RANDOM.normal(size=SAMPLES) * 10.0 ** RANDOM.integers(-20, 20, size=SAMPLES)
TARGETS = RANDOM.normal(size=(SAMPLES, 3)) * (1.0, 10.0, 0.1) + (0.0, 1e6, 0.0)
FOUND = TARGETS + RANDOM.normal(size=(SAMPLES, 3)) / 4
TOKENS = RANDOM.integers(1000, size=SAMPLES)

CASES: dict[str, tuple[Callable[[], metrics.Metric[Any]], tuple[np.ndarray, ...]]] = {
    "Count": (metrics.Count, (LABELS,)),
    "Loss": (metrics.Loss, (LOSSES,)),
    "Accuracy": (metrics.Accuracy, (SCORES, LABELS)),
    "TopK": (lambda: metrics.TopK(3), (SCORES, LABELS)),
    "ConfusionMatrix": (lambda: metrics.ConfusionMatrix(CLASSES), (PREDICTIONS, LABELS)),
    "PerClass": (lambda: metrics.PerClass(CLASSES), (PREDICTIONS, LABELS)),
    "MeanVariance": (metrics.MeanVariance, (LOSSES,)),
    "MeanSquaredError": (metrics.MeanSquaredError, (FOUND, TARGETS)),
    "MeanAbsoluteError": (metrics.MeanAbsoluteError, (FOUND, TARGETS)),
    "R2": (lambda: metrics.R2(3), (FOUND, TARGETS)),
    "Perplexity": (metrics.Perplexity, (TOKENS * CONFIDENCES, TOKENS)),
    "AUROC": (metrics.AUROC, (COARSE, BINARY)),
    "CalibrationError": (metrics.CalibrationError, (CONFIDENCES, BINARY)),
}


def updated(name: str, rows: Any = slice(None), *, convert: Any = np.asarray) -> metrics.Metric[Any]:
    make, columns = CASES[name]
    metric = make()
    metric.update(*(convert(column[rows]) for column in columns))
    return metric


def after(metric: metrics.Metric[Any], *columns: Any) -> Any:
    """Return the value of a metric after one update."""
    metric.update(*columns)
    return metric.compute()


def plain(value: Any) -> Any:
    """Return a metric's value as text that is equal exactly if the bits are, NaN included."""
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)


# ---- against scikit-learn ------------------------------------------------------------------------------


def test_accuracy_and_top_k_equal_those_of_scikit_learn():
    from sklearn import metrics as sk

    assert updated("Accuracy").compute() == sk.accuracy_score(LABELS, PREDICTIONS)
    assert updated("TopK").compute() == sk.top_k_accuracy_score(LABELS, SCORES, k=3, labels=range(CLASSES))


def test_the_confusion_matrix_equals_that_of_scikit_learn():
    from sklearn import metrics as sk

    expected = sk.confusion_matrix(LABELS, PREDICTIONS, labels=range(CLASSES))
    assert (updated("ConfusionMatrix").compute() == expected).all()


def test_precision_recall_and_f1_equal_those_of_scikit_learn():
    from sklearn import metrics as sk

    given = {"labels": range(CLASSES), "zero_division": np.nan}
    expected = sk.precision_recall_fscore_support(LABELS, PREDICTIONS, **given)
    found = updated("PerClass").compute()
    for values, name in zip(expected, ("precision", "recall", "f1", "samples"), strict=True):
        assert [getattr(one, name) for one in found] == pytest.approx(list(values), rel=1e-15, nan_ok=True)
    assert math.isnan(found[-1].recall)


def test_the_area_under_the_curve_equals_that_of_scikit_learn_with_ties():
    from sklearn import metrics as sk

    assert updated("AUROC").compute() == pytest.approx(sk.roc_auc_score(BINARY, COARSE), rel=1e-14)


def test_the_calibration_error_equals_that_of_scikit_learns_curve():
    from sklearn.calibration import calibration_curve

    right, confident = calibration_curve(BINARY, CONFIDENCES, n_bins=15, strategy="uniform")
    sizes = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], CONFIDENCES), minlength=15)
    expected = (np.abs(right - confident) * sizes[sizes > 0]).sum() / SAMPLES
    assert updated("CalibrationError").compute() == pytest.approx(expected, rel=1e-7)


def test_errors_and_r2_equal_those_of_scikit_learn():
    from sklearn import metrics as sk

    errors = {"MeanSquaredError": sk.mean_squared_error, "MeanAbsoluteError": sk.mean_absolute_error}
    for name, function in {**errors, "R2": sk.r2_score}.items():
        assert updated(name).compute() == pytest.approx(function(TARGETS, FOUND), rel=1e-13), name
    single = metrics.R2()
    single.update(FOUND[:, 0], TARGETS[:, 0])
    single.update(FOUND[:9, :1], TARGETS[:9, :1])
    both = [np.concatenate([each[:, 0], each[:9, 0]]) for each in (TARGETS, FOUND)]
    assert single.compute() == pytest.approx(sk.r2_score(*both), rel=1e-13)


def test_r2_beside_a_large_mean_is_right_and_of_equal_targets_or_what_is_not_finite_nan():
    targets = 1e9 + np.arange(4.0)
    assert after(metrics.R2(), targets + 0.5, targets) == 1 - 1 / 5
    for found, wanted in (([1.0, 2.0], [3.0, 3.0]), ([math.inf, 0.0], [1.0, 2.0]), ([], [])):
        assert math.isnan(after(metrics.R2(), found, wanted))


def test_perplexity_is_that_of_torchs_cross_entropy():
    scores, labels = torch.from_numpy(SCORES).double(), torch.from_numpy(LABELS)
    losses = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
    expected = torch.nn.functional.cross_entropy(scores, labels).exp().item()
    tokens, sums = metrics.Perplexity(), metrics.Perplexity()
    tokens.update(losses)
    sums.update([losses[:100].sum().item(), 0.0, losses[100:].sum().item()], [100, 0, SAMPLES - 100])
    assert tokens.compute() == pytest.approx(expected, rel=1e-13)
    assert sums.compute() == pytest.approx(expected, rel=1e-13)
    assert after(metrics.Perplexity(), [1e6]) == math.inf  # beyond float64


def test_loss_mean_and_variance_are_exact_and_rounded_once():
    mean = sum(map(Fraction, LOSSES.tolist())) / SAMPLES
    assert updated("Loss").compute() == float(mean)
    found = updated("MeanVariance").compute()
    assert (found.count, found.mean) == (SAMPLES, float(mean))
    assert found.variance == float(statistics.pvariance(map(Fraction, LOSSES.tolist())))


def test_a_variance_beside_a_large_mean_is_right():
    found = after(metrics.MeanVariance(), np.array([1e9 + 1, 1e9 + 2, 1e9 + 3]) * 1e7)
    assert found.variance == pytest.approx(2 / 3 * 1e14, rel=1e-15)


# ---- any division --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_any_division_and_order_of_samples_gives_the_same_bits(name):
    whole = plain(updated(name).compute())
    for seed in range(5):
        random = np.random.default_rng(seed)
        order = random.permutation(SAMPLES)
        parts = np.split(order, np.sort(random.integers(SAMPLES, size=4)))
        merged = CASES[name][0]()
        for part in [*parts, order[:0]]:
            merged.merge(updated(name, part))
        assert plain(merged.compute()) == whole
        batches = CASES[name][0]()
        for part in parts:
            batches.update(*(column[part] for column in CASES[name][1]))
        assert plain(batches.compute()) == whole


def reduce_all(rank: int, world_size: int) -> list[str]:
    shares = np.split(np.arange(SAMPLES), [100, 100] if world_size == 3 else [400])
    found = []
    for name in CASES:
        own = updated(name, shares[rank])
        before = plain(own.compute())
        found.append(plain(metrics.reduce(own).compute()))
        assert plain(own.compute()) == before
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_gives_the_same_bits(run_ranks, size):
    expected = [plain(updated(name).compute()) for name in CASES]
    assert run_ranks(size, reduce_all, timeout=200) == [expected] * size


def test_in_one_process_reduce_changes_nothing():
    assert metrics.reduce(updated("Loss")).compute() == updated("Loss").compute()


def reduce_different(rank: int, world_size: int) -> str:
    return error_of(lambda: metrics.reduce(metrics.TopK(1 + rank)))[0]


def test_ranks_that_reduce_different_metrics_are_refused(run_ranks):
    assert run_ranks(2, reduce_different, timeout=200) == ["RanksDiffer"] * 2


# ---- what goes in --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_torch_tensors_give_the_same_as_arrays_and_no_samples_change_nothing(name):
    assert plain(updated(name, convert=torch.from_numpy).compute()) == plain(updated(name).compute())
    assert plain(updated(name, slice(0)).compute()) == plain(CASES[name][0]().compute())


def test_bfloat16_and_tensors_that_require_a_gradient_are_accepted():
    losses = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    assert after(metrics.Loss(), losses) == 1.0


def test_equal_scores_rank_as_in_argmax_and_nan_ranks_first():
    scores = np.array([[1.0, 1.0], [1.0, 1.0], [math.nan, 2.0], [math.nan, 2.0]])
    for labels, expected in (([0, 1, 0, 1], 0.5), ([0, 0, 0, 0], 1.0)):
        for metric in (metrics.TopK(1), metrics.Accuracy()):
            assert after(metric, scores, np.array(labels)) == expected


def test_lists_are_accepted_and_empty_ones_too():
    accuracy = metrics.Accuracy()
    accuracy.update([1, 0], [1, 1])
    assert (after(accuracy, [], []), after(metrics.TopK(1), [[0.1, 0.9]], [1])) == (0.5, 1.0)


def test_large_integers_that_float64_holds_are_summed_exactly():
    assert after(metrics.Loss(), np.array([2**62, -(2**62), 3])) == 1.0


def test_zero_and_minus_zero_are_one_score():
    assert after(metrics.AUROC(), np.array([0.0, -0.0]), np.array([1, 0])) == 0.5


def test_a_predicted_class_out_of_range_is_wrong_and_counts_for_no_class():
    found = after(metrics.PerClass(2), np.array([0, 5, -1]), np.array([0, 1, 1]))
    assert [(one.correct, one.predicted, one.samples) for one in found] == [(1, 1, 1), (0, 0, 2)]


@pytest.mark.parametrize(("update", "said"), [
    (lambda: metrics.Loss().update(torch.tensor(0.3)), "one number per sample"),
    (lambda: metrics.Loss().update(torch.zeros(1, dtype=torch.complex64)), "complex"),
    (lambda: metrics.Accuracy().update(np.zeros(3), np.zeros(3, int)), "integers"),
    (lambda: metrics.Accuracy().update(np.zeros((3, 2), complex), np.zeros(3, int)), "expected scores"),
    (lambda: metrics.Accuracy().update([2**63], [0]), "9223372036854775808"),
    (lambda: metrics.Loss().update(np.array([2**53 + 1])), "would be rounded"),
    (lambda: metrics.Loss().update(np.array([2**63 - 1])), "would be rounded"),
    (lambda: metrics.Loss().update(np.array([1], "longdouble") + 2.0**-60), "would be rounded"),
    (lambda: metrics.Loss().update(np.ma.array([1.0, 2.0], mask=[True, False])), "masked"),
    (lambda: metrics.TopK(0), "at least 1"),
    (lambda: metrics.CalibrationError(0), "at least 1"),
    (lambda: metrics.Accuracy().update(np.zeros(3, int), np.zeros(2, int)), "3 samples on one side, 2"),
    (lambda: metrics.ConfusionMatrix(2).update(np.array([2]), np.array([0])), "2 classes"),
    (lambda: metrics.PerClass(2).update(np.array([0]), np.array([-1])), "one of these is -1"),
    (lambda: metrics.TopK(1).update(np.zeros((1, 3)), np.array([3])), "3 classes"),
    (lambda: metrics.AUROC().update(np.array([math.nan]), np.array([1])), "NaN"),
    (lambda: metrics.MeanSquaredError().update(np.zeros((3, 1)), np.zeros(3)), "shape \\(3, 1\\)"),
    (lambda: metrics.MeanAbsoluteError().update(np.zeros(1), 0.0), "targets \\(\\)"),
    (lambda: metrics.R2().update(np.zeros((3, 2)), np.zeros((3, 2))), "needs 1 per sample"),
    (lambda: metrics.R2().update(0.0, 0.0), "needs 1 per sample"),
    (lambda: metrics.R2(0), "at least 1"),
    (lambda: metrics.Perplexity().update([1.0], [-1]), "a count is -1"),
    (lambda: metrics.Perplexity().update([1.0], [1.0]), "integers"),
    (lambda: metrics.Perplexity().update([1.0, 2.0], [1]), "2 samples on one side, 1"),
    (lambda: metrics.CalibrationError().update(np.array([1.5]), np.array([True])), "between 0 and 1"),
    (lambda: metrics.TopK(1).merge(metrics.TopK(2)), "TopK\\(1\\) can't be merged with TopK\\(2\\)"),
    (lambda: metrics.Count().merge(metrics.Loss()), "can't be merged"),
])  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(update, said):
    with pytest.raises((TypeError, ValueError), match=said):
        update()


# ---- what needs numpy alone: exact sums, and all else where torch is absent ----------------------------


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MOST = 1.7976931348623157e308
EXTREMES = [0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, MOST, -MOST]


def total_of(*parts: list[float]) -> ExactSum:
    whole = ExactSum()
    for part in parts:
        one = ExactSum()
        one.add(np.array(part, dtype=np.float64))
        whole.merge(one)
    return whole


@given(st.lists(FLOATS | st.sampled_from(EXTREMES), max_size=40))
def test_the_sum_and_the_sum_of_squares_are_exact(values):
    assert total_of(values).fraction == sum(map(Fraction, values), Fraction())
    squares = ExactSum()
    squares.add_squares(np.array(values, dtype=np.float64))
    assert squares.fraction == sum((Fraction(value) ** 2 for value in values), Fraction())


@given(st.lists(FLOATS, max_size=30), st.integers(0, 30), st.randoms())
def test_order_and_division_do_not_matter(values, cut, random):
    shuffled = [*values]
    random.shuffle(shuffled)
    assert total_of(shuffled[:cut], [], shuffled[cut:]).units == total_of(values).units


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40))
def test_the_value_is_rounded_once_as_fsum_does(values):
    assert total_of(values).value == math.fsum(values)


def test_a_sum_of_more_numbers_than_one_piece_is_exact():
    values = np.full(PIECE + 3, -0.1)
    values[0], values[-1] = 1e17, -1e17
    found = ExactSum()
    found.add(values)
    assert found.value == math.fsum(values)
    assert found.value != values.sum()


@given(st.lists(FLOATS | st.sampled_from(EXTREMES), max_size=20))
def test_a_packed_sum_is_unpacked_from_its_own_numbers_only(values):
    one = total_of(values)
    packed = iter([*one.pack(), 7])
    found = ExactSum.unpack(packed)
    assert (found.units, next(packed)) == (one.units, 7)
    assert all(-(2**63) <= number < 2**63 for number in one.pack())


BEYOND = [([1.0, math.inf], math.inf), ([1.0, -math.inf], -math.inf), ([math.inf, -math.inf], math.nan)]
BEYOND += [([1.0, math.nan], math.nan), ([MOST] * 2, math.inf), ([-MOST] * 2, -math.inf)]


@pytest.mark.parametrize(("values", "expected"), BEYOND)
def test_infinities_nan_and_overflow_behave_as_in_float64(values, expected):
    found = total_of(values[:1], values[1:])
    assert ExactSum.unpack(found.pack()).value == pytest.approx(expected, nan_ok=True)
    assert total_of([MOST] * 2).over(2) == MOST


def test_a_mean_of_nothing_is_nan():
    assert math.isnan(ExactSum().over(0))


# Where torch is absent.

PROGRAM = """
import json, sys
from ckpttool import batchnorm, distributed, metrics
assert not {"numpy", "torch"} & set(sys.modules), "importing the packages is to import neither"
import numpy as np

scores, labels = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), np.array([1, 0, 0])
found = {}
for name, columns in {
    "Accuracy": (scores, labels), "Loss": (scores[:, 0],), "AUROC": (scores[:, 1], labels),
    "CalibrationError": (scores[:, 1], labels), "Count": (labels,), "MeanVariance": (scores,),
}.items():
    metric, other = getattr(metrics, name)(), getattr(metrics, name)()
    metric.update(*columns)
    other.merge(metric)
    found[name] = repr(other.compute())
for name, metric in {"TopK": metrics.TopK(1), "PerClass": metrics.PerClass(2)}.items():
    metric.update(scores, labels)
    found[name] = repr(metric.compute())
found["pool"] = float(batchnorm.pool([0.0, 2.0], [1.0, 3.0]).variance)

errors = []
for call in (
    lambda: metrics.reduce(metrics.Count()),
    lambda: metrics.gather(labels, {}, samples=3),
    lambda: batchnorm.SyncBatchNorm,
    lambda: distributed.fail_together,
):
    try:
        call()
    except ImportError as error:
        errors.append([type(error).__name__, error.message, error.hint, error.exit_code])
print(json.dumps([found, errors]))
"""


def test_without_torch_every_metric_computes_from_arrays_and_what_needs_torch_says_so(tmp_path: Path) -> None:
    """Importing torch fails as it does where it isn't installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f\"No module named '{name}'\", name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    found, raised = json.loads(ran.stdout)
    assert (found["Accuracy"], found["AUROC"], found["Count"]) == (repr(2 / 3), repr(1.0), "3")
    assert (found["pool"], len(found)) == (3.0, 9)
    assert [kind for kind, *_ in raised] == ["NeedsTorch"] * 4
    for _, message, hint, exit_code in raised:
        assert message.startswith("ckpttool.")
        assert "needs torch, which is not installed" in message
        assert (hint, exit_code) == (install("torch"), 2)


def test_the_packages_offer_their_public_names_lazily() -> None:
    from ckpttool import batchnorm, distributed, metrics

    for package in (batchnorm, distributed, metrics):
        assert package.__doc__
        assert all(getattr(package, name).__doc__ for name in package.__all__)
        assert Path(package.__file__).name == "__init__.py"


# ---- evaluation of any model from a loop of your own ---------------------------------------------------


NUMBERS = 301


def numbers(samples: int = NUMBERS) -> TensorDataset:
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
@pytest.mark.parametrize(("samples", "batch_size"), [(NUMBERS, 32), (1, 128), (0, 128), (64, 32)])
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
    labelled = TensorDataset(features, torch.arange(NUMBERS) % 3)
    found = metrics.evaluate_classes(linear(3), labelled, ["cat", "dog", "eel"], batch_size=64)
    return found.score() | {"ranks": 0}


def test_classes_are_counted_alike_on_any_number_of_ranks(run_ranks, one_thread):
    alone = classify(0, 1)
    assert [one["class"] for one in alone["per_class"]] == ["cat", "dog", "eel"]
    assert alone["samples"] == NUMBERS
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


@pytest.mark.parametrize(("given", "said"), [
    ([metrics.Accuracy], "metrics is a list, not a mapping"),
    ({"f1": lambda: 0.5}, r"metrics\['f1'\] makes a float, not a metric of ckpttool.metrics"),
    ({"f1": "accuracy"}, r"metrics\['f1'\] makes a str"),
    ({"mae": (metrics.MeanAbsoluteError, 3)}, "the second of a pair is a function"),
])  # fmt: skip
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


def test_the_program_for_your_own_loop_runs(here, capsys):
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.partition("## A model in your own loop")[2]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    given = {"F": F, "model": linear(), "test_set": numbers(9), "device": "cpu", "rank": 0}
    exec("import json\nfrom pathlib import Path\n" + program, given)
    assert json.loads((here / "eval.json").read_text())["samples"] == 9
    assert capsys.readouterr().out.endswith(" 9\n")
