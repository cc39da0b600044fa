"""What a saving says of itself: choices that contradict each other, what stays, and what is left out."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpttool
from ckpttool.errors import UsageFault
from tests.support.crafting import dict_of, name, storage, tensor, torch_zip
from tests.support.saved import opened

TENSOR, BYTES = tensor(storage(1), (1,)), {"0": bytes(4)}


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


@pytest.mark.parametrize(
    "output, choices, said",
    [
        ("out.safetensors", {"full": True, "state": "ema"}, "one state of it was named"),
        ("out.pt", {"full": True, "state": "ema"}, "one state of it was named"),
        ("out/", {"full": True, "to": "torch-sharded"}, "holds only the model's state"),
        ("out.pt", {"keep_copies": True}, "copies were asked for"),
        ("out.safetensors", {"keep_copies": True, "full": True}, "copies were asked for"),
        ("out/", {"keep_copies": True, "to": "torch-sharded"}, "copies were asked for"),
        ("out.pt", {"shard_size": 100}, "is one file, but a shard size was given"),
        ("out", {"shard_size": 100, "to": "dcp"}, "is one folder that is not cut"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_choice_that_would_do_nothing_is_a_fault_of_usage_with_a_way_out(
    output: str, choices: dict[str, Any], said: str, dry_run: bool, tmp_path: Path
) -> None:
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


def test_the_command_line_keeps_a_full_file_full_and_convert_asks(cli: Any, tmp_path: Path) -> None:
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
def test_names_that_could_run_are_reported_for_each_pickle_written(
    kind: str, cli: Any, tmp_path: Path
) -> None:
    """A file of tensors can't run anything; a .pt that is made of it can, where it is loaded so."""
    torch_zip(
        tmp_path / "in.pt", dict_of({"model": dict_of({"a": TENSOR}), "f": name("os", "system")}), BYTES
    )
    source = ckpttool.open(tmp_path / "in.pt")
    assert ckpttool.save(source, tmp_path / "same.pt").mentions == ("os.system",)
    ckpttool.save(source, tmp_path / "full", to=kind, full=True)
    saved = ckpttool.save(ckpttool.open(tmp_path / "full"), tmp_path / "out.pt")
    assert saved.mentions == ("os.system",)
    ran = cli("convert", tmp_path / "full", tmp_path / "again.pt")
    assert ran.code == 0 and "os.system" in ran.err
    ran = cli("convert", tmp_path / "full", tmp_path / "still", "--to", "safetensors", "--full")
    assert "os.system" not in ran.err


def test_what_a_format_has_no_place_for_is_called_so(cli: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.pt")
    assert "left out: code\n" in ran.err
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors")
    assert "left out: code\n" in ran.err
