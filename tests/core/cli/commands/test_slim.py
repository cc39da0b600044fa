"""ckpttool disarm and slim, as people and scripts use them."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.crafting import call, dict_of, name, storage, tensor, text, torch_zip


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    """Save last.pt with objects, and in.pt of a training whose model uses a part of a storage."""
    model = {"w": torch.arange(6.0).reshape(2, 3)}
    args = argparse.Namespace(lr=0.1, out=pathlib.Path("runs"))
    torch.save({"model": model, "args": args, "best": [np.float64(n) for n in range(9)]}, "last.pt")
    big = torch.arange(100_000, dtype=torch.float32)
    value = {"model": {"part": big[10:13], "own": torch.ones(2)}, "optimizer": [big], "epoch": 3}
    torch.save({"run": value, "args": 1}, "in.pt")


# disarm


def test_every_object_is_named_with_what_it_became(cli: Any) -> None:
    ran = cli("disarm last.pt safe.pt")
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "argparse.Namespace -> dict: args",
        "pathlib.PosixPath -> text: args.out",
        "numpy.float64 -> float: best.0, best.1, best.2, best.3 and 5 more",
    ]
    assert ran.out.startswith("disarmed 11 objects -> safe.pt (")
    assert torch.load("safe.pt", weights_only=True)["args"] == {"lr": 0.1, "out": "runs"}
    assert "best.8" in cli("disarm last.pt safe.pt --force -v").err


def test_the_json_has_path_from_and_to_of_every_object(cli: Any) -> None:
    ran = cli("disarm last.pt safe.pt --json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds", "changed"}
    assert ran.json["changed"][0] == {"name": "args", "from": "argparse.Namespace", "to": "dict"}
    assert len(ran.json["changed"]) == 11
    assert ran.json["bytes"] == os.path.getsize("safe.pt")
    assert cli("disarm last.pt dry.pt --json --dry-run").json["changed"] == ran.json["changed"]


def test_a_file_without_objects_is_written_all_the_same(cli: Any) -> None:
    torch.save({"w": torch.ones(2)}, "in.pt", pickle_protocol=4)
    ran = cli("disarm in.pt out.pt")
    assert ran.code == 0 and ran.out.startswith("found only tensors and plain values -> ")
    assert torch.equal(torch.load("out.pt", weights_only=True)["w"], torch.ones(2))


@pytest.mark.parametrize("output", ["out.safetensors", "folder/"])
def test_what_a_format_other_than_pt_would_hold_is_a_usage_error(output: str, cli: Any) -> None:
    ran = cli("disarm last.pt", output)
    assert ran.code == 2 and "disarm writes a .pt file" in ran.err


def test_a_special_tensor_is_refused_with_the_way_out(cli: Any) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"model": {"w": torch.ones(2), "n": nested}, "epoch": 1}, "in.pt")
    ran = cli("disarm in.pt out.pt")
    assert ran.code == 3
    assert "'n' (nested float32) can't be loaded by torch.load(weights_only=True)" in ran.err
    assert "--exclude n" in ran.err
    assert not os.path.exists("out.pt")


def test_a_hostile_file_runs_nothing_and_its_names_are_escaped(cli: Any, here: Path) -> None:
    harm = call(name("os", "system\x1b[31m"), text(f"touch {here / 'harm'}"))
    tree = dict_of({"model": dict_of({"w": tensor(storage())}), "x": harm})
    ran = cli("disarm", torch_zip(here / "in.pt", tree, {"0": bytes(16)}), "out.pt")
    assert ran.code == 0 and "os.system\\x1b[31m -> record: x" in ran.err
    assert "\x1b" not in ran.err
    torch.load("out.pt", weights_only=False)
    assert not os.path.exists("harm")


def test_it_streams_to_stdout_and_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from ckpttool.core.cli import main; main()"
    with open("piped.pt", "wb") as out:
        words = [sys.executable, "-c", code, "disarm", "last.pt", "-"]
        ran = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 0, ran.stderr
    assert torch.load("piped.pt", weights_only=True)["args"]["out"] == "runs"


# slim


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_only_the_state_is_written_and_the_rest_is_named(ending: str, cli: Any) -> None:
    ran = cli(f"slim in.pt out{ending}")
    assert (ran.code, ran.err) == (0, "left out: args, run.optimizer, run.epoch\n")
    size = os.path.getsize("in.pt")
    assert ran.out.startswith(f"slimmed {size / 1000:.0f} kB -> out{ending} (")
    loaded = torch.load("out.pt") if ending == ".pt" else load_file("out.safetensors")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {"part": [10, 11, 12], "own": [1, 1]}
    assert os.path.getsize(f"out{ending}") < 3_000


def test_json_has_the_fields_that_scripts_rely_on(cli: Any) -> None:
    ran = cli("slim in.pt out.pt --json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds"}
    assert (ran.json["keys"], ran.json["renamed"]) == (2, 0)
    assert ran.json["left_out"] == ["args", "run.optimizer", "run.epoch"]
    assert ran.json["bytes"] == os.path.getsize("out.pt")
    assert cli("slim out.pt again.pt --json").json["left_out"] == []  # the file is the state


def test_another_state_can_be_named_and_none_is_exit_3(cli: Any) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "ema": {"v": torch.ones(1)}}, "in.pt")
    assert cli("slim in.pt out.pt --state ema --json").json["left_out"] == ["model"]
    assert list(torch.load("out.pt")) == ["v"]
    torch.save({"epoch": 1}, "in.pt")
    ran = cli("slim in.pt none.pt")
    assert ran.code == 3 and "holds no dict of tensors" in ran.err
    assert not os.path.exists("none.pt")
