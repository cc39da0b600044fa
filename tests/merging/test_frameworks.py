"""Folders of Lightning and Megatron, recorded by `tests/support/framework_runs.py`, against their tools.

And folders in which files of two kinds lie together.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import Damaged, UsageFault
from tests.support import framework_runs
from tests.support.comparing import convert, refused
from tests.support.recording import unpack
from tests.support.running import Cli, assert_says
from tests.support.user_classes import NAMES_BY_ENUMS


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Unpack the folders of Lightning and Megatron."""
    return unpack(framework_runs.RECORDED, tmp_path)


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, whatever the order of keys."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_lightning_s_folder_becomes_what_lightning_s_own_merger_makes(saved: Path, cli: Cli) -> None:
    assert cli("merge", saved / "lightning-fsdp", saved / "out.ckpt").code == 0
    wanted = torch.load(saved / "lightning-fsdp-whole.pt")
    assert {"state_dict", "optimizer_states", "loops"} < wanted.keys()
    assert same(torch.load(saved / "out.ckpt"), wanted)


def test_lightning_s_folder_of_fsdp2_becomes_a_whole_checkpoint_of_lightning(saved: Path, cli: Cli) -> None:
    assert cli("merge", saved / "lightning-fsdp2", saved / "out.ckpt").code == 0
    found, wanted = torch.load(saved / "out.ckpt"), torch.load(saved / "lightning-fsdp2-whole.pt")
    assert {key: same(found[key], wanted[key]) for key in wanted} == dict.fromkeys(wanted, True)
    assert (found["epoch"], found["global_step"]) == (1, 4)


def test_a_folder_of_fabric_keeps_the_names_of_its_user(saved: Path, cli: Cli) -> None:
    folder = saved / "lightning-fsdp"
    meta = torch.load(folder / "meta.pt")
    del meta["pytorch-lightning_version"]  # Fabric writes none
    torch.save(meta, folder / "meta.pt")
    assert cli("merge", folder, saved / "out.ckpt").code == 0
    assert {"model", "optimizer_0", "loops"} < torch.load(saved / "out.ckpt").keys()


def test_what_lies_in_lightning_s_meta_and_in_the_folder_is_an_error(saved: Path, cli: Cli) -> None:
    folder = saved / "lightning-fsdp"
    torch.save(torch.load(folder / "meta.pt") | {"state_dict": {}}, folder / "meta.pt")
    assert_says(cli("merge", folder, saved / "out.ckpt"), 3, "meta.pt: has 'state_dict', and so has")


def test_megatron_s_folder_is_what_one_rank_of_megatron_loads(saved: Path, cli: Cli) -> None:
    assert_says(cli("merge", saved / "megatron", saved / "out.pt"), 0, "common.pt")
    found = torch.load(saved / "out.pt")
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert same(tensors, torch.load(saved / "megatron-whole.pt"))


# Files of two kinds in one folder.


def trained(folder: Path) -> tuple[Path, Any]:
    """Write the files of two ranks of a training into `ranks`; return that folder, and the whole."""
    model = torch.nn.Linear(3, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept, (group,) = optimizer.state_dict().values()
    names = ["weight", "bias"]
    state = dict(zip(names, kept.values(), strict=True))
    named = {"state": state, "param_groups": [group | {"params": names}]}
    whole = {"model": dict(model.state_dict()), "optimizer": named}
    torch.save(whole, folder / "whole.pt")
    ckpttool.split(ckpttool.open(folder / "whole.pt"), folder / "ranks", 2)
    return folder / "ranks", whole


def as_dcp(folder: Path, model: Any) -> None:
    """Write a model as DCP into a folder that has other files."""
    convert({"model": model}, folder.parent / "dcp", to="dcp")
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


@pytest.mark.parametrize("kind", [as_dcp, as_hugging_face])
def test_model_and_optimizer_of_two_kinds_are_one_checkpoint(kind: Any, tmp_path: Path, cli: Cli) -> None:
    folder, whole = trained(tmp_path)
    for path in folder.glob("model_*"):
        path.unlink()
    kind(folder, whole["model"])
    for options in ([], ["--take-rank", 1]):
        ran = cli("merge", folder, tmp_path / "out.pt", "--force", "--json", *options)
        assert (ran.code, ran.json["keys"]) == (0, 2)
        assert same(torch.load(tmp_path / "out.pt"), whole)
    named = NAMES_BY_ENUMS if kind is as_dcp else []
    assert [problem.name for problem in ckpttool.verify(folder, no_code=True).problems] == named
    page = cli("inspect", folder, "--json").json
    assert (page["state"], page["ranks"]["world_size"], page["ranks"]["step"]) == ("model", 2, 1)
    assert {"optimizer.state.weight.step"} < {*page["ranks"]["replicated"]}
    next(folder.glob("optim_*_rank_1.pt")).unlink()
    with pytest.raises(Damaged, match="the file of rank 1 of 2 is missing"):
        ckpttool.open(folder).state()


def assert_two_kinds(folder: Path, said: str, cli: Cli, way: str = "") -> None:
    """Commands refuse a folder of two models, and propose to merge one of them."""
    for command, *output in (["inspect"], ["digest"], ["merge", folder.parent / "out.pt"]):
        assert_says(cli(command, folder, *output), 3, said, way)


def test_two_models_in_one_folder_are_refused_with_the_command_for_each(tmp_path: Path, cli: Cli) -> None:
    folder, whole = trained(tmp_path)
    as_dcp(folder, whole["model"])
    for way in (f"ckpttool merge {folder}/.metadata OUTPUT", f"{folder}/model_world_size_2_rank_1.pt"):
        assert_two_kinds(folder, "has 'model' in files of two kinds", cli, way)
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


def test_tags_of_deepspeed_in_a_dcp_folder_are_a_second_model(runs: Path, tmp_path: Path, cli: Cli) -> None:
    folder = Path(shutil.copytree(runs / "zero2-fp32", tmp_path / "run"))
    as_dcp(folder, {"w": torch.ones(2)})
    said = "has 'model' and 'module' in files of two kinds, DeepSpeed 0.19.8 ZeRO-2 and DCP"
    for path in (folder / "global_step3", folder / ".metadata"):
        assert_two_kinds(folder, said, cli, f"ckpttool merge {path} OUTPUT")


def test_each_dcp_folder_is_named_once_where_two_hold_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for place in (folder, folder / "model"):
        place.mkdir()
        as_dcp(place, {"w": torch.ones(2)})
        shutil.rmtree(place.parent / "dcp")
    commands = [f"ckpttool merge {place}/.metadata OUTPUT" for place in (folder / "model", folder)]
    assert refused(folder).hint == f"merge each by itself: {'; '.join(commands)}"


def test_pieces_of_hugging_face_in_a_dcp_folder_are_a_second_model(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    as_hugging_face(folder, {"w": torch.ones(6, 3)})
    as_dcp(folder, {"w": torch.ones(2)})
    assert_two_kinds(folder, "in files of two kinds, DCP as safetensors and DCP", cli)


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


def test_pieces_of_hugging_face_are_told_by_rank_and_there_is_none_to_take(tmp_path: Path, cli: Cli) -> None:
    as_hugging_face(tmp_path, {"w": torch.ones(6, 3)})
    held = cli("inspect", tmp_path, "--json").json["ranks"]["held"]
    assert sum(held.values()) == 72 and all(rank.isdecimal() for rank in held)
    for paths in (tmp_path, sorted(tmp_path.iterdir())):
        refused(paths, "so there is no rank to take", UsageFault, ckpttool.open_ranks, take_rank=0)
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pt")
    files = sorted(tmp_path.iterdir())
    refused(files, r"other\.pt: holds no pieces as safetensors", opened=ckpttool.open_ranks)


def test_a_rank_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    as_hugging_face(tmp_path, {"w": torch.ones(6, 3)})
    end = "model-00001-of-00001.safetensors"
    (tmp_path / f"shard-00001-{end}").rename(tmp_path / f"shard-9999999-{end}")
    refused(tmp_path, r"shard-9999999.*says that rank 9999998 wrote it")
