"""Folders of Lightning and Megatron, recorded by `tests/support/framework_runs.py`, against their tools.

And folders in which files of two kinds lie together.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import Damaged, UsageFault
from tests.support import deepspeed_runs, framework_runs
from tests.support.running import Ran
from tests.support.saved import refused

Cli = Callable[..., Ran]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Unpack the recorded folders."""
    with tarfile.open(framework_runs.RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, whatever the order of keys."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_lightning_s_folder_becomes_what_lightning_s_own_merger_makes(runs: Path, cli: Cli) -> None:
    assert cli("merge", runs / "lightning-fsdp", runs / "out.ckpt").code == 0
    wanted = torch.load(runs / "lightning-fsdp-whole.pt")
    assert {"state_dict", "optimizer_states", "loops"} < wanted.keys()
    assert same(torch.load(runs / "out.ckpt"), wanted)


def test_lightning_s_folder_of_fsdp2_becomes_a_whole_checkpoint_of_lightning(runs: Path, cli: Cli) -> None:
    assert cli("merge", runs / "lightning-fsdp2", runs / "out.ckpt").code == 0
    found, wanted = torch.load(runs / "out.ckpt"), torch.load(runs / "lightning-fsdp2-whole.pt")
    assert {key: same(found[key], wanted[key]) for key in wanted} == dict.fromkeys(wanted, True)
    assert (found["epoch"], found["global_step"]) == (1, 4)


def test_a_folder_of_fabric_keeps_the_names_of_its_user(runs: Path, cli: Cli) -> None:
    folder = runs / "lightning-fsdp"
    meta = torch.load(folder / "meta.pt")
    del meta["pytorch-lightning_version"]  # Fabric writes none
    torch.save(meta, folder / "meta.pt")
    assert cli("merge", folder, runs / "out.ckpt").code == 0
    assert {"model", "optimizer_0", "loops"} < torch.load(runs / "out.ckpt").keys()


def test_what_lies_in_lightning_s_meta_and_in_the_folder_is_an_error(runs: Path, cli: Cli) -> None:
    folder = runs / "lightning-fsdp"
    torch.save(torch.load(folder / "meta.pt") | {"state_dict": {}}, folder / "meta.pt")
    ran = cli("merge", folder, runs / "out.ckpt")
    assert (ran.code, "meta.pt: has 'state_dict', and so has" in ran.err) == (3, True)


def test_megatron_s_folder_is_what_one_rank_of_megatron_loads(runs: Path, cli: Cli) -> None:
    ran = cli("merge", runs / "megatron", runs / "out.pt")
    assert (ran.code, "common.pt" in ran.err) == (0, True)
    found = torch.load(runs / "out.pt")
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert same(tensors, torch.load(runs / "megatron-whole.pt"))


# Files of two kinds in one folder.


def trained(folder: Path) -> tuple[Path, Any]:
    """Write the files of two ranks of a training into `ranks`; return that folder, and the whole."""
    model = torch.nn.Linear(3, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    named = {**optimizer.state_dict()}
    named["state"] = dict(zip(("weight", "bias"), named["state"].values(), strict=True))
    named["param_groups"] = [{**named["param_groups"][0], "params": ["weight", "bias"]}]
    whole = {"model": dict(model.state_dict()), "optimizer": named}
    torch.save(whole, folder / "whole.pt")
    ckpttool.split(ckpttool.open(folder / "whole.pt"), folder / "ranks", 2)
    return folder / "ranks", whole


def as_dcp(folder: Path, model: Any) -> None:
    """Write a model as DCP into a folder that has other files."""
    torch.save({"model": model}, folder.parent / "model.pt")
    ckpttool.save(ckpttool.open(folder.parent / "model.pt"), folder.parent / "dcp", to="dcp")
    for path in (folder.parent / "dcp").iterdir():
        shutil.move(path, folder)


def as_hugging_face(folder: Path, model: Any) -> None:
    """Write a model as two ranks' pieces, as HuggingFaceStorageWriter names and describes them."""
    for rank in range(2):
        pieces = {name: tensor.chunk(2)[rank].clone() for name, tensor in model.items()}
        begins = {name: [3 * rank, *[0] * (tensor.dim() - 1)] for name, tensor in model.items()}
        places = {name: {"saved_offsets": begin} for name, begin in begins.items()}
        metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        save_file(pieces, folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", metadata=metadata)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [as_dcp, as_hugging_face])
def test_a_model_of_one_kind_and_an_optimizer_of_another_are_one_checkpoint(
    kind: Callable[..., None], tmp_path: Path, cli: Cli
) -> None:
    folder, whole = trained(tmp_path)
    for path in folder.glob("model_*"):
        path.unlink()
    kind(folder, whole["model"])
    for options in ([], ["--take-rank", 1]):
        ran = cli("merge", folder, tmp_path / "out.pt", "--force", "--json", *options)
        assert (ran.code, ran.json["keys"]) == (0, 2)
        assert same(torch.load(tmp_path / "out.pt"), whole)
    assert ckpttool.verify(folder, no_code=True).ok
    page = cli("inspect", folder, "--json").json
    assert (page["state"], page["ranks"]["world_size"], page["ranks"]["step"]) == ("model", 2, 1)
    assert {"optimizer.state.weight.step"} < {*page["ranks"]["replicated"]}
    next(folder.glob("optim_*_rank_1.pt")).unlink()
    with pytest.raises(Damaged, match="the file of rank 1 of 2 is missing"):
        ckpttool.open(folder).state()


@pytest.mark.filterwarnings("ignore")
def test_two_models_in_one_folder_are_refused_with_the_command_for_each(tmp_path: Path, cli: Cli) -> None:
    folder, whole = trained(tmp_path)
    as_dcp(folder, whole["model"])
    for command in ("inspect",), ("merge", tmp_path / "out.pt"):
        ran = cli(command[0], folder, *command[1:])
        assert (ran.code, "has 'model' in files of two kinds" in ran.err) == (3, True)
    assert f"ckpttool merge {folder}/.metadata OUTPUT" in ran.err
    assert f"{folder}/model_world_size_2_rank_1.pt" in ran.err
    assert cli("merge", folder / ".metadata", tmp_path / "out.pt").code == 0


def test_a_storage_that_one_rank_alone_refers_to_is_no_stray_record(tmp_path: Path) -> None:
    folder, _ = trained(tmp_path)
    for rank in range(2):
        own = {"generator": torch.full((3,), rank)}
        torch.save(own, folder / f"extra_state_world_size_2_rank_{rank}.pt")
    assert ckpttool.open(folder).unread
    assert ckpttool.verify(folder, no_code=True).ok
    with zipfile.ZipFile(folder / "extra_state_world_size_2_rank_1.pt", "a") as archive:
        archive.writestr("extra_state_world_size_2_rank_1/data/99", b"anything else")
    (problem,) = ckpttool.verify(folder, no_code=True).problems
    assert problem.name == "record extra_state_world_size_2_rank_1/data/99"


def test_tags_of_deepspeed_in_a_dcp_folder_are_a_second_model(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    with tarfile.open(deepspeed_runs.RECORDED) as archive:
        inside = [member for member in archive if member.name.split("/")[0] == "zero2-fp32"]
        archive.extractall(tmp_path, inside, filter="data")
    (tmp_path / "zero2-fp32").rename(folder)
    as_dcp(folder, {"w": torch.ones(2)})
    for command in ("digest",), ("merge", tmp_path / "out.pt"):
        ran = cli(command[0], folder, *command[1:])
        assert ran.code == 3
        assert "has 'model' and 'module' in files of two kinds, DeepSpeed 0.19.8 ZeRO-2 and DCP" in ran.err
    for path in (folder / "global_step3", folder / ".metadata"):
        assert f"ckpttool merge {path} OUTPUT" in ran.err


@pytest.mark.filterwarnings("ignore")
def test_each_dcp_folder_is_named_once_where_two_hold_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for place in (folder, folder / "model"):
        place.mkdir()
        as_dcp(place, {"w": torch.ones(2)})
        shutil.rmtree(place.parent / "dcp")
    with pytest.raises(Damaged) as caught:
        ckpttool.open(folder)
    commands = [f"ckpttool merge {place}/.metadata OUTPUT" for place in (folder / "model", folder)]
    assert caught.value.hint == f"merge each by itself: {'; '.join(commands)}"


def test_pieces_of_hugging_face_in_a_dcp_folder_are_a_second_model(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    as_hugging_face(folder, {"w": torch.ones(6, 3)})
    as_dcp(folder, {"w": torch.ones(2)})
    for command in ("digest",), ("merge", tmp_path / "out.pt"):
        ran = cli(command[0], folder, *command[1:])
        assert (ran.code, "in files of two kinds, DCP as safetensors and DCP" in ran.err) == (3, True)


@pytest.mark.filterwarnings("ignore")
def test_notes_named_after_a_rank_keep_nobody_from_a_dcp_folder(tmp_path: Path, cli: Cli) -> None:
    """Whoever saves with DCP may keep anything beside it; what torch or safetensors wrote is still read."""
    folder = tmp_path / "d"
    torch.distributed.checkpoint.save({"model": {"w": torch.arange(4.0)}}, checkpoint_id=folder)
    alone = cli("digest", folder).out
    (folder / "loader_rank_0.bin").write_bytes(b"notes")
    (folder / "rng_rank_1.pt").touch()
    torch.save({"rng": torch.ones(3)}, folder / "rng_rank_0.pt")
    assert cli("digest", folder).out == alone
    ran = cli("merge", folder, tmp_path / "out.pt")
    notes = "other files of the folder, not copied: loader_rank_0.bin, rng_rank_0.pt, rng_rank_1.pt"
    assert (ran.code, ran.err.splitlines()[-1]) == (0, notes)
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["w"], torch.arange(4.0))
    (folder / "rng_rank_0.pt").write_bytes((folder / "rng_rank_0.pt").read_bytes()[:-40])
    assert "rng_rank_0.pt: " in cli("digest", folder).err


def test_there_is_no_rank_to_take_where_what_ranks_share_is_stored_once(tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    folder.mkdir()
    as_hugging_face(folder, {"w": torch.ones(6, 3)})
    for paths in (folder, sorted(folder.iterdir())):
        refused(paths, "so there is no rank to take", UsageFault, ckpttool.open_ranks, take_rank=0)
    torch.save({"w": torch.ones(2)}, folder / "other.pt")
    refused(
        sorted(folder.iterdir()), r"other\.pt: holds no pieces as safetensors", opened=ckpttool.open_ranks
    )


def test_inspect_says_in_json_how_many_bytes_each_rank_holds(tmp_path: Path, cli: Cli) -> None:
    as_hugging_face(tmp_path, {"w": torch.ones(6, 3)})
    held = json.loads(cli("inspect", tmp_path, "--json").out)["ranks"]["held"]
    assert sum(held.values()) == 72 and all(rank.isdecimal() for rank in held)


def test_a_rank_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    as_hugging_face(tmp_path, {"w": torch.ones(6, 3)})
    end = "model-00001-of-00001.safetensors"
    (tmp_path / f"shard-00001-{end}").rename(tmp_path / f"shard-9999999-{end}")
    refused(tmp_path, r"shard-9999999.*says that rank 9999998 wrote it")
