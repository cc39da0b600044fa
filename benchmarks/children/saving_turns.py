"""One process of `python -m benchmarks.saving`: `saving_turns.py FOLDER MEGABYTES ROUNDS STEPS BATCH`.

It trains with train/main.py's own parts, and the ways of saving take turns. Writes the seconds of each round
to FOLDER/seconds.json: `blocked`, for which the training stands still in a save, and `whole`, of some steps
with one save; `cpu` are its seconds of processor time, which depend less on what else the machine does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import Dataset

from ckpttool import distributed
from train import main
from train.checkpoint.format import capture
from train.checkpoint.saver import Saver, tensors_of
from train.config import command_line
from train.launch.program import Stop
from train.run.run import Agreement
from train.trainer.trainer import Trainer

LAYERS = 24
WIDTH = int(os.environ.get("WIDTH", "0"))


class Noise(Dataset[Any]):
    """The same sample again and again."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 1 << 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(WIDTH), index % 2


def data() -> tuple[Noise, Noise]:
    return Noise(), Noise()


def model() -> nn.Module:
    layers = [
        layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


class Ways:
    """The ways of saving. Each is a pair: what training waits for, and what ends the save."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.saver = Saver(trainer, str(folder))
        self.state = capture(trainer)
        self.buffers = [torch.empty_like(tensor) for tensor in tensors_of(self.state)]
        self.stager = DefaultStager(
            StagingOptions(*[False] * 4)
        )  # neither pinned nor shared, nor in a thread
        self.future: Any = None

    def named(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        return {
            "copy": (self.copy, lambda: None),
            "async": (lambda: self.save("async"), self.saver.finish_save),
            "sync": (lambda: self.save("sync"), lambda: None),
            "sync 64": (self.save_unaligned, lambda: None),
            "torch.save": (lambda: torch.save(self.state, self.folder / "own.pt"), lambda: None),
            "dcp": (lambda: self.dcp(None), self.wait),
            "dcp again": (lambda: self.dcp(self.stager), self.wait),
        }

    def copy(self) -> None:
        for buffer, tensor in zip(self.buffers, tensors_of(self.state), strict=True):
            buffer.copy_(tensor)

    def save(self, how: str) -> None:
        config = self.trainer.config
        self.trainer.config = replace(config, saving=replace(config.saving, save=how))
        self.saver.save(last=True, best=False)

    def save_unaligned(self) -> None:
        with mock.patch("train.checkpoint.files.BLOCK", 64):  # torch's own
            self.save("sync")

    def dcp(self, stager: Any) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        part = {name: self.state[name] for name in ("model", "optimizer")}
        self.future = dcp.async_save(part, checkpoint_id=self.folder / "dcp", async_stager=stager)

    def wait(self) -> None:
        self.future.result()


def measure(folder: Path, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    flags_given = ["--data", f"{__file__}:data", "--model", f"{__file__}:model", "--optimizer", "adam"]
    job = main.prepare(command_line.parse([*flags_given, "--batch-size", str(batch), "--backend", "gloo"]))
    blocked: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with distributed.process_group(job.place):
        trainer = Trainer(job.config, job.data, job.model, job.place, job.task)
        taken = main.steps_of_epoch(trainer)
        next(taken)
        ways = Ways(trainer, folder)
        agreement = Agreement(Stop(25.0), ways.saver)
        trainer.before_update = agreement.begin

        def train(count: int) -> None:
            for _ in range(count):
                next(taken)
                agreement.finish()

        size = sum(tensor.nbytes for tensor in ways.buffers)
        named = ways.named()
        for _ in range(rounds + 1):  # the first is not counted: it gets its memory from the system
            for name, (begin, end) in named.items():
                train(1)
                began = time.perf_counter()
                begin()
                blocked.setdefault(name, []).append(time.perf_counter() - began)
                end()
        say(f"{size / 1e6:.0f} MB")
        turns = ["none", "async", "torch.save", "dcp again"]
        train(steps)  # not counted either
        for done in range(rounds if steps else 0):
            start = done % len(turns)  # nobody is always the last, on a machine that grows slower
            for name in turns[start:] + turns[:start]:
                began, busy = time.perf_counter(), time.process_time()
                begin, end = named.get(name, (lambda: None, lambda: None))
                begin()
                train(steps)
                end()
                whole.setdefault(name, []).append(time.perf_counter() - began)
                cpu.setdefault(name, []).append(time.process_time() - busy)
                say(f"{name}: {whole[name][-1]:.1f} s")
    first = {name: seconds.pop(0) for name, seconds in blocked.items()}
    return {"bytes": size, "blocked": blocked, "first": first, "whole": whole, "cpu": cpu}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    where, numbers = Path(sys.argv[1]), [int(one) for one in sys.argv[2:]]
    WIDTH = int((numbers[0] * 1e6 / 12 / LAYERS) ** 0.5)  # Adam has two numbers for each parameter
    os.environ["WIDTH"] = str(WIDTH)  # for this file as a module, from which the data and the model come
    found = measure(where, *numbers[1:])
    (where / "seconds.json").write_text(json.dumps(found))
    os._exit(0)
