"""The files that commands read and replace while calls fail, and what they must write. Imports torch.

The largest tensor is large enough to be copied by several threads.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core import cli
from ckpttool.metrics import certificate
from tests.support.every_format import apart, as_dcp, as_tar, converted

# Elements of the largest tensor: 5 MiB
LARGE = 5 << 18


def state(seed: int = 0, prefix: str = "module.") -> OrderedDict[str, torch.Tensor]:
    """Return a state with a large tensor, one of some blocks, small ones, an empty one and a tie."""
    made = torch.Generator().manual_seed(seed)
    named = {
        "embed.weight": torch.rand(5, LARGE // 5, generator=made),
        "fc.weight": torch.rand(300, 257, generator=made),
        "bn.running_mean": torch.rand(4, generator=made),
        "bn.running_var": torch.rand(4, generator=made),
        "bn.num_batches_tracked": torch.tensor(3 + seed),
        "half": torch.rand(3, 5, generator=made).half(),
        "empty": torch.zeros(0, 3),
    }
    named["head.weight"] = named["embed.weight"]
    return OrderedDict((prefix + name, value) for name, value in named.items())


def training(seed: int = 0) -> dict[str, Any]:
    """Return a checkpoint that the trainer knows for its own; its optimizer names its parameters."""
    named = state(seed)
    momentum = {0: {"momentum_buffer": torch.full((300, 257), 1.5 + seed)}}
    group = {"lr": 0.1, "params": [0], "param_names": ["module.fc.weight"]}
    optimizer = {"state": momentum, "param_groups": [group]}
    own = {"progress": {"global_step": seed}, "digests": {}}
    return {"model": named, "optimizer": optimizer, "epoch": seed, **own}


def _ranks(path: Path) -> None:
    """Write what two ranks would."""
    source = path.with_name("source.pt")
    torch.save(training(), source)
    assert not cli.run(["split", f"{source}", f"{path}/", "--ranks", "2", "--as", "dtensor", "-q"])
    source.unlink()


def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of an adapter, whose product has no rounding."""
    return torch.arange(514.0).reshape(2, 257) % 4, torch.arange(600.0).reshape(300, 2) % 3


def _adapter(path: Path) -> None:
    """Write a LoRA adapter of rank 2 for one layer, as PEFT does."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["fc"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    first, second = _factors()
    layer = "base_model.model.module.fc.lora_"
    save_file({f"{layer}A.weight": first, f"{layer}B.weight": second}, path / "adapter_model.safetensors")


def _delta(path: Path) -> None:
    """Write what makes in.pt of other.pt."""
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(("in.pt", "other.pt")):
            torch.save(training(number), f"{folder}/{name}")
        ckpttool.delta(f"{folder}/other.pt", f"{folder}/in.pt", path)


def _predictions(rank: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import numpy as np

        index = np.arange(rank, 4000, 2)
        rows = certificate.Predictions(index, index % 10, index % 9, index / 7.0)
        certificate.write(path, rows, certificate.Evaluation(2, 4000), rank)

    return write


# By name, what writes each
INPUTS: dict[str, Callable[[Path], object]] = {
    "in.pt": lambda path: torch.save(training(), path),
    "other.pt": lambda path: torch.save(training(1), path),
    "legacy.pt": lambda path: torch.save(training(), path, _use_new_zipfile_serialization=False),
    "tar.pt": as_tar,
    "in.safetensors": lambda path: save_file(apart(state()), path),
    "full.safetensors": converted(training, to="safetensors", full=True),
    "shards": converted(training, to="safetensors-sharded", shard_size=4 << 20),
    "dcp": as_dcp(training),
    "ranks": _ranks,
    "adapter": _adapter,
    "delta.safetensors": _delta,
    "rank0.safetensors": _predictions(0),
    "rank1.safetensors": _predictions(1),
}


def write(folder: Path) -> None:
    """Write every input into a folder."""
    for name, make in INPUTS.items():
        make(folder / name)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Return a written state as torch or safetensors loads it; of folders, as this package does."""
    if path.is_dir():
        with ckpttool.open(path) as checkpoint:
            return {name: value.clone() for name, value in checkpoint.state().load().items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        found = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise AssertionError(f"{path.name}: torch does not load it: {error}") from None
    return found.get("model", found)


def _mean() -> dict[str, torch.Tensor]:
    both = zip(state().items(), state(1).values(), strict=True)
    exact = {name: ((a.double() + b.double()) / 2).to(a.dtype) for (name, a), b in both}
    return exact | {"module.bn.num_batches_tracked": torch.tensor(4)}


def _bf16() -> dict[str, torch.Tensor]:
    return {name: v.bfloat16() if v.is_floating_point() else v for name, v in state().items()}


def _adapted() -> dict[str, torch.Tensor]:
    first, second = _factors()
    exact = state()["module.fc.weight"].double() + second.double() @ first.double()
    return {**state(), "module.fc.weight": exact.float()}


# States that outputs must have, in plain torch
WANTED: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "plain": partial(state, prefix=""),
    "prefixed": state,
    "twice prefixed": partial(state, prefix="x.module."),
    "renamed": partial(state, prefix="model."),
    "bf16": _bf16,
    "mean": _mean,
    "adapted": _adapted,
}


def check(path: Path, wanted: str) -> None:
    """Raise AssertionError unless an output has the values of WANTED; of a tie one name will do."""
    found, meant = loaded(path), WANTED[wanted]()
    lacking = {name for name in meant.keys() - found.keys() if not name.endswith("head.weight")}
    assert not lacking and found.keys() <= meant.keys(), f"{found.keys() ^ meant.keys()}"
    for name, value in found.items():
        assert value.dtype == meant[name].dtype and torch.equal(value, meant[name]), f"{name} differs"
