"""A file that holds a part of a model is said to be one, with the command that joins the whole."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
from ckpttool.checkpoint.checkpoint import SHARDING
from ckpttool.errors import Mismatch

SPEC = "m.py:net"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))\n"
    )
    torch.save(net().state_dict(), "one.pt")
    torch.save({f"module.{name}": tensor for name, tensor in net().state_dict().items()}, "ddp.pt")
    return tmp_path


def run_commands(cli: Any, script: str) -> None:
    """Run the lines of a script as a user would paste them."""
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert cli(*shlex.split(line)[1:]).code == 0, line


def diagnosed(cli: Any, path: str) -> str:
    ran = cli("doctor", path, "--model", SPEC)
    assert ran.code == 1
    assert "another architecture" not in ran.out
    return str(ran.out)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", ["one.pt", "ddp.pt"])
def test_one_rank_s_file_is_said_to_be_one(model: str, rank: int, cli: Any, folder: Path) -> None:
    assert cli("split", model, "ranks/", "--ranks", 2, "--as", "dtensor").code == 0
    said = diagnosed(cli, f"ranks/model_world_size_2_rank_{rank}.pt")
    assert f"one-rank: the file is rank {rank} of 2: 6 of its tensors are pieces" in said
    assert model == "ddp.pt" or "ckpttool merge ranks ranks.mended.pt" in said
    run_commands(cli, said)


def test_a_state_inside_one_rank_s_file_too(cli: Any, folder: Path) -> None:
    torch.save({"epoch": 3, "model": torch.load("one.pt")}, "run.pt")
    assert cli("split", "run.pt", "ranks/", "--ranks", 3, "--as", "dtensor").code == 0
    file = next(name for name in sorted(os.listdir("ranks")) if name.startswith("model"))
    assert "rank 0 of 3" in diagnosed(cli, f"ranks/{file}")


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_one_shard_is_said_to_be_one_also_by_reload(ending: str, cli: Any, folder: Path) -> None:
    to = ("--to", "torch-sharded") if ending == "bin" else ()
    assert cli("convert", "one.pt", "hf/", "--shard-size", "60B", *to).code == 0
    file = next(f"hf/{name}" for name in sorted(os.listdir("hf")) if name.endswith(f"-of-00004.{ending}"))
    said = diagnosed(cli, file)
    assert "one-shard: the file is shard 1 of 4" in said
    merge = said.splitlines()[2]
    assert merge.startswith("ckpttool merge hf hf.mended.")
    with pytest.raises(Mismatch) as caught:
        ckpttool.reload(file, net(), spec=SPEC)
    assert merge in str(caught.value.hint)
    run_commands(cli, said)


def test_a_shard_that_holds_all_that_the_model_has_loads(cli: Any, folder: Path) -> None:
    save_file(dict(net().state_dict()), "model-00002-of-00003.safetensors")
    assert cli("doctor", "model-00002-of-00003.safetensors", "--model", SPEC).code == 0


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-00001-of-00002.safetensors", "one-shard: the file is shard 1 of 2"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "what rank 1 of a DeepSpeed run wrote"),
        ("pieces.safetensors", "one-rank: the file holds one rank's pieces of tensors"),
    ],
)
def test_a_part_without_the_rest_names_what_is_missing(file: str, words: str, cli: Any, folder: Path) -> None:
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
def test_a_slice_of_a_tensor_parallel_run_is_said_to_be_one(name: str, cli: Any, folder: Path) -> None:
    parts = [f"mp_rank_0{number}/{name}" for number in range(2)]
    if name.startswith("consolidated"):
        parts = [f"mp/{name}", "mp/consolidated.01.pth"]
    for part in parts:
        Path(part).parent.mkdir(exist_ok=True)
        torch.save({"0.weight": torch.ones(2, 4)}, part)
    said = diagnosed(cli, parts[0]).replace("\n#  ", "")
    assert "one-slice: the file is one of 2 files that ranks wrote" in said
    assert "ckpttool can't join them" in said
