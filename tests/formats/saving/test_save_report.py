"""What a saving says of itself: contradicting choices, what stays, what is left out, and which devices."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpttool
from ckpttool.errors import UsageFault
from tests.support.attacks import BYTES, TENSOR
from tests.support.crafting import dict_of, name, storage, tensor, text, torch_zip
from tests.support.running import Cli, assert_says
from tests.support.saved import convert, opened

TRAINING = {
    "model": OrderedDict({"module.a": torch.arange(4.0), "module.b": torch.ones(2)}),
    "ema": OrderedDict({"module.a": torch.zeros(4)}),
    "optimizer": {
        "state": {0: {"momentum": torch.ones(4)}},
        "param_groups": [{"params": [0], "param_names": ["module.a"]}],
    },
    "epoch": 3,
}


def full_file(folder: Path, tree: object = TRAINING) -> ckpttool.Checkpoint:
    torch.save(tree, folder / "in.pt")
    ckpttool.save(ckpttool.open(folder / "in.pt"), folder / "full.safetensors", full=True)
    return ckpttool.open(folder / "full.safetensors")


SHARDS = {"to": "torch-sharded"}


@pytest.mark.parametrize(
    "output, choices, said",
    [
        ("o.safetensors", {"full": True, "state": "ema"}, "one state of it was named"),
        ("o.pt", {"full": True, "state": "ema"}, "one state of it was named"),
        ("o/", {"full": True, **SHARDS}, "holds only the model's state"),
        ("o.pt", {"keep_copies": True}, "copies were asked for"),
        ("o.safetensors", {"keep_copies": True, "full": True}, "copies were asked for"),
        ("o/", {"keep_copies": True, **SHARDS}, "copies were asked for"),
        ("o.pt", {"shard_size": 100}, "is one file, but a shard size was given"),
        ("o", {"shard_size": 100, "to": "dcp"}, "is one folder that is not cut"),
    ],
)
def test_choices_that_would_do_nothing_are_told(output: str, choices: Any, said: str, tmp_path: Path) -> None:
    for dry_run in (False, True):
        with pytest.raises(UsageFault, match=said) as fault:
            ckpttool.save(opened(TRAINING, tmp_path), f"{tmp_path}/{output}", dry_run=dry_run, **choices)
        assert fault.value.hint
        assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("output", ["out.safetensors", "out/"])
def test_a_full_file_stays_full_when_its_keys_are_renamed(output: str, tmp_path: Path) -> None:
    new, _ = ckpttool.strip_prefix(full_file(tmp_path))
    saved = ckpttool.save(new, f"{tmp_path}/{output}")
    assert saved.left_out == ()
    found = ckpttool.open(tmp_path / output)
    ckpttool.save(found, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt")
    assert list(back) == list(TRAINING)
    assert (list(back["model"]), list(back["ema"])) == (["a", "b"], ["a"])  # what carries the prefix loses it
    assert back["optimizer"]["param_groups"][0]["param_names"] == ["a"]
    assert back["epoch"] == 3
    if output == "out.safetensors":
        with safe_open(tmp_path / output, "pt") as file:
            assert {"model.a", "model.b", "ema.a"} <= set(file.keys())


def test_tensors_alone_are_taken_out_of_a_full_file_by_asking_for_them(tmp_path: Path) -> None:
    whole = full_file(tmp_path)
    saved = ckpttool.save(whole, tmp_path / "alone.safetensors", full=False)
    assert saved.left_out == ("ema", "optimizer", "epoch")
    ckpttool.save(ckpttool.slim(whole), tmp_path / "slim.safetensors")
    for which in ("alone", "slim"):
        with safe_open(tmp_path / f"{which}.safetensors", "pt") as file:
            assert set(file.keys()) == {"module.a", "module.b"}
            assert "ckpttool.full" not in (file.metadata() or {})


def test_the_command_line_keeps_a_full_file_full_and_convert_asks(cli: Cli, tmp_path: Path) -> None:
    full_file(tmp_path)
    source = tmp_path / "full.safetensors"
    for command, flags, left_out in (
        ("strip-prefix", [], []),
        ("convert", [], ["ema", "optimizer", "epoch"]),
        ("convert", ["--full"], []),
    ):
        ran = cli(command, source, tmp_path / "out.safetensors", *flags, "--json", "--force")
        assert ran.code == 0 and ran.json["left_out"] == left_out
    ran = cli("convert", source, tmp_path / "d.safetensors", "--full", "--state", "ema")
    assert ran.code == 2 and "leave out --full or --state" in ran.err


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded", "dcp"])
def test_names_that_could_run_are_reported_for_each_pickle(kind: str, cli: Cli, tmp_path: Path) -> None:
    """A file of tensors can't run anything; a .pt that is made of it can, where it is loaded so."""
    body = dict_of({"model": dict_of({"a": TENSOR}), "f": name("os", "system")})
    source = ckpttool.open(torch_zip(tmp_path / "in.pt", body, BYTES))
    assert ckpttool.save(source, tmp_path / "same.pt").mentions == ("os.system",)
    ckpttool.save(source, tmp_path / "full", to=kind, full=True)
    saved = ckpttool.save(ckpttool.open(tmp_path / "full"), tmp_path / "out.pt")
    assert saved.mentions == ("os.system",)
    assert_says(cli("convert", tmp_path / "full", tmp_path / "again.pt"), 0, "os.system")
    ran = cli("convert", tmp_path / "full", tmp_path / "still", "--to", "safetensors", "--full")
    assert "os.system" not in ran.err


def test_what_a_format_has_no_place_for_is_called_so(cli: Cli, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "in.pt")
    for ending in ("pt", "safetensors"):
        assert "left out: code\n" in cli("convert", tmp_path / "in.pt", tmp_path / f"out.{ending}").err


# The devices that a `.pt` tags its storages with: said when they are not the CPU, and mapped by --device.

SAID = "torch.load needs map_location='cpu' on a machine without it; --device cpu writes it for any"


def tagged(path: Path, *devices: str) -> Path:
    """A state of one tensor on each device, as torch would have saved it there."""
    weights = {
        f"module.w{i}": tensor(storage(1, key=str(i)), (1,)).replace(text("cpu"), text(device))
        for i, device in enumerate(devices)
    }
    return torch_zip(path, dict_of(weights), {str(i): bytes(4) for i in range(len(devices))})


@pytest.fixture
def on_cuda(tmp_path: Path) -> Path:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    return tagged(tmp_path / "in.pt", "cuda:0", "cpu")


RENAMING = [["strip-prefix"], ["add-prefix", "--prefix", "x."], ["rename-keys", "--map", "module=x"]]
COMMANDS = [["convert"], *RENAMING, ["slim"], ["average"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_device_is_said_and_mapped(command: list[str], on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    is_computed = command == ["average"]  # such values are on the CPU
    words = [*command, *([on_cuda] * (1 + is_computed))]
    ran = cli(*words, tmp_path / "out.pt")
    assert ran.code == 0, ran.err
    if not is_computed:
        assert "cuda:0: " + SAID in ran.err
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "out.pt")
    ran = cli(*words, tmp_path / "cpu.pt", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    assert {value.device.type for value in torch.load(tmp_path / "cpu.pt").values()} == {"cpu"}


def test_shards_of_torch_are_mapped_too(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    assert_says(cli("convert", on_cuda, tmp_path / "a", "--to", "torch-sharded"), 0, SAID)
    ran = cli("convert", on_cuda, tmp_path / "b", "--to", "torch-sharded", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    for shard in (tmp_path / "b").glob("*.bin"):
        torch.load(shard)


def test_every_storage_is_mapped_wherever_it_is(tmp_path: Path) -> None:
    """Storages inside objects and bare ones too; those of the meta device have no bytes, and stay."""
    body = dict_of({"a": TENSOR.replace(text("cpu"), text("cuda:3")), "b": storage(1, key="1")})
    body = body.replace(text("cpu"), text("cuda:1"))
    path = torch_zip(tmp_path / "in.pt", body, {"0": bytes(4), "1": bytes(4)})
    assert ckpttool.save(ckpttool.open(path), tmp_path / "out.pt").devices == ("cuda:1", "cuda:3")
    assert ckpttool.save(ckpttool.open(path), tmp_path / "1.pt", device="cuda:1").devices == ("cuda:1",)
    assert ckpttool.save(ckpttool.open(path), tmp_path / "cpu.pt", device="cpu").devices == ()
    with ckpttool.open(tmp_path / "cpu.pt") as checkpoint:
        assert {each.location for _, each in checkpoint.storages()} == {"cpu"}
    tree = {"m": torch.empty(2, device="meta"), "c": torch.ones(1)}
    assert convert(tree, tmp_path / "again.pt", device="cpu").devices == ()
    assert torch.load(tmp_path / "again.pt")["m"].device.type == "meta"


def test_values_and_sharing_stay(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    convert({"a": weight, "b": weight[1:]}, tmp_path / "out.pt", device="cpu")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["b"].tolist() == [1, 2, 3]
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("device", ["", "CPU!", "cpu,cuda", "meta", "a b"])
def test_a_word_that_is_no_device_is_a_usage_error(device: str, cli: Cli, tmp_path: Path) -> None:
    path = tagged(tmp_path / "in.pt", "cpu")
    ran = cli("convert", path, tmp_path / "out.pt", "--device", device)
    assert ran.code == 2 and not (tmp_path / "out.pt").exists()


def test_a_format_without_devices_takes_and_tells_none(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert_says(cli("convert", on_cuda, out, "--device", "cpu"), 2, "--device")
    with pytest.raises(UsageFault):
        ckpttool.save(ckpttool.open(on_cuda), out, device="cpu")
    assert "cuda" not in cli("convert", on_cuda, out).err
