"""Write the same checkpoint in every format that the package reads."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckpttool
from tests.support import other_files


class Net(torch.nn.Module):
    """A model of two layers, one with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def state() -> dict[str, torch.Tensor]:
    """Return a state with module versions, a tied tensor and a view."""
    named = model().state_dict()
    named["tied.weight"] = named["fc.weight"]
    named["fc.row"] = named["fc.weight"][3]
    return named


def arrays() -> dict[str, Any]:
    """Return the same state as arrays of NumPy, each with memory of its own."""
    return {name: tensor.numpy().copy() for name, tensor in state().items()}


def training() -> dict[str, Any]:
    """Return a training checkpoint: a state, and values of many types, nested and shared."""
    net = model()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    named = state()
    return {
        "model": named,
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best": float("inf"),
        "nothing": {},
        "nested": {"deep": [1, ("two", {"rng": torch.get_rng_state(), "dtype": torch.float16})]},
        "average": {"of": named["fc.weight"], "parameter": torch.nn.Parameter(torch.ones(2))},
    }


def with_objects() -> dict[str, Any]:
    """Return a training checkpoint with an object of a class and a reference to a class."""
    return {**training(), "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)), "schedule": io.StringIO}


def as_tar(path: Path) -> None:
    """Write a state as torch before 0.1.12 did; torch still reads it."""
    named = state()

    def dumped(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)

    storages, tensors = io.BytesIO(), io.BytesIO()
    storages.write(dumped(len(named)))
    tensors.write(dumped(len(named)))
    kinds = {torch.float32: torch.FloatStorage, torch.int64: torch.LongStorage}
    for key, value in enumerate(named.values(), 1):
        flat = value.contiguous().view(-1)
        storages.write(dumped((key, "cpu", kinds[value.dtype])))
        storages.write(struct.pack("<q", flat.numel()) + flat.numpy().tobytes())
        tensors.write(dumped((100 + key, key, torch.FloatTensor)))
        tensors.write(struct.pack("<ii", value.dim(), 0))
        tensors.write(struct.pack(f"<{2 * value.dim()}q", *value.shape, *value.stride()))
        tensors.write(struct.pack("<q", 0))
    storages.write(dumped([]))

    class Identity(int):
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return str(int(obj)) if isinstance(obj, Identity) else None

    tree = io.BytesIO()
    Pickler(tree, protocol=2).dump(OrderedDict((name, Identity(101 + i)) for i, name in enumerate(named)))
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("storages", storages), ("tensors", tensors), ("pickle", tree)):
            member = tarfile.TarInfo(name)
            member.size = len(data.getvalue())
            archive.addfile(member, io.BytesIO(data.getvalue()))


def as_script(path: Path) -> None:
    """Write a model as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model()), path)


def converted(of: Callable[[], object], **choices: Any) -> Callable[[Path], None]:
    """Return a function that writes what torch saves as `ckpttool.save` does with these choices."""

    def write(path: Path) -> None:
        source = path.with_suffix(".source.pt")
        torch.save(of(), source)
        with ckpttool.open(source) as checkpoint:
            ckpttool.save(checkpoint, path, **choices)
        source.unlink()

    return write


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with memory of their own, as safetensors' writer demands."""
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def as_dcp(of: Callable[[], dict[str, Any]]) -> Callable[[Path], None]:
    """Return a function that writes a training checkpoint as a DCP folder."""

    def write(path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(of(), checkpoint_id=path, no_dist=True)

    return write


INPUTS: dict[str, Callable[[Path], None]] = {
    "torch zip (since 1.6)": lambda path: torch.save(with_objects(), path),
    "torch legacy (before 1.6)": lambda path: torch.save(
        with_objects(), path, _use_new_zipfile_serialization=False
    ),
    "torch tar (before 0.1.12)": as_tar,
    "`torch.save(model)`": lambda path: torch.save({"model": model(), "epoch": 3}, path),
    "TorchScript": as_script,
    "safetensors": lambda path: save_file(apart(state()), path, metadata={"who": "me"}),
    "safetensors `--full`": converted(training, to="safetensors", full=True),
    "shards, safetensors": converted(state, to="safetensors-sharded"),
    "shards, torch": converted(state, to="torch-sharded"),
    "DCP folder": as_dcp(training),
    "exported program (`.pt2`)": lambda path: other_files.state_as_package(path, arrays()),
    "GGUF": lambda path: other_files.state_as_gguf(path, arrays()),
    "ONNX": lambda path: other_files.state_as_onnx(path, arrays()),
    "NumPy (`.npz`)": lambda path: other_files.state_as_npz(path, arrays()),
}
