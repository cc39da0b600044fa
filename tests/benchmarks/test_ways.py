"""Benchmarks of their own programs: each way runs, and the tables are of what was measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import batchnorm, saving, tokens, training
from benchmarks.case import Run
from benchmarks.children import batchnorm_steps, gather_rows
from benchmarks.children.digits_by_class import shards
from benchmarks.running_statistics import Measured, as_markdown, measure, write_rank_files
from ckpttool.batchnorm.sync_batchnorm import SyncBatchNorm
from tests.ranks.programs import start
from tests.support.running import ROOT
from train import main
from train.config import command_line
from train.model.builtin import resnet20

BATCHNORM = [("none", 1), ("plain", 1), ("sync", 1)]
ROWS = [("rows", 130, 2), ("tuples", 130, 2), ("tensors", 130, 2), ("epoch", 130, 2)]


@pytest.mark.covered(lambda child, given: given in (BATCHNORM[0], BATCHNORM[1]))
@pytest.mark.parametrize(
    ("child", "given"),
    [*((batchnorm_steps, way) for way in BATCHNORM), *((gather_rows, way) for way in ROWS)],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_each_way_of_a_benchmark_of_two_ranks_runs(run_ranks: Any, child: Any, given: Any) -> None:
    """It checks its own result."""
    run_ranks(child.RANKS, child.work_in_group, *given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("child", "given"), [(batchnorm.CHILD, ["sync", "1"]), (gather_rows.__file__, ["rows", "130", "2"])]
)
def test_the_program_of_a_benchmark_of_two_ranks_runs(child: str, given: list[str]) -> None:
    done = start([sys.executable, str(child), *given])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- BatchNorm -----------------------------------------------------------------------------------------


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
    model = batchnorm_steps.KINDS[kind](resnet20())
    assert {type(m) for m in model.modules() if "Norm" in type(m).__name__} == set(norms)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 19


# ---- saving, and the loop ------------------------------------------------------------------------------

FOUND = {
    "bytes": 5e8,
    "blocked": {"copy": [0.04, 0.05], "async": [0.04, 0.05], "torch.save": [0.4, 0.5]},
    "first": {"copy": 1.0, "async": 1.0, "torch.save": 1.0},
    "whole": {"none": [10.0, 20.0], "async": [10.2, 20.4]},
    "cpu": {"none": [10.0, 20.0], "async": [10.1, 20.2]},
}
BARE, OURS = [(1.0, 0.5), (2.0, 0.5), (4.0, 0.5)], [(2.0, 0.4), (2.0, 0.5), (2.0, 1.0)]
SECONDS = {"bare": BARE, "ours": OURS}


def test_the_tables_hold_each_way_against_a_copy_and_a_run_without_saves() -> None:
    lines = saving.as_markdown(FOUND).splitlines()
    assert "| torch.save | 0.450 s | 0.400-0.500 s | 10.00 | 1.000 s |" in lines
    assert "| train/main.py --save async | 15.3 s | +2.0% | +1.0% |" in lines
    assert "| async / copy | ≤ 1.20 × | 1.00 × | met |" in lines
    assert lines[-1] == "| async, beyond no save | ≤ 3.0% | 2.0% | met |"


def test_a_ratio_of_loops_is_the_median_of_those_of_the_rounds() -> None:
    assert training.ratio(SECONDS, "ours") == training.ratio(SECONDS, "ours", cpu=True) == 1.0
    assert training.ratio({"ours": OURS[1:] * 2, "bare": BARE[1:] * 2}, "ours") == 1.5


def test_the_table_of_loops_names_what_was_measured() -> None:
    lines = training.as_markdown(SECONDS, 4).splitlines()
    assert lines[2] == "| a bare loop | 2.00 | 1.000 | 1.00 – 1.00 | 1.000 |"
    assert lines[3] == "| train/main.py | 2.00 | 1.000 | 0.50 – 2.00 | 1.000 |"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_ways_of_saving_take_turns(tmp_path: Path) -> None:
    found = saving.measure(tmp_path, megabytes=2, rounds=2, steps=1, batch=2)
    assert 1.9e6 < found["bytes"] < 2.3e6
    assert {len(seconds) for part in ("blocked", "whole") for seconds in found[part].values()} == {2}


def test_each_loop_that_is_offered_is_one_that_can_be_run() -> None:
    known = training.CHILD.read_text()
    assert all(f'"{way}": ' in known for way in [*training.NAMES, *training.SHARDED, *tokens.NAMES.values()])


@pytest.mark.long
def test_the_loops_take_turns(tmp_path: Path) -> None:
    seconds = training.measure(tmp_path, ["bare", "ours"], launches=1, rounds=2, steps=1, batch=4)
    assert [len(of_way) for of_way in seconds.values()] == [2, 2]
    assert all(wall > 0 and cpu > 0 for of_way in seconds.values() for wall, cpu in of_way)


# ---- merging -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_run_of_merging_prints_every_way_and_target(tmp_path: Path) -> None:
    options = ["--size", "4MB", "--rounds", "1", "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.merging", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for kind in (", cut by rows", ", cut by rows and columns", " of ZeRO-3"):
        assert f"merge 8 ranks{kind}, 4 MB" in done.stdout
    for way in ("cp", "ckpttool merge", "torch.load + copy + save_file"):
        assert f"\n{way}" in done.stdout
    assert list(tmp_path.iterdir()) == []


# ---- what statistics of one rank cost, and what pooling recovers: the example of docs/batchnorm.md -------


def train_on_ranks(rank: int, world_size: int, arguments: Sequence[str], statistics: str) -> None:
    os.environ["STATISTICS"] = statistics
    try:
        main.train(main.prepare(command_line.parse(arguments)))
    finally:
        del os.environ["STATISTICS"]


@pytest.mark.long
def test_both_trainings_end_with_the_same_weights_and_plain_keeps_the_statistics_of_rank_0(
    run_ranks: Any, tmp_path: Path
) -> None:
    def train(arguments: Sequence[str], ranks: int, folder: Path) -> None:
        run_ranks(ranks, train_on_ranks, arguments, str(folder), timeout=90)

    measured = measure(tmp_path, train=train)
    assert measured.same_weights
    assert (len(measured.plain), len(measured.pooled), len(measured.ranks)) == (4, 4, 4)
    assert measured.ranks[0] == measured.plain[-1]
    scores = [*measured.plain, *measured.pooled, *measured.ranks, measured.offline]
    assert all(0 <= score <= 1 for score in scores)


def test_each_rank_has_its_own_classes_and_together_they_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        train, test = shards()
        found.append({int(train[index][1]) for index in range(len(train))})
        assert len({int(label) for _, label in test}) == 10
    assert found == [{0, 1, 2}, {3, 4}, {5, 6, 7}, {8, 9}]


def test_a_rank_file_differs_from_the_checkpoint_only_in_the_statistics(tmp_path: Path) -> None:
    model = {"module.1.weight": torch.ones(2), "module.1.running_mean": torch.zeros(2)}
    torch.save({"model": model}, tmp_path / "last.pt")
    for rank in (1, 2):
        statistics = {"1.running_mean": torch.full((2,), float(rank))}
        torch.save(statistics, tmp_path / f"statistics{rank - 1}.pt")
    for rank, path in enumerate(write_rank_files(tmp_path / "last.pt", tmp_path), 1):
        state = torch.load(path, weights_only=True)["model"]
        assert list(state) == list(model)
        assert torch.equal(state["module.1.weight"], torch.ones(2))
        assert state["module.1.running_mean"].tolist() == [rank, rank]


def test_the_page_has_the_tables_that_the_command_prints() -> None:
    """Their rows and columns: the numbers are of the machine that they were measured on."""
    page = (ROOT / "docs/batchnorm.md").read_text(encoding="utf-8")
    table = as_markdown(Measured([0.5] * 4, [0.5] * 4, [0.5] * 4, 0.5, True))
    assert re.sub(r"\d\d\.\d %", "50.0 %", page).count(table) == 1
