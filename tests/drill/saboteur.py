"""A model whose ranks are killed at chosen places: `--model tests/drill/saboteur.py:model`.

The places and the marks are in the folder that the variable DRILL names. `plan.json` there lists the kills in
order, and before each the rank makes the file `kill-<number>`, so that no rank kills twice.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks.runs import Source
from train.trainer.trainer import Trainer

STARTED = time.time()
FOLDER = Path(os.environ["DRILL"])
RANK = int(os.environ.get("RANK", "0"))


class Saboteur:
    """Kills this rank, its agent or everything where the next kill of the plan says so."""

    def __init__(self) -> None:
        self.kills: list[dict[str, Any]] = json.loads((FOLDER / "plan.json").read_text())
        self.trainer: Trainer | None = None
        self.next = sum((FOLDER / f"kill-{number}").exists() for number in range(len(self.kills)))
        if self.next:
            self.before = (FOLDER / f"kill-{self.next - 1}").stat().st_mtime

    def due(self, place: str) -> bool:
        """Return whether this is the place of the next kill, and this the rank."""
        if self.next == len(self.kills) or (self.next and self.before > STARTED):
            return False  # where one kill follows another, the second is for the next attempt
        kill = self.kills[self.next]
        step = self.trainer.progress.global_step if self.trainer else 0
        return bool(kill["at"] == place and kill["rank"] == RANK and step >= kill["step"])

    def at(self, place: str) -> None:
        """Kill, if it is due here."""
        if not self.due(place):
            return
        try:
            (FOLDER / f"kill-{self.next}").open("x").close()
        except FileExistsError:
            return
        kill = self.kills[self.next]
        if kill["whom"] != "all" and kill["signal"] != "none":
            pid = os.getpid() if kill["whom"] == "worker" else os.getppid()
            os.kill(pid, signal.Signals[kill["signal"]])
        if kill["signal"] == "none":  # the drill does what it has in mind, and says when
            while not (FOLDER / f"go-{self.next}").exists():
                time.sleep(0.01)
            self.next, self.before = self.next + 1, 0.0
        elif kill["signal"] == "SIGKILL":
            time.sleep(60)  # until the end comes: by the kernel, or by the drill

    def goes_on(self) -> None:
        """Leave a mark if this is the first step after a kill."""
        if self.next and self.before < STARTED:
            (FOLDER / f"on-{self.next - 1}").touch()

    def after(self, seconds: float) -> None:
        """Kill after this time, wherever the rank then is."""
        threading.Thread(target=lambda: (time.sleep(seconds), self.at("any")), daemon=True).start()


class Net(nn.Module):
    """A small network with what a resume can get wrong: buffers and random numbers."""

    def __init__(self, classes: int, saboteur: Saboteur) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, stride=4)
        self.last = nn.Linear(8 * 8 * 8, classes)
        self.told = [saboteur]  # in a list: a module would take it for a part of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (saboteur,) = self.told
        if saboteur.trainer and self.training:
            saboteur.goes_on()
            saboteur.at("step")
        elif saboteur.trainer:
            saboteur.at("evaluation")
        x = torch.dropout(self.conv(self.norm(x)).relu(), 0.2, self.training)
        return self.last(x.flatten(1))


def model(num_classes: int) -> nn.Module:
    """Return the network, after the saboteur is told of everything that the trainer does."""
    saboteur = Saboteur()
    saboteur.at("start")
    for kill in saboteur.kills[saboteur.next : saboteur.next + 1]:
        if kill["at"] == "any":
            saboteur.after(kill["after"])
    _tell_of_files(saboteur)
    _tell(Trainer, "__init__", after=lambda trainer: setattr(saboteur, "trainer", trainer))
    return Net(num_classes, saboteur)


def stream() -> Any:
    """Return fifty images as a stream that knows its position, and ten to test with."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 3, 32, 32, generator=generator), torch.arange(60) % 10
    samples = list(zip(images, labels.tolist(), strict=True))
    source = Source(samples[:50])
    source.classes = [str(number) for number in range(10)]  # type: ignore[attr-defined]
    return source, samples[50:]


def _tell(owner: Any, name: str, *, after: Callable[..., None]) -> None:
    """Have a function followed by a call with its first argument."""
    original = getattr(owner, name)

    def told(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments, **named)
        after(arguments[0])
        return found

    setattr(owner, name, told)


def _tell_of_files(saboteur: Saboteur) -> None:
    """Tell of checkpoints that are written: one that is half on the disk, and one that has just its name."""
    fsync, replace = os.fsync, os.replace

    def half_written(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if ".pt" in path:
            if saboteur.due("save"):
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
            saboteur.at("save")
        fsync(fd)

    def renamed(source: str, target: str, **options: Any) -> None:
        if str(target).endswith(".pt"):
            saboteur.at("before the rename")
        replace(source, target, **options)
        folder, name = os.path.split(target)
        if name.endswith(".pt"):
            saboteur.at("after the rename")
        if name == "best.pt" or (name == "last.pt" and not os.path.exists(os.path.join(folder, "best.pt"))):
            saboteur.at("one of two names")

    os.fsync, os.replace = half_written, renamed
