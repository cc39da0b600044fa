"""What the terminal of the picture shows: a few commands, run on checkpoints that are the same everywhere."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.comparing import convert, prefixed, saved
from tests.support.running import ROOT

WIDTH = 92
COMMANDS = [
    "ckpttool inspect last.pt --depth 1",
    "ckpttool strip-prefix last.pt model.safetensors",
    "ckpttool diff epoch-8.pt epoch-9.pt",
    "ckpttool scan downloads",
]
LAYERS, SIZE, WORDS = 6, 128, 2048


class Stranger:
    """An object that runs a program when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def state(epoch: int) -> dict[str, torch.Tensor]:
    """Return a small transformer's state. Each epoch moves some of its weights."""
    start, moves = np.random.RandomState(0), np.random.RandomState(1)

    def weight(*shape: int, moving: float = 0.0) -> torch.Tensor:
        drawn, moved = (rng.standard_normal(shape) for rng in (start, moves))
        return torch.from_numpy((0.02 * drawn + 0.02 * moving * epoch * moved).astype(np.float32))

    made = {"embed.weight": weight(WORDS, SIZE)}
    for layer in range(LAYERS):
        last = layer == LAYERS - 1
        name = f"layers.{layer}"
        made |= {f"{name}.norm1.weight": torch.ones(SIZE)}
        made |= {f"{name}.attention.{each}.weight": weight(SIZE, SIZE) for each in ("q", "k", "v", "out")}
        made |= {f"{name}.norm2.weight": torch.ones(SIZE)}
        made |= {f"{name}.mlp.up.weight": weight(4 * SIZE, SIZE, moving=0.01 * last)}
        made |= {f"{name}.mlp.down.weight": weight(SIZE, 4 * SIZE, moving=0.002 * last)}
    return made | {"norm.weight": torch.ones(SIZE), "head.weight": made["embed.weight"]}


def training(epoch: int) -> dict[str, Any]:
    """Return what a script of DistributedDataParallel saves."""
    parameters = [torch.nn.Parameter(tensor) for name, tensor in state(epoch).items() if "head" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": prefixed(state(epoch), "module."), "optimizer": optimizer.state_dict(), "epoch": epoch}


def prepare(folder: Path) -> None:
    """Write the files of the session; ckpttool's own writer makes the same bytes under any torch."""
    convert(training(9), folder / "last.pt")
    for epoch in (8, 9):
        wrapped = prefixed(state(epoch), "module.")
        wrapped["module.norm.weight"] = torch.ones(SIZE // (10 - epoch))
        convert({"model": wrapped, "epoch": epoch}, folder / f"epoch-{epoch}.pt")
    (folder / "downloads").mkdir()
    saved({"weight": torch.ones(2), "extra": Stranger()}, folder / "downloads" / "stranger.pt")
    saved({"weight": torch.ones(2)}, folder / "downloads" / "plain.pt")


def shown(folder: Path) -> str:
    """Return what a terminal shows of the commands, with its colours."""
    lines = []
    for command in COMMANDS:
        prompt = f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m"
        lines += [prompt, *_in_terminal(command, folder).splitlines(), ""]
    return "\n".join(lines[:-1])


def _in_terminal(command: str, folder: Path) -> str:
    """Run a command of ckpttool in a terminal of its own, and return what it wrote there."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "60", "PYTHONPATH": str(ROOT)}
    env.pop("NO_COLOR", None)
    words = [sys.executable, "-m", *shlex.split(command)]
    running = subprocess.Popen(words, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = bytearray()
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # how Linux says that the other side has closed
        pass
    os.close(ours)
    assert running.wait() in (0, 1), written.decode()  # 1: `diff` and `scan` have something to say
    return written.decode().replace("\r\n", "\n")
