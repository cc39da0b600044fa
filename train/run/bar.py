"""A progress bar with speed, memory and time left; and how long an epoch's parts take. Imports torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from train.log.speed import peak_memory
from train.trainer.trainer import Trainer

# Seconds between two looks at the figures behind the bar.
INTERVAL = 1.0


class Bar:
    """The steps of an epoch on a bar on stderr, if `shown`. At its end it is gone."""

    def __init__(self, trainer: Trainer, *, shown: bool) -> None:
        self.trainer, self.shown = trainer, shown
        self._bar: Any = None
        self._began, self._first, self._looked = time.monotonic(), trainer.progress.global_step, 0.0

    def over(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps, and count them."""
        if not self.shown:
            yield from steps
            return
        from tqdm import tqdm

        progress, total = self.trainer.progress, self.trainer.feed.known_steps
        label = f"epoch {progress.epoch + 1}/{self.trainer.config.epochs}"
        look: dict[str, Any] = {"unit": "step", "leave": False, "dynamic_ncols": True}
        with tqdm(total=total, initial=progress.step, desc=label, **look) as self._bar:
            for step in steps:
                if time.monotonic() - self._looked >= INTERVAL:
                    self._looked = time.monotonic()
                    self._bar.set_postfix_str(", ".join(self.figures()), refresh=False)
                self._bar.update()
                yield step
        self._bar = None

    def figures(self) -> list[str]:
        """Return what stands behind the bar: of the last line of the log, and of now."""
        trainer, now = self.trainer, self.trainer.log.latest
        unit = f"{trainer.log.work.unit or 'samples'}_per_second"
        rate, mfu = now.get(unit), now.get("mfu")
        found = [f"{rate:,.0f} {unit.partition('_')[0]}/s"] if rate else []
        found += [f"MFU {mfu:.0%}"] if mfu else []
        found.append(f"{peak_memory(trainer.place.device) / 1e9:.1f} GB")
        done = trainer.progress.global_step - self._first
        if done > 0 and (trainer.feed.known_steps is not None or trainer.config.max_steps):
            left = trainer.updater.total_steps - trainer.progress.global_step
            found.append(f"{in_hours((time.monotonic() - self._began) / done * max(left, 0))} left")
        return found

    def clear(self) -> None:
        """Make room for a line on the terminal."""
        if self._bar is not None:
            self._bar.clear()

    def refresh(self) -> None:
        """Show the bar again below a line."""
        if self._bar is not None and (self._bar.total is None or self._bar.n < self._bar.total):
            self._bar.refresh()


def in_hours(seconds: float) -> str:
    """Return a time as `2:05`, or `1:02:05` with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """The seconds of an epoch, from here on: in all, in its steps, and in its evaluations."""

    def __init__(self) -> None:
        self._began, self._training, self._evaluating = time.monotonic(), 0.0, 0.0

    def training(self, steps: Iterator[None]) -> Iterator[None]:
        """Yield the steps; the time that they take themselves is that of training."""
        while True:
            began = time.monotonic()
            try:
                step = next(steps)
            except StopIteration:
                return
            finally:
                self._training += time.monotonic() - began
            yield step

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of the block as that of evaluations."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._evaluating += time.monotonic() - began

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def times(self) -> dict[str, float]:
        """Return the seconds for the log."""
        parts = {"train_seconds": self._training, "evaluate_seconds": self._evaluating}
        return {name: round(value, 3) for name, value in {"seconds": self.seconds(), **parts}.items()}
