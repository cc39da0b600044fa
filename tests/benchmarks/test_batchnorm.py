"""benchmarks/batchnorm: it runs and computes the right ratios; never how fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import batchnorm
from benchmarks.case import Run
from benchmarks.children.batchnorm_steps import KINDS, RANKS, work_in_group
from ckpttool.batchnorm.sync_batchnorm import SyncBatchNorm
from train.model.builtin import resnet20


def test_ratios_leave_out_the_start(tmp_path: Path) -> None:
    seconds = {batchnorm.START: 2.0, batchnorm.NONE: 3.0, batchnorm.PLAIN: 4.0, batchnorm.SYNC: 6.0}
    results = {name: [Run(number, 0, 0)] for name, number in seconds.items()}
    case = batchnorm.set_up(tmp_path, 0)
    assert [way.name for way in case.ways] == list(seconds)
    assert [target.measure(results) for target in case.targets] == [2.0, 0.75]


@pytest.mark.parametrize(
    "kind, norms", [("none", []), ("plain", [nn.BatchNorm2d]), ("sync", [SyncBatchNorm])]
)
def test_the_models_differ_only_in_their_normalisation(kind: str, norms: list[type]) -> None:
    model = KINDS[kind](resnet20())
    assert {type(m) for m in model.modules() if "Norm" in type(m).__name__} == set(norms)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 19


@pytest.mark.parametrize("kind", ["none", "plain", "sync"])
def test_the_steps_of_each_kind_run(run_ranks: Any, kind: str) -> None:
    run_ranks(RANKS, work_in_group, kind, 1)


def test_the_program_runs_steps_on_two_ranks() -> None:
    done = subprocess.run(
        [sys.executable, batchnorm.CHILD, "sync", "1"], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
