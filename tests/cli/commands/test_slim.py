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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    value = {
        "model": {"w": torch.arange(6.0).reshape(2, 3)},
        "args": argparse.Namespace(lr=0.1, out=pathlib.Path("runs")),
        "best": [np.float64(n) for n in range(9)],
    }
    torch.save(value, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_every_object_is_named_with_what_it_became(path: Path, cli: Any) -> None:
    out = path.with_name("safe.pt")
    ran = cli("disarm", path, out)
    assert ran.code == 0
    assert ran.err.splitlines() == [
        "argparse.Namespace -> dict: args",
        "pathlib.PosixPath -> text: args.out",
        "numpy.float64 -> float: best.0, best.1, best.2, best.3 and 5 more",
    ]
    assert ran.out.startswith(f"disarmed 11 objects -> {out} (")
    assert torch.load(out, weights_only=True)["args"] == {"lr": 0.1, "out": "runs"}
    assert "best.8" in cli("disarm", path, out, "--force", "-v").err


def test_the_json_has_path_from_and_to_of_every_object(path: Path, cli: Any) -> None:
    ran = cli("disarm", path, path.with_name("safe.pt"), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds", "changed"}
    assert ran.json["changed"][0] == {"name": "args", "from": "argparse.Namespace", "to": "dict"}
    assert len(ran.json["changed"]) == 11
    assert ran.json["bytes"] == path.with_name("safe.pt").stat().st_size


def test_a_file_without_objects_is_written_all_the_same(cli: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt", pickle_protocol=4)
    ran = cli("disarm", tmp_path / "in.pt", tmp_path / "out.pt")
    assert ran.code == 0 and ran.out.startswith("found only tensors and plain values -> ")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], torch.ones(2))


def test_what_a_format_other_than_pt_would_hold_is_a_usage_error(path: Path, cli: Any) -> None:
    for output in ("out.safetensors", "folder/"):
        ran = cli("disarm", path, path.parent / output if output[-1] != "/" else f"{path.parent}/{output}")
        assert ran.code == 2 and "disarm writes a .pt file" in ran.err


def test_an_existing_output_is_replaced_only_with_force_and_may_be_the_input(path: Path, cli: Any) -> None:
    before = path.read_bytes()
    assert cli("disarm", path, path).code == 2
    assert path.read_bytes() == before
    assert cli("disarm", path, path, "--force", "-q").code == 0
    torch.load(path, weights_only=True)


def test_a_dry_run_names_the_same_and_writes_nothing(path: Path, cli: Any) -> None:
    dry = cli("disarm", path, path.with_name("safe.pt"), "--dry-run", "--json").json
    assert not path.with_name("safe.pt").exists()
    ran = cli("disarm", path, path.with_name("safe.pt"), "--json").json
    assert (dry["changed"], dry["bytes"]) == (ran["changed"], ran["bytes"])


def test_a_special_tensor_is_refused_with_the_way_out(cli: Any, tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"model": {"w": torch.ones(2), "n": nested}, "epoch": 1}, tmp_path / "in.pt")
    ran = cli("disarm", tmp_path / "in.pt", tmp_path / "out.pt")
    assert ran.code == 3
    assert "'n' (nested float32) can't be loaded by torch.load(weights_only=True)" in ran.err
    assert "--exclude n" in ran.err
    assert not (tmp_path / "out.pt").exists()


def test_a_hostile_file_runs_nothing_and_its_names_are_escaped(cli: Any, tmp_path: Path) -> None:
    harm = call(name("os", "system\x1b[31m"), text(f"touch {tmp_path / 'harm'}"))
    torch_zip(
        tmp_path / "in.pt", dict_of({"model": dict_of({"w": tensor(storage())}), "x": harm}), {"0": bytes(16)}
    )
    ran = cli("disarm", tmp_path / "in.pt", tmp_path / "out.pt")
    assert ran.code == 0 and "os.system\\x1b[31m -> record: x" in ran.err
    assert "\x1b" not in ran.err
    torch.load(tmp_path / "out.pt", weights_only=False)
    assert not (tmp_path / "harm").exists()


def test_it_streams_to_stdout_and_needs_no_torch(path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from ckpttool.cli import main; main()"
    words = [sys.executable, "-c", code, "disarm", str(path), "-"]
    with open(path.with_name("piped.pt"), "wb") as out:
        ran = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False, env={**os.environ})
    assert ran.returncode == 0, ran.stderr
    loaded: Any = torch.load(path.with_name("piped.pt"), weights_only=True)
    assert loaded["args"]["out"] == "runs"


@pytest.fixture
def training(tmp_path: Path) -> Path:
    big = torch.arange(100_000, dtype=torch.float32)
    value = {"model": {"part": big[10:13], "own": torch.ones(2)}, "optimizer": [big], "epoch": 3}
    torch.save({"run": value, "args": 1}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_only_the_state_is_written_and_the_rest_is_named(ending: str, training: Path, cli: Any) -> None:
    out = training.parent / f"out{ending}"
    ran = cli("slim", training, out)
    assert (ran.code, ran.err) == (0, "left out: args, run.optimizer, run.epoch\n")
    assert ran.out.startswith(f"slimmed {training.stat().st_size / 1000:.0f} kB -> {out} (")
    loaded = torch.load(out) if ending == ".pt" else load_file(out)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {"part": [10, 11, 12], "own": [1, 1]}
    assert out.stat().st_size < 3_000


def test_json_has_the_fields_that_scripts_rely_on(training: Path, cli: Any) -> None:
    ran = cli("slim", training, training.parent / "out.pt", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds"}
    assert (ran.json["keys"], ran.json["renamed"]) == (2, 0)
    assert ran.json["left_out"] == ["args", "run.optimizer", "run.epoch"]
    assert ran.json["bytes"] == (training.parent / "out.pt").stat().st_size


def test_another_state_can_be_named(training: Path, cli: Any) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "ema": {"v": torch.ones(1)}}, training)
    ran = cli("slim", training, training.parent / "out.pt", "--state", "ema", "--json")
    assert ran.json["left_out"] == ["model"]
    assert list(torch.load(training.parent / "out.pt")) == ["v"]


def test_a_state_that_is_the_file_leaves_nothing_behind(cli: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    assert cli("slim", tmp_path / "in.pt", tmp_path / "out.pt", "--json").json["left_out"] == []


def test_a_file_without_a_state_is_exit_3(cli: Any, tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "in.pt")
    ran = cli("slim", tmp_path / "in.pt", tmp_path / "out.pt")
    assert ran.code == 3 and "holds no dict of tensors" in ran.err
    assert not (tmp_path / "out.pt").exists()


def test_a_dry_run_tells_the_size_it_would_have(training: Path, cli: Any) -> None:
    dry = cli("slim", training, training.parent / "out.pt", "--dry-run", "--json").json
    assert not (training.parent / "out.pt").exists()
    assert cli("slim", training, training.parent / "out.pt", "--json").json["bytes"] == dry["bytes"]
