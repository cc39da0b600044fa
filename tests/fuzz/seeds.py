"""The honest files that are changed: a small one of every format. Imports torch."""

from __future__ import annotations

import functools
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.every_format import as_dcp, as_script, as_tar, converted, with_objects

# The files of a checkpoint by name; that of a single file is empty
Files = dict[str, bytes]


def state() -> OrderedDict[str, torch.Tensor]:
    """Return a small state with a tie, a view, other dtypes and an empty tensor."""
    rows = torch.arange(12.0).reshape(3, 4)
    return OrderedDict(
        {
            "module.a": rows,
            "module.tied": rows,
            "module.view": rows.t()[1:],
            "module.half": torch.ones(3).half(),
            "module.count": torch.tensor(7),
            "module.empty": torch.zeros(0, 2),
            "module.flag": torch.tensor([True, False]),
        }
    )


def training() -> dict[str, Any]:
    """Return a checkpoint of plain values, nested and shared, which `weights_only` reads."""
    shared = [1, 2]
    return {
        "model": state(),
        "optimizer": {"state": {0: {"m": torch.ones(2, 3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "epoch": 3,
        "betas": (0.9, 0.999),
        "big": 2**70,
        "lists": {"a": shared, "b": shared},
    }


def _trainers(path: Path) -> None:
    """Write what the trainer's checkpoint holds."""
    plan = {"samples": 8, "batch_size": 4, "seed": 0, "world_size": 2}
    sums = {"epoch": 1, "step": 0, "global_step": 2, "best": -float("inf"), "sums": [[0.0] * 4] * 2}
    random_state = {"python": [3, list(range(20)), None], "torch": torch.arange(40, dtype=torch.uint8)}
    whole = training() | {"progress": sums, "plan": plan, "rng": [random_state] * 2, "scaler": {}}
    torch.save(whole | {"digests": {"model": "0" * 64}, "config": {"lr": 0.1, "data": "digits"}}, path)


def _safetensors(path: Path) -> None:
    save_file(
        {name: value.contiguous().clone() for name, value in state().items()}, path, metadata={"who": "me"}
    )


# By format, what writes each seed
SEEDS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "zip .pt": (
        lambda path: torch.save(training(), path),
        lambda path: torch.save(with_objects(), path),
        lambda path: torch.save(state(), path),
    ),
    "trainer's last.pt": (_trainers,),
    "legacy .pt": (
        lambda path: torch.save(training(), path, _use_new_zipfile_serialization=False),
        lambda path: torch.save(with_objects(), path, _use_new_zipfile_serialization=False),
    ),
    "tar": (as_tar,),
    "TorchScript": (as_script,),
    "safetensors": (_safetensors,),
    "safetensors --full": (converted(training, to="safetensors", full=True),),
    "shards, safetensors": (
        converted(training, to="safetensors-sharded", shard_size=64),
        converted(training, to="safetensors-sharded", shard_size=64, full=True),
    ),
    "shards, torch": (converted(training, to="torch-sharded", shard_size=64),),
    "DCP": (as_dcp(training), converted(training, to="dcp", full=True)),
}

FOLDERS = ("shards, safetensors", "shards, torch", "DCP")


@functools.cache
def seeds(kind: str) -> tuple[Files, ...]:
    """Return the seeds of a format."""
    made = []
    for write in SEEDS[kind]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "in"
            write(path)
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            made.append({"" if file == path else file.name: file.read_bytes() for file in files})
    return tuple(made)


def put(files: Files, path: Path) -> None:
    """Write files to a path: a file, or a folder of them."""
    if "" in files:
        path.write_bytes(files[""])
        return
    path.mkdir()
    for name, raw in files.items():
        (path / name).write_bytes(raw)
