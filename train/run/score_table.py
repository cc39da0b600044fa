"""The lines of scores that a run prints: as many columns as fit on a line. The log has all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TRAIN_LOSS, TRAIN_RIGHT, TEST_LOSS, TEST_RIGHT = "train loss", "train correct", "test loss", "test correct"
COUNTED, SECONDS = "correct of all", "seconds"
WIDTHS = {TRAIN_LOSS: 10, TRAIN_RIGHT: 7, TEST_LOSS: 10, TEST_RIGHT: 7, COUNTED: 12, SECONDS: 7}
HEADS = {TRAIN_RIGHT: "correct", TEST_RIGHT: "correct", COUNTED: ""}
BEST = "  best"


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
        own = [TEST_RIGHT, COUNTED] if metrics is None else [*metrics]
        names = [TRAIN_LOSS, *([TRAIN_RIGHT] if metrics is None else []), TEST_LOSS, *own, SECONDS]
        self._label = label
        self._shown = {name: WIDTHS.get(name) or max(len(name), len("1.234e-05")) for name in names}
        self.hidden: list[str] = []
        for name in (COUNTED, *reversed(metrics or ()), SECONDS, TRAIN_RIGHT, TRAIN_LOSS):
            if label + sum(wide + 2 for wide in self._shown.values()) + len(BEST) <= width:
                break
            if self._shown.pop(name, None):
                self.hidden.append(name)

    def heading(self) -> str:
        heads = (f"{HEADS.get(name, name):>{width}}" for name, width in self._shown.items())
        return "  ".join([f"{'epoch':>{self._label}}", *heads])

    def line(self, label: str, cells: Mapping[str, str], *, best: bool) -> str:
        """Return a line; columns without a cell stay empty."""
        shown = (f"{cells.get(name, ''):>{width}}" for name, width in self._shown.items())
        return "  ".join([f"{label:>{self._label}}", *shown]) + BEST * best
