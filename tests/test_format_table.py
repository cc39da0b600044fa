"""The README's table of formats: every cell is a conversion that is done here, and looked at.

`python tests/test_format_table.py` writes the table into the README; the test fails when it is stale.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool import full
from ckpttool.digest import digest

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- formats -->\n", "<!-- /formats -->"

OUTPUTS = {
    "`.pt`": {"to": "torch-zip"},
    "`.safetensors`": {"to": "safetensors"},
    "`.safetensors --full`": {"to": "safetensors", "full": True},
    "shards, safetensors": {"to": "safetensors-sharded", "shard_size": 600},
    "shards, torch": {"to": "torch-sharded", "shard_size": 600},
    "DCP": {"to": "dcp"},
    "DCP `--full`": {"to": "dcp", "full": True},
}

EVERYTHING, STATE = "all", "state"


class Net(torch.nn.Module):
    """Two layers, one with buffers."""

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
    return model().state_dict()


def training() -> dict[str, Any]:
    """A training checkpoint: a state beside what is none."""
    net = model()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.5}


def as_tar(path: Path) -> None:
    """As torch before 0.1.12 wrote it; torch itself reads it still."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model()), path)


def through(to: str) -> Callable[[Path], None]:
    """A folder of another format, which its own readers are shown to read elsewhere."""

    def make(path: Path) -> None:
        torch.save(state(), path.with_suffix(".source.pt"))
        ckpttool.save(ckpttool.open(path.with_suffix(".source.pt")), path, to=to)

    return make


def as_dcp(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(training(), checkpoint_id=path, no_dist=True)


INPUTS: dict[str, Callable[[Path], None]] = {
    "torch zip (since 1.6)": lambda path: torch.save(training(), path),
    "torch legacy (before 1.6)": lambda path: torch.save(
        training(), path, _use_new_zipfile_serialization=False
    ),
    "torch tar (before 0.1.12)": as_tar,
    "`torch.save(model)`": lambda path: torch.save({"model": model(), "epoch": 3}, path),
    "TorchScript": as_script,
    "safetensors": lambda path: save_file(state(), path),
    "shards, safetensors": through("safetensors-sharded"),
    "shards, torch": through("torch-sharded"),
    "DCP folder": as_dcp,
}


def only_tensors(checkpoint: ckpttool.Checkpoint) -> bool:
    tree = checkpoint.tree
    return (
        isinstance(tree, dict)
        and all(isinstance(value, ckpttool.TensorRef) for value in tree.values())
        and not getattr(tree, "attributes", None)
    )


def cell(source: Path, folder: Path, wanted: dict[str, Any]) -> str:
    """Converts, reads the result with what reads it, and says how much of the source is in it."""
    target = folder / f"{source.name}-{'-'.join(map(str, wanted.values()))}"
    checkpoint = ckpttool.open(source)
    saved = ckpttool.save(checkpoint, target, **wanted)
    found = ckpttool.open(target)
    assert found.format == wanted["to"]
    assert digest(found.state().tensors) == digest(checkpoint.state().tensors)
    same = full.encode(found.tree).text == full.encode(checkpoint.tree).text or (
        only_tensors(found) and only_tensors(checkpoint)  # then the digest says all but their order
    )
    assert same or saved.left_out, "something was left behind and not named"
    return EVERYTHING if same else STATE


def table(folder: Path) -> str:
    rows = [f"| from \\ to | {' | '.join(OUTPUTS)} |", f"|---|{'---|' * len(OUTPUTS)}"]
    for name, make in INPUTS.items():
        source = folder / f"in{len(rows)}"
        make(source)
        cells = [cell(source, folder, wanted) for wanted in OUTPUTS.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def test_the_table_in_the_readme_is_what_the_conversions_do(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert BEGIN in text, "the README has no place for the table"
    assert text.partition(BEGIN)[2].partition(END)[0] == table(tmp_path), f"stale: python {__file__}"


@pytest.mark.parametrize("name", INPUTS)
def test_the_values_of_each_input_are_those_torch_saved(name: str, tmp_path: Path) -> None:
    INPUTS[name](tmp_path / "in")
    expected = training()["model"] if "training" in str(INPUTS[name]) else state()
    found = ckpttool.open(tmp_path / "in").state()
    assert {n: t.shape for n, t in found.tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}


if __name__ == "__main__":
    import tempfile

    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    with tempfile.TemporaryDirectory() as temporary:
        middle = f"{BEGIN}{table(Path(temporary))}{END}"
    README.write_text(before + middle + rest.partition(END)[2], encoding="utf-8")
