"""In a plain install, without torch or safetensors, every command that can do without them runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.cli import group
from ckpttool.metrics import predictions
from tests.support.every_format import INPUTS
from tests.support.running import ROOT

HIDDEN = ("torch", "torchvision", "safetensors", "sklearn")

RUN_ALL = """
import contextlib, io, json, sys
from ckpttool import cli
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words)
    if code:
        print(" ".join(words), "exits", code, out.getvalue(), err.getvalue())
"""

NEED_NO_TORCH = """
inspect IN
inspect IN --stats
inspect IN --tensors --json
digest IN
verify IN
verify IN --against IN
diff IN IN --rtol 0.1
slim IN slim.pt
add-prefix IN wrapped.safetensors
strip-prefix wrapped.safetensors plain.pt
rename-keys IN renamed.safetensors --map fc=head
average IN IN mean.pt --weights 1,2
convert IN copy.pt
convert IN copy.safetensors --verify
convert IN half.safetensors --dtype bf16
convert IN full.safetensors --full
convert full.safetensors back.pt
convert IN shards/ --shard-size 1kB
convert IN torch-shards/ --to torch-sharded
convert-batchnorm old.pt sync.safetensors --to sync
convert-batchnorm old.pt older.pt pooled.pt --counts 2,2 --keep-first *
gather-metrics rank0.safetensors rank1.safetensors --out metrics.json
"""

NEED_TORCH = {
    "reload in.pt --model torchvision:resnet18": "torch",
    "doctor in.pt --model torchvision:resnet18": "torch",
    "convert in.pt folder/ --to dcp": "torch",
    "optimizer in.pt out.pt --to names --model torchvision:resnet18": "train",
    "convert-batchnorm in.pt out.pt --to sync --model torchvision:resnet18": "torch",
}


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the libraries of HIDDEN are as if they were not installed."""
    stubs = tmp_path_factory.mktemp("stubs")
    for name in HIDDEN:
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        (stubs / f"{name}.py").write_text(missing)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(stubs), str(ROOT)])}


def run(env: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpttool", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def failures(env: dict[str, str], folder: Path, commands: list[str]) -> str:
    """Run commands one after another in one process; say which failed, and how."""
    words = json.dumps([command.split() for command in commands])
    given: Any = {"env": env, "cwd": folder, "input": words, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-c", RUN_ALL], check=False, **given)
    return ran.stdout + ran.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of every kind that commands take beside the checkpoint itself."""
    norm = torch.nn.BatchNorm1d(2).state_dict()
    del norm["num_batches_tracked"]
    torch.save(norm, tmp_path / "old.pt")
    torch.save({name: values + 1 for name, values in norm.items()}, tmp_path / "older.pt")
    for rank in range(2):
        index = np.arange(rank, 5, 2)
        rows = predictions.Predictions(index, index % 2, index % 2, index / 4)
        path = tmp_path / f"rank{rank}.safetensors"
        predictions.write(path, rows, predictions.Evaluation(2, 5), rank)
    return tmp_path


@pytest.mark.parametrize("name", HIDDEN)
def test_the_stubs_hide_the_library(name: str, without_torch: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    ran = subprocess.run(command, env=without_torch, cwd=tmp_path, capture_output=True, check=False)
    assert f"No module named '{name}'".encode() in ran.stderr


@pytest.mark.parametrize("kind", INPUTS)
def test_commands_run_without_torch_on_every_format(kind: str, without_torch: Any, folder: Path) -> None:
    INPUTS[kind](folder / "in")
    assert not failures(without_torch, folder, NEED_NO_TORCH.replace("IN", "in").strip().splitlines())


@pytest.mark.parametrize(
    "kind", ["torch zip (since 1.6)", "torch legacy (before 1.6)", "safetensors `--full`"]
)
def test_the_optimizer_is_keyed_anew_without_torch(kind: str, without_torch: Any, folder: Path) -> None:
    INPUTS[kind](folder / "in")
    commands = ["optimizer in named.pt --to names", "optimizer named.pt again.pt --to indices"]
    assert not failures(without_torch, folder, commands)


def test_the_optimizer_of_dcp_gets_indices_without_torch(without_torch: dict[str, str], folder: Path) -> None:
    INPUTS["DCP folder"](folder / "in")
    assert not failures(without_torch, folder, ["optimizer in out.pt --to indices"])


@pytest.mark.parametrize("command", NEED_TORCH)
def test_a_command_that_needs_torch_names_the_extra(command: str, without_torch: Any, folder: Path) -> None:
    torch.save({"model": torch.nn.BatchNorm1d(2).state_dict()}, folder / "in.pt")
    before = sorted(folder.iterdir())
    ran = run(without_torch, folder, *command.split())
    message, hint = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message.startswith("error: ") and "torch" in message
    assert hint == f"hint: in a clone of ckpttool: pip install -e '.[{NEED_TORCH[command]}]'"
    assert sorted(folder.iterdir()) == before


def test_a_model_file_with_torchvision_leads_to_the_extra(without_torch: Any, folder: Path) -> None:
    (folder / "net.py").write_text("from torchvision.models import resnet18\n")
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, folder / "in.pt")
    command = "optimizer in.pt o.pt --to names --model net.py:resnet18"
    ran = run(without_torch, folder, *command.split())
    message, hint = ran.stderr.splitlines()
    assert (ran.returncode, hint) == (2, "hint: in a clone of ckpttool: pip install -e '.[train]'")
    assert message.startswith("error: net.py:resnet18: ")


def test_with_json_the_extra_is_in_the_object(without_torch: dict[str, str], folder: Path) -> None:
    torch.save({"w": torch.ones(2)}, folder / "in.pt")
    ran = run(without_torch, folder, "reload", "in.pt", "--model", "torchvision:resnet18", "--json")
    error = json.loads(ran.stdout)["error"]
    assert error["kind"] == "not-installed"
    assert error["hint"] == "in a clone of ckpttool: pip install -e '.[torch]'"


def test_help_and_versions_need_no_torch_numpy_or_wcwidth(without_torch: Any, tmp_path: Path) -> None:
    for name in ("numpy", "wcwidth", "tqdm"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError")
    env = without_torch | {"PYTHONPATH": os.pathsep.join([str(tmp_path), without_torch["PYTHONPATH"]])}
    commands = ["--help", *(f"{name} --help" for name in group.commands)]
    assert not failures(env, tmp_path, commands)
    assert run(env, tmp_path, "--version").returncode == 0


MOVE_BYTES = """
inspect IN
digest IN
diff IN IN
slim IN OUT.pt
strip-prefix IN OUT.safetensors
add-prefix IN OUT.pt
convert IN OUT/
"""


@pytest.mark.parametrize("command", MOVE_BYTES.strip().splitlines())
def test_moving_bytes_imports_no_numpy(command: str, without_torch: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise AssertionError")
    env = without_torch | {"PYTHONPATH": os.pathsep.join([str(tmp_path), without_torch["PYTHONPATH"]])}
    torch.save({"model": {"module.w": torch.ones(2)}}, tmp_path / "in.pt")
    words = command.replace("IN", "in.pt").replace("OUT", "out").split()
    ran = run(env, tmp_path, *words)
    assert ran.returncode == 0, ran.stderr


def test_the_declared_dependencies_are_those_of_a_plain_install() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"ml_dtypes", "click", "numpy", "tqdm", "wcwidth"}
    assert {name.partition(">")[0] for name in project["dependencies"]} == wanted
