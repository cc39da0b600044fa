"""The README's table of formats: every cell is a conversion that is done here, and looked at.

`python tests/test_format_table.py` writes the table into the README; the test fails when it is stale.
"""

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

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool import full
from ckpttool.digest import digest
from ckpttool.errors import Refused
from ckpttool.formats import Saved

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

EVERYTHING, VALUES, STATE = "all", "values", "state"


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
    """A state with module versions, and with a name that is a tie and one that is a view."""
    named = model().state_dict()
    named["tied.weight"] = named["fc.weight"]
    named["fc.row"] = named["fc.weight"][3]
    return named


def training() -> dict[str, Any]:
    """A training checkpoint: a state beside what is none, of many types, nested, and shared."""
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
    """The same with an object that only its own code could make, and a name of code."""
    return {**training(), "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)), "schedule": io.StringIO}


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


def full_of(make: Callable[[], object], to: str) -> Callable[[Path], None]:
    """What `--full` wrote."""

    def write(path: Path) -> None:
        torch.save(make(), path.with_suffix(".source.pt"))
        ckpttool.save(ckpttool.open(path.with_suffix(".source.pt")), path, to=to, full=True)

    return write


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each with memory of its own, as safetensors' own writer demands."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def as_dcp(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(training(), checkpoint_id=path, no_dist=True)


INPUTS: dict[str, Callable[[Path], None]] = {
    "torch zip (since 1.6)": lambda path: torch.save(with_objects(), path),
    "torch legacy (before 1.6)": lambda path: torch.save(
        with_objects(), path, _use_new_zipfile_serialization=False
    ),
    "torch tar (before 0.1.12)": as_tar,
    "`torch.save(model)`": lambda path: torch.save({"model": model(), "epoch": 3}, path),
    "TorchScript": as_script,
    "safetensors": lambda path: save_file(apart(state()), path, metadata={"who": "me"}),
    "safetensors `--full`": full_of(training, "safetensors"),
    "shards, safetensors": through("safetensors-sharded"),
    "shards, torch": through("torch-sharded"),
    "DCP folder": as_dcp,
}


def is_flat(checkpoint: ckpttool.Checkpoint) -> bool:
    """Whether a file holds tensors by name and nothing else, of which the digest says all but the order."""
    tree = checkpoint.tree
    return (
        isinstance(tree, dict)
        and all(isinstance(value, ckpttool.TensorRef) for value in tree.values())
        and not getattr(tree, "attributes", None)
    )


def sharing(checkpoint: ckpttool.Checkpoint) -> dict[str, set[str]]:
    """The names that look at the same memory, for each name."""
    named = list(checkpoint.tensors())
    return {a: {b for b, other in named if other.storage is tensor.storage} for a, tensor in named}


def saved_without_objects(
    checkpoint: ckpttool.Checkpoint, target: Path, wanted: dict[str, Any]
) -> tuple[Saved, list[str]]:
    """Saves; what is refused is left out by the name that the hint gives, as a user would."""
    try:
        return ckpttool.save(checkpoint, target, **wanted), []
    except Refused as refused:
        name = str(refused.hint).rpartition("--drop ")[2]
        saved, others = saved_without_objects(ckpttool.drop(checkpoint, [name]), target, wanted)
        return saved, [name, *others]


def cell(source: Path, folder: Path, wanted: dict[str, Any]) -> str:
    """Converts, reads the result with what reads it, and says how much of the source is in it."""
    target = folder / f"{source.name}-{'-'.join(map(str, wanted.values()))}"
    checkpoint = ckpttool.open(source)
    saved, dropped = saved_without_objects(checkpoint, target, wanted)
    found = ckpttool.open(target)
    assert found.format == wanted["to"]
    assert digest(found.state().tensors) == digest(checkpoint.state().tensors)
    same = full.encode(found.tree).text == full.encode(checkpoint.tree).text or (
        is_flat(found) and is_flat(checkpoint) and sharing(found) == sharing(checkpoint)
    )
    same &= dict(found.metadata) == dict(checkpoint.metadata) and not checkpoint.unread
    named = [*saved.left_out, *saved.copied, *saved.text_keys, *dropped]
    assert same == (not named), f"{same}, and named as left behind: {named}"
    if same:
        return EVERYTHING
    whole = wanted["to"] in ("torch-zip", "dcp") or "full" in wanted
    kept = digest(dict(found.tensors())) == digest(dict(checkpoint.tensors()))
    return VALUES if whole and kept else STATE


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
    modules = ("`torch.save(model)`", "TorchScript")  # which hold what the model itself has
    expected = model().state_dict() if name in modules else state()
    found = ckpttool.open(tmp_path / "in").state()
    assert {n: t.shape for n, t in found.tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}


if __name__ == "__main__":
    import tempfile

    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    with tempfile.TemporaryDirectory() as temporary:
        middle = f"{BEGIN}{table(Path(temporary))}{END}"
    README.write_text(before + middle + rest.partition(END)[2], encoding="utf-8")
