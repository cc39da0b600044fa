"""What metrics need of numpy alone: sums of float64 without rounding, and all else where torch is absent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.metrics.exact_sum import PIECE, ExactSum
from tests.support.running import ROOT

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
    found, errors = json.loads(ran.stdout)
    assert (found["Accuracy"], found["AUROC"], found["Count"]) == (repr(2 / 3), repr(1.0), "3")
    assert (found["pool"], len(found)) == (3.0, 9)
    assert [kind for kind, *_ in errors] == ["NeedsTorch"] * 4
    for _, message, hint, exit_code in errors:
        assert message.startswith("ckpttool.")
        assert "needs torch, which is not installed" in message
        assert (hint, exit_code) == ("in a clone of ckpttool: pip install -e '.[torch]'", 2)


def test_the_packages_offer_their_public_names_lazily() -> None:
    from ckpttool import batchnorm, distributed, metrics

    for package in (batchnorm, distributed, metrics):
        assert package.__doc__
        assert all(getattr(package, name).__doc__ for name in package.__all__)
        assert Path(package.__file__).name == "__init__.py"
