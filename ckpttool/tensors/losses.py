"""Numbers that did not survive a change of type: each element of a storage counted once. Imports numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

from ..lazy import NDArray, np

CELL = 1 << 20  # elements of a storage whose losses are marked together
FEW = CELL >> 5  # as many places take the memory of a bit for each element

Loss = Literal["infinite", "zero", "nan"]  # what a finite number, or one that is not 0, became


@dataclass(slots=True)
class CastReport:
    """What casting did, complete once the bytes were written."""

    tensors: int = 0
    _marks: dict[tuple[Loss, int, int], NDArray[Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def overflows(self) -> int:
        """Finite values that became infinite: each element of a storage once, in however many tensors."""
        return self.count("infinite")

    @property
    def underflows(self) -> int:
        """Values that became 0, likewise."""
        return self.count("zero")

    @property
    def nans(self) -> int:
        """Finite values that became NaN, likewise; a cast has none."""
        return self.count("nan")

    def count(self, loss: Loss) -> int:
        """Return how many elements were lost in this way."""
        return sum(_marked_in(marks) for (kind, *_), marks in self._marks.items() if kind == loss)

    def note(self, loss: Loss, storage: int, places: NDArray[np.int64]) -> None:
        """Record that elements of a storage were lost. Several threads may call this at once."""
        cells = places // CELL
        with self._lock:
            for cell in np.flatnonzero(np.bincount(cells)).tolist():
                key = loss, storage, cell
                here = (places[cells == cell] % CELL).astype(np.uint32)
                self._marks[key] = _marked(self._marks.get(key, here[:0]), here)

    def note_non_finite(
        self, storage: int, finite: NDArray[np.bool_], made: NDArray[Any], at: int = 0
    ) -> None:
        """Record which finite numbers became infinite or NaN; the first is element `at` of a storage."""
        if np.isfinite(made).all():
            return
        lost: dict[Loss, NDArray[np.bool_]] = {"infinite": np.isinf(made), "nan": np.isnan(made)}
        for loss, here in lost.items():
            if len(places := np.flatnonzero(finite & here)):
                self.note(loss, storage, places + at)


def _marked(marks: NDArray[Any], places: NDArray[np.uint32]) -> NDArray[Any]:
    """Return a cell's marks with more places: places as long as they are few, else a bit for each element."""
    if marks.dtype == np.uint32:
        places = np.union1d(marks, places)
        if len(places) < FEW:
            return places
        marks = np.zeros(CELL >> 3, np.uint8)
    np.bitwise_or.at(marks, places >> 3, (128 >> (places & 7)).astype(np.uint8))
    return marks


def _marked_in(marks: NDArray[Any]) -> int:
    return len(marks) if marks.dtype == np.uint32 else int(np.unpackbits(marks).sum())


@dataclass(slots=True)
class CastReports(CastReport):
    """Several reports as one: known once the output is written."""

    reports: list[CastReport] = field(default_factory=list)

    def count(self, loss: Loss) -> int:
        """Return how many elements were lost in this way, in all of them."""
        return sum(report.count(loss) for report in self.reports)
