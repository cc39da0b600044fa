"""The lines of scores: columns that do not fit a terminal give way in an order, and are named."""

from __future__ import annotations

import pytest

from train.run.report import BEST_MARK, Column, ScoreTable

TEXTS = ["2.3076", "97.50%", "2.3037", "100.00%", "(8123/10000)", "1234.5"]
CELLS: dict[Column | str, str] = {**dict(zip(Column, TEXTS, strict=True)), "mae": "1.234e-05"}


@pytest.mark.parametrize(("width", "hidden"), [
    (120, []),
    (78, []),
    (77, ["correct of all"]),
    (60, ["correct of all", "seconds"]),
    (50, ["correct of all", "seconds", "train correct"]),
    (40, ["correct of all", "seconds", "train correct", "train loss"]),
])  # fmt: skip
def test_columns_give_way_to_the_width_and_are_named(width, hidden):
    table = ScoreTable(7, None, width)
    line = table.line("3/10", CELLS, best=True)
    assert table.hidden == hidden
    assert len(line) <= width and line.endswith(BEST_MARK)
    assert len(table.heading()) == len(line) - len(BEST_MARK)
    assert line.split() == [
        "3/10",
        *(text for column, text in zip(Column, TEXTS, strict=True) if column.value[0] not in hidden),
        "best",
    ]


def test_the_metrics_of_a_task_give_way_from_the_last_and_before_the_seconds():
    assert ScoreTable(7, ["mse", "mae", "r2"], 80).hidden == []
    assert ScoreTable(7, ["mse", "mae", "r2"], 70).hidden == ["r2"]
    table = ScoreTable(7, ["mse", "mae"], 57)
    assert table.hidden == ["mae"]
    assert table.heading().split() == ["epoch", "train", "loss", "test", "loss", "mse", "seconds"]


def test_what_has_no_score_stays_empty_below_its_head():
    table = ScoreTable(7, None, 80)
    line = table.line("1/2", {Column.TEST_LOSS: "2.3037"}, best=False)
    assert line.split() == ["1/2", "2.3037"]
    assert line.index("2.3037") + 6 == table.heading().index("test loss") + len("test loss")


def test_a_metric_may_have_the_name_of_another_column():
    table = ScoreTable(7, ["seconds", "train loss"], 120)
    cells = CELLS | {"seconds": "0.5", "train loss": "0.25"}
    assert table.line("1/2", cells, best=False).split() == [
        "1/2",
        "2.3076",
        "2.3037",
        "0.5",
        "0.25",
        "1234.5",
    ]
