"""The example of docs/batchnorm.md: what statistics of one rank cost, and what pooling recovers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.children.digits_by_class import shards
from benchmarks.running_statistics import Measured, as_markdown, measure, write_rank_files
from tests.support.running import ROOT
from train import main
from train.config import command_line


def train_on_ranks(rank: int, world_size: int, arguments: Sequence[str], statistics: str) -> None:
    os.environ["STATISTICS"] = statistics
    try:
        main.train(main.prepare(command_line.parse(arguments)))
    finally:
        del os.environ["STATISTICS"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, run_ranks: Any) -> Measured:
    def train(arguments: Sequence[str], ranks: int, folder: Path) -> None:
        run_ranks(ranks, train_on_ranks, arguments, str(folder), timeout=90)

    return measure(tmp_path_factory.mktemp("statistics"), train=train)


@pytest.mark.long
def test_both_trainings_end_with_the_same_weights(measured: Measured) -> None:
    assert measured.same_weights


@pytest.mark.long
def test_the_statistics_of_one_rank_cost_accuracy_and_pooling_recovers_it(measured: Measured) -> None:
    assert len(measured.ranks) == 4
    # With three seeds: 3.8 points or more above the ranks' mean, and 3.9 or more above rank 0.
    assert measured.pooled[-1] > sum(measured.ranks) / 4 + 0.03
    assert measured.pooled[-1] > measured.plain[-1] + 0.03
    assert measured.pooled[-1] > max(measured.ranks)
    # In the first epochs the weights themselves are bad; even then pooling does not harm.
    assert all(ours >= theirs for ours, theirs in zip(measured.pooled, measured.plain, strict=True))


@pytest.mark.long
def test_plain_scores_as_the_statistics_of_rank_0(measured: Measured) -> None:
    assert measured.ranks[0] == measured.plain[-1]
    assert measured.ranks[0] not in measured.ranks[1:], "else the ranks would hardly differ"


@pytest.mark.long
def test_files_pooled_afterwards_score_as_the_pooled_training(measured: Measured) -> None:
    """Almost: files of single ranks lack the variance between ranks within a step."""
    assert measured.offline == pytest.approx(measured.pooled[-1], abs=0.02)
    assert measured.offline > max(measured.ranks)


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
