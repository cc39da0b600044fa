"""The devices that a `.pt` tags its storages with: said when they are not the CPU, and mapped by --device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.errors import UsageFault
from tests.support.crafting import dict_of, storage, tensor, text, torch_zip
from tests.support.running import Ran
from tests.support.saved import convert

Cli = Callable[..., Ran]

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
def test_the_device_is_said_and_can_be_mapped(
    command: list[str], on_cuda: Path, cli: Cli, tmp_path: Path
) -> None:
    is_computed = command == ["average"]  # such values are on the CPU
    inputs = [on_cuda, on_cuda] if is_computed else [on_cuda]
    ran = cli(*command, *inputs, tmp_path / "out.pt")
    assert ran.code == 0, ran.err
    if not is_computed:
        assert "cuda:0: " + SAID in ran.err
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "out.pt")
    ran = cli(*command, *inputs, tmp_path / "cpu.pt", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    assert {value.device.type for value in torch.load(tmp_path / "cpu.pt").values()} == {"cpu"}


def test_shards_of_torch_are_mapped_too(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    ran = cli("convert", on_cuda, tmp_path / "a", "--to", "torch-sharded")
    assert ran.code == 0 and SAID in ran.err
    ran = cli("convert", on_cuda, tmp_path / "b", "--to", "torch-sharded", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    for shard in (tmp_path / "b").glob("*.bin"):
        torch.load(shard)


def test_every_storage_is_mapped_wherever_it_is(tmp_path: Path) -> None:
    """Storages inside objects and bare ones too; those of the meta device have no bytes, and stay."""
    body = dict_of(
        {"a": tensor(storage(1), (1,)).replace(text("cpu"), text("cuda:3")), "b": storage(1, key="1")}
    )
    body = body.replace(text("cpu"), text("cuda:1"))
    path = torch_zip(tmp_path / "in.pt", body, {"0": bytes(4), "1": bytes(4)})
    saved = ckpttool.save(ckpttool.open(path), tmp_path / "out.pt")
    assert saved.devices == ("cuda:1", "cuda:3")
    assert ckpttool.save(ckpttool.open(path), tmp_path / "cpu.pt", device="cpu").devices == ()
    with ckpttool.open(tmp_path / "cpu.pt") as checkpoint:
        assert {each.location for _, each in checkpoint.storages()} == {"cpu"}
    torch.save({"m": torch.empty(2, device="meta"), "c": torch.ones(1)}, tmp_path / "meta.pt")
    assert (
        ckpttool.save(ckpttool.open(tmp_path / "meta.pt"), tmp_path / "again.pt", device="cpu").devices == ()
    )
    assert torch.load(tmp_path / "again.pt")["m"].device.type == "meta"


def test_a_device_may_be_any_that_torch_tags(tmp_path: Path) -> None:
    path = tagged(tmp_path / "in.pt", "cuda:0")
    assert ckpttool.save(ckpttool.open(path), tmp_path / "out.pt", device="cuda:1").devices == ("cuda:1",)


def test_values_and_sharing_stay(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    convert({"a": weight, "b": weight[1:]}, tmp_path / "plain.pt")
    ckpttool.save(ckpttool.open(tmp_path / "in.pt"), tmp_path / "out.pt", device="cpu")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["b"].tolist() == [1, 2, 3]
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("device", ["", "CPU!", "cpu,cuda", "meta", "a b"])
def test_a_word_that_is_no_device_is_a_usage_error(device: str, cli: Cli, tmp_path: Path) -> None:
    path = tagged(tmp_path / "in.pt", "cpu")
    ran = cli("convert", path, tmp_path / "out.pt", "--device", device)
    assert ran.code == 2 and not (tmp_path / "out.pt").exists()


def test_a_device_for_a_format_without_devices_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    path = tagged(tmp_path / "in.pt", "cpu")
    ran = cli("convert", path, tmp_path / "out.safetensors", "--device", "cpu")
    assert ran.code == 2 and "--device" in ran.err
    with pytest.raises(UsageFault):
        ckpttool.save(ckpttool.open(path), tmp_path / "out.safetensors", device="cpu")


def test_nothing_is_said_where_no_device_is_written(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    assert "cuda" not in cli("convert", on_cuda, tmp_path / "out.safetensors").err
