"""Metrics in an environment without torch: numpy arrays are enough, except to reduce over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT

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


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> list:
    """Run the program where importing torch fails as it does where it isn't installed."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f\"No module named '{name}'\", name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    path = os.pathsep.join([str(folder), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_every_metric_computes_from_arrays(without_torch: list) -> None:
    found, _ = without_torch
    assert found["Accuracy"] == repr(2 / 3)
    assert found["AUROC"] == repr(1.0)
    assert found["Count"] == "3"
    assert found["pool"] == 3.0
    assert len(found) == 9


def test_what_needs_torch_says_so_and_how_to_install_it(without_torch: list) -> None:
    _, errors = without_torch
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
