"""The line of Python that the doctor prints loads a state by torch or safetensors alone."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.models.diagnosis.report import refused_by_torch
from tests.ranks.forked import WarmPython
from tests.support import architectures
from tests.support.running import Ran
from tests.support.trees import TREES

Cli = Callable[..., Ran]
Run = Callable[[str], None]
SPEC = f"{architectures.__file__}:net"


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Ignore torch's warnings of quantised tensors and of newer pickle protocols."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torch_takes(path: Path) -> bool:
    try:
        torch.load(path)
    except Exception:  # pickle.UnpicklingError, or what a hostile tree makes of the unpickler
        return False
    return True


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(set(TREES) - {"a number", "nothing"}))
def test_what_torch_refuses_is_known_before_it_is_loaded(name: str, protocol: int, tmp_path: Path) -> None:
    torch.save(TREES[name], tmp_path / "f.pt", pickle_protocol=protocol)
    with ckpttool.open(tmp_path / "f.pt") as checkpoint:
        assert torch_takes(tmp_path / "f.pt") == (not refused_by_torch(checkpoint))
        ckpttool.save(checkpoint, tmp_path / "out.pt")
        assert torch_takes(tmp_path / "out.pt") == (not refused_by_torch(checkpoint, rewritten=True))


def line(cli: Cli, path: Path, *more: str) -> str:
    return str(cli("doctor", path, "--model", SPEC, "--json", *more).json["python"])


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(architectures.__file__).parent)!r})
import ckpttool, safetensors.torch, torch
from architectures import net
model = net()
"""


@pytest.fixture
def run(warm_python: WarmPython) -> Run:
    """Return a function that runs a line in a process that has just built the model."""

    def run_line(python: str) -> None:
        ran = warm_python.run("-c", PROGRAM + python)
        assert ran.returncode == 0, ran.stderr

    return run_line


def state(**given: Any) -> dict[str, torch.Tensor]:
    return dict(architectures.net(**given).state_dict())


def test_a_nested_state_is_taken_out_of_its_dicts(cli: Cli, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "it's.pt"
    torch.save({"epoch": 1, "all of it": {"model": state()}}, path)
    python = line(cli, path)
    assert python == f"model.load_state_dict(torch.load(\"{path}\")['all of it']['model'])"
    run(python)
    assert python in cli("doctor", path, "--model", SPEC).out


def test_a_named_state_is_taken_by_its_name(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": state(classes=9), "teacher": state()}, tmp_path / "f.pt")
    assert line(cli, tmp_path / "f.pt", "--state", "teacher").endswith("['teacher'])")


def test_safetensors_are_loaded_by_their_own_library(cli: Cli, run: Run, tmp_path: Path) -> None:
    save_file(state(), tmp_path / "f.safetensors")
    python = line(cli, tmp_path / "f.safetensors")
    assert python == f"safetensors.torch.load_model(model, '{tmp_path}/f.safetensors')"
    run(python)


def test_a_file_from_a_gpu_is_mapped_to_the_cpu(
    cli: Cli, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each storage is tagged with its device, which torch.load looks for."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"model": state()}, tmp_path / "f.pt")
    python = line(cli, tmp_path / "f.pt")
    assert "map_location='cpu'" in python
    run(python)


def test_objects_in_the_file_are_said_with_the_command_that_leaves_them_out(
    cli: Cli, run: Run, tmp_path: Path
) -> None:
    prefixed = {f"module.{name}": value for name, value in state().items()}
    tree = {"model": prefixed, "args": argparse.Namespace(lr=0.1), "epoch": 1}
    torch.save(tree, tmp_path / "f.pt")
    found = cli("doctor", tmp_path / "f.pt", "--model", SPEC, "--json").json
    assert found["python"] == f"ckpttool.reload('{tmp_path}/f.mended.pt', model, state='model')"
    kinds = {problem["kind"]: problem for problem in found["problems"]}
    assert kinds["objects"]["remark"]
    assert "argparse.Namespace" in kinds["objects"]["message"]
    for kind in ("prefix", "objects"):
        words = kinds[kind]["command"].split()[1:]
        assert cli(*words).code == 0
    run(f"model.load_state_dict(torch.load('{tmp_path}/f.mended.pt'))")


@pytest.mark.parametrize("kind", ["shards", "dcp"])
def test_folders_are_loaded_by_ckpttool(kind: str, cli: Cli, run: Run, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "f.pt")
    to = {"shards": "safetensors-sharded", "dcp": "dcp"}[kind]
    with ckpttool.open(tmp_path / "f.pt") as checkpoint:
        ckpttool.save(checkpoint, tmp_path / kind, to=to)
    python = line(cli, tmp_path / kind)
    assert python == f"ckpttool.reload('{tmp_path}/{kind}', model)"
    run(python)


def test_a_file_that_no_command_fixes_has_no_line(cli: Cli, tmp_path: Path) -> None:
    torch.save({"other": torch.ones(1)}, tmp_path / "f.pt")
    assert cli("doctor", tmp_path / "f.pt", "--model", SPEC, "--json").json["python"] is None
