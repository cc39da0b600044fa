"""The lines of scores that a run prints: as many columns as fit on a line. The log has all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

BEST = "  best"


class Column(Enum):
    """What a line has besides a task's metrics, which may have any name: name, heading, width."""

    TRAIN_LOSS = "train loss", "train loss", 10
    TRAIN_RIGHT = "train correct", "correct", 7
    TEST_LOSS = "test loss", "test loss", 10
    TEST_RIGHT = "test correct", "correct", 7
    COUNTED = "correct of all", "", 12
    SECONDS = "seconds", "seconds", 7


class ScoreTable:
    """The columns that fit into a width, behind a label such as `3/10`.

    Args:
        label: columns of the label.
        metrics: names of a task's metrics; None for classification, which has shares of correct samples.
        width: columns of the line.

    Attributes:
        hidden: the names of the columns that do not fit, in the order in which they gave way.
    """

    def __init__(self, label: int, metrics: Sequence[str] | None, width: int) -> None:
        own: list[Column | str] = [Column.TEST_RIGHT, Column.COUNTED] if metrics is None else [*metrics]
        trained = [Column.TRAIN_LOSS, Column.TRAIN_RIGHT] if metrics is None else [Column.TRAIN_LOSS]
        last = Column.SECONDS, Column.TRAIN_RIGHT, Column.TRAIN_LOSS
        ways: list[Column | str] = [Column.COUNTED, *reversed(metrics or ()), *last]  # in which they give way
        self._label = label
        self._shown = {each: _facts(each) for each in (*trained, Column.TEST_LOSS, *own, Column.SECONDS)}
        self.hidden: list[str] = []
        for each in ways:
            if label + sum(wide + 2 for _, _, wide in self._shown.values()) + len(BEST) <= width:
                break
            if facts := self._shown.pop(each, None):
                self.hidden.append(facts[0])

    def heading(self) -> str:
        heads = (f"{head:>{width}}" for _, head, width in self._shown.values())
        return "  ".join([f"{'epoch':>{self._label}}", *heads])

    def line(self, label: str, cells: Mapping[Column | str, str], *, best: bool) -> str:
        """Return a line; columns without a cell stay empty."""
        shown = (f"{cells.get(each, ''):>{width}}" for each, (_, _, width) in self._shown.items())
        return "  ".join([f"{label:>{self._label}}", *shown]) + BEST * best


def _facts(column: Column | str) -> tuple[str, str, int]:
    """Return the name, the heading and the width of a column."""
    return (
        column.value if isinstance(column, Column) else (column, column, max(len(column), len("1.234e-05")))
    )
