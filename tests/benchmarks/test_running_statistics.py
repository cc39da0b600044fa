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
def test_both_trainings_end_with_the_same_weights_and_plain_keeps_the_statistics_of_rank_0(
    measured: Measured,
) -> None:
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
