"""What the doctor prints: the line of Python that loads a state, and how the whole of a part is joined."""

from __future__ import annotations

import argparse
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool.core.checkpoint.checkpoint import SHARDING
from ckpttool.errors import Mismatch
from ckpttool.models.report import refused_by_torch
from tests.support import architectures
from tests.support.comparing import opened, prefixed, saved
from tests.support.running import Cli
from tests.support.trees import TREES

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


def run(python: str) -> None:
    """Run a line in a program that has just built the model."""
    given = {"torch": torch, "safetensors": safetensors, "ckpttool": ckpttool}
    exec(python, {"model": architectures.net(), **given})


def state(**given: Any) -> dict[str, torch.Tensor]:
    return dict(architectures.net(**given).state_dict())


def test_a_nested_state_is_taken_out_of_its_dicts(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "it's.pt"
    torch.save({"epoch": 1, "all of it": {"model": state()}}, path)
    python = line(cli, path)
    assert python == f"model.load_state_dict(torch.load(\"{path}\")['all of it']['model'])"
    run(python)
    assert python in cli("doctor", path, "--model", SPEC).out


def test_a_named_state_is_taken_by_its_name(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": state(classes=9), "teacher": state()}, tmp_path / "f.pt")
    assert line(cli, tmp_path / "f.pt", "--state", "teacher").endswith("['teacher'])")


def test_safetensors_are_loaded_by_their_own_library(cli: Cli, tmp_path: Path) -> None:
    save_file(state(), tmp_path / "f.safetensors")
    python = line(cli, tmp_path / "f.safetensors")
    assert python == f"safetensors.torch.load_model(model, '{tmp_path}/f.safetensors')"
    run(python)


def test_a_file_from_a_gpu_is_mapped_to_the_cpu(cli: Cli, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Each storage is tagged with its device, which torch.load looks for."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"model": state()}, tmp_path / "f.pt")
    python = line(cli, tmp_path / "f.pt")
    assert "map_location='cpu'" in python
    run(python)


def test_objects_in_the_file_are_said_with_the_command_that_leaves_them_out(cli: Cli, tmp_path: Path) -> None:
    tree = {"model": prefixed(state(), "module."), "args": argparse.Namespace(lr=0.1), "epoch": 1}
    torch.save(tree, tmp_path / "f.pt")
    found = cli("doctor", tmp_path / "f.pt", "--model", SPEC, "--json").json
    assert found["python"] == f"ckpttool.reload('{tmp_path}/f.mended.pt', model, state='model')"
    kinds = {problem["kind"]: problem for problem in found["problems"]}
    assert kinds["objects"]["remark"]
    assert "argparse.Namespace" in kinds["objects"]["message"]
    for kind in ("prefix", "objects"):
        assert cli(*kinds[kind]["command"].split()[1:]).code == 0
    run(f"model.load_state_dict(torch.load('{tmp_path}/f.mended.pt'))")


@pytest.mark.parametrize("to", ["safetensors-sharded", "dcp"])
def test_folders_are_loaded_by_ckpttool(to: str, cli: Cli, tmp_path: Path) -> None:
    ckpttool.save(opened(state(), tmp_path), tmp_path / "folder", to=to)
    python = line(cli, tmp_path / "folder")
    assert python == f"ckpttool.reload('{tmp_path}/folder', model)"
    run(python)


def test_a_file_that_no_command_fixes_has_no_line(cli: Cli, tmp_path: Path) -> None:
    path = saved({"other": torch.ones(1)}, tmp_path / "f.pt")
    assert cli("doctor", path, "--model", SPEC, "--json").json["python"] is None


# A file that holds a part of a model is said to be one, with the command that joins the whole.

OWN = "m.py:net"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    layers = "nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)"
    Path("m.py").write_text(f"from torch import nn\ndef net(): return nn.Sequential({layers})\n")
    torch.save(net().state_dict(), "one.pt")
    torch.save(prefixed(net().state_dict(), "module."), "ddp.pt")
    return tmp_path


def run_commands(cli: Cli, script: str) -> None:
    """Run the lines of a script as a user would paste them."""
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert cli(*shlex.split(line)[1:]).code == 0, line


def diagnosed(cli: Cli, path: str) -> str:
    ran = cli("doctor", path, "--model", OWN)
    assert ran.code == 1
    assert "another architecture" not in ran.out
    return str(ran.out)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", ["one.pt", "ddp.pt"])
def test_one_rank_s_file_is_said_to_be_one(model: str, rank: int, cli: Cli, folder: Path) -> None:
    assert cli("split", model, "ranks/", "--ranks", 2, "--as", "dtensor").code == 0
    said = diagnosed(cli, f"ranks/model_world_size_2_rank_{rank}.pt")
    assert f"one-rank: the file is rank {rank} of 2: 6 of its tensors are pieces" in said
    assert model == "ddp.pt" or "ckpttool merge ranks ranks.mended.pt" in said
    run_commands(cli, said)


def test_a_state_inside_one_rank_s_file_too(cli: Cli, folder: Path) -> None:
    torch.save({"epoch": 3, "model": torch.load("one.pt")}, "run.pt")
    assert cli("split", "run.pt", "ranks/", "--ranks", 3, "--as", "dtensor").code == 0
    file = next(name for name in sorted(os.listdir("ranks")) if name.startswith("model"))
    assert "rank 0 of 3" in diagnosed(cli, f"ranks/{file}")


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_one_shard_is_said_to_be_one_also_by_reload(ending: str, cli: Cli, folder: Path) -> None:
    to = ("--to", "torch-sharded") if ending == "bin" else ()
    assert cli("convert", "one.pt", "hf/", "--shard-size", "60B", *to).code == 0
    file = next(f"hf/{name}" for name in sorted(os.listdir("hf")) if name.endswith(f"-of-00004.{ending}"))
    said = diagnosed(cli, file)
    assert "one-shard: the file is shard 1 of 4" in said
    merge = said.splitlines()[2]
    assert merge.startswith("ckpttool merge hf hf.mended.")
    with pytest.raises(Mismatch) as caught:
        ckpttool.reload(file, net(), spec=OWN)
    assert merge in str(caught.value.hint)
    run_commands(cli, said)


def test_a_shard_that_holds_all_that_the_model_has_loads(cli: Cli, folder: Path) -> None:
    save_file(dict(net().state_dict()), "model-00002-of-00003.safetensors")
    assert cli("doctor", "model-00002-of-00003.safetensors", "--model", OWN).code == 0


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-00001-of-00002.safetensors", "one-shard: the file is shard 1 of 2"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "what rank 1 of a DeepSpeed run wrote"),
        ("pieces.safetensors", "one-rank: the file holds one rank's pieces of tensors"),
    ],
)
def test_a_part_without_the_rest_names_what_is_missing(file: str, words: str, cli: Cli, folder: Path) -> None:
    (folder / "run").mkdir()
    path, state = f"run/{file}", {"0.weight": torch.ones(4, 4)}
    if file.endswith(".pt"):
        torch.save({"optimizer_state_dict": {"zero_stage": 2}}, path)
    else:
        save_file(state, path, metadata={SHARDING: "{}"} if file.startswith("pieces") else None)
    said = diagnosed(cli, path).replace("\n#  ", "")
    assert words in said
    assert "copy" in said
    assert "ckpttool merge" in said


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model_optim_rng.pt"])
def test_a_slice_of_a_tensor_parallel_run_is_said_to_be_one(name: str, cli: Cli, folder: Path) -> None:
    parts = [f"mp_rank_0{number}/{name}" for number in range(2)]
    if name.startswith("consolidated"):
        parts = [f"mp/{name}", "mp/consolidated.01.pth"]
    for part in parts:
        Path(part).parent.mkdir(exist_ok=True)
        torch.save({"0.weight": torch.ones(2, 4)}, part)
    said = diagnosed(cli, parts[0]).replace("\n#  ", "")
    assert "one-slice: the file is one of 2 files that ranks wrote" in said
    assert "ckpttool can't join them" in said
