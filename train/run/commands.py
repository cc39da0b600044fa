"""Commands that a run proposes, to be pasted into a shell. Imports torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

import torch

from ckpttool.distributed.processes import started_by_spawn
from train.config.command_line import arguments_of
from train.config.training import TrainConfig


def program(name: str) -> str:
    """Return the path of a program of this package, relative to the working directory."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), f"{name}.py")
    below = os.path.relpath(path)
    return path if below.startswith(os.pardir) else below


def to_paste(words: Sequence[str], columns: int = 80) -> str:
    """Return a command for a shell, indented, broken before a flag where a line would be too long."""
    lines = [" "]
    for number, word in enumerate(words):
        quoted = shlex.quote(word)
        after = words[number + 1] if number + 1 < len(words) else "-"
        width = len(quoted) + (0 if after.startswith("-") else 1 + len(shlex.quote(after)))
        if word.startswith("-") and len(lines[-1]) + 1 + width > columns - 2:
            lines.append("     ")
        lines[-1] += f" {quoted}"
    return " \\\n".join(lines)


def flags_of(config: TrainConfig) -> list[str]:
    """Return the flags with which an evaluation builds the same model and takes the same samples."""
    names = ("task", "eval_batch", "mean", "std", "resize")
    usual = TrainConfig(**{name: getattr(config, name) for name in names})
    return ["--model", config.model, "--data", config.data, *arguments_of(usual)]


def flags_of_bits(device: torch.device) -> list[str]:
    """Return the flags with which an evaluation gives the same numbers to the last digit."""
    threads = torch.get_num_threads()
    return ["--threads", str(threads)] if device.type == "cpu" and threads != 1 else []


def to_go_on(config: TrainConfig, folder: str, ranks: int, step: int) -> str:
    """Return how to start an interrupted run again, from its last checkpoint."""
    spawned = ranks if started_by_spawn() else None
    resumed = replace(config, out=folder, resume="auto", force=False, spawn=spawned)
    if resumed.stop_at and resumed.stop_at <= step:
        resumed = replace(resumed, stop_at=None)
    if ranks != int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return f"to continue, start it as before with --out {shlex.quote(folder)} --resume auto"
    start = ["python"] if spawned or ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    return f"to continue:\n{to_paste([*start, program('main'), *arguments_of(resumed)])}"
